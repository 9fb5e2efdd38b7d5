"""After an outage the late runs of a tenant are released at a rate, the newest first."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Duration, to_datetime
from fencepost_server.domain.schedule import MisfireAction, OverlapPolicy
from fencepost_server.engine.governor import AHEAD, HELD_MAX

from tests.factories import NOON, cron, every, job_spec
from tests.integration.governed import (
    assert_newest_first,
    late_jobs,
    parked,
    release_all,
    released,
    server_of,
    servers_of,
)
from tests.integration.world import World


@pytest.mark.parametrize("late", [2 * HOUR, 31 * SECOND])
async def test_late_runs_are_released_one_after_the_other_the_newest_first(
    world: World, late: Duration
) -> None:
    await late_jobs(world, 20, late=late, step=SECOND)
    server = server_of(world, 4.0)
    await server.fire()
    assert await released(world) == []
    assert await server.governor.release() == 5
    await world.move(AHEAD)
    assert await server.governor.release() == 4
    # Places are kept to whenever somebody looks.
    assert await server.governor.release() == 0
    await release_all(world, server.governor, step=SECOND // 3)
    places = await released(world)
    first = places[0][0]
    assert [delay - first for delay, _ in places] == [place / 4 for place in range(20)]
    assert_newest_first(places)


async def test_the_order_holds_over_all_partitions_batches_and_kinds_of_late_fires(
    world: World,
) -> None:
    # Of several ages and policies, in batches of a few, by two servers at once.
    await late_jobs(world, 60, late=3 * HOUR, step=MINUTE)
    await late_jobs(world, 40, late=50 * SECOND, step=SECOND)
    rule = every(
        17 * MINUTE, misfire=MisfireAction.CATCH_UP, max_catch_up=9, overlap=OverlapPolicy.ALLOW
    )
    for number in range(12):
        await world.add_job(f"catching-{number}", job_spec(rule), next_run_at=NOON - 5 * HOUR)
    for number in range(30):
        await world.add_job(
            f"cron-{number}", job_spec(cron(f"{number} * * * *")), next_run_at=NOON - 4 * HOUR
        )
    async with servers_of(world, 2, 25.0) as (one, two):
        await asyncio.gather(one.fire(), two.fire())
        made = await parked(world)
        assert made > 150
        await release_all(world, one.governor, two.governor)
    places = await released(world)
    assert len(places) >= made
    assert_newest_first([each for each in places if each[1] < to_datetime(NOON - 10 * SECOND)])


async def test_no_second_has_more_than_the_rate(world: World) -> None:
    names = [f"job-{number}" for number in range(300)]
    await world.add_jobs(names, job_spec(every(DAY)), next_run_at=world.now - HOUR)
    async with servers_of(world, 3, 50.0) as servers:
        await asyncio.gather(*(server.fire() for server in servers))
        claimable = []
        for _ in range(7):
            await asyncio.gather(*(server.governor.release() for server in servers))
            claimable.append(len(await world.claim(1000)))
            await world.move(SECOND)
    # The first of each second is there when it begins.
    assert claimable == [1, 50, 50, 50, 50, 50, 49]


async def test_a_slow_rate_releases_one_now_and_then(world: World) -> None:
    await late_jobs(world, 4, late=HOUR)
    server = server_of(world, 0.1)
    await server.fire()
    taken = []
    for _ in range(40):
        await server.governor.release()
        taken.append(len(await world.claim(10)))
        await world.move(SECOND)
    assert [second for second, runs in enumerate(taken) if runs] == [0, 10, 20, 30]


async def test_nothing_is_parked_without_a_rate_or_an_outage(world: World) -> None:
    await late_jobs(world, 5, late=2 * HOUR)
    await server_of(world, 0.0).fire()
    assert [delay for delay, _ in await released(world)] == [0.0] * 5
    await late_jobs(world, 5, late=9 * SECOND)
    await server_of(world, 1.0).fire()
    assert [delay for delay, _ in await released(world)] == [0.0] * 10


async def test_what_falls_due_while_others_are_fired_is_not_parked_however_late_it_is(
    world: World,
) -> None:
    server = server_of(world, 1.0)
    await server.fire()
    await late_jobs(world, 20, late=-SECOND)
    # The scheduler goes on and on, and gets to these only after two minutes.
    for _ in range(24):
        await world.move(5 * SECOND)
        await server.scheduler._parked_before(world.now)
    await server.fire()
    assert [delay for delay, _ in await released(world)] == [0.0] * 20
    assert await parked(world) == 0


async def test_a_gap_in_firing_is_an_outage_for_all_schedulers(world: World) -> None:
    async with servers_of(world, 2, 1.0) as (one, two):
        await one.fire()
        await two.fire()
        await late_jobs(world, 6, late=-SECOND)
        await world.move(MINUTE)
        await one.fire()
        # The other one hears of it although somebody fires again.
        await late_jobs(world, 5, late=30 * SECOND)
        await two.fire()
        assert await parked(world) == 11


async def test_the_next_fire_is_never_held_back(world: World) -> None:
    for number in range(10):
        await world.add_job(
            f"job-{number}", job_spec(every(HOUR)), next_run_at=NOON - 10 * HOUR + 30 * MINUTE
        )
    server = server_of(world, 0.1)
    await server.fire()
    rows = await world.query("SELECT DISTINCT next_run_at FROM fencepost.job_schedules")
    assert [row["next_run_at"] for row in rows] == [to_datetime(NOON + 30 * MINUTE)]
    assert await parked(world) == 10
    while world.now < NOON + 30 * MINUTE:
        await world.move(SECOND)
        await server.scheduler._parked_before(world.now)
    await server.fire()
    assert [delay for delay, _ in await released(world)] == [0.0] * 10
    assert await parked(world) == 10


async def test_a_second_outage_goes_before_the_rest_of_the_first(world: World) -> None:
    server = server_of(world, 10.0)
    await late_jobs(world, 100, late=2 * HOUR, step=SECOND)
    await server.fire()
    for _ in range(3):
        await server.governor.release()
        await world.move(SECOND)
    first = await released(world)
    assert len(first) == 31
    # Everybody is gone for a minute.
    await late_jobs(world, 15, late=-SECOND, step=3 * SECOND)
    await world.move(MINUTE)
    again = server_of(world, 10.0)
    await again.fire()
    await release_all(world, again.governor)
    places = await released(world)
    assert_newest_first(places[:31])
    assert_newest_first(places[31:])
    assert all(at > to_datetime(NOON) for _, at in places[31:46])


async def test_a_restart_in_the_middle_goes_on_where_it_was(world: World) -> None:
    await late_jobs(world, 40, late=HOUR, step=MINUTE)
    async with servers_of(world, 1, 10.0) as (server,):
        # It goes after its first batches, and another one fires and releases the rest.
        await server.scheduler.fire_due()
    async with servers_of(world, 1, 10.0) as (server,):
        await server.fire()
        await server.governor.release()
        await world.move(SECOND)
    async with servers_of(world, 1, 10.0) as (server,):
        await release_all(world, server.governor)
    places = await released(world)
    assert len(places) == 40
    assert_newest_first(places)
    delays = [delay for delay, _ in places]
    assert [round(b - a, 6) for a, b in itertools.pairwise(delays)] == [0.1] * 39


async def test_nothing_is_released_while_the_newest_are_not_known(world: World) -> None:
    server = server_of(world, 10.0)
    await late_jobs(world, 3, late=2 * HOUR)
    await server.fire()
    [held] = await _overdue(world, 1)
    async with _holding(world, held):
        assert await server.governor.release() == 0
        # It does not become less: something holds it, and the others must go on.
        await world.move(5 * SECOND)
        assert await server.governor.release() == 3


async def test_a_server_that_is_always_behind_releases_all_the_same(world: World) -> None:
    server = server_of(world, 10.0)
    await late_jobs(world, 3, late=2 * HOUR)
    await server.fire()
    await _overdue(world, 1)
    begun = world.now
    while not await server.governor.release():
        await world.move(2 * SECOND)
        await _overdue(world, 1)
    assert HELD_MAX <= world.now - begun <= HELD_MAX + 2 * SECOND


async def _overdue(world: World, count: int) -> list[str]:
    names = [f"overdue-{world.now}-{number}" for number in range(count)]
    return await world.add_jobs(names, job_spec(every(DAY)), next_run_at=world.now - MINUTE)


@asynccontextmanager
async def _holding(world: World, job_id: str) -> AsyncIterator[None]:
    """Somebody else holds the job's row."""
    other = await asyncpg.connect(world.dsn)
    try:
        async with other.transaction():
            await other.execute(
                "SELECT FROM fencepost.job_schedules WHERE job_id = $1 FOR UPDATE", job_id
            )
            yield
    finally:
        await other.close()


