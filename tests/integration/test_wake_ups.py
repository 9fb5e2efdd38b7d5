"""How soon things are noticed: by a hint at once, and by looking when the hint is lost.

A loop that looks every minute shows what a hint does, because no test waits for so long; a
server that hears no hints shows what looking does.
"""

import asyncio
import json
from typing import Any

import asyncpg
import pytest
from fencepost.v1 import run_service_pb2, worker_pb2
from fencepost_server.domain.names import format_run
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine import run_reads
from fencepost_server.engine.run_reads import RunReads
from fencepost_server.engine.wake import Wakes
from google.protobuf.duration_pb2 import Duration

from tests.integration.running_server import QUEUE, RunningServer, key_of, running, success, until
from tests.integration.worker_session import WAIT_S

_NEVER_S = 60.0


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that hear no hint of another process."""
    monkeypatch.setattr(Wakes, "heard", lambda self, channel, payload: None)


async def claim(server: RunningServer) -> worker_pb2.Assignment:
    run: worker_pb2.Assignment
    (run,) = (
        await server.runs.ClaimRuns(
            run_service_pb2.ClaimRunsRequest(
                subscriptions=[worker_pb2.QueueSubscription(queue=QUEUE)], max_runs=1
            )
        )
    ).runs
    return run


async def complete(server: RunningServer, run: worker_pb2.Assignment) -> None:
    await server.runs.CompleteRun(run_service_pb2.CompleteRunRequest(completion=success(run)))


async def test_an_enqueue_reaches_a_worker_of_its_server_without_any_look(
    database_url: str,
) -> None:
    async with running(database_url, claim_poll_s=_NEVER_S) as server:
        await server.make_job()
        async with server.session(credit=2) as session:
            # Whatever its first look was to find has been found.
            await session.beat()
            for _ in range(2):
                [key] = await server.enqueue()
                (run,) = await session.runs(1)
                assert key_of(run.run) == key


async def test_an_enqueue_on_another_server_reaches_it_by_its_hint(database_url: str) -> None:
    async with (
        running(database_url) as one,
        running(database_url, claim_poll_s=_NEVER_S) as other,
    ):
        await one.make_job()
        async with other.session(credit=1) as session:
            await session.beat()
            [key] = await one.enqueue()
            (run,) = await session.runs(1)
            assert key_of(run.run) == key


@pytest.mark.usefixtures("deaf")
async def test_a_lost_hint_costs_no_more_than_the_next_look(database_url: str) -> None:
    async with running(database_url) as one, running(database_url, claim_poll_s=1.0) as other:
        await one.make_job()
        async with other.session(credit=1) as session:
            await session.beat()
            [key] = await one.enqueue()
            (run,) = await session.runs(1)
            assert key_of(run.run) == key


async def test_a_run_of_the_applications_own_transaction_is_found_by_looking(
    database_url: str,
) -> None:
    async with running(database_url, claim_poll_s=1.0) as server:
        await server.make_job()
        application = await asyncpg.connect(database_url)
        try:
            async with server.session(credit=1) as session:
                await session.beat()
                await application.execute(
                    "SELECT fencepost.enqueue('mail', $1)", json.dumps({"to": "a"})
                )
                (run,) = await session.runs(1)
                assert run.kind == "mail.send"
        finally:
            await application.close()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set whenever a run has been read for an answer."""
    event = asyncio.Event()
    read = RunReads._read

    async def reading(self: RunReads, *values: Any, **named: Any) -> Any:
        run = await read(self, *values, **named)
        event.set()
        return run

    monkeypatch.setattr(RunReads, "_read", reading)
    return event


async def wait(server: RunningServer, key: RunKey, looked: asyncio.Event) -> "asyncio.Future[Any]":
    """A WaitRun call that has looked once and found that the run has not ended."""
    looked.clear()
    waiting: asyncio.Future[Any] = asyncio.ensure_future(
        server.runs.WaitRun(
            run_service_pb2.WaitRunRequest(
                name=format_run("default", "mail", key.scheduled_at), wait=Duration(seconds=30)
            ),
            timeout=45,
        )
    )
    await asyncio.wait_for(looked.wait(), WAIT_S)
    return waiting


async def test_an_end_on_the_same_server_answers_a_wait_without_a_look(
    database_url: str, monkeypatch: pytest.MonkeyPatch, looked: asyncio.Event
) -> None:
    monkeypatch.setattr(run_reads, "_WAIT_FIRST", int(_NEVER_S * 1_000_000))
    async with running(database_url) as server:
        await server.make_job()
        for end in ("complete", "cancel"):
            [key] = await server.enqueue()
            name = format_run("default", "mail", key.scheduled_at)
            run = await claim(server) if end == "complete" else None
            waiting = await wait(server, key, looked)
            if run is not None:
                await complete(server, run)
            else:
                await server.runs.CancelRun(run_service_pb2.CancelRunRequest(name=name))
            answer = await asyncio.wait_for(waiting, WAIT_S)
            assert answer.ended
            assert answer.run.state == (
                RunState.SUCCEEDED if end == "complete" else RunState.CANCELLED
            )


async def test_an_end_on_another_server_answers_a_wait_by_looking(
    database_url: str, looked: asyncio.Event
) -> None:
    async with running(database_url) as one, running(database_url) as other:
        await one.make_job()
        [key] = await one.enqueue()
        run = await claim(one)
        waiting = await wait(other, key, looked)
        await complete(one, run)
        answer = await asyncio.wait_for(waiting, WAIT_S)
        assert (answer.ended, answer.run.state) == (True, RunState.SUCCEEDED)


async def test_a_server_that_leaves_answers_its_waits(
    database_url: str, monkeypatch: pytest.MonkeyPatch, looked: asyncio.Event
) -> None:
    monkeypatch.setattr(run_reads, "_WAIT_FIRST", int(_NEVER_S * 1_000_000))
    async with running(database_url) as server:
        await server.make_job()
        [key] = await server.enqueue()
        waiting = await wait(server, key, looked)
        server.stopping.set()
        answer = await asyncio.wait_for(waiting, WAIT_S)
        assert (answer.ended, answer.run.state) == (False, RunState.QUEUED)
        await until(lambda: _is_done(server), what="the server has left")


async def _is_done(server: RunningServer) -> bool:
    return server.serving.done()
