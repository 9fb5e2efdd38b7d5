"""Scenes as in `overlap_scenes`, with jobs whose time rules or limits say more: jitter,
calendars, intervals that count from ends, a cap, and a place that a run waits for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from fencepost_server.clock import MINUTE, SECOND, ceil_second, to_datetime
from fencepost_server.domain.calendar import CalendarContent
from fencepost_server.domain.schedule import IntervalSpec, OverlapPolicy
from fencepost_server.engine.governor import PARKED_MAX
from fencepost_server.store.calendars import CalendarSettings, CalendarStore, set_job_calendars

from tests.factories import NOON, every, job_spec, schedule
from tests.integration.gated_engine import CALENDAR
from tests.integration.overlap_scenes import Scene, scene_of, start_first
from tests.integration.run_invariants import Invariants, SeenRun
from tests.integration.world import World

CAP = 1
_JITTER = 50 * SECOND
# Excludes the second fire and no other.
_ICS = "BEGIN:VEVENT\nUID:1\nDTSTART:20261201T120030Z\nDURATION:PT1M\nEND:VEVENT\n"
_ODD_DELAYS = """
    SELECT count(*) FROM fencepost.run_queue
    WHERE state = 'queued' AND attempt = 0 AND origin <> 'enqueue'
      AND available_at <> greatest(created_at, fencepost.jittered(
          job_id, scheduled_at, $1, scheduled_at + interval '1 minute'))
"""
# A run that is not parked may be claimed within the second that is given out ahead.
_ODDLY_PARKED = """
    SELECT count(*) FROM fencepost.run_queue
    WHERE attempt = 0 AND parked <> (available_at > $1::timestamptz + interval '1 second')
"""
_ODD_BOUNDS = """
    SELECT count(*) FROM fencepost.run_queue
    WHERE state <> 'blocked' AND wait_until <> available_at + interval '1 minute'
"""
_OPEN = "SELECT count(*) FROM fencepost.run_queue WHERE attempt_open"
_SCHEDULE = """
    SELECT (extract(epoch FROM next_run_at) * 1000000)::bigint AS next_run_at, awaits_end,
           fire_count, (SELECT j.deleted_at IS NOT NULL FROM fencepost.jobs AS j) AS is_deleted
    FROM fencepost.job_schedules
"""
_EXCLUDED = """
    SELECT (extract(epoch FROM first_at) * 1000000)::bigint AS first,
           (extract(epoch FROM last_at) * 1000000)::bigint AS last
    FROM fencepost.fire_skips WHERE reason = 'excluded'
