"""What a new time rule does to fires, done and to come."""

from collections.abc import AsyncIterator

import pytest
from fencepost.v1 import job_pb2, schedule_pb2
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.clock import SECOND

from tests.integration.definition_calls import (
    NAME,
    create,
    make_due,
    runs,
    skips,
    update,
    yearly_job,
)
from tests.integration.definition_server import DefinitionServer, serving


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


async def test_a_new_time_rule_settles_what_the_old_one_owes(server: DefinitionServer) -> None:
    await create(server)
    due = await make_due(server, 5)
    changed = (await update(server, yearly_job("0 4 1 1 *"), "schedule")).job
    assert await runs(server) == [("queued", "schedule", 1, due)]
    assert changed.last_scheduled_at.seconds == due
    assert changed.next_run_at.seconds % 86_400 == 4 * 3600
    assert changed.fire_count == 1
    assert len(server.woken.lane_hints) == 1


async def test_a_change_of_something_else_leaves_the_next_fire_alone(
    server: DefinitionServer,
) -> None:
    await create(server)
    due = await make_due(server, 5)
    changed = (await update(server, job_pb2.Job(name=NAME, description="d"))).job
    assert changed.next_run_at.seconds == due
    assert await runs(server) == []


async def test_a_new_rule_of_a_paused_job_skips_what_passed(server: DefinitionServer) -> None:
    await create(server)
    await server.jobs.PauseJob(pb.PauseJobRequest(name=NAME))
    await make_due(server, 500)
    changed = (await update(server, yearly_job("0 4 1 1 *"), "schedule")).job
    assert await runs(server) == []
    assert await skips(server) == ["paused"]
    assert changed.next_run_at.seconds > server.now() // SECOND
    assert changed.state == job_pb2.JOB_STATE_PAUSED


async def test_a_finished_job_fires_again_with_a_new_one_off(server: DefinitionServer) -> None:
    job = yearly_job("")
    job.schedule.once.at.seconds = server.now() // SECOND - 1
    finished = await create(server, job)
    assert finished.state == job_pb2.JOB_STATE_FINISHED
    job.schedule.once.at.seconds = server.now() // SECOND + 3600
    again = (await update(server, job, "schedule")).job
    assert again.state == job_pb2.JOB_STATE_ACTIVE
    job.schedule.once.at.seconds = finished.last_scheduled_at.seconds - 60
    behind = (await update(server, job, "schedule")).job
    assert behind.state == job_pb2.JOB_STATE_FINISHED
    assert len(await runs(server)) == 1


async def test_a_job_without_its_schedule_waits(server: DefinitionServer) -> None:
    await create(server)
    changed = (await update(server, job_pb2.Job(name=NAME), "schedule")).job
    assert changed.state == job_pb2.JOB_STATE_ACTIVE
    assert not changed.HasField("next_run_at")
    assert not changed.HasField("schedule")


async def test_the_limit_of_fires_counts_from_the_creation(server: DefinitionServer) -> None:
    await create(server)
    await make_due(server, 5)
    job = yearly_job()
    job.schedule.max_fires = 1
    changed = (await update(server, job, "schedule")).job
    assert (changed.fire_count, changed.state) == (1, job_pb2.JOB_STATE_FINISHED)
    job.schedule.max_fires = 2
    assert (await update(server, job, "schedule")).job.state == job_pb2.JOB_STATE_ACTIVE


async def test_an_anchorless_interval_keeps_its_beat(server: DefinitionServer) -> None:
    job = yearly_job("")
    job.schedule.interval.every.seconds = 3600
    first = await create(server, job)
    # As if the job were 90 minutes old.
    await server.query("UPDATE fencepost.jobs SET created_at = created_at - interval '90 min'")
    job.schedule.interval.every.seconds = 7200
    changed = (await update(server, job, "schedule")).job
    # It still counts from its creation: the second beat is half an hour away.
    assert changed.next_run_at.seconds == first.next_run_at.seconds + 1800
    assert (await update(server, job, "schedule")).job == changed


async def test_a_long_backlog_is_settled_to_its_end(server: DefinitionServer) -> None:
    job = yearly_job("* * * * * *")
    job.schedule.overlap_policy = schedule_pb2.OVERLAP_POLICY_ALLOW
    job.schedule.misfire_policy.threshold.seconds = 86_400
    await create(server, job)
    due = await make_due(server, 30_000)
    changed = (await update(server, yearly_job(), "schedule")).job
    made = await runs(server)
    assert (made[0][3], made[-1][3]) == (due, changed.last_scheduled_at.seconds)
    assert len(made) == changed.last_scheduled_at.seconds - due + 1 >= 30_000
