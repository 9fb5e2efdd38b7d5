"""After an outage the late runs of a tenant are released at a rate, the newest first."""

from datetime import datetime

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Duration, to_datetime
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.domain.schedule import MisfireAction, OverlapPolicy
from fencepost_server.engine.firing import Scheduler

from tests.factories import NOON, every, job_spec
from tests.integration.world import World

H = 3600


def _governed(world: World, rate: float) -> Scheduler:
    return Scheduler(
        database=world.database,
        clock=world.database.clock,
        ownership=AllPartitions(),
        wake=world.woken,
        batch_max=500,
        concurrency=2,
        catch_up_rate=rate,
    )


async def _fire(scheduler: Scheduler) -> None:
    while await scheduler.fire_due():
        pass


async def _delays(world: World) -> list[tuple[float, datetime]]:
    """Seconds from now until each run may be claimed, and its fire, the soonest first."""
    rows = await world.query(
        "SELECT available_at, scheduled_at FROM fencepost.run_queue"
        " WHERE state = 'queued' ORDER BY available_at, scheduled_at DESC"
    )
    now = to_datetime(world.now)
    return [((row["available_at"] - now).total_seconds(), row["scheduled_at"]) for row in rows]


async def _jobs(
    world: World, count: int, *, late: Duration, step: Duration = 0, **rule: object
) -> None:
    """Daily jobs whose fires are due one `step` after the other, the first `late` ago."""
    for number in range(count):
        await world.add_job(
            f"job-{late}-{number}",
            job_spec(every(DAY, **rule)),
            next_run_at=world.now - late + number * step,
        )


@pytest.mark.parametrize("late", [2 * HOUR, 30 * SECOND])
async def test_late_runs_are_released_one_after_the_other_the_newest_first(
    world: World, late: Duration
) -> None:
    await _jobs(world, 20, late=late, step=SECOND)
    await _fire(_governed(world, 4.0))
    delays = await _delays(world)
    assert [delay for delay, _ in delays] == [place / 4 for place in range(20)]
    assert [at for _, at in delays] == sorted((at for _, at in delays), reverse=True)


async def test_no_second_has_more_than_the_rate(world: World) -> None:
    names = [f"job-{number}" for number in range(300)]
    await world.add_jobs(names, job_spec(every(DAY)), next_run_at=world.now - HOUR)
    await _fire(_governed(world, 50.0))
    delays = [delay for delay, _ in await _delays(world)]
    assert len(delays) == 300
    assert [sum(second <= delay < second + 1 for delay in delays) for second in range(7)] == [
        *[50] * 6,
        0,
    ]
    claimable = []
    for _ in range(6):
        claimable.append(len(await world.claim(1000)))
        await world.move(SECOND)
    # The first of each second is there when it begins.
    assert claimable == [1, 50, 50, 50, 50, 50]


async def test_nothing_is_held_back_without_a_rate_or_an_outage(world: World) -> None:
    await _jobs(world, 5, late=2 * HOUR)
    await _fire(_governed(world, 0.0))
    assert [delay for delay, _ in await _delays(world)] == [0.0] * 5
    await _jobs(world, 5, late=9 * SECOND)
    await _fire(_governed(world, 1.0))
    assert [delay for delay, _ in await _delays(world)] == [0.0] * 10


async def test_the_next_fire_is_never_held_back(world: World) -> None:
    for number in range(10):
        await world.add_job(
            f"job-{number}", job_spec(every(HOUR)), next_run_at=NOON - 10 * HOUR + 30 * MINUTE
        )
    await _fire(_governed(world, 0.1))
    rows = await world.query("SELECT DISTINCT next_run_at FROM fencepost.job_schedules")
    assert [row["next_run_at"] for row in rows] == [to_datetime(NOON + 30 * MINUTE)]
    assert max(delay for delay, _ in await _delays(world)) == 90.0
    await world.move(30 * MINUTE)
    await world.raw.execute("DELETE FROM fencepost.run_queue")
    await _fire(_governed(world, 0.1))
    assert [delay for delay, _ in await _delays(world)] == [0.0] * 10


async def test_places_go_on_where_the_last_batch_ended(world: World) -> None:
    governor = _governed(world, 2.0)
    await _jobs(world, 4, late=HOUR)
    await _fire(governor)
    await _jobs(world, 4, late=2 * HOUR)
    await _fire(governor)
    assert [delay for delay, _ in await _delays(world)] == [place / 2 for place in range(8)]
    # Unused time is not saved up.
    await world.move(MINUTE)
    await world.raw.execute("DELETE FROM fencepost.run_queue")
    await _jobs(world, 2, late=3 * HOUR)
    await _fire(_governed(world, 2.0))
    assert [delay for delay, _ in await _delays(world)] == [0.0, 0.5]


async def test_a_short_outage_does_not_wait_behind_a_long_one(world: World) -> None:
    governor = _governed(world, 1.0)
    await _jobs(world, 100, late=HOUR)
    await _fire(governor)
    await _jobs(world, 3, late=20 * SECOND)
    await _fire(governor)
    recent = [delay for delay, at in await _delays(world) if at > to_datetime(NOON - MINUTE)]
    assert recent == [0.0, 1.0, 2.0]
    # What was missed by more comes after both.
    await _jobs(world, 1, late=2 * HOUR)
    await _fire(governor)
    assert max(delay for delay, _ in await _delays(world)) == 100.0


async def test_tenants_have_a_pace_of_their_own(world: World) -> None:
    await _jobs(world, 4, late=HOUR)
    await world.raw.execute(
        "INSERT INTO fencepost.tenants (name, created_at, updated_at) VALUES ('acme', now(), now())"
    )
    await world.raw.execute(
        "UPDATE fencepost.job_schedules SET tenant_id = t.tenant_id FROM fencepost.tenants AS t"
        " WHERE t.name = 'acme' AND job_id IN (SELECT job_id FROM fencepost.jobs"
        " WHERE name LIKE '%-0' OR name LIKE '%-1')"
    )
    await _fire(_governed(world, 1.0))
    assert [delay for delay, _ in await _delays(world)] == [0.0, 0.0, 1.0, 1.0]


async def test_caught_up_runs_of_thoughtful_rows_are_paced_too(world: World) -> None:
    rule = every(HOUR, misfire=MisfireAction.CATCH_UP, max_catch_up=5, overlap=OverlapPolicy.ALLOW)
    for number in range(2):
        await world.add_job(f"job-{number}", job_spec(rule), next_run_at=NOON - 9 * HOUR)
    await _fire(_governed(world, 2.0))
    delays = await _delays(world)
    on_time = [delay for delay, at in delays if at == to_datetime(NOON)]
    assert len(delays) == 12
    assert on_time == [0.0, 0.0]
    missed = [(delay, at) for delay, at in delays if at != to_datetime(NOON)]
    assert len({delay for delay, _ in missed}) == 10
    assert [at for _, at in missed] == sorted((at for _, at in missed), reverse=True)


async def test_runs_that_wait_for_each_other_take_one_place(world: World) -> None:
    rule = every(
        HOUR, misfire=MisfireAction.CATCH_UP, max_catch_up=5, overlap=OverlapPolicy.QUEUE_ALL
    )
    for number in range(3):
        await world.add_job(f"job-{number}", job_spec(rule), next_run_at=NOON - 9 * HOUR)
    await _fire(_governed(world, 1.0))
    assert [delay for delay, _ in await _delays(world)] == [0.0, 1.0, 2.0]
