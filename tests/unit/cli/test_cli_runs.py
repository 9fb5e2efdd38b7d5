"""`fencepost run`, `runs` and `workers`: made, listed, followed to the end, exit codes."""

import json
from typing import Any

import grpc
import pytest
from fencepost.v1 import (
    admin_pb2,
    admin_service_pb2,
    failure_pb2,
    run_pb2,
    run_service_pb2,
    worker_pb2,
)
from fencepost_server.cli import watching
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.unit.cli.scripted import Refusal, Run, ScriptedServer

NAME = "tenants/default/jobs/hello/runs/2026-12-01T09:00:00.000001Z"
SHORT = "hello/2026-12-01T09:00:00.000001Z"


def a_run(state: "run_pb2.RunState.ValueType", **fields: Any) -> run_pb2.Run:
    return run_pb2.Run(
        name=NAME,
        key=run_pb2.RunKey(job_id="j", scheduled_at=Timestamp(seconds=1000)),
        state=state,
        kind="demo.hello",
        **fields,
    )


QUEUED = a_run(run_pb2.RUN_STATE_QUEUED)
RUNNING = a_run(run_pb2.RUN_STATE_RUNNING, attempt=1)
SUCCEEDED = a_run(
    run_pb2.RUN_STATE_SUCCEEDED,
    attempt=1,
    first_claimed_at=Timestamp(seconds=1002),
    claimed_at=Timestamp(seconds=1002),
    ended_at=Timestamp(seconds=1064),
)
DEAD = a_run(
    run_pb2.RUN_STATE_DEAD,
    attempt=5,
    dead_reason=run_pb2.DEAD_REASON_MAX_FAILURES,
    last_failure=failure_pb2.Failure(code="SMTP", message="timed\nout\x1b[31m"),
)


def waited(run: run_pb2.Run, *, ended: bool) -> run_service_pb2.WaitRunResponse:
    return run_service_pb2.WaitRunResponse(run=run, ended=ended)


def test_a_run_is_made_and_named(server: ScriptedServer, run: Run) -> None:
    server.on("EnqueueRun", run_service_pb2.EnqueueRunResponse(run=QUEUED))
    result = run(
        *("run", "hello", "--payload", '{"a":1}', "--delay", "10m", "--unique-key", "k"),
        *("--priority", "0", "--label", "a=b"),
    )
    assert (result.code, result.out) == (0, f"{SHORT}\n")
    assert f"fencepost runs watch {SHORT}" in result.err
    request = server.requests["EnqueueRun"][0]
    assert request.job == "tenants/default/jobs/hello"
    assert request.payload.json == '{"a":1}'
    assert request.delay == Duration(seconds=600)
    assert request.unique_key.key == "k"
    assert request.HasField("priority")
    assert dict(request.labels) == {"a": "b"}
    assert len(request.request_id) == 36


def test_a_held_unique_key_is_told(server: ScriptedServer, run: Run) -> None:
    server.on("EnqueueRun", run_service_pb2.EnqueueRunResponse(run=RUNNING, existing=True))
    result = run("run", "hello", "--unique-key", "k")
    assert (result.code, result.out) == (0, f"{SHORT}\n")
    assert "no run was made" in result.err


def test_a_run_that_is_due_twice_is_refused(server: ScriptedServer, run: Run) -> None:
    result = run("run", "hello", "--delay", "1s", "--at", "2027-01-01T00:00:00Z")
    assert (result.code, dict(server.requests)) == (2, {})


def test_watch_ends_well_with_the_run(server: ScriptedServer, run: Run) -> None:
    server.on("EnqueueRun", run_service_pb2.EnqueueRunResponse(run=QUEUED))
    server.on(
        "WaitRun",
        waited(QUEUED, ended=False),
        waited(RUNNING, ended=False),
        waited(SUCCEEDED, ended=True),
    )
    result = run("run", "hello", "--watch")
    assert result.code == 0
    told = [line.strip() for line in result.err.splitlines()]
    assert told == [f"run {SHORT}", "queued", "running · attempt 1", "succeeded · attempt 1"]
    shown = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert (shown["state"], shown["waited"], shown["took"]) == ("succeeded", "2s", "1m 02s")


