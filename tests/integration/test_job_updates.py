"""UpdateJob over gRPC and a real database."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from fencepost.v1 import job_pb2
from fencepost.v1 import job_service_pb2 as pb

from tests.integration.definition_calls import NAME, PARENT, create, read, update, yearly_job
from tests.integration.definition_server import DefinitionServer, refusal, serving


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


async def test_a_change_of_the_definition_is_a_new_version(server: DefinitionServer) -> None:
    first = await create(server)
    wanted = job_pb2.Job(name=NAME, labels={"env": "prod"}, etag=first.etag)
    wanted.limits.max_in_flight = 3
    changed = (await update(server, wanted)).job
    assert (changed.version, changed.limits.max_in_flight) == (2, 3)
    assert changed.labels == {"env": "prod"}
    assert changed.next_run_at == first.next_run_at
    assert changed.schedule == first.schedule
    assert changed.etag != first.etag
    assert await read(server) == changed
    old = await server.jobs.GetJob(pb.GetJobRequest(name=NAME, version=1))
    assert (old.job.version, dict(old.job.labels)) == (1, {})
    assert old.job.etag == changed.etag
    row = (await server.query("SELECT version, max_in_flight FROM fencepost.job_schedules"))[0]
    assert (row["version"], row["max_in_flight"]) == (2, 3)
    assert (await server.query("SELECT has_capped_jobs FROM fencepost.queues"))[0][0]


async def test_an_identical_update_changes_nothing(server: DefinitionServer) -> None:
    job = yearly_job("*/5 * * * *")
    job.payload.json = "[1]"
    job.limits.lease_ttl.seconds = 20
    first = await create(server, job)
    for mask in ((), ("*",), ("schedule.cron.expressions", "payload")):
        assert (await update(server, job, *mask)).job == first
    # What was read can be sent back as it is.
    assert (await update(server, first)).job == first
    assert (await update(server, first, "*")).job == first
    assert len(await server.query("SELECT FROM fencepost.job_versions")) == 1


async def test_an_etag_makes_an_update_conditional(server: DefinitionServer) -> None:
    first = await create(server)
    await update(server, job_pb2.Job(name=NAME, display_name="x", etag=first.etag))
    stale = job_pb2.Job(name=NAME, display_name="y", etag=first.etag)
    seen = await refusal(update(server, stale))
    assert (seen.code, seen.reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")
    assert seen.metadata["currentEtag"] == (await read(server)).etag
    assert (await read(server)).display_name == "x"


async def test_an_etag_of_a_namesake_does_not_match(server: DefinitionServer) -> None:
    first = await create(server)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME))
    await create(server)
    stale = job_pb2.Job(name=NAME, display_name="y", etag=first.etag)
    assert (await refusal(update(server, stale))).reason == "ETAG_MISMATCH"


async def test_updates_at_once_lose_nothing(server: DefinitionServer) -> None:
    await create(server)
    paths = ("display_name", "description", "labels", "limits.max_in_flight")
    wanted = job_pb2.Job(name=NAME, display_name="n", description="d", labels={"a": "b"})
    wanted.limits.max_in_flight = 2
    await asyncio.gather(*(update(server, wanted, path) for path in paths))
    stored = await read(server)
    assert (stored.display_name, stored.description) == ("n", "d")
    assert dict(stored.labels) == {"a": "b"}
    assert (stored.limits.max_in_flight, stored.version) == (2, 5)


async def test_wrong_updates_are_refused(server: DefinitionServer) -> None:
    await create(server)
    bad = yearly_job("61 * * * *")
    lost = job_pb2.Job(name=NAME, target=job_pb2.Target(queue=f"{PARENT}/queues/no", kind="k"))
    for job, paths, reason in (
        (bad, (), "INVALID_SCHEDULE"),
        (lost, (), "QUEUE_NOT_FOUND"),
        (yearly_job(), ("paused",), "INVALID_FIELD"),
        (yearly_job(), ("nope",), "INVALID_FIELD"),
        (job_pb2.Job(name=NAME), ("*",), "INVALID_FIELD"),
        (job_pb2.Job(name=NAME), ("target.kind",), "INVALID_FIELD"),
        (job_pb2.Job(name=f"{PARENT}/jobs/b"), (), "JOB_NOT_FOUND"),
        (job_pb2.Job(), (), "INVALID_FIELD"),
    ):
        assert (await refusal(update(server, job, *paths))).reason == reason
    assert (await read(server)).version == 1


async def test_a_check_changes_nothing(server: DefinitionServer) -> None:
    first = await create(server)
    wanted = job_pb2.Job(name=NAME, display_name="x")
    shown = (await update(server, wanted, validate_only=True)).job
    assert (shown.display_name, shown.version) == ("x", 2)
    assert await read(server) == first
    missing = yearly_job()
    missing.name = f"{PARENT}/jobs/b"
    answer = await update(server, missing, allow_missing=True, validate_only=True)
    assert answer.created
    assert len(await server.query("SELECT FROM fencepost.jobs")) == 1


async def test_apply_makes_the_job_and_then_changes_it(server: DefinitionServer) -> None:
    job = yearly_job()
    made = await update(server, job, allow_missing=True)
    assert (made.created, made.job.version) == (True, 1)
    again = await update(server, job, allow_missing=True)
    assert (again.created, again.job) == (False, made.job)
    job.description = "d"
    changed = await update(server, job, allow_missing=True)
    assert (changed.created, changed.job.version) == (False, 2)


async def test_a_condition_on_a_job_that_is_gone_does_not_hold(server: DefinitionServer) -> None:
    job = yearly_job()
    job.etag = (await create(server)).etag
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME))
    assert (await refusal(update(server, job, allow_missing=True))).reason == "JOB_NOT_FOUND"


async def test_applies_at_once_make_one_job(server: DefinitionServer) -> None:
    answers = await asyncio.gather(
        *(update(server, yearly_job(), allow_missing=True) for _ in range(5))
    )
    assert sorted(answer.created for answer in answers) == [False, False, False, False, True]
    assert {answer.job.job_id for answer in answers} == {answers[0].job.job_id}


async def test_an_update_sent_again_gets_the_first_answer(server: DefinitionServer) -> None:
    first = await create(server)
    request = pb.UpdateJobRequest(
        job=job_pb2.Job(name=NAME, display_name="x", etag=first.etag), request_id="u-1"
    )
    answer = await server.jobs.UpdateJob(request)
    # The etag is stale by now, but the call is the same.
    assert await server.jobs.UpdateJob(request) == answer
    request.job.display_name = "y"
    assert (await refusal(server.jobs.UpdateJob(request))).reason == "REQUEST_ID_REUSED"
    made = pb.UpdateJobRequest(
        job=job_pb2.Job(name=f"{PARENT}/jobs/b", target=job_pb2.Target(kind="k")),
        allow_missing=True,
        request_id="u-2",
    )
    assert (await server.jobs.UpdateJob(made)).created
    assert (await server.jobs.UpdateJob(made)).created
    assert (await read(server)).version == 2
