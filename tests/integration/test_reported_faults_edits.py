"""Faults of edits, and of clocks set to other zones, that users of other schedulers reported
in public, a test for each and for its family. What was reported stands in the comment above.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import asyncpg
import pytest
from fencepost.v1 import job_pb2
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.api.schedule_messages import read_schedule
from fencepost_server.clock import HOUR, MINUTE, SECOND, Instant, from_datetime
from fencepost_server.domain.job import JobSpec
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import RunKey, stable_fraction
from fencepost_server.engine.definition import Definition
from fencepost_server.engine.job_creation import JobEntry, Origin
from fencepost_server.engine.job_update import JobUpdate
from fencepost_server.engine.jobs import Jobs
from fencepost_server.errors import JobAlreadyExists
from fencepost_server.policy.schedule import first_fire
from fencepost_server.store.jobs import JobRecord

from tests.factories import NOON, cron, every, job_spec
from tests.integration.definition_calls import NAME, PARENT, create, read, update, yearly_job
from tests.integration.definition_server import DefinitionServer, serving
from tests.integration.world import World, build

REPORT = JobName(tenant="default", job="report")
ZONES = ("UTC", "Asia/Kathmandu", "Australia/Sydney", "America/Los_Angeles")


def _jobs(world: World) -> Jobs:
    return Jobs(database=world.database, catalogue=world.catalogue, wake=world.woken)


def _as_it_is(job: JobRecord) -> Definition:
    return Definition(spec=job.spec, payload=job.payload)


def _labelled(job: JobRecord) -> Definition:
    return Definition(spec=replace(job.spec, labels={"team": "night"}), payload=job.payload)


def _other_payload(job: JobRecord) -> Definition:
    return Definition(spec=job.spec, payload=b"other")


# temporal#4866: saving an identical definition again lost the jittered run that was pending.
@pytest.mark.parametrize(
    ("change", "version"), [(_as_it_is, 1), (_labelled, 2), (_other_payload, 2)]
)
@pytest.mark.parametrize("is_fired", [True, False], ids=["fired", "due"])
async def test_an_edit_of_something_else_leaves_a_jittered_run_alone(
    world: World, change: Callable[[JobRecord], Definition], version: int, is_fired: bool
) -> None:
    spec = job_spec(every(5 * MINUTE, jitter=MINUTE))
    # An id, and with it a delay, that leaves room for an edit while the run is pending.
    while True:
        job = await world.add_job(spec=spec, next_run_at=NOON, payload=b"first")
        delay = int(stable_fraction(str(RunKey(job, NOON)), "jitter") * MINUTE)
        if delay > 20 * SECOND:
            break
        await _jobs(world).delete(
            REPORT, etag="", allow_missing=False, cancel_runs=False, now=NOON - 1
        )
    if is_fired:
        assert await world.scheduler.fire_due() == 1
    await world.pass_time(10 * SECOND)
    before = await _rows(world, job)

    answer = await _jobs(world).update(
        Origin(tenant="default", now=world.now),
        JobUpdate(name=REPORT, change=change),
        encode=lambda _job, _made: b"",
    )
    assert not isinstance(answer, bytes)
    assert answer[0].version == version
    assert await _rows(world, job) == before
    await world.scheduler.fire_due()
    await world.pass_time(NOON + delay - 1 - world.now)
    assert await world.claim(5) == []
    await world.pass_time(1)
    [run] = await world.claim(5)
    assert run.key == RunKey(job, NOON)
    await world.report(run)
    await world.pass_time(NOON + 5 * MINUTE - 1 - world.now)
    await world.scheduler.fire_due()
    assert await world.runs_of(job) == []
    assert await world.next_of(job) == 300


async def _rows(world: World, job: str) -> tuple[str, list[str]]:
    """The next fire and the live runs of a job, as the database writes them."""
    next_run_at = await world.value(
        "SELECT next_run_at::text FROM fencepost.job_schedules WHERE job_id = $1::uuid", job
    )
    runs = await world.query(
        "SELECT r::text AS row FROM fencepost.run_queue AS r WHERE job_id = $1::uuid", job
    )
    return next_run_at, [run["row"] for run in runs]


# dkron#590: after an edit the next run that was shown was still that of the old schedule.
async def test_every_reader_sees_the_next_fire_of_the_newest_edit(database_url: str) -> None:
    chance = random.Random(590)
    async with serving(database_url) as server:
        await create(server)
        shown: dict[int, int] = {}
        seen: set[tuple[int, int]] = set()
        done = asyncio.Event()
        reader = asyncio.create_task(_watch(server, seen, done))
        for number in range(200):
            earliest = server.now()
            response = await _edit_at_random(server, chance)
            found = response.job
            assert await read(server) == found, f"edit {number}"
            assert [await _listed(server)] == [found.next_run_at], f"edit {number}"
            wanted = {
                first_fire(
                    read_schedule(found.schedule, now=at), now=at, seed=f"default/{found.name}"
                )
                for at in (earliest, server.now())
            }
            assert found.next_run_at.seconds * SECOND in wanted, f"edit {number}: {found}"
            shown[found.version] = found.next_run_at.seconds
        done.set()
        await reader
        assert len(set(shown.values())) > 100
        # A reader in between saw a version together with its own next fire.
        assert {pair for pair in seen if pair[0] in shown} <= set(shown.items())
        assert len(seen) > 10


async def _edit_at_random(server: DefinitionServer, chance: random.Random) -> pb.UpdateJobResponse:
    """Another rule or, one time in five, only another label."""
    if not chance.randrange(5):
        relabelled = job_pb2.Job(name=NAME, labels={"n": str(chance.randrange(10**6))})
        return await update(server, relabelled, "labels")
    expression = f"{chance.randrange(60)} {chance.randrange(24)} {chance.randrange(1, 29)} * *"
    job = yearly_job(expression)
    job.schedule.cron.time_zone = chance.choice(ZONES)
    return await update(server, job, "schedule")
