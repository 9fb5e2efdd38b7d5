"""CreateJob and GetJob over gRPC and a real database."""

from collections.abc import AsyncIterator

import grpc
import pytest
from fencepost.v1 import job_pb2, schedule_pb2
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.domain.job import partition_of, partition_of_id

from tests.integration.definition_calls import PARENT, a_job, a_request, count_jobs
from tests.integration.definition_server import DefinitionServer, refusal, serving


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


async def test_a_job_is_stored_and_read_back(server: DefinitionServer) -> None:
    job = a_job("0 3 * * *", env="prod")
    job.payload.json = '{"a": "\\u0000"}'
    created = (await server.jobs.CreateJob(a_request("nightly", job))).job
    assert created.name == f"{PARENT}/jobs/nightly"
    assert partition_of_id(created.job_id) == partition_of(tenant="default", job_name="nightly")
    assert (created.version, created.state) == (1, job_pb2.JOB_STATE_ACTIVE)
    assert created.next_run_at.seconds % 86_400 == 3 * 3600
    assert created.payload.json == job.payload.json
    for last_part in ("nightly", created.job_id):
        found = await server.jobs.GetJob(pb.GetJobRequest(name=f"{PARENT}/jobs/{last_part}"))
        assert found.job == created
    assert server.woken.partitions == [{partition_of_id(created.job_id)}]
    assert await count_jobs(server) == 1


async def test_a_job_without_schedule_waits(server: DefinitionServer) -> None:
    created = (await server.jobs.CreateJob(a_request("adhoc"))).job
    assert created.state == job_pb2.JOB_STATE_ACTIVE
    assert not created.HasField("next_run_at")
    assert await count_jobs(server) == 1


async def test_the_server_picks_a_name(server: DefinitionServer) -> None:
    names = {(await server.jobs.CreateJob(a_request(""))).job.name for _ in range(3)}
    assert len(names) == 3


async def test_a_fire_that_is_due_makes_its_run_in_the_same_commit(
    server: DefinitionServer,
) -> None:
    job = a_job()
    job.schedule.once.SetInParent()
    answer = await server.jobs.CreateJob(a_request("now", job))
    rows = await server.query(
        "SELECT job_id, scheduled_at, state, version FROM fencepost.run_queue"
    )
    assert [(str(row["job_id"]), row["state"], row["version"]) for row in rows] == [
        (answer.job.job_id, "queued", 1)
    ]
    text = rows[0]["scheduled_at"].strftime("%Y-%m-%dT%H:%M:%SZ")
    assert answer.run_name == f"{PARENT}/jobs/now/runs/{text}"
    assert answer.job.state == job_pb2.JOB_STATE_FINISHED
    assert answer.job.fire_count == 1
    assert len(server.woken.lane_hints) == 1


async def test_a_paused_job_does_not_fire(server: DefinitionServer) -> None:
    job = a_job()
    job.schedule.once.SetInParent()
    job.paused, job.pause_reason = True, "not yet"
    answer = await server.jobs.CreateJob(a_request("later", job))
    assert (answer.run_name, answer.job.state) == ("", job_pb2.JOB_STATE_PAUSED)
    assert answer.job.pause_reason == "not yet"
    assert await server.query("SELECT FROM fencepost.run_queue") == []


async def test_the_trace_of_the_call_is_kept(server: DefinitionServer) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = (("traceparent", parent), ("tracestate", "a=b"), ("baggage", "x" * 3000))
    created = (await server.jobs.CreateJob(a_request("traced"), metadata=sent)).job
    assert created.trace_context.traceparent == parent
    assert created.trace_context.tracestate == "a=b"
    assert created.trace_context.baggage == ""


async def test_a_cap_makes_the_claims_of_the_queue_count(server: DefinitionServer) -> None:
    statement = "SELECT has_capped_jobs FROM fencepost.queues"
    await server.jobs.CreateJob(a_request("free"))
    assert not (await server.query(statement))[0]["has_capped_jobs"]
    job = a_job()
    job.limits.max_in_flight = 2
    await server.jobs.CreateJob(a_request("capped", job))
    assert (await server.query(statement))[0]["has_capped_jobs"]