def test_watch_of_a_dead_run_exits_7(server: ScriptedServer, run: Run) -> None:
    server.on("WaitRun", waited(DEAD, ended=True))
    result = run("runs", "watch", SHORT, "-o", "json")
    assert result.code == 7
    assert json.loads(result.out)["state"] == "RUN_STATE_DEAD"
    # The failure's text cannot move the terminal's cursor or break the line.
    assert "why:    max failures: SMTP timed out [31m" in result.err


def test_watch_gives_up_with_8(server: ScriptedServer, run: Run) -> None:
    server.on("WaitRun", waited(RUNNING, ended=False))
    result = run("runs", "watch", SHORT, "--timeout", "0s")
    assert result.code == 8
    assert f"fencepost runs watch {SHORT}" in result.err
    assert server.requests["WaitRun"][0].name == NAME


def test_watch_outlasts_a_restart_of_the_server(
    server: ScriptedServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_RETRY_S", 0.01)
    away = Refusal(grpc.StatusCode.UNAVAILABLE, "draining", reason="SERVER_DRAINING")
    server.on("WaitRun", waited(RUNNING, ended=False), away, away, waited(SUCCEEDED, ended=True))
    result = run("runs", "watch", SHORT)
    assert (result.code, result.err.count("trying again")) == (0, 1)


def test_watch_of_a_wrong_address_ends_at_once(run: Run) -> None:
    result = run("runs", "watch", SHORT, "--server", "127.0.0.1:1")
    assert (result.code, "127.0.0.1:1" in result.err) == (6, True)


def test_runs_are_listed(server: ScriptedServer, run: Run) -> None:
    server.on("ListRuns", run_service_pb2.ListRunsResponse(runs=[SUCCEEDED, DEAD]))
    result = run(
        *("runs", "list", "hello", "--state", "dead", "--state", "succeeded"),
        *("--since", "2026-12-01T10:00:00+01:00", "--kind", "demo.hello"),
    )
    request = server.requests["ListRuns"][0]
    assert request.parent == "tenants/default/jobs/hello"
    assert request.filter == (
        "state=DEAD,SUCCEEDED AND kind=demo.hello AND scheduled_at>=2026-12-01T09:00:00Z"
    )
    first, second = result.out.splitlines()[1:]
    assert first.split() == [
        SHORT,
        "succeeded",
        "demo.hello",
        "1",
        "unspecified",
        "2s",
        "1m",
        "02s",
        "-",
    ]
    assert second.endswith("max failures: SMTP timed out [31m")


def test_one_run_is_shown_with_its_attempts(server: ScriptedServer, run: Run) -> None:
    server.on("GetRun", run_service_pb2.GetRunResponse(run=SUCCEEDED))
    attempt = run_pb2.Attempt(attempt=1, outcome=run_pb2.ATTEMPT_OUTCOME_SUCCEEDED)
    server.on("ListAttempts", run_service_pb2.ListAttemptsResponse(attempts=[attempt]))
    result = run("runs", "get", SHORT)
    assert result.code == 0
    assert result.out.splitlines()[-1].split()[:2] == ["1", "succeeded"]
    as_json = run("runs", "get", NAME, "-o", "json")
    assert json.loads(as_json.out)["name"] == NAME


def test_a_name_that_is_no_run_is_refused(server: ScriptedServer, run: Run) -> None:
    result = run("runs", "get", "hello")
    assert (result.code, "JOB/SCHEDULED_AT" in result.err) == (2, True)


def test_workers_are_listed(server: ScriptedServer, run: Run) -> None:
    subscription = worker_pb2.QueueSubscription(
        queue="tenants/default/queues/default", kinds=["b", "a"]
    )
    worker = admin_pb2.Worker(
        name="workers/w-1",
        state=admin_pb2.WORKER_STATE_READY,
        subscriptions=[subscription],
        slots=8,
        held_runs=8,
    )
    server.on("ListWorkers", admin_service_pb2.ListWorkersResponse(workers=[worker]))
    result = run("workers", "list")
    assert result.out.splitlines()[1].split()[:7] == [
        "w-1",
        "-",
        "ready",
        "default",
        "a",
        "b",
        "8/8",
    ]
    assert json.loads(run("workers", "list", "-o", "json").out)["workers"][0]["slots"] == 8
