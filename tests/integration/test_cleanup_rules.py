"""Clean-up of cron rules: those that no job has go, beside whoever asks for the same rule."""

import asyncio

import asyncpg
import pytest
from fencepost_server.clock import DAY, HOUR, Duration, to_datetime
from fencepost_server.engine.cleanup import Cleanup
from fencepost_server.store.catalogue import Catalogue

from tests.factories import NOON, cron, job_spec
from tests.integration.world import World


@pytest.fixture
def cleaner(world: World) -> Cleanup:
    return Cleanup(database=world.database, history=30 * DAY)


async def prune(cleaner: Cleanup) -> None:
    await cleaner.prune(NOON, floor=NOON - 30 * DAY)


async def rules(world: World) -> int:
    found: int = await world.value("SELECT count(*) FROM fencepost.schedules")
    return found


async def _age_rules(world: World, by: Duration) -> None:
    await world.query("UPDATE fencepost.schedules SET used_at = $1", to_datetime(world.now - by))


async def test_a_rule_goes_a_week_after_anybody_wanted_it(world: World, cleaner: Cleanup) -> None:
    await world.catalogue.schedule_ids([{"cron": ["1 1 * * *"], "time_zone": "UTC"}])
    await _age_rules(world, 7 * DAY)
    await prune(cleaner)
    assert await rules(world) == 1
    await _age_rules(world, 7 * DAY + 1)
    await prune(cleaner)
    assert await rules(world) == 0


async def test_a_rule_that_a_job_has_stays(world: World, cleaner: Cleanup) -> None:
    await world.add_job("cron", job_spec(cron("1 1 * * *")), next_run_at=NOON + HOUR)
    await _age_rules(world, 60 * DAY)
    await prune(cleaner)
    assert await rules(world) == 1
    used_at = await world.value("SELECT used_at FROM fencepost.schedules")
    assert used_at == to_datetime(NOON), "not looked at again for a week"


async def test_a_rule_that_is_wanted_again_is_kept_or_made_anew(
    world: World, cleaner: Cleanup
) -> None:
    rule = {"cron": ["1 1 * * *"], "time_zone": "UTC"}
    [first] = await Catalogue(pool=world.database.requests).schedule_ids([rule])
    await _age_rules(world, 60 * DAY)
    [again] = await Catalogue(pool=world.database.requests).schedule_ids([rule])
    assert again == first
    await prune(cleaner)
    assert await rules(world) == 1, "asking for it made it young"
    await _age_rules(world, 60 * DAY)
    await prune(cleaner)
    [anew] = await Catalogue(pool=world.database.requests).schedule_ids([rule])
    assert anew != first
    assert await rules(world) == 1


async def test_a_rule_that_somebody_is_just_asking_for_is_left_alone(
    world: World, cleaner: Cleanup
) -> None:
    rule = {"cron": ["1 1 * * *"], "time_zone": "UTC"}
    await world.catalogue.schedule_ids([rule])
    await _age_rules(world, 60 * DAY)
    other = await asyncpg.connect(world.dsn)
    try:
        async with other.transaction():
            await other.execute("UPDATE fencepost.schedules SET used_at = now()")
            async with asyncio.timeout(10):
                await prune(cleaner)
    finally:
        await other.close()
    assert await rules(world) == 1
