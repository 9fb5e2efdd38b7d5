"""Priority and age: the order of claims, after outages and lost workers too."""

from itertools import pairwise

import pytest
from fencepost_server.clock import MINUTE, SECOND, Instant, to_datetime
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.claims import AGEING_S

from tests.factories import job_spec
from tests.integration.takers import make_dispatcher, make_taker
from tests.integration.world import World

_LEVEL = AGEING_S * SECOND


async def _limits(world: World, capped: bool) -> None:
    """Under a cap nobody reaches, so that both claims are tried."""
    if capped:
        await world.query("UPDATE fencepost.queues SET max_in_flight = 100000")


@pytest.mark.parametrize("capped", [False, True])
async def test_each_level_is_worth_a_minute_of_waiting(world: World, capped: bool) -> None:
    await _limits(world, capped)
    job = await world.add_job()
    made: dict[RunKey, int] = {}
    # Highest priority last, each one level and a little more than a minute after the one before.
    for priority in range(10):
        [key] = await world.enqueue(job, priority=priority)
        made[key] = priority
        await world.move(_LEVEL + SECOND)
    order = [made[run.key] for run in await world.claim(10, capped=capped)]
    assert order == list(range(10))
    made.clear()
    for priority in range(10):
        [key] = await world.enqueue(job, priority=priority)
        made[key] = priority
        await world.move(_LEVEL - SECOND)
    order = [made[run.key] for run in await world.claim(10, capped=capped)]
    assert order == list(range(9, -1, -1))


@pytest.mark.parametrize("capped", [False, True])
async def test_the_lowest_priority_is_served_under_a_stream_of_the_highest(
    world: World, capped: bool
) -> None:
    await _limits(world, capped)
    job = await world.add_job()
    [low] = await world.enqueue(job, priority=0)
    await world.move(SECOND)
    waited = SECOND
    while True:
        await world.enqueue(job, priority=9)
        await world.move(20 * SECOND)
        waited += 20 * SECOND
        [run] = await world.claim(1, capped=capped)
        if run.key == low:
            break
        assert waited <= 9 * _LEVEL + 20 * SECOND
    # Not sooner either: nine levels are worth nine minutes.
    assert waited > 9 * _LEVEL - 40 * SECOND


@pytest.mark.parametrize("capped", [False, True])
async def test_recovered_runs_of_high_priority_go_before_new_ones_of_low(
    world: World, capped: bool
) -> None:
    await _limits(world, capped)
    job = await world.add_job()
    urgent = set(await world.enqueue(job, 10, priority=9))
    held = await world.claim(10, capped=capped)
    assert {run.key for run in held} == urgent
    # At another instant than the others, whose keys are taken.
    await world.move(SECOND)
    before = await world.enqueue(job, 5, priority=0)
    assert len(before) == 5
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 10
    # From the recovery on new runs of no priority arrive all the time.
    # While all ten still wait out their lost leases, which is possible, an older run is taken.
    order: list[RunKey] = []
    after: set[RunKey] = set()
    while not urgent <= set(order):
        after |= set(await world.enqueue(job, 2, priority=0))
        await world.pass_time(SECOND)
        order += [run.key for run in await world.claim(1, capped=capped)]
        assert len(order) < 60
    late = [place for place, key in enumerate(order) if key in after]
    last = max(place for place, key in enumerate(order) if key in urgent)
    assert not late or min(late) > last
    assert set(order) - urgent <= set(before)


@pytest.mark.parametrize("capped", [False, True])
async def test_a_backlog_is_worked_off_oldest_first_while_new_runs_arrive(
    world: World, capped: bool
) -> None:
    """Workers take a quarter more than arrives; nobody of equal priority is overtaken."""
    await _limits(world, capped)
    job = await world.add_job(spec=job_spec())
    for _ in range(50):
        await world.enqueue(job, 20)
        await world.move(6 * SECOND)
    dispatcher = make_dispatcher(world)
    takers = [await make_taker(world, credits=0) for _ in range(2)]
    for taker in takers:
        dispatcher.subscribe(taker)
    oldest_ages: list[int] = []
    newest_started: Instant = 0
    while not oldest_ages or oldest_ages[-1] > 5 * SECOND:
        await world.enqueue(job, 20)
        await world.move(2 * SECOND)
        for taker in takers:
            taker.taken.clear()
            taker.credits = 25
        await dispatcher.scan()
        assert await dispatcher.dispatch() == 50
        started = [run.key.scheduled_at for taker in takers for run in taker.taken]
        # Whoever starts now was due after all that started before, give or take one batch.
        assert min(started) > newest_started - MINUTE
        newest_started = max(newest_started, *started)
        oldest = await world.value(
            "SELECT extract(epoch FROM $1::timestamptz - min(available_at)) * 1000000 "
            "FROM fencepost.run_queue WHERE state = 'queued'",
            to_datetime(world.now),
        )
        oldest_ages.append(int(oldest or 0))
    falls = [later - earlier for earlier, later in pairwise(oldest_ages)]
    assert all(fall <= 0 for fall in falls)
    assert len(oldest_ages) > 10