"""


@dataclass(slots=True, kw_only=True)
class Jittered(Invariants):
    """A run that nobody has claimed yet waits as long as its key says, whoever made it."""

    async def check(self) -> list[SeenRun]:
        runs = await Invariants.check(self)
        assert await self.world.raw.fetchval(_ODD_DELAYS, _JITTER // SECOND) == 0
        return runs


@dataclass(slots=True, kw_only=True)
class Parked(Invariants):
    """A run is parked or has a place, its bound of waiting goes with it, and once a fire or the
    governor has come by, none is parked."""

    async def check(self) -> list[SeenRun]:
        runs = await Invariants.check(self)
        now = to_datetime(self.world.now)
        assert await self.world.raw.fetchval(_ODDLY_PARKED, now) == 0
        assert await self.world.value(_ODD_BOUNDS) == 0
        return runs

    async def check_end(self) -> None:
        await Invariants.check_end(self)
        if self.policy is not OverlapPolicy.ALLOW:
            assert (
                await self.world.value("SELECT count(*) FROM fencepost.run_queue WHERE parked") == 0
            )


@dataclass(slots=True, kw_only=True)
class Capped(Invariants):
    """No more attempts of the job are open than its cap allows."""

    async def check(self) -> list[SeenRun]:
        runs = await Invariants.check(self)
        assert await self.world.value(_OPEN) <= CAP, runs
        return runs


@dataclass(slots=True, kw_only=True)
class Excluding(Invariants):
    """Only what the calendar excluded is skipped for it, and every fire has its one answer."""

    async def check_end(self) -> None:
        await Invariants.check_end(self)
        for stretch in await self.world.query(_EXCLUDED):
            assert stretch["first"] == stretch["last"] == NOON + MINUTE


@dataclass(slots=True, kw_only=True)
class Following(Invariants):
    """The next fire is known, or a live run will tell it; never both, and never neither."""

    async def check_end(self) -> None:
        world = self.world
        await world.promoter.sweep_ends()
        while await world.scheduler.fire_due():
            pass
        runs = await self.check()
        [row] = await world.query(_SCHEDULE)
        live = [run for run in runs if run.is_live]
        if row["is_deleted"]:
            assert row["next_run_at"] is None
            return
        assert row["awaits_end"] is (row["next_run_at"] is None), dict(row)
        assert len(live) <= 1, f"the next fire did not wait for the end: {live}"
        assert row["awaits_end"] is bool(live), f"{dict(row)}, {live}"
        assert row["fire_count"] == len(runs)
        if not live:
            # Every minute, or every other after the edit, from an end at this instant.
            ends = ceil_second(world.now)
            assert row["next_run_at"] in (ends + MINUTE, ends + 2 * MINUTE)


@asynccontextmanager
async def jittered(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """As `running`, and runs are delayed."""
    spec = job_spec(every(MINUTE, overlap=policy, jitter=_JITTER))
    job_id = await world.add_job(spec=spec, next_run_at=NOON)
    await world.scheduler.fire_due()
    await world.pass_time(_JITTER)
    claimed = await world.claim()
    await world.move_to(NOON + MINUTE)
    invariants = Jittered(world=world, policy=policy, first=NOON)
    async with scene_of(world, job_id, claimed, invariants) as scene:
        yield scene


@asynccontextmanager
async def excluding(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """As `running`, and a calendar excludes the second fire, which is due."""
    store = CalendarStore(database=world.database)
    settings = CalendarSettings(description="", content=CalendarContent(ics=_ICS))
    made = await store.create(world.tenant_id, CALENDAR, settings, now=world.now)
    assert made is not None
    assert not isinstance(made, bytes)
    spec = job_spec(every(MINUTE, overlap=policy, exclude_calendars=(CALENDAR,)))
    job_id = await world.add_job(spec=spec, next_run_at=NOON)
    async with world.database.requests.transaction() as connection:
        await set_job_calendars(connection, {job_id: [made.calendar_id]}, is_new=True)
    claimed = await start_first(world)
    invariants = Excluding(world=world, policy=policy, first=NOON)
    async with scene_of(world, job_id, claimed, invariants) as scene:
        yield scene


@asynccontextmanager
async def following(world: World) -> AsyncIterator[Scene]:
    """The run of an interval after completion is with a worker, whose lease is over."""
    policy = OverlapPolicy.ALLOW
    spec = job_spec(schedule(IntervalSpec(every=MINUTE, after_completion=True), overlap=policy))
    job_id = await world.add_job(spec=spec, next_run_at=NOON)
    claimed = await start_first(world)
    invariants = Following(world=world, policy=policy, first=NOON)
    async with scene_of(world, job_id, claimed, invariants) as scene:
        yield scene


@asynccontextmanager
async def capped(world: World) -> AsyncIterator[Scene]:
    """As `running`, the job has its cap full, two more of its runs are due, and a fire."""
    policy = OverlapPolicy.ALLOW
    spec = job_spec(every(MINUTE, overlap=policy), max_in_flight=CAP)
    job_id = await world.add_job(spec=spec, next_run_at=NOON)
    await world.raw.execute("UPDATE fencepost.queues SET has_capped_jobs = true")
    claimed = await start_first(world, capped=True)
    await world.enqueue(job_id, 2)
    invariants = Capped(world=world, policy=policy, first=NOON)
    async with scene_of(world, job_id, claimed, invariants) as scene:
        yield replace(scene, claims_under_caps=True)


@asynccontextmanager
async def parked(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """The first run is parked after an outage, and the second fire is due."""
    spec = job_spec(every(MINUTE, overlap=policy), queue_timeout=MINUTE)
    job_id = await world.add_job(spec=spec, next_run_at=NOON)
    await world.scheduler.fire_due()
    await world.move(MINUTE)
    until = to_datetime(world.now + PARKED_MAX)
    await world.raw.execute(
        "UPDATE fencepost.run_queue SET parked = true, available_at = $1::timestamptz,"
        " wait_until = $1::timestamptz + interval '1 minute'",
        until,
    )
    invariants = Parked(world=world, policy=policy, first=NOON)
    async with scene_of(world, job_id, [], invariants) as scene:
        yield scene
