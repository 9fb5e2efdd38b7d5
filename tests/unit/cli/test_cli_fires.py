"""`fencepost jobs fires`, `jobs backfill` and `ops`: the right calls, the right words."""

import json
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from fencepost.v1 import job_service_pb2, operation_pb2, run_service_pb2, schedule_pb2
from google.protobuf.timestamp_pb2 import Timestamp

from tests.unit.cli.scripted import Refusal, Run, ScriptedServer

OPERATION = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
RUN = "tenants/default/jobs/nightly/runs/2027-03-29T00:30:00Z"


def _at(text: str) -> Timestamp:
    stamp = Timestamp()
    stamp.FromJsonString(text)
    return stamp


def _fired() -> schedule_pb2.Fire:
    return schedule_pb2.Fire(
        scheduled_at=_at("2027-03-29T00:30:00Z"),
        local_time="2027-03-29T02:30:00+02:00",
        disposition=schedule_pb2.FIRE_DISPOSITION_CAUGHT_UP,
        run_name=RUN,
        job_version=2,
        count=1,
    )


def _skipped(count: int) -> schedule_pb2.Fire:
    return schedule_pb2.Fire(
        scheduled_at=_at("2027-03-27T01:30:00Z"),
        last_scheduled_at=_at("2027-03-28T01:30:00Z"),
        local_time="2027-03-27T02:30:00+01:00",
        disposition=schedule_pb2.FIRE_DISPOSITION_SKIPPED,
        skip_reason=schedule_pb2.SKIP_REASON_MISFIRE,
        run_name=RUN,
        job_version=1,
        count=count,
        detail="late",
    )


def _operation(**fields: object) -> operation_pb2.Operation:
    values: dict[str, object] = {
        "name": f"tenants/default/operations/{OPERATION}",
        "action": operation_pb2.OPERATION_ACTION_BACKFILL,
        "state": operation_pb2.OPERATION_STATE_RUNNING,
        "filter": "job:nightly",
        "rate": 10,
        "matched": 7,
        "changed": 3,
    }
    return operation_pb2.Operation(**(values | fields))  # type: ignore[arg-type]


def test_fires_are_a_line_each(server: ScriptedServer, run: Run) -> None:
    answer = job_service_pb2.ListFiresResponse(fires=[_fired(), _skipped(2), _skipped(10_000)])
    server.on("ListFires", answer)
    lines = run("jobs", "fires", "nightly").out.splitlines()
    assert lines[0].split()[:2] == ["LOCAL", "TIME"]
    assert lines[1].split() == [
        *("2027-03-29T02:30:00+02:00", "caught", "up", "1", "-"),
        *("nightly/2027-03-29T00:30:00Z", "2", "-"),
    ]
    assert "skipped (misfire)  2 " in lines[2]
    assert "10000+" in lines[3]
    [request] = server.requests["ListFires"]
    assert request.parent == "tenants/default/jobs/nightly"
    assert not request.HasField("since")
    assert not request.HasField("until")


def test_a_range_is_instants_or_durations_back_from_now(server: ScriptedServer, run: Run) -> None:
    server.on("ListFires", job_service_pb2.ListFiresResponse())
    command = ("jobs", "fires", "nightly", "--since", "7d", "--skipped")
    result = run(*command, "--until", "2099-01-01T00:00:00Z")
    assert result.code == 0
    assert "no such fires" in result.err
    [request] = server.requests["ListFires"]
    back = datetime.now(UTC) - request.since.ToDatetime(tzinfo=UTC)
    assert abs(back - timedelta(days=7)) < timedelta(minutes=5)
    assert request.until == _at("2099-01-01T00:00:00Z")
    assert list(request.dispositions) == [schedule_pb2.FIRE_DISPOSITION_SKIPPED]


def test_fires_as_json_are_those_of_the_contract(server: ScriptedServer, run: Run) -> None:
    first = job_service_pb2.ListFiresResponse(fires=[_fired()], next_page_token="more")
    server.on("ListFires", first, job_service_pb2.ListFiresResponse(fires=[_skipped(2)]))
    fires = json.loads(run("jobs", "fires", "nightly", "-o", "json").out)["fires"]
    assert [fire["disposition"] for fire in fires] == [
        "FIRE_DISPOSITION_CAUGHT_UP",
        "FIRE_DISPOSITION_SKIPPED",
    ]
    assert [request.page_token for request in server.requests["ListFires"]][-1] == "more"


