"""Commands that look at runs and steer them, as typed, against a whole server."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
from fencepost.v1 import failure_pb2, run_service_pb2, worker_pb2
from fencepost_server.cli.main import main

from tests.integration.running_server import QUEUE, RunningServer, running, until


@pytest.fixture(autouse=True)
def quiet_server() -> Iterator[None]:
    """The server of these tests shares its standard output with the commands."""
    with Path(os.devnull).open("w") as nowhere:
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(nowhere))
        yield
        structlog.reset_defaults()


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """Types commands, in a thread beside the server."""

    server: RunningServer
    capsys: pytest.CaptureFixture[str]

    async def type(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Standard output and error of a command that ends with `code`."""
        self.capsys.readouterr()
        ended = await asyncio.to_thread(main, [*words, "--server", self.server.address])
        said = self.capsys.readouterr()
        assert ended == code, said.out + said.err
        return said.out, said.err

    async def read(self, *words: str) -> Any:
        """The document that a command prints."""
        return json.loads((await self.type(*words, "-o", "json"))[0])


async def claim(server: RunningServer, count: int) -> Sequence[worker_pb2.Assignment]:
    request = run_service_pb2.ClaimRunsRequest(
        subscriptions=[worker_pb2.QueueSubscription(queue=QUEUE)], max_runs=count
    )
    request.wait.FromSeconds(5)
    return list((await server.runs.ClaimRuns(request)).runs)


async def end(server: RunningServer, assignment: worker_pb2.Assignment, *, code: str = "") -> None:
    """A success, or with a code a failure that is final."""
    completion = worker_pb2.Completion(run=assignment.run, attempt=assignment.attempt)
    if code:
        completion.failure.code = code
        completion.failure.message = f"{code} happened"
        completion.failure.retry = failure_pb2.RETRY_DIRECTIVE_NEVER
    else:
        completion.success.SetInParent()
    await server.runs.CompleteRun(run_service_pb2.CompleteRunRequest(completion=completion))


async def bury(server: RunningServer, count: int, *, code: str = "SMTP", at_hand: int = 0) -> None:
    """Runs that die at their first attempt, with `at_hand` more that wait already."""
    await server.enqueue(count)
    for assignment in await claim_all(server, count + at_hand):
        await end(server, assignment, code=code)


async def claim_all(server: RunningServer, count: int) -> list[worker_pb2.Assignment]:
    found: list[worker_pb2.Assignment] = []

    async def enough() -> bool:
        found.extend(await claim(server, count - len(found)))
        return len(found) == count

    await until(enough, what=f"{count} runs are claimed", seconds=60)
    return found