async def test_tenants_have_a_pace_of_their_own(world: World) -> None:
    await late_jobs(world, 4, late=HOUR)
    await world.raw.execute(
        "INSERT INTO fencepost.tenants (name, created_at, updated_at) VALUES ('acme', now(), now())"
    )
    await world.raw.execute(
        "UPDATE fencepost.job_schedules SET tenant_id = t.tenant_id FROM fencepost.tenants AS t"
        " WHERE t.name = 'acme' AND job_id IN (SELECT job_id FROM fencepost.jobs"
        " ORDER BY name LIMIT 2)"
    )
    server = server_of(world, 1.0)
    await server.fire()
    await server.governor.release()
    assert [delay for delay, _ in await released(world)] == [0.0, 0.0, 1.0, 1.0]


async def test_a_rate_that_was_taken_away_lets_go_what_is_parked(world: World) -> None:
    await late_jobs(world, 30, late=HOUR)
    await server_of(world, 1.0).fire()
    assert await parked(world) == 30
    # In several statements, each bounded.
    assert await server_of(world, 0.0, runs_max=4).governor.release() == 30
    assert len(await world.claim(100)) == 1
    await world.move(SECOND)
    assert len(await world.claim(100)) == 29


async def test_jitter_that_is_not_over_spreads_by_itself(world: World) -> None:
    names = [f"job-{number}" for number in range(20)]
    await world.add_jobs(names, job_spec(every(DAY, jitter=2 * HOUR)), next_run_at=world.now - HOUR)
    server = server_of(world, 100.0)
    await server.fire()
    waiting = [delay for delay, _ in await released(world)]
    assert waiting
    assert all(0 < delay <= 3600 for delay in waiting)
    assert len(waiting) + await parked(world) == 20
    assert await server.governor.release() == 20 - len(waiting)


async def test_runs_that_wait_for_each_other_take_one_place(world: World) -> None:
    rule = every(
        HOUR, misfire=MisfireAction.CATCH_UP, max_catch_up=5, overlap=OverlapPolicy.QUEUE_ALL
    )
    for number in range(3):
        await world.add_job(f"job-{number}", job_spec(rule), next_run_at=NOON - 9 * HOUR)
    server = server_of(world, 1.0)
    await server.fire()
    assert await parked(world) == 3
    await release_all(world, server.governor)
    assert len(await released(world)) == 3