@pytest.mark.parametrize("flags", [("--since", "yesterday"), ("--until", "2027-01-01T00:00")])
def test_a_mistyped_range_is_explained(run: Run, flags: tuple[str, str]) -> None:
    result = run("jobs", "fires", "nightly", *flags)
    assert result.code == 2
    assert flags[1] in result.err


def test_a_backfill_says_how_to_follow_it(server: ScriptedServer, run: Run) -> None:
    server.on("BackfillJob", job_service_pb2.BackfillJobResponse(operation=_operation(), matched=7))
    flags = "--since 2027-03-01T00:00:00Z --until 2027-03-08T00:00:00Z --rate 50 --allow-overlap"
    result = run("jobs", "backfill", "nightly", *flags.split(), "--reason", "a lost week")
    assert result.code == 0
    assert f"fencepost ops watch {OPERATION}" in result.err
    [request] = server.requests["BackfillJob"]
    assert request.since == _at("2027-03-01T00:00:00Z")
    assert request.until == _at("2027-03-08T00:00:00Z")
    assert (request.rate, request.reason) == (50, "a lost week")
    assert request.overlap_policy == schedule_pb2.OVERLAP_POLICY_ALLOW
    assert len(request.request_id) == 36


def test_a_dry_run_shows_what_would_be_made(server: ScriptedServer, run: Run) -> None:
    server.on("BackfillJob", job_service_pb2.BackfillJobResponse(matched=1, samples=[_fired()]))
    result = run("jobs", "backfill", "nightly", "--since", "7d", "--dry-run")
    assert "2027-03-29T02:30:00+02:00" in result.out
    assert "1 fires would get a run; nothing was made" in result.err
    [request] = server.requests["BackfillJob"]
    assert request.dry_run
    assert request.overlap_policy == schedule_pb2.OVERLAP_POLICY_QUEUE_ALL
    assert abs(request.until.ToDatetime(tzinfo=UTC) - datetime.now(UTC)) < timedelta(minutes=5)


def test_too_many_fires_is_a_usage_error(server: ScriptedServer, run: Run) -> None:
    server.on(
        "BackfillJob",
        lambda _: Refusal(
            grpc.StatusCode.INVALID_ARGUMENT,
            "the range holds more than 10000 fires",
            reason="TOO_MANY_FIRES",
        ),
    )
    result = run("jobs", "backfill", "nightly", "--since", "7d")
    assert result.code == 2
    assert "--max-runs" in result.err


def test_operations_are_listed(server: ScriptedServer, run: Run) -> None:
    server.on("ListOperations", run_service_pb2.ListOperationsResponse(operations=[_operation()]))
    out = run("ops", "list", "--state", "running", "--state", "done").out
    assert out.splitlines()[1].split()[:5] == [OPERATION, "backfill", "running", "3", "7"]
    [request] = server.requests["ListOperations"]
    assert request.filter == "state=RUNNING,DONE"


def test_an_operation_is_watched_to_its_end(server: ScriptedServer, run: Run) -> None:
    stopped = _operation(
        state=operation_pb2.OPERATION_STATE_STOPPED,
        stop_cause=operation_pb2.STOP_CAUSE_REQUESTED,
        changed_dead=1,
        changed_ended=2,
    )
    server.on(
        "GetOperation",
        run_service_pb2.GetOperationResponse(operation=_operation()),
        run_service_pb2.GetOperationResponse(operation=stopped),
    )
    result = run("ops", "watch", OPERATION)
    assert result.code == 0
    assert "running · 3 of 7 made · 0 ended" in result.err
    assert "stopped (requested) · 3 of 7 made · 2 ended · 1 dead" in result.err
    assert "state      stopped (requested)" in result.out
    assert server.requests["GetOperation"][0].name == f"tenants/default/operations/{OPERATION}"


def test_a_watch_gives_up_when_told(server: ScriptedServer, run: Run) -> None:
    server.on("GetOperation", run_service_pb2.GetOperationResponse(operation=_operation()))
    result = run("ops", "watch", OPERATION, "--timeout", "0s")
    assert result.code == 8
    assert "it goes on" in result.err


def test_an_operation_is_read_and_stopped(server: ScriptedServer, run: Run) -> None:
    server.on("GetOperation", run_service_pb2.GetOperationResponse(operation=_operation()))
    server.on("StopOperation", run_service_pb2.StopOperationResponse(operation=_operation()))
    assert "rate       10 runs a second" in run("ops", "get", OPERATION).out
    stopped = json.loads(run("ops", "stop", OPERATION, "-o", "json").out)
    assert stopped["matched"] == "7"
