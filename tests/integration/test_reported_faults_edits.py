"""Faults of edits, and of clocks set to other zones, that users of other schedulers reported
in public, a test for each and for its family. What was reported stands in the comment above.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import asyncpg
import pytest
from fencepost.v1 import job_pb2
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.api.wire_schedule import read_schedule
from fencepost_server.clock import HOUR, MINUTE, SECOND, Instant, from_datetime, to_datetime
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import RunKey, stable_fraction
from fencepost_server.domain.schedule import MisfireAction, OverlapPolicy
from fencepost_server.engine.definition import Definition
from fencepost_server.engine.job_creation import CreatedJob, JobEntry, Origin
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
_LIVE_AND_ORPHANED = """
    SELECT count(*) FILTER (WHERE j.deleted_at IS NULL) AS live,
           count(*) FILTER (WHERE j.deleted_at IS NOT NULL AND s.next_run_at IS NOT NULL)
               AS orphaned
    FROM fencepost.jobs AS j JOIN fencepost.job_schedules AS s USING (job_id)
"""
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
    delay = 0
    while delay < 20 * SECOND:
        await _jobs(world).delete(
            REPORT, etag="", allow_missing=True, cancel_runs=False, now=NOON - 1
        )
        job = await world.add_job(spec=spec, next_run_at=NOON, payload=b"first")
        delay = int(stable_fraction(str(RunKey(job, NOON)), "jitter") * MINUTE)
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
    assert (await world.live(run.key))["version"] == (1 if is_fired else version)
    await world.report(run)
    await world.pass_time(NOON + 5 * MINUTE - 1 - world.now)
    await world.scheduler.fire_due()
    assert await world.runs_of(job) == []
    assert await world.next_of(job) == 300


async def test_a_due_fire_is_decided_by_the_newest_policies(world: World) -> None:
    job = await world.add_job(spec=job_spec(every()), next_run_at=NOON)
    await world.pass_time(5 * MINUTE)

    def skipping(seen: JobRecord) -> Definition:
        schedule = every(misfire=MisfireAction.SKIP)
        return Definition(spec=replace(seen.spec, schedule=schedule), payload=seen.payload)

    before = await _rows(world, job)
    await _jobs(world).update(
        Origin(tenant="default", now=world.now),
        JobUpdate(name=REPORT, change=skipping),
        encode=lambda _job, _made: b"",
    )
    assert await _rows(world, job) == before
    while await world.scheduler.fire_due():
        pass
    made = [at for at, _, _ in await world.runs_of(job)]
    assert made == [240, 300], "what is late by no more than the threshold"
    assert await world.value("SELECT count(*) FROM fencepost.fire_skips") == 1


@pytest.mark.parametrize("cancel_runs", [False, True])
async def test_a_deletion_decides_what_is_due_and_runs_go_on_unless_asked(
    world: World, cancel_runs: bool
) -> None:
    spec = job_spec(every(overlap=OverlapPolicy.QUEUE_ALL))
    job = await world.add_job(spec=spec, next_run_at=NOON)
    assert await world.scheduler.fire_due() == 1
    [run] = await world.claim()
    await world.move(MINUTE)
    await world.enqueue(job, at=NOON + HOUR)
    await _jobs(world).delete(
        REPORT, etag="", allow_missing=False, cancel_runs=cancel_runs, now=world.now
    )
    left = await world.runs_of(job)
    if cancel_runs:
        assert left == [(0, "running", "schedule")]
        assert (await world.live(run.key))["cancel_requested"]
        assert (await world.ended(RunKey(job, NOON + MINUTE)))["state"] == "cancelled"
        return
    assert [state for _, state, _ in left] == ["running", "blocked", "queued"]
    await world.report(run)
    assert await world.promoter.sweep() == 1
    assert [state for _, state, _ in await world.runs_of(job)] == ["queued", "queued"]


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
            assert [job.next_run_at for job in (await _listed(server)).jobs] == [
                found.next_run_at
            ], f"edit {number}"
            wanted = {
                first_fire(read_schedule(found.schedule, now=at, field="schedule"), now=at)
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
    # Far enough ahead that nothing becomes due in the meantime.
    month = (datetime.now(UTC).month + chance.randrange(1, 10)) % 12 + 1
    day, hour, minute = chance.randrange(1, 29), chance.randrange(24), chance.randrange(60)
    expression = f"{minute} {hour} {day} {month} *"
    job = yearly_job(expression)
    job.schedule.cron.time_zone = chance.choice(ZONES)
    return await update(server, job, "schedule")


async def _listed(server: DefinitionServer) -> pb.ListJobsResponse:
    return await server.jobs.ListJobs(pb.ListJobsRequest(parent=PARENT))


async def _watch(server: DefinitionServer, seen: set[tuple[int, int]], done: asyncio.Event) -> None:
    """Collects the version and the next fire that reads and lists show, until told."""
    while not done.is_set():
        for job in (await read(server), *(await _listed(server)).jobs):
            seen.add((job.version, job.next_run_at.seconds))


# pg-boss#592: deleting and making the same schedule in two processes gave two runs.
async def test_clients_that_delete_and_make_one_name_leave_one_job_of_it(world: World) -> None:
    jobs = _jobs(world)
    done = asyncio.Event()
    made = 0
    watcher = asyncio.create_task(_watch_name(world, done))
    for number in range(1, 13):
        # A pass at the very instant of a fire, then clients that race with the next pass.
        await world.move_to(NOON + number * MINUTE)
        counts = await asyncio.gather(
            world.scheduler.fire_due(),
            *(_delete_and_make(jobs, world.now, client) for client in range(8)),
            world.scheduler.fire_due(),
        )
        made += sum(counts[1:-1])
        assert await world.scheduler.fire_due() == 0
    done.set()
    assert await watcher > 10
    assert made >= 12
    per_minute = await world.query(
        "SELECT scheduled_at, count(*) AS runs FROM fencepost.run_queue GROUP BY scheduled_at"
    )
    assert [row["runs"] for row in per_minute] == [1] * 11, "the first minute had no job yet"
    # Who made the last one has left a job that goes on.
    await jobs.create(Origin(tenant="default", now=world.now), [_minutely()], encode=lambda _: b"")
    await world.move(MINUTE)
    assert await world.scheduler.fire_due() == 1


def _minutely() -> JobEntry:
    return JobEntry(job_name=REPORT.job, definition=Definition(spec=job_spec(cron())))


async def _delete_and_make(jobs: Jobs, now: Instant, client: int) -> int:
    """How many jobs of the name this client made in its rounds; some do it the other way round."""
    made = 0
    for turn in range(4):
        if turn or client % 2:
            await jobs.delete(REPORT, etag="", allow_missing=True, cancel_runs=False, now=now)
        (outcome,) = await jobs.create(
            Origin(tenant="default", now=now), [_minutely()], encode=lambda _: b""
        )
        assert isinstance(outcome, CreatedJob | JobAlreadyExists), outcome
        made += isinstance(outcome, CreatedJob)
    return made


async def _watch_name(world: World, done: asyncio.Event) -> int:
    """Looks again and again for what must never be; how often it did."""
    looks = 0
    connection = await asyncpg.connect(world.dsn)
    try:
        while not done.is_set():
            row = await connection.fetchrow(_LIVE_AND_ORPHANED)
            assert row is not None
            assert row["live"] <= 1
            assert row["orphaned"] == 0, "a deleted job has a next fire"
            looks += 1
    finally:
        await connection.close()
    return looks


# sidekiq#4796, croner#284, celery#9715: where the host's zone was not the job's, jobs did not
# run, ran all the time or lost an hour.
@pytest.mark.parametrize("database_zone", ZONES)
@pytest.mark.parametrize("start", ["2026-10-03T12:00Z", "2026-10-31T12:00Z"])
async def test_the_zone_of_the_database_moves_no_fire(
    database_url: str, database_zone: str, start: str
) -> None:
    begin = from_datetime(datetime.fromisoformat(start))
    await _set_zone(database_url, database_zone)
    async with build(database_url, at=begin) as world:
        names = {zone: zone.replace("/", "-").replace("_", "-").lower() for zone in ZONES}
        entries = [
            JobEntry(
                job_name=names[zone],
                definition=Definition(spec=job_spec(cron("0 9 * * *", zone))),
            )
            for zone in ZONES
        ]
        outcomes = await _jobs(world).create(
            Origin(tenant="default", now=begin), entries, encode=lambda _: b""
        )
        assert all(isinstance(outcome, CreatedJob) for outcome in outcomes), outcomes
        for _ in range(72):
            await world.move(HOUR)
            await world.scheduler.fire_due()
        rows = await world.query(
            "SELECT name, scheduled_at FROM fencepost.run_queue JOIN fencepost.jobs USING (job_id)"
            " ORDER BY name, scheduled_at"
        )
        found = [(row["name"], from_datetime(row["scheduled_at"])) for row in rows]
        assert found == sorted(
            (names[zone], at) for zone in ZONES for at in _mornings(zone, begin, begin + 72 * HOUR)
        )
        assert len(found) == 12


async def _set_zone(dsn: str, zone: str) -> None:
    """Sessions that do not say what they want have this zone from now on."""
    connection = await asyncpg.connect(dsn)
    try:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE {name} SET timezone = '{zone}'")
    finally:
        await connection.close()
    connection = await asyncpg.connect(dsn)
    try:
        assert await connection.fetchval("SHOW timezone") == zone
    finally:
        await connection.close()


def _mornings(zone: str, begin: Instant, end: Instant) -> list[Instant]:
    """Nine in the morning of each day in a zone, by the standard library's account."""
    day = to_datetime(begin).replace(hour=9, minute=0, tzinfo=ZoneInfo(zone)) - timedelta(days=1)
    mornings = [from_datetime((day + timedelta(days=n)).astimezone(UTC)) for n in range(6)]
    return [at for at in mornings if begin < at <= end]
