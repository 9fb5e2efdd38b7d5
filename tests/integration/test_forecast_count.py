"""Counts of jobs for forecasts, made beforehand by one server at a time, also if it dies."""

import pytest
from fencepost_server.clock import MINUTE, SECOND, Instant, to_datetime
from fencepost_server.engine.forecast import PEAKS_MAX, Forecasts
from fencepost_server.engine.forecast_count import COUNT_AGE_MAX, ForecastCount
from fencepost_server.errors import ServerOverloaded

from tests.integration.forecast_jobs import compute, random_jobs, store, walked
from tests.integration.world import World


def _beforehand(world: World) -> tuple[ForecastCount, Forecasts]:
    """As if any number of jobs were too many to be counted for a forecast."""
    database, clock = world.database, world.database.clock
    count = ForecastCount(database=database, clock=clock, jobs_live_max=-2, slice_blocks=3)
    return count, Forecasts(database=database, clock=clock, jobs_live_max=-2)


@pytest.mark.parametrize(("tenant_id", "hours"), [(None, 24), (2, 1), (1, 48)])
async def test_jobs_counted_beforehand_make_the_same_forecast(
    world: World, tenant_id: int | None, hours: int
) -> None:
    await world.move(17 * SECOND)
    jobs = random_jobs(world.now, 150)
    await store(world, jobs)
    mine = [job for job in jobs if tenant_id in (None, job.tenant_id)]
    counted_at = world.now
    expected = walked(mine, counted_at // MINUTE * MINUTE, hours + 1)
    count, forecasts = _beforehand(world)
    assert await count.count()
    # What fires or goes meanwhile is in the next count only.
    await world.raw.execute("DELETE FROM fencepost.job_schedules")
    for age in (0, 9, 14, 31):
        await world.move_to(counted_at + age * MINUTE)
        found = await forecasts.get(tenant_id=tenant_id, hours=hours)
        assert expected[age : age + hours * 60] == list(found.fires_per_minute)
        assert (found.start_at // MINUTE, found.computed_at) == (world.now // MINUTE, counted_at)
        assert len(found.peaks) == PEAKS_MAX
        assert found.peaks[0].fires == max(found.fires_per_minute)


async def test_one_server_at_a_time_counts_and_old_counts_go(world: World) -> None:
    await store(world, random_jobs(world.now, 50))
    one, forecasts = _beforehand(world)
    two, _ = _beforehand(world)
    with pytest.raises(ServerOverloaded, match="counted beforehand"):
        await forecasts.get(tenant_id=None, hours=1)
    assert [await one.count(), await two.count()] == [True, False]
    known = await _counts(world)
    for _ in range(3):
        await world.move(10 * MINUTE)
        assert await two.count()
        before, known = known, await _counts(world)
        assert known[:-1] == before[-1:]
    assert (await forecasts.get(tenant_id=None, hours=1)).computed_at == world.now
    await world.move(COUNT_AGE_MAX + MINUTE)
    with pytest.raises(ServerOverloaded, match="counted beforehand"):
        await forecasts.get(tenant_id=None, hours=1)


async def _counts(world: World) -> list[int]:
    rows = await world.query("SELECT DISTINCT count_id FROM fencepost.forecast_groups ORDER BY 1")
    return [row["count_id"] for row in rows]


async def test_a_slice_that_was_begun_before_another_server_took_over_counts_for_nothing(
    world: World,
) -> None:
    await store(world, random_jobs(world.now, 50))
    slow, forecasts = _beforehand(world)
    other, _ = _beforehand(world)

    async def overtaken(_count_id: int, now: Instant, next_at: Instant, block: int) -> None:
        # The snapshot of its statement is older than the take-over, its commit is newer.
        await world.move(10 * MINUTE)
        assert await other.count()
        await world.raw.execute(
            "INSERT INTO fencepost.forecast_groups (count_id, tenant_id, first_at, jobs)"
            " VALUES ($1, 1, $2, 1000)",
            _count_id,
            to_datetime(world.now + MINUTE),
        )

    slow._slice = overtaken  # type: ignore[assignment, method-assign]
    assert not await slow.count()
    found = await forecasts.get(tenant_id=None, hours=24)
    assert list((await compute(world)).fires_per_minute) == list(found.fires_per_minute)
    await world.move(10 * MINUTE)
    assert await other.count()
    assert len(await _counts(world)) == 2


async def test_a_server_that_dies_while_it_counts_leaves_the_last_count_and_nothing_else(
    world: World,
) -> None:
    await store(world, random_jobs(world.now, 50))
    dying, forecasts = _beforehand(world)
    other, _ = _beforehand(world)
    assert await other.count()
    first_at = world.now
    await world.move(11 * MINUTE)
    sliced = dying._slice

    async def dies(*arguments: object) -> None:
        await sliced(*arguments)  # type: ignore[arg-type]
        raise _DiedError

    dying._slice = dies  # type: ignore[assignment, method-assign]
    with pytest.raises(_DiedError):
        await dying.count()
    assert (await forecasts.get(tenant_id=None, hours=1)).computed_at == first_at
    assert not await other.count()
    await world.move(10 * MINUTE)
    assert await other.count()
    found = await forecasts.get(tenant_id=None, hours=24)
    assert found.computed_at == world.now
    assert list((await compute(world)).fires_per_minute) == list(found.fires_per_minute)


class _DiedError(Exception):
    """The process is gone."""


async def test_a_count_that_took_too_long_is_not_read(world: World) -> None:
    await store(world, random_jobs(world.now, 50))
    slow, forecasts = _beforehand(world)
    other, _ = _beforehand(world)
    sliced = slow._slice

    async def overtaken(*arguments: object) -> None:
        await sliced(*arguments)  # type: ignore[arg-type]
        await world.move(10 * MINUTE)
        assert await other.count()

    slow._slice = overtaken  # type: ignore[assignment, method-assign]
    assert not await slow.count()
    found = await forecasts.get(tenant_id=None, hours=24)
    assert found.computed_at == world.now
    walk = await compute(world)
    assert list(walk.fires_per_minute) == list(found.fires_per_minute)


async def test_few_jobs_are_not_counted_beforehand(world: World) -> None:
    await store(world, random_jobs(world.now, 5))
    count = ForecastCount(database=world.database, clock=world.database.clock)
    assert not await count.count()
    assert await world.value("SELECT count(*) FROM fencepost.forecast_groups") == 0
