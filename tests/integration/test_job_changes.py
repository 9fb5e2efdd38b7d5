"""PauseJob, ResumeJob and DeleteJob over gRPC and a real database."""

from collections.abc import AsyncIterator

import grpc
import pytest
from fencepost.v1 import job_pb2
from fencepost.v1 import job_service_pb2 as pb

from tests.integration.definition_calls import (
    NAME,
    PARENT,
    create,
    make_due,
    read,
    runs,
    skips,
    update,
    yearly_job,
)
from tests.integration.definition_server import DefinitionServer, refusal, serving


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


async def test_pausing_and_resuming(server: DefinitionServer) -> None:
    await create(server)
    paused = (await server.jobs.PauseJob(pb.PauseJobRequest(name=NAME, reason="r"))).job
    assert (paused.state, paused.pause_reason) == (job_pb2.JOB_STATE_PAUSED, "r")
    again = (await server.jobs.PauseJob(pb.PauseJobRequest(name=NAME, reason="other"))).job
    assert again == paused
    resumed = (await server.jobs.ResumeJob(pb.ResumeJobRequest(name=NAME))).job
    assert (resumed.state, resumed.pause_reason) == (job_pb2.JOB_STATE_ACTIVE, "")
    assert resumed.version == 1
    assert (await server.jobs.ResumeJob(pb.ResumeJobRequest(name=NAME))).job == resumed
    assert len(server.woken.partitions) >= 2


async def test_resume_lets_the_misfire_policy_pick(server: DefinitionServer) -> None:
    job = yearly_job("* * * * * *")
    job.paused = True
    await create(server, job)
    await make_due(server, 600)
    resumed = (await server.jobs.ResumeJob(pb.ResumeJobRequest(name=NAME))).job
    made = await runs(server)
    assert made, "the newest missed fire stands in for the others"
    assert "paused" in await skips(server)
    assert resumed.next_run_at.seconds > resumed.last_scheduled_at.seconds
    assert resumed.state == job_pb2.JOB_STATE_ACTIVE


async def test_a_finished_job_cannot_be_paused_or_resumed(server: DefinitionServer) -> None:
    job = yearly_job("")
    job.schedule.once.SetInParent()
    await create(server, job)
    for call in (
        server.jobs.PauseJob(pb.PauseJobRequest(name=NAME)),
        server.jobs.ResumeJob(pb.ResumeJobRequest(name=NAME)),
    ):
        seen = await refusal(call)
        assert (seen.code, seen.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "JOB_FINISHED")


async def test_a_deleted_job_frees_its_name_and_leaves_a_tombstone(
    server: DefinitionServer,
) -> None:
    first = await create(server)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME, etag=first.etag))
    by_id = f"{PARENT}/jobs/{first.job_id}"
    for name in (NAME, by_id):
        assert (await refusal(server.jobs.GetJob(pb.GetJobRequest(name=name)))).reason == (
            "JOB_NOT_FOUND"
        )
        gone = pb.DeleteJobRequest(name=name)
        assert (await refusal(server.jobs.DeleteJob(gone))).reason == "JOB_NOT_FOUND"
        gone.allow_missing = True
        await server.jobs.DeleteJob(gone)
    row = (
        await server.query(
            "SELECT deleted_at IS NOT NULL AS gone, next_run_at"
            " FROM fencepost.jobs JOIN fencepost.job_schedules USING (job_id)"
        )
    )[0]
    assert (row["gone"], row["next_run_at"]) == (True, None)
    second = await create(server)
    assert second.job_id != first.job_id
    assert second.job_id[-2:] == first.job_id[-2:]
    listed = await server.jobs.ListJobs(pb.ListJobsRequest(parent=PARENT))
    assert [job.job_id for job in listed.jobs] == [second.job_id]


async def test_a_stale_etag_deletes_nothing(server: DefinitionServer) -> None:
    first = await create(server)
    await update(server, job_pb2.Job(name=NAME, description="d"))
    seen = await refusal(server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME, etag=first.etag)))
    assert seen.reason == "ETAG_MISMATCH"
    assert (await read(server)).description == "d"


@pytest.mark.parametrize("cancel_runs", [False, True])
async def test_runs_of_a_deleted_job_go_on_unless_asked(
    server: DefinitionServer, cancel_runs: bool
) -> None:
    job = yearly_job("")
    job.schedule.once.SetInParent()
    await create(server, job)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME, cancel_runs=cancel_runs))
    assert len(await runs(server)) == (0 if cancel_runs else 1)


async def test_deleting_a_paused_job_records_what_it_passed_by(server: DefinitionServer) -> None:
    job = yearly_job()
    job.paused = True
    await create(server, job)
    await make_due(server, 100)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME))
    assert await runs(server) == []
    assert await skips(server) == ["paused"]
