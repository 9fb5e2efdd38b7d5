"""Indexes that days get when they are over: built once, beside writers, whatever comes between."""

import asyncio
from datetime import timedelta

import asyncpg
import pytest
from fencepost_server.clock import DAY, to_datetime
from fencepost_server.store import day_tables
from fencepost_server.store.day_tables import DAY_INDEXES, DayTables

from tests.factories import NOON
from tests.integration.world import World, build

TODAY = to_datetime(NOON).date()


async def _indexes(world: World, back: int) -> set[str]:
    table = f"job_runs_{TODAY - timedelta(days=back):%Y%m%d}"
    rows = await world.query(
        "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
        "WHERE i.indrelid = ('fencepost.' || $1)::text::regclass AND i.indisvalid",
        table,
    )
    names = {row["relname"].removeprefix(f"{table}_") for row in rows}
    return names & DAY_INDEXES.keys()


async def test_days_that_are_over_get_them_and_today_does_not(database_url: str) -> None:
    async with build(database_url) as world:
        await world.retention.index_days()
        assert await _indexes(world, 1) == DAY_INDEXES.keys()
        assert await _indexes(world, 0) == set()
        await world.move(DAY)
        await world.retention.index_days()
        assert await _indexes(world, 0) == DAY_INDEXES.keys()


async def test_what_is_there_is_not_built_again(database_url: str) -> None:
    async with build(database_url) as world:
        tables = DayTables(world.dsn)
        assert len(await tables.index_before(TODAY, tables_max=5)) == 1
        assert await tables.index_before(TODAY, tables_max=5) == []


async def test_servers_that_build_together_do_not_fail(database_url: str) -> None:
    async with build(database_url) as world:
        await world.move(DAY)
        await asyncio.gather(*(world.retention.index_days() for _ in range(4)))
        while await DayTables(world.dsn).index_before(TODAY + timedelta(days=1), tables_max=5):
            pass
        assert await _indexes(world, 0) == await _indexes(world, 1) == DAY_INDEXES.keys()


async def test_an_old_reader_puts_it_off_and_it_is_finished_later(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(day_tables, "_BUILD_LOCK_TIMEOUT", "50ms")
    async with build(database_url) as world:
        tables = DayTables(world.dsn)
        reader = await asyncpg.connect(world.dsn)
        try:
            await reader.execute(
                "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM fencepost.job_runs"
            )
            assert await tables.index_before(TODAY, tables_max=5) == []
            assert await _indexes(world, 1) < DAY_INDEXES.keys()
            # Writers of that day do not wait for what waits for the reader.
            building = asyncio.create_task(tables.index_before(TODAY, tables_max=5))
            async with asyncio.timeout(5):
                await _end_a_run_of_yesterday(world)
            await building
        finally:
            await reader.close()
        assert await tables.index_before(TODAY, tables_max=5) == [
            f"job_runs_{TODAY - timedelta(days=1):%Y%m%d}"
        ]
        assert await _indexes(world, 1) == DAY_INDEXES.keys()
        leftovers = await world.value("SELECT count(*) FROM pg_index WHERE NOT indisvalid")
        # The indexes of the parents are valid once all of their tables have them.
        assert leftovers == 0


async def _end_a_run_of_yesterday(world: World) -> None:
    await world.query(
        "INSERT INTO fencepost.job_runs (job_id, scheduled_at, available_at, created_at, ended_at, "
        "tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count, "
        "snooze_count, replay_count, state, origin, priority) "
        "VALUES (gen_random_uuid(), $1, $1, $1, $1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 'succeeded', "
        "'schedule', 0)",
        to_datetime(NOON - DAY),
    )
