"""`fencepost runs why`, `tail`, `cancel`, `replay`, `discard`: calls, words, ends."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from fencepost.v1 import failure_pb2, run_pb2, run_service_pb2
from fencepost_server.cli import tailing
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.unit.cli.scripted import Refusal, Run, ScriptedServer

NAME = "tenants/default/jobs/invoice/runs/2026-12-01T09:00:00Z"
SHORT = "invoice/2026-12-01T09:00:00Z"
AWAY = Refusal(grpc.StatusCode.UNAVAILABLE, "draining", reason="SERVER_DRAINING")


def a_run(state: "run_pb2.RunState.ValueType", **fields: Any) -> run_pb2.Run:
    return run_pb2.Run(
        name=NAME,
        state=state,
        kind="invoice.send",
        queue="tenants/default/queues/billing",
        **fields,
    )


QUEUED = a_run(run_pb2.RUN_STATE_QUEUED)


def an_event(state: "run_pb2.RunState.ValueType", **fields: Any) -> run_pb2.RunEvent:
    return run_pb2.RunEvent(
        changed_at=Timestamp(seconds=1_764_579_242, nanos=113_000_000), run=a_run(state, **fields)
    )


def told(cursor: str, *events: run_pb2.RunEvent, gap: bool = False) -> Any:
    return run_service_pb2.WatchRunsResponse(cursor=cursor, events=events, gap=gap)


def test_holds_are_told_with_what_to_do(server: ScriptedServer, run: Run) -> None:
    holds = [
        run_pb2.Hold(
            code=run_pb2.HOLD_CODE_QUEUE_PAUSED,
            message="the queue is paused:\nthe provider is down",
            subject="tenants/default/queues/billing",
        ),
        run_pb2.Hold(
            code=run_pb2.HOLD_CODE_KEY_LIMIT,
            message="2 of 2 runs of the key acme",
            holders=[NAME],
            clears_in=Duration(seconds=90),
        ),
        run_pb2.Hold(code=99, message="something that a newer server knows"),  # type: ignore[arg-type]
    ]
    server.on("ExplainRun", run_service_pb2.ExplainRunResponse(run=QUEUED, holds=holds))
    result = run("runs", "why", SHORT)
    assert result.code == 0
    assert result.out.splitlines() == [
        f"{SHORT} is queued: 3 things keep it from starting",
        "- the queue is paused: the provider is down",
        "  try      fencepost queues resume billing",
        "- 2 of 2 runs of the key acme · clears in 1m 30s",
        f"  held by  {SHORT}",
        "  try      wait, or raise it: fencepost queues set billing --max-in-flight-per-key N",
        "- something that a newer server knows",
    ]
    assert server.requests["ExplainRun"][0].name == NAME
    as_json = json.loads(run("runs", "why", SHORT, "-o", "json").out)
    assert as_json["holds"][0]["code"] == "HOLD_CODE_QUEUE_PAUSED"


def test_there_is_advice_for_every_hold() -> None:
    from fencepost_server.cli.why import describe_hold

    for code in run_pb2.HoldCode.values():
        lines = describe_hold(run_pb2.Hold(code=code, subject="tenants/t/queues/q"), QUEUED)
        assert lines[0].startswith("- ")
        assert (len(lines) == 2) == (code != run_pb2.HOLD_CODE_UNSPECIFIED)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (QUEUED, f"{SHORT} is queued: nothing keeps it from starting"),
        (
            a_run(run_pb2.RUN_STATE_RUNNING, attempt=2, worker="workers/w-7"),
            f"{SHORT} is running: attempt 2 on worker w-7",
        ),
        (
            a_run(run_pb2.RUN_STATE_DEAD, dead_reason=run_pb2.DEAD_REASON_MAX_FAILURES),
            f"{SHORT} is dead: max failures",
        ),
        (a_run(run_pb2.RUN_STATE_SUCCEEDED), f"{SHORT} is succeeded"),
    ],
)
def test_a_run_that_nothing_holds(
    server: ScriptedServer, run: Run, answer: run_pb2.Run, line: str
) -> None:
    server.on("ExplainRun", run_service_pb2.ExplainRunResponse(run=answer))
    assert run("runs", "why", SHORT).out == f"{line}\n"


def test_a_wrong_run_is_told_as_the_server_says(server: ScriptedServer, run: Run) -> None:
    refusal = Refusal(
        grpc.StatusCode.NOT_FOUND, f"{NAME} does not exist", reason="RUN_NOT_FOUND", resource=NAME
    )
    server.on("ExplainRun", lambda _: refusal)
    result = run("runs", "why", SHORT)
    assert result.code == 3
    assert f"{NAME} does not exist" in result.err
    assert "fencepost runs list" in result.err


def test_changes_are_a_line_each_over_a_restart(
    server: ScriptedServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tailing, "_RETRY_FIRST_S", 0.001)
    failed = an_event(
        run_pb2.RUN_STATE_RETRYING,
        attempt=2,
        available_at=Timestamp(seconds=1_764_579_300),
        last_failure=failure_pb2.Failure(code="SMTP", message="timed\nout"),
    )
    refusal = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "filter: no", reason="INVALID_FIELD")
    server.on(
        "WatchRuns",
        lambda _: [told("c1", an_event(run_pb2.RUN_STATE_RUNNING, attempt=1)), told("c2"), AWAY],
        lambda _: AWAY,
        lambda _: [told("c3", failed, gap=True)],
        lambda _: refusal,
    )
    command = ("runs", "tail", "--job", "invoice", "--state", "dead", "--filter", "kind=a")
    result = run(*command)
    assert result.code == 2
    assert result.out.splitlines() == [
        f"08:54:02.113  {SHORT}  invoice.send  running",
        f"08:54:02.113  {SHORT}  invoice.send  retrying   again at 2025-12-01 08:55:00+00:00: "
        "SMTP timed out · attempt 2",
    ]
    said = [line.strip() for line in result.err.splitlines()]
    assert said[0].endswith("draining; trying again")
    assert said[1] == "goes on"
    assert said[2].startswith("gap: ")
    requests = server.requests["WatchRuns"]
    assert [each.cursor for each in requests] == ["", "c2", "c2", "c3"]
    assert {each.parent for each in requests} == {"tenants/default/jobs/invoice"}
    assert {each.filter for each in requests} == {"kind=a AND state=DEAD"}


def test_changes_as_json_are_a_document_a_line(server: ScriptedServer, run: Run) -> None:
    refusal = Refusal(grpc.StatusCode.NOT_FOUND, "no such tenant", reason="TENANT_NOT_FOUND")
    event = an_event(run_pb2.RUN_STATE_DEAD)
    server.on("WatchRuns", lambda _: [told("c1", event, event), refusal])
    result = run("runs", "tail", "-o", "json")
    assert result.code == 3
    documents = [json.loads(line) for line in result.out.splitlines()]
    assert [each["run"]["state"] for each in documents] == ["RUN_STATE_DEAD"] * 2


def test_a_tail_ends_when_told(server: ScriptedServer, run: Run) -> None:
    server.on("WatchRuns", lambda _: [told("c1")])
    assert run("runs", "tail", "--for", "300ms").code == 0


def test_a_tail_of_a_wrong_address_ends_at_once(run: Run) -> None:
    assert run("runs", "tail", "--server", "127.0.0.1:1").code == 6


def test_a_tail_gives_up_when_the_server_stays_away(
    server: ScriptedServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tailing, "_RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(tailing, "_AWAY_S", 0.05)
    server.on("WatchRuns", lambda _: [told("c1"), AWAY], lambda _: AWAY)
    result = run("runs", "tail")
    assert (result.code, "cannot watch runs" in result.err) == (6, True)


def test_a_run_is_cancelled(server: ScriptedServer, run: Run) -> None:
    asked = a_run(run_pb2.RUN_STATE_RUNNING, attempt=1, cancel_requested=True)
    ended = a_run(run_pb2.RUN_STATE_SUCCEEDED)
    server.on(
        "CancelRun", *(run_service_pb2.CancelRunResponse(run=each) for each in (asked, ended))
    )
    result = run("runs", "cancel", SHORT, "--grace", "30s", "--reason", "wrong input")
    assert (result.code, f"fencepost runs watch {SHORT}" in result.err) == (0, True)
    [request] = server.requests["CancelRun"]
    assert (request.name, request.reason, request.grace.seconds) == (NAME, "wrong input", 30)
    again = run("runs", "cancel", SHORT)
    assert (again.code, "it had ended before: succeeded" in again.err) == (0, True)
    assert not server.requests["CancelRun"][1].HasField("grace")


def test_a_dead_letter_is_replayed(server: ScriptedServer, run: Run, tmp_path: Path) -> None:
    server.on("ReplayRun", run_service_pb2.ReplayRunResponse(run=QUEUED))
    file = tmp_path / "payload.json"
    file.write_text('{"a": 1.0}')
    result = run(
        *("runs", "replay", SHORT, "--payload-file", str(file), "--newest-version"),
        *("--reason", "fixed"),
    )
    assert (result.code, f"fencepost runs watch {SHORT}" in result.err) == (0, True)
    [request] = server.requests["ReplayRun"]
    assert request.payload.json == '{"a": 1.0}'
    assert (request.use_newest_version, request.reason) == (True, "fixed")
    assert len(request.request_id) == 36
    both = run("runs", "replay", SHORT, "--payload", "1", "--payload-file", str(file))
    assert (both.code, len(server.requests["ReplayRun"])) == (2, 1)


def test_a_replay_is_watched_to_its_end(server: ScriptedServer, run: Run) -> None:
    server.on("ReplayRun", run_service_pb2.ReplayRunResponse(run=QUEUED))
    dead = a_run(run_pb2.RUN_STATE_DEAD, attempt=6)
    server.on("WaitRun", run_service_pb2.WaitRunResponse(run=dead, ended=True))
    assert run("runs", "replay", SHORT, "--watch").code == 7


def test_what_is_not_dead_is_not_replayed(server: ScriptedServer, run: Run) -> None:
    refusal = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "it is SUCCEEDED", reason="RUN_NOT_DEAD")
    server.on("ReplayRun", lambda _: refusal)
    result = run("runs", "replay", SHORT)
    assert (result.code, "fencepost dead list" in result.err) == (5, True)


def test_a_discard_is_asked_for(server: ScriptedServer, run: Run) -> None:
    server.on("DiscardRun", run_service_pb2.DiscardRunResponse(run=a_run(run_pb2.RUN_STATE_DEAD)))
    asked = run("runs", "discard", SHORT)
    assert (asked.code, "say --yes" in asked.err) == (2, True)
    assert run("runs", "discard", SHORT, "--reason", "paid by hand", "--yes").code == 0
    [request] = server.requests["DiscardRun"]
    assert (request.name, request.reason) == (NAME, "paid by hand")


def test_a_unique_key_says_what_to_do_about_its_holder(server: ScriptedServer, run: Run) -> None:
    server.on("EnqueueRun", run_service_pb2.EnqueueRunResponse(run=QUEUED))
    flags = "--unique k --on-conflict replace-waiting --keep-for 2d --concurrency-key acme"
    assert run("run", "invoice", *flags.split()).code == 0
    [request] = server.requests["EnqueueRun"]
    assert request.unique_key.key == "k"
    assert request.unique_key.on_conflict == run_pb2.UNIQUE_CONFLICT_ACTION_REPLACE_WAITING
    assert request.unique_key.keep_for == Duration(seconds=172_800)
    assert request.concurrency_key == "acme"
    alone = run("run", "invoice", "--keep-for", "2d")
    assert (alone.code, "--unique-key KEY" in alone.err) == (2, True)
