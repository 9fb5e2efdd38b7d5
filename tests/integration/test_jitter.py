"""Jitter delays runs by a stable part of it, and moves nothing else."""

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, from_datetime
from fencepost_server.domain.run import RunKey, stable_fraction
from fencepost_server.domain.schedule import MisfireAction, OverlapPolicy, Schedule

from tests.factories import NOON, cron, every, job_spec, once
from tests.integration.world import World


@pytest.mark.parametrize(
    "text", ["", "a", "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42/2026-12-01T12:00:00Z", "ü/€", "x" * 500]
)
async def test_the_database_makes_the_same_fraction_as_the_server(world: World, text: str) -> None:
    assert await world.value("SELECT fencepost.stable_fraction($1)", text) == stable_fraction(text)


async def _delays(world: World, job: str) -> dict[int, int]:
    rows = await world.query(
        "SELECT scheduled_at, available_at FROM fencepost.run_queue WHERE job_id = $1::uuid", job
    )
    return {
        from_datetime(row["scheduled_at"]): from_datetime(row["available_at"])
        - from_datetime(row["scheduled_at"])
        for row in rows
    }


def _expected(job: str, at: int, bound: int) -> int:
    return int(stable_fraction(str(RunKey(job, at)), "jitter") * bound)


@pytest.mark.parametrize(
    ("schedule", "bound"),
    [
        (cron("0 * * * *", jitter=10 * MINUTE), 10 * MINUTE),
        (cron("* * * * *", jitter=10 * MINUTE), MINUTE),
        (every(HOUR, jitter=2 * HOUR), HOUR),
        (once(NOON, jitter=DAY), DAY),
        (every(HOUR, jitter=2 * HOUR, end_at=NOON + 10 * MINUTE), 2 * HOUR),
        (every(HOUR, jitter=2 * HOUR, overlap=OverlapPolicy.QUEUE_ALL), HOUR),
    ],
)
async def test_a_fire_on_the_fast_path_is_delayed_below_the_next_fire(
    world: World, schedule: Schedule, bound: int
) -> None:
    jobs = await world.add_jobs([f"job{i}" for i in range(40)], job_spec(schedule), NOON)
    assert await world.scheduler.fire_due() == 40
    delays = [(await _delays(world, job))[NOON] for job in jobs]
    assert delays == [_expected(job, NOON, bound) for job in jobs]
    assert max(delays) < bound
    assert max(delays) - min(delays) > bound // 2


async def test_the_settle_path_delays_by_the_same_part(world: World) -> None:
    spec = job_spec(
        every(MINUTE, jitter=HOUR, misfire=MisfireAction.CATCH_UP, threshold=10 * SECOND)
    )
    job = await world.add_job(spec=spec, next_run_at=NOON)
    await world.settle([job])
    await world.move(MINUTE)
    await world.settle([job])
    delays = await _delays(world, job)
    assert delays == {at: _expected(job, at, MINUTE) for at in (NOON, NOON + MINUTE)}


async def test_a_run_delayed_by_jitter_is_not_claimed_before(world: World) -> None:
    job = await world.add_job(spec=job_spec(once(NOON, jitter=HOUR)), next_run_at=NOON)
    await world.scheduler.fire_due()
    delay = (await _delays(world, job))[NOON]
    await world.pass_time(delay - 1)
    assert await world.claim() == []
    await world.pass_time(1)
    [run] = await world.claim()
    assert run.key == RunKey(job, NOON)


async def test_a_late_fire_is_available_at_once_if_its_jitter_is_over(world: World) -> None:
    job = await world.add_job(spec=job_spec(once(NOON, jitter=SECOND)), next_run_at=NOON)
    await world.move(HOUR)
    await world.scheduler.fire_due()
    assert (await _delays(world, job))[NOON] == HOUR
