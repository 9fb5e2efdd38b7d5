"""New zone data under stored fires, and servers whose data differs."""

from dataclasses import replace

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Instant
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.domain.schedule import CronSpec, IntervalSpec
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.tzdata import MOVING
from fencepost_server.policy.cron import compile_cron
from fencepost_server.policy.zone_move import StoredZones, decided_until
from fencepost_server.policy.zone_source import ZoneSource, pinned

from tests.factories import NOON, cron, job_spec, schedule
from tests.integration.world import World

# In December Berlin is an hour ahead of UTC, Helsinki two, London none.
EVENING = cron("0 18 * * *", "Europe/Berlin")


def _data(version: str, berlin: str = "Europe/Berlin") -> ZoneSource:
    """Zone data that says of Berlin what the pinned data says of another place."""
    contents = {"UTC": pinned().content("UTC"), "Europe/Berlin": pinned().content(berlin)}
    return StoredZones(contents, version=version)


def _scheduler(world: World, zones: ZoneSource) -> Scheduler:
    return Scheduler(
        database=world.database,
        clock=world.database.clock,
        ownership=AllPartitions(),
        wake=world.woken,
        batch_max=500,
        concurrency=1,
        zones=zones,
    )


async def _next(world: World, job: str) -> float | None:
    """Hours after noon."""
    at = await world.next_of(job)
    return None if at is None else at / 3600


async def _old(world: World) -> Scheduler:
    old = _scheduler(world, _data("2099a"))
    await old.prepare()
    return old


@pytest.mark.parametrize(("berlin", "hours"), [("Europe/Helsinki", 4), ("Europe/London", 6)])
async def test_the_next_fire_of_a_changed_zone_moves_with_its_local_time(
    world: World, berlin: str, hours: int
) -> None:
    await _old(world)
    job = await world.add_job(spec=job_spec(EVENING), next_run_at=NOON + 5 * HOUR)
    paused = await world.add_job("b", job_spec(EVENING), next_run_at=NOON + 5 * HOUR, paused=True)
    other = await world.add_job("c", job_spec(cron("0 17 * * *")), next_run_at=NOON + 5 * HOUR)
    plain = schedule(IntervalSpec(every=HOUR))
    interval = await world.add_job("d", job_spec(plain), next_run_at=NOON + 5 * HOUR)
    await _scheduler(world, _data("2099b", berlin)).prepare()
    assert await _next(world, job) == hours
    assert await _next(world, paused) == hours
    assert await _next(world, other) == 5
    assert await _next(world, interval) == 5


async def test_moving_is_safe_to_repeat_and_ends(world: World) -> None:
    await _old(world)
    job = await world.add_job(spec=job_spec(EVENING), next_run_at=NOON + 5 * HOUR)
    new = _scheduler(world, _data("2099b", "Europe/London"))
    await new.prepare()
    await new.prepare()
    await _scheduler(world, _data("2099b", "Europe/London")).prepare()
    # Stored by an older server that had not looked since: moved by the next walk.
    late = await world.add_job("late", job_spec(EVENING), next_run_at=NOON + 29 * HOUR)
    await world.move(MOVING + SECOND)
    await new.prepare()
    assert await _next(world, job) == 6
    assert await _next(world, late) == 30
    assert await world.value("SELECT count(*) FROM fencepost.zone_moves") == 0
    assert await world.value("SELECT count(moved_until) FROM fencepost.zones") == 0
    await new.prepare()
    assert await _next(world, job) == 6


async def test_no_local_time_is_fired_twice_when_it_moves_behind_its_fire(world: World) -> None:
    old = await _old(world)
    job = await world.add_job(spec=job_spec(EVENING), next_run_at=NOON + 5 * HOUR)
    await world.move_to(NOON + 5 * HOUR)
    assert await old.fire_due() == 1
    assert await _next(world, job) == 29
    await world.move(30 * MINUTE)
    new = _scheduler(world, _data("2099b", "Europe/London"))
    await new.prepare()
    assert await _next(world, job) == 30
    await world.move(HOUR)
    assert await new.fire_due() == 0
    assert [at for at, _, _ in await world.runs_of(job)] == [5 * 3600]


async def test_no_local_time_is_lost_when_it_moves_into_the_past(world: World) -> None:
    await _old(world)
    job = await world.add_job(spec=job_spec(EVENING), next_run_at=NOON + 5 * HOUR)
    await world.move_to(NOON + 4 * HOUR + 30 * MINUTE)
    new = _scheduler(world, _data("2099b", "Europe/Helsinki"))
    await new.prepare()
    assert await _next(world, job) == 4
    assert await new.fire_due() == 1
    assert await world.runs_of(job) == [(4 * 3600, "queued", "catch_up")]
    assert await _next(world, job) == 28