async def test_settings_are_repeated_where_fires_find_them(server: DefinitionServer) -> None:
    job = a_job()
    job.target.priority = 4
    job.schedule.interval.every.seconds = 60
    job.schedule.max_fires = 9
    job.schedule.misfire_policy.threshold.seconds = 5
    job.schedule.misfire_policy.window.seconds = 600
    job.schedule.overlap_policy = schedule_pb2.OVERLAP_POLICY_QUEUE_ALL
    job.limits.lease_ttl.seconds = 15
    job.limits.attempt_timeout.nanos = 0
    job.limits.attempt_timeout.seconds = 77
    job.limits.cancel_grace.seconds = 5
    job.limits.concurrency_key = "k"
    await server.jobs.CreateJob(a_request("wide", job))
    row = (await server.query("SELECT * FROM fencepost.job_schedules"))[0]
    wanted = {
        "priority": 4,
        "every_s": 60,
        "schedule_id": None,
        "max_fires": 9,
        "misfire": "run_once",
        "misfire_after_s": 5,
        "misfire_window_s": 600,
        "overlap": "queue_all",
        "lease_s": 15,
        "attempt_timeout_s": 77,
        "cancel_grace_s": 5,
        "concurrency_key": "k",
        "max_in_flight": None,
        "version": 1,
    }
    assert {name: row[name] for name in wanted} == wanted


async def test_a_name_is_taken_once(server: DefinitionServer) -> None:
    await server.jobs.CreateJob(a_request("a"))
    seen = await refusal(server.jobs.CreateJob(a_request("a")))
    assert (seen.code, seen.reason) == (grpc.StatusCode.ALREADY_EXISTS, "JOB_ALREADY_EXISTS")
    assert seen.resource == f"{PARENT}/jobs/a"
    assert await count_jobs(server) == 1


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        ({"parent": "tenants/none"}, "TENANT_NOT_FOUND", None),
        ({"parent": "none"}, "INVALID_FIELD", "parent"),
        ({"parent": ""}, "INVALID_FIELD", "parent"),
        ({"job_name": "A"}, "INVALID_FIELD", "job_name"),
        ({"job_name": "a\x00"}, "INVALID_FIELD", "job_name"),
        ({"request_id": "x" * 37}, "INVALID_FIELD", "request_id"),
        ({"request_id": "a\x00"}, "INVALID_FIELD", "request_id"),
    ],
)
async def test_wrong_requests_are_refused(
    server: DefinitionServer, change: dict[str, str], reason: str, field: str | None
) -> None:
    request = a_request("a")
    for name, value in change.items():
        setattr(request, name, value)
    seen = await refusal(server.jobs.CreateJob(request))
    assert seen.reason == reason
    assert seen.fields == ([] if field is None else [field])
    assert await count_jobs(server) == 0


async def test_wrong_definitions_are_refused(server: DefinitionServer) -> None:
    lost = a_job()
    lost.target.queue = f"{PARENT}/queues/none"
    never = a_job("0 0 30 2 *")
    over = a_job("@daily")
    over.schedule.end_at.seconds = 5
    odd = a_job("* * *")
    for job, reason, fields in (
        (lost, "QUEUE_NOT_FOUND", []),
        (never, "INVALID_SCHEDULE", ["job.schedule.cron.expressions[0]"]),
        (odd, "INVALID_SCHEDULE", ["job.schedule.cron.expressions[0]"]),
        (over, "INVALID_SCHEDULE", ["job.schedule"]),
    ):
        seen = await refusal(server.jobs.CreateJob(a_request("a", job)))
        assert (seen.reason, seen.fields) == (reason, fields)
    assert (await refusal(server.jobs.CreateJob(pb.CreateJobRequest(parent=PARENT)))).fields == [
        "job"
    ]
    assert await count_jobs(server) == 0


async def test_a_check_stores_nothing(server: DefinitionServer) -> None:
    job = a_job()
    job.schedule.once.SetInParent()
    request = a_request("a", job, request_id="r")
    request.validate_only = True
    shown = (await server.jobs.CreateJob(request)).job
    assert shown.name == f"{PARENT}/jobs/a"
    assert await count_jobs(server) == 0
    for table in ("run_queue", "requests"):
        assert await server.query(f"SELECT FROM fencepost.{table}") == []
    assert server.woken.partitions == []
    await server.jobs.CreateJob(a_request("a"))
    assert (await refusal(server.jobs.CreateJob(request))).reason == "JOB_ALREADY_EXISTS"


async def test_missing_jobs_are_not_found(server: DefinitionServer) -> None:
    created = (await server.jobs.CreateJob(a_request("a"))).job
    for name, version in (
        (f"{PARENT}/jobs/b", 0),
        (f"{PARENT}/jobs/0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42", 0),
        (created.name, 2),
    ):
        seen = await refusal(server.jobs.GetJob(pb.GetJobRequest(name=name, version=version)))
        assert (seen.code, seen.reason) == (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")
        assert seen.resource == name
