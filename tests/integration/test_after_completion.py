"""Intervals that count from the end of each run."""

import asyncio
from typing import Any

import pytest
from fencepost_server.clock import DAY, HOUR, MILLISECOND, MINUTE, SECOND
from fencepost_server.domain.schedule import IntervalSpec, MisfireAction, OverlapPolicy, Schedule
from fencepost_server.engine.promoter import Promoter

from tests.factories import NOON, failed, job_spec, plain_retry, schedule
from tests.integration.world import World


def _after(every: int = HOUR, **fields: Any) -> Schedule:
    return schedule(IntervalSpec(every=every, after_completion=True), **fields)


async def _fired(world: World, **fields: Any) -> str:
    job = await world.add_job(spec=job_spec(_after(**fields)), next_run_at=NOON)
    await world.scheduler.fire_due()
    return job


async def _state(world: World, job: str) -> tuple[int | None, bool]:
    awaits = await world.value(
        "SELECT awaits_end FROM fencepost.job_schedules WHERE job_id = $1::uuid", job
    )
    return await world.next_of(job), awaits


async def test_the_next_fire_is_every_after_the_end_rounded_up(world: World) -> None:
    job = await _fired(world)
    assert await _state(world, job) == (None, True)
    assert await world.promoter.sweep_ends() == 0
    [run] = await world.claim()
    await world.pass_time(20 * SECOND + 300 * MILLISECOND)
    assert await world.promoter.sweep_ends() == 0
    await world.report(run)
    assert await world.promoter.sweep_ends() == 1
    assert await _state(world, job) == (3600 + 21, False)
    assert await world.promoter.sweep_ends() == 0
    await world.move_to(NOON + HOUR + 21 * SECOND)
    assert await world.scheduler.fire_due() == 1
    assert [at for at, _, _ in await world.runs_of(job)] == [3621]


async def test_a_dead_run_has_ended_and_a_retrying_one_has_not(world: World) -> None:
    spec = job_spec(_after(), retry=plain_retry(max_failures=2))
    job = await world.add_job(spec=spec, next_run_at=NOON)
    await world.scheduler.fire_due()
    [run] = await world.claim()
    await world.report(run, failed())
    assert await world.promoter.sweep_ends() == 0
    await world.pass_time(20 * SECOND)
    [run] = await world.claim()
    await world.report(run, failed())
    assert await world.value("SELECT count(*) FROM fencepost.dead_letters") == 1
    assert await world.promoter.sweep_ends() == 1
    assert await _state(world, job) == (3620, False)


async def test_the_end_gives_a_hint_so_that_no_sweep_is_needed(world: World) -> None:
    job = await _fired(world)
    [run] = await world.claim()
    world.lifecycle.serial_ended.append(world.promoter.ended)
    loop = asyncio.create_task(world.promoter.run(interval=HOUR))
    try:
        async with asyncio.timeout(10):
            world.woken.event.clear()
            await world.report(run)
            while (await _state(world, job))[1]:
                await world.woken.event.wait()
                world.woken.event.clear()
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
    assert await _state(world, job) == (3600, False)
    assert world.woken.partitions[-1] == {
        await world.value(
            "SELECT partition_id FROM fencepost.job_schedules WHERE job_id = $1::uuid", job
        )
    }


async def test_another_process_goes_on_after_a_crash(world: World) -> None:
    job = await _fired(world)
    [run] = await world.claim()
    await world.report(run)
    other = Promoter(database=world.database, clock=world.database.clock, wake=world.woken)
    counts = await asyncio.gather(other.sweep_ends(), world.promoter.sweep_ends())
    assert sum(counts) == 1
    assert await _state(world, job) == (3600, False)


async def test_a_fire_skipped_by_overlap_counts_from_itself(world: World) -> None:
    job = await world.add_job(
        spec=job_spec(_after(MINUTE, overlap=OverlapPolicy.SKIP)), next_run_at=NOON
    )
    await world.enqueue(job, at=NOON - SECOND)
    await world.scheduler.fire_due()
    assert await world.skips_of(job) == [(0, 0, "overlap", None)]
    assert await _state(world, job) == (60, False)
    await world.move(150 * SECOND)
    await world.scheduler.fire_due()
    assert await world.skips_of(job) == [(0, 120, "overlap", None)]
    assert await _state(world, job) == (180, False)


async def test_max_fires_and_end_at_finish_the_schedule(world: World) -> None:
    job = await _fired(world, max_fires=1)
    assert await _state(world, job) == (None, False)
    other = await world.add_job(
        "other", job_spec(_after(end_at=NOON + 30 * MINUTE)), next_run_at=NOON
    )
    await world.scheduler.fire_due()
    for run in await world.claim(2):
        await world.report(run)
    assert await world.promoter.sweep_ends() == 1
    assert await _state(world, other) == (None, False)


@pytest.mark.parametrize(
    ("misfire", "fires", "skipped", "following"),
    [
        (MisfireAction.RUN_ONCE, [0], [], None),
        (MisfireAction.CATCH_UP, [0], [], None),
        (MisfireAction.SKIP, [], [(0, 86_400, "misfire", None)], 90_000),
    ],
)
async def test_after_an_outage_one_fire_was_missed(
    world: World,
    misfire: MisfireAction,
    fires: list[int],
    skipped: list[tuple[int, int, str, int | None]],
    following: int | None,
) -> None:
    job = await world.add_job(spec=job_spec(_after(misfire=misfire)), next_run_at=NOON)
    await world.move(DAY + 30 * MINUTE)
    await world.scheduler.fire_due()
    assert [at for at, _, _ in await world.runs_of(job)] == fires
    assert await world.skips_of(job) == skipped
    assert await world.next_of(job) == following


async def test_misfires_outside_the_window_are_dropped(world: World) -> None:
    job = await world.add_job(spec=job_spec(_after(window=2 * HOUR)), next_run_at=NOON)
    await world.move(DAY + 30 * MINUTE)
    await world.scheduler.fire_due()
    assert await world.skips_of(job) == [(0, 22 * 3600, "misfire", None)]
    assert await world.runs_of(job) == [(23 * 3600, "queued", "catch_up")]


async def test_a_paused_job_learns_its_next_fire_and_waits_with_it(world: World) -> None:
    job = await _fired(world)
    await world.query("UPDATE fencepost.job_schedules SET paused = true")
    [run] = await world.claim()
    await world.report(run)
    assert await world.promoter.sweep_ends() == 1
    await world.move(2 * HOUR)
    assert await world.scheduler.fire_due() == 0
    await world.settle([job], resuming=True)
    assert await world.runs_of(job) == [(3600, "queued", "catch_up")]
    assert await _state(world, job) == (None, True)
