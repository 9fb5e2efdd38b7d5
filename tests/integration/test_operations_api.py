"""BackfillJob and the operations of RunService over gRPC and a real database."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from fencepost.v1 import (
    job_pb2,
    job_service_pb2,
    operation_pb2,
    run_service_pb2,
    schedule_pb2,
)
from fencepost_server.clock import SECOND
from fencepost_server.engine.backfill_steps import BackfillSteps
from fencepost_server.engine.wake import Wakes
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.integration.definition_server import refusal
from tests.integration.run_server import RunServer, serving

NAME = "tenants/default/jobs/hourly"
HOUR = 3600


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[RunServer]:
    async with serving(database_url) as running:
        yield running


async def _job(server: RunServer) -> job_pb2.Job:
    """An hourly job that is a day old."""
    schedule = schedule_pb2.Schedule(
        interval=schedule_pb2.IntervalSpec(every=Duration(seconds=HOUR))
    )
    job = await server.make_job("hourly", schedule=schedule)
    await server.query("UPDATE fencepost.jobs SET created_at = created_at - interval '1 day'")
    # Its scheduler is up to date: what is due is done.
    await server.query(
        "UPDATE fencepost.job_schedules SET next_run_at = next_run_at + interval '1 hour'"
        " WHERE next_run_at <= fencepost.clock()"
    )
    return job


def _request(server: RunServer, hours: int = 5, **values: Any) -> Any:
    now = server.now() // SECOND
    request = job_service_pb2.BackfillJobRequest(
        name=NAME, since=Timestamp(seconds=now - hours * HOUR), until=Timestamp(seconds=now)
    )
    request.MergeFrom(job_service_pb2.BackfillJobRequest(**values))
    return request


async def test_a_backfill_is_an_operation_that_ends(server: RunServer) -> None:
    await _job(server)
    answer = await server.jobs.BackfillJob(
        _request(server, overlap_policy=schedule_pb2.OVERLAP_POLICY_ALLOW, reason="a lost morning")
    )
    operation = answer.operation
    assert (answer.matched, len(answer.samples)) == (5, 5)
    assert operation.state == operation_pb2.OPERATION_STATE_RUNNING
    assert operation.action == operation_pb2.OPERATION_ACTION_BACKFILL
    assert (operation.rate, operation.reason, operation.matched) == (10, "a lost morning", 5)
    assert operation.filter.startswith("job:hourly scheduled_at>=")
    steps = BackfillSteps(database=server.database, clock=server.database.clock, wake=Wakes())
    assert await steps.step()
    get = run_service_pb2.GetOperationRequest(name=operation.name)
    done = (await server.runs.GetOperation(get)).operation
    assert (done.state, done.changed) == (operation_pb2.OPERATION_STATE_DONE, 5)
    assert done.HasField("ended_at")
    stop = run_service_pb2.StopOperationRequest(name=operation.name)
    assert (await server.runs.StopOperation(stop)).operation == done
    fires = await server.jobs.ListFires(job_service_pb2.ListFiresRequest(parent=NAME))
    backfilled = [
        f for f in fires.fires if f.disposition == schedule_pb2.FIRE_DISPOSITION_BACKFILLED
    ]
    assert [f.scheduled_at for f in reversed(backfilled)] == [
        f.scheduled_at for f in answer.samples
    ]
    # The runs are claimed and end like any other.
    for _ in range(5):
        [assignment] = (await server.claim()).runs
        await server.complete(assignment)
    assert (await server.runs.GetOperation(get)).operation.changed_ended == 5


async def test_operations_are_filtered_and_paged(server: RunServer) -> None:
    await _job(server)
    made = [(await server.jobs.BackfillJob(_request(server))).operation.name for _ in range(3)]
    stop = run_service_pb2.StopOperationRequest(name=made[1])
    stopped = (await server.runs.StopOperation(stop)).operation
    assert stopped.stop_cause == operation_pb2.STOP_CAUSE_REQUESTED
    request = run_service_pb2.ListOperationsRequest(parent="tenants/default", page_size=2)
    first = await server.runs.ListOperations(request)
    request.page_token = first.next_page_token
    second = await server.runs.ListOperations(request)
    names = [each.name for each in [*first.operations, *second.operations]]
    assert sorted(names) == sorted(made)
    assert second.next_page_token == ""
    for text, count in (
        ("state=RUNNING", 2),
        ("state:STOPPED action:BACKFILL", 1),
        ("state!=STOPPED", 2),
        ("action=CANCEL,REPLAY", 0),
        ("state=RUNNING AND state=STOPPED", 0),
    ):
        request = run_service_pb2.ListOperationsRequest(parent="tenants/default", filter=text)
        assert len((await server.runs.ListOperations(request)).operations) == count, text
    request = run_service_pb2.ListOperationsRequest(parent="tenants/default", filter="rate=1")
    refused = await refusal(server.runs.ListOperations(request))
    assert refused.reason == "FILTER_NOT_SUPPORTED"


async def test_the_same_request_gets_the_same_answer(server: RunServer) -> None:
    await _job(server)
    request = _request(server, request_id="once")
    first = await server.jobs.BackfillJob(request)
    assert await server.jobs.BackfillJob(request) == first
    request.rate = 1
    refused = await refusal(server.jobs.BackfillJob(request))
    assert refused.reason == "REQUEST_ID_REUSED"
    [count] = await server.query("SELECT count(*) AS n FROM fencepost.operations")
    assert count["n"] == 1


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"rate": 0.01}, "rate"),
        ({"rate": 1001}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": -1}, "rate"),
        ({"max_runs": -1}, "max_runs"),
        ({"max_runs": 1_000_001}, "max_runs"),
        ({"overlap_policy": schedule_pb2.OVERLAP_POLICY_SKIP}, "overlap_policy"),
        ({"overlap_policy": 77}, "overlap_policy"),
        ({"reason": "x" * 257}, "reason"),
        ({"until": Timestamp(seconds=2**35)}, "until"),
        ({"since": Timestamp(seconds=2**35)}, "since"),
        ({"name": "jobs/a"}, "name"),
        ({"request_id": "x" * 37}, "request_id"),
    ],
)
async def test_bad_backfills_name_the_field(
    server: RunServer, values: dict[str, Any], field: str
) -> None:
    request = _request(server)
    for name, value in values.items():
        if isinstance(value, Timestamp):
            getattr(request, name).CopyFrom(value)
        else:
            setattr(request, name, value)
    refused = await refusal(server.jobs.BackfillJob(request))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.fields == [field]


async def test_a_range_is_required(server: RunServer) -> None:
    request = job_service_pb2.BackfillJobRequest(name=NAME)
    assert (await refusal(server.jobs.BackfillJob(request))).fields == ["since"]
    request.since.seconds = 1
    assert (await refusal(server.jobs.BackfillJob(request))).fields == ["until"]


async def test_what_does_not_exist_is_not_found(server: RunServer) -> None:
    refused = await refusal(server.jobs.BackfillJob(_request(server)))
    assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")
    missing = "tenants/default/operations/0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
    calls = [
        server.runs.GetOperation(run_service_pb2.GetOperationRequest(name=missing)),
        server.runs.StopOperation(run_service_pb2.StopOperationRequest(name=missing)),
    ]
    for call in calls:
        refused = await refusal(call)
        assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND")
        assert refused.resource == missing
    bad = run_service_pb2.GetOperationRequest(name="tenants/default/operations/one")
    assert (await refusal(server.runs.GetOperation(bad))).fields == ["name"]


async def test_a_job_without_schedule_is_refused(server: RunServer) -> None:
    await server.make_job("hourly")
    refused = await refusal(server.jobs.BackfillJob(_request(server)))
    assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_SCHEDULE")
