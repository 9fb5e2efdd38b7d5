"""Runs that wait for an earlier run of their job, and when they are freed."""

import asyncio

from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.promoter import Promoter

from tests.factories import NOON, every, job_spec
from tests.integration.world import World, build


async def _waiting(world: World, fires: int = 3, name: str = "report") -> str:
    """A job with one claimed run and `fires` that wait behind it."""
    spec = job_spec(every(overlap=OverlapPolicy.QUEUE_ALL))
    job = await world.add_job(name, spec, next_run_at=world.now)
    for _ in range(fires + 1):
        await world.scheduler.fire_due()
        await world.move(MINUTE)
    return job


async def _states(world: World, job: str) -> list[str]:
    return [state for _, state, _ in await world.runs_of(job)]


async def test_only_the_oldest_waiting_run_is_freed_and_only_when_nothing_else_is_live(
    world: World,
) -> None:
    job = await _waiting(world)
    [run] = await world.claim(5)
    assert await world.promoter.sweep() == 0
    await world.report(run)
    assert await world.promoter.sweep() == 1
    assert await world.promoter.sweep() == 0
    assert await _states(world, job) == ["queued", "blocked", "blocked"]
    assert [at for at, _, _ in await world.runs_of(job)] == [60, 120, 180]


async def test_a_freed_run_is_available_now_and_hinted(world: World) -> None:
    job = await _waiting(world)
    [run] = await world.claim()
    await world.report(run)
    world.woken.lane_hints.clear()
    assert await world.promoter.promote([job]) == 1
    assert len(world.woken.lane_hints) == 1
    [freed] = await world.claim()
    assert freed.key.scheduled_at == NOON + MINUTE


async def test_a_run_in_backoff_still_holds_up_the_waiting_ones(world: World) -> None:
    await _waiting(world)
    await world.query("UPDATE fencepost.run_queue SET state = 'retrying' WHERE state = 'queued'")
    assert await world.promoter.sweep() == 0


async def test_a_run_delayed_into_next_month_holds_up_nothing(world: World) -> None:
    job = await _waiting(world)
    [run] = await world.claim()
    await world.enqueue(job, at=NOON + 30 * DAY)
    await world.report(run)
    assert await world.promoter.sweep() == 1


async def test_regular_fires_go_before_waiting_backfill_runs(world: World) -> None:
    job = await _waiting(world)
    await world.query(
        "UPDATE fencepost.run_queue SET origin = 'backfill' "
        "WHERE scheduled_at = (SELECT min(scheduled_at) FROM fencepost.run_queue "
        "WHERE state = 'blocked')"
    )
    [run] = await world.claim()
    await world.report(run)
    await world.promoter.sweep()
    assert [(at, state) for at, state, _ in await world.runs_of(job)] == [
        (60, "blocked"),
        (120, "queued"),
        (180, "blocked"),
    ]


async def test_a_job_that_is_locked_is_left_for_the_next_sweep(world: World) -> None:
    job = await _waiting(world)
    [run] = await world.claim()
    await world.report(run)
    async with world.raw.transaction():
        await world.query(
            "SELECT FROM fencepost.job_schedules WHERE job_id = $1::uuid FOR UPDATE", job
        )
        assert await world.promoter.sweep() == 0
    assert await world.promoter.sweep() == 1


async def test_two_promoters_free_one_run_of_each_job(database_url: str) -> None:
    async with build(database_url) as world:
        jobs = [await _waiting(world, 2, f"job{i}") for i in range(5)]
        while runs := await world.claim(20):
            for run in runs:
                await world.report(run)
        other = Promoter(database=world.database, clock=world.database.clock, wake=world.woken)
        await asyncio.gather(*(p.sweep() for p in (world.promoter, other) * 3))
        await world.promoter.sweep()
        for job in jobs:
            assert (await _states(world, job)).count("queued") == 1


async def test_the_end_of_a_run_frees_the_next_at_once(world: World) -> None:
    job = await _waiting(world)
    [run] = await world.claim()
    world.lifecycle.serial_ended.append(world.promoter.ended)
    loop = asyncio.create_task(world.promoter.run(interval=HOUR))
    try:
        async with asyncio.timeout(10):
            await world.report(run)
            world.woken.event.clear()
            while (await _states(world, job))[0] != "queued":
                await world.woken.event.wait()
                world.woken.event.clear()
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
    assert await _states(world, job) == ["queued", "blocked", "blocked"]


async def test_a_sweep_goes_through_more_jobs_than_one_batch(world: World) -> None:
    spec = job_spec(every(overlap=OverlapPolicy.QUEUE_ALL))
    await world.add_jobs([f"job{i}" for i in range(1203)], spec, NOON)
    await world.scheduler.fire_due()
    await world.query("UPDATE fencepost.run_queue SET state = 'blocked'")
    await world.move(SECOND)
    assert await world.promoter.sweep() == 1203