async def test_why_a_run_waits_and_what_helps(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(database_url) as server:
        terminal = Terminal(server=server, capsys=capsys)
        await server.make_job("mail")
        await terminal.type("queues", "pause", "default", "--reason", "the provider is down")
        name = (await terminal.type("run", "mail"))[0].strip()
        out, _ = await terminal.type("runs", "why", name)
        assert out.startswith(f"{name} is queued: ")
        assert "the provider is down" in out
        assert "  try      fencepost queues resume default\n" in out
        assert "  try      start a worker that listens on the queue default\n" in out
        await terminal.type("queues", "resume", "default")
        codes = [hold["code"] for hold in (await terminal.read("runs", "why", name))["holds"]]
        assert codes == ["HOLD_CODE_NO_WORKER"]
        out, _ = await terminal.type("runs", "cancel", name, "--reason", "not needed")
        assert "state      cancelled" in out
        assert await terminal.type("runs", "why", name) == (
            f"{name} is cancelled: requested\n",
            "",
        )
        _, err = await terminal.type("runs", "why", "mail/2020-01-01T00:00:00Z", code=3)
        assert "tenants/default/jobs/mail/runs/2020-01-01T00:00:00Z" in err
        _, err = await terminal.type("runs", "why", "mail/yesterday", code=2)
        assert "yesterday" in err


async def test_changes_are_tailed(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job("mail")
        await server.make_job("other")
        tail = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fencepost_server.cli", "runs", "tail", "--job", "mail"),
            *("--server", server.address),
            stdout=asyncio.subprocess.PIPE,
        )
        assert tail.stdout is not None

        async def is_watched() -> bool:
            rows = await server.query("SELECT watched_until > now() FROM fencepost.shard_state")
            return bool(rows[0][0])

        try:
            await until(is_watched, what="the tail listens", seconds=60)
            await bury(server, 1)
            # Of another job, and therefore not among what is read below.
            await server.enqueue(1, job="other")
            await bury(server, 1, code="GONE", at_hand=1)
            lines: list[str] = []
            while not any("GONE" in line for line in lines):
                lines.append((await asyncio.wait_for(tail.stdout.readline(), 60)).decode())
            tail.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(tail.wait(), 60) == 130
        finally:
            if tail.returncode is None:
                tail.kill()
                await tail.wait()
    assert all("  mail/" in f"  {line.split()[1]}" for line in lines)
    assert sum(line.split()[3] == "dead" for line in lines) == 2
    assert any("not retryable: SMTP SMTP happened" in line for line in lines)


async def test_dead_letters_are_looked_at_and_steered_one_by_one(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(database_url) as server:
        terminal = Terminal(server=server, capsys=capsys)
        await server.make_job("mail")
        await bury(server, 2, code="SMTP")
        await bury(server, 1, code="GONE")
        groups = (await terminal.read("dead", "groups"))["groups"]
        assert {group["failureCode"]: group["count"] for group in groups} == {
            "SMTP": "2",
            "GONE": "1",
        }
        out, _ = await terminal.type("dead", "groups", "--error", "GONE")
        assert "GONE happened" in out
        [gone] = (await terminal.read("dead", "list", "--error", "GONE"))["runs"]
        name = gone["name"].replace("tenants/default/jobs/", "").replace("runs/", "")
        await terminal.type("runs", "discard", name, code=2)
        await terminal.type("runs", "discard", name, "--reason", "paid by hand", "--yes")
        _, err = await terminal.type("runs", "replay", name, code=5)
        assert "fencepost run JOB" in err
        left = (await terminal.read("dead", "list"))["runs"]
        assert {run["lastFailure"]["code"] for run in left} == {"SMTP"}
        name = left[0]["name"].replace("tenants/default/jobs/", "").replace("runs/", "")
        await terminal.type("runs", "replay", name, "--payload", '{"again": true}')
        [assignment] = await claim(server, 1)
        assert (assignment.attempt, assignment.payload.json) == (2, '{"again": true}')
        await end(server, assignment)
        out, _ = await terminal.type("runs", "watch", name)
        assert "state      succeeded" in out
        _, err = await terminal.type("runs", "discard", name, "--yes", code=5)
        assert "fencepost dead list" in err


async def test_a_canary_is_replayed_before_the_others(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(database_url) as server:
        terminal = Terminal(server=server, capsys=capsys)
        await server.make_job("mail")
        await bury(server, 20)
        command = ("runs", "bulk", "replay", "--job", "mail", "--error", "SMTP", "--rate", "1000")
        out, _ = await terminal.type(*command, "--dry-run")
        assert out.splitlines()[0] == "20 runs match"
        assert len(out.splitlines()) == 8
        canary = asyncio.create_task(terminal.type(*command, "--canary", "10%", "--yes", code=7))
        first, second = await claim_all(server, 2)
        await end(server, first)
        await end(server, second, code="SMTP")
        _, err = await canary
        assert "2 of 20 runs replayed, 1 dead again" in err
        assert "fencepost runs bulk replay --job mail --error SMTP --rate 1000" in err
        # What it says is what goes on.
        others = asyncio.create_task(terminal.type(*command, "--yes", "--watch"))
        for assignment in await claim_all(server, 19):
            await end(server, assignment)
        out, _ = await others
        assert "changed    19" in out
        operations = (await terminal.read("ops", "list"))["operations"]
        assert [each["state"] for each in operations] == ["OPERATION_STATE_DONE"] * 2
        _, err = await terminal.type(*command, "--yes")
        assert "nothing to replay" in err


async def test_many_runs_are_cancelled_and_discarded(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(database_url) as server:
        terminal = Terminal(server=server, capsys=capsys)
        await server.make_job("mail")
        await bury(server, 3)
        await server.enqueue(5)
        flags = ("--job", "mail", "--rate", "1000", "--reason", "sent twice", "--yes", "--watch")
        out, _ = await terminal.type("runs", "bulk", "cancel", *flags)
        assert "changed    5" in out
        cancelled = (await terminal.read("runs", "list", "--state", "cancelled"))["runs"]
        assert {run["cancelReason"] for run in cancelled} == {"sent twice"}
        out, _ = await terminal.type("dead", "discard", "--max", "2", *flags)
        assert "changed    2" in out
        assert len((await terminal.read("dead", "list"))["runs"]) == 1
        assert len((await terminal.read("dead", "list", "--discarded"))["runs"]) == 3
        _, err = await terminal.type("runs", "bulk", "cancel", "--filter", "colour=red", code=2)
        assert "colour" in err


async def test_a_unique_key_is_held_and_told(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(database_url) as server:
        terminal = Terminal(server=server, capsys=capsys)
        await server.make_job("mail")
        first, _ = await terminal.type("run", "mail", "--unique-key", "order-17")
        second, err = await terminal.type("run", "mail", "--unique-key", "order-17")
        assert second == first
        assert "no run was made" in err
        reject = ("run", "mail", "--unique-key", "order-17", "--on-conflict", "reject")
        _, err = await terminal.type(*reject, code=5)
        assert "order-17" in err
        third, _ = await terminal.type(
            *("run", "mail", "--unique-key", "order-17", "--on-conflict", "replace-waiting")
        )
        assert third != first
        states = {
            run["name"].rpartition("/")[2]: run["state"]
            for run in (await terminal.read("runs", "list"))["runs"]
        }
        assert states == {
            first.strip().rpartition("/")[2]: "RUN_STATE_CANCELLED",
            third.strip().rpartition("/")[2]: "RUN_STATE_QUEUED",
        }