async def test_what_is_due_already_is_fired_as_stored(world: World) -> None:
    await _old(world)
    job = await world.add_job(spec=job_spec(EVENING), next_run_at=NOON + 5 * HOUR)
    await world.move_to(NOON + 5 * HOUR)
    new = _scheduler(world, _data("2099b", "Europe/Helsinki"))
    await new.prepare()
    assert await new.fire_due() == 1
    assert [at for at, _, _ in await world.runs_of(job)] == [5 * 3600]
    assert await _next(world, job) == 28


async def test_bounds_of_the_schedule_hold_for_a_moved_fire(world: World) -> None:
    await _old(world)
    begins = replace(EVENING, start_at=NOON + 4 * HOUR + SECOND)
    ends = replace(EVENING, end_at=NOON + 5 * HOUR + SECOND)
    first = await world.add_job("a", job_spec(begins), next_run_at=NOON + 5 * HOUR)
    last = await world.add_job("b", job_spec(ends), next_run_at=NOON + 5 * HOUR)
    await _scheduler(world, _data("2099b", "Europe/Helsinki")).prepare()
    assert await _next(world, first) == 28
    assert await _next(world, last) == 4
    # Once more while the first move is not over.
    await _scheduler(world, _data("2099c", "Europe/London")).prepare()
    assert await _next(world, first) == 30


async def test_a_server_with_older_data_does_not_fire_the_zones_that_differ(
    world: World,
) -> None:
    old = await _old(world)
    job = await world.add_job(spec=job_spec(EVENING), next_run_at=NOON + 5 * HOUR)
    other = await world.add_job("utc", job_spec(cron("0 18 * * *")), next_run_at=NOON + 6 * HOUR)
    new = _scheduler(world, _data("2099b", "Europe/London"))
    await new.prepare()
    await old.prepare()
    version = "SELECT tzdata_version FROM fencepost.shard_state"
    assert await world.value(version) == "2099b"
    await world.move_to(NOON + 6 * HOUR)
    assert await old.fire_due() == 1
    assert [at for at, _, _ in await world.runs_of(other)] == [6 * 3600]
    assert await world.runs_of(job) == []
    assert await new.fire_due() == 1
    assert [at for at, _, _ in await world.runs_of(job)] == [6 * 3600]
    assert await _next(world, job) == 30


async def test_each_server_uses_only_the_next_fires_that_its_own_data_gave(world: World) -> None:
    old = await _old(world)
    await world.add_jobs(["a", "b"], job_spec(cron("0 * * * *")), NOON)
    assert await old.fire_due() == 2
    new = _scheduler(world, _data("2099b", "Europe/London"))
    await new.prepare()
    await world.move(HOUR)
    assert await new.fire_due() == 2
    await old.prepare()
    await world.move(HOUR)
    assert await old.fire_due() == 2
    versions = await world.query("SELECT DISTINCT tzdata FROM fencepost.schedule_fires ORDER BY 1")
    assert [row["tzdata"] for row in versions] == ["2099a", "2099b"]


@pytest.mark.parametrize("berlin", ["Europe/Helsinki", "Europe/London", "Asia/Kolkata", "UTC"])
@pytest.mark.parametrize(
    "expression", ["0 18 * * *", "0 9,10 * * *", "30 */2 * * 1-5", "0 0 1 * *"]
)
def test_a_fire_that_did_not_move_stays_and_one_that_did_keeps_its_local_time(
    berlin: str, expression: str
) -> None:
    spec = CronSpec(expressions=(expression,), time_zone="Europe/Berlin")
    old = compile_cron(spec, zones=_data("2099a"))
    new = compile_cron(spec, zones=_data("2099b", berlin))
    same = compile_cron(spec, zones=_data("2099c"))
    at: Instant = NOON
    for _ in range(30):
        following = old.next_after(at)
        assert following is not None
        at = following
        until = decided_until(old, same, at)
        assert until is not None
        assert same.next_after(until) == at
        until = decided_until(old, new, at)
        assert until is not None
        moved = new.next_after(until)
        assert moved is not None
        assert new.local_time(moved)[:19] == old.local_time(at)[:19]
        assert abs(moved - at) < DAY
