"""Following the database clock, and knowing when not to trust it."""

import asyncpg
import pytest
from fencepost_server.clock import MINUTE, SECOND
from fencepost_server.engine import timekeeper
from fencepost_server.engine.timekeeper import DISTRUST, STEP_MAX, Timekeeper
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Database
from fencepost_server.store.statements import Statement


async def _shift(dsn: str, seconds: float) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(
            "CREATE OR REPLACE FUNCTION fencepost.clock() RETURNS timestamptz LANGUAGE sql "
            f"VOLATILE AS 'SELECT clock_timestamp() + interval ''{seconds} seconds'''"
        )
    finally:
        await connection.close()


@pytest.mark.parametrize("step", [-STEP_MAX - SECOND, STEP_MAX + SECOND])
async def test_a_step_of_the_clock_is_distrusted_for_the_length_of_a_lease(
    database_url: str, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    async with Database(database_url, hot_size=1, requests_size=1) as database:
        keeper = Timekeeper(database=database, storage_changed=lambda _: None)
        await keeper.first_sample()
        before = database.clock.now()
        assert keeper.is_trusted
        await _shift(database_url, step / SECOND)
        await keeper._sample()
        assert not keeper.is_trusted
        # What is discarded for a slow answer would leave the old offset in place.
        assert abs(database.clock.now() - before - step) < MINUTE
        later = timekeeper.monotonic() + DISTRUST
        monkeypatch.setattr(timekeeper, "monotonic", lambda: later)
        assert keeper.is_trusted


async def test_a_small_step_is_followed_and_trusted(database_url: str) -> None:
    async with Database(database_url, hot_size=1, requests_size=1) as database:
        keeper = Timekeeper(database=database, storage_changed=lambda _: None)
        await keeper.first_sample()
        await _shift(database_url, 2)
        await keeper._sample()
        assert keeper.is_trusted


async def test_it_tells_once_when_the_database_goes_and_once_when_it_is_back(
    database_url: str,
) -> None:
    told: list[bool] = []
    async with Database(database_url, hot_size=1, requests_size=1) as database:
        keeper = Timekeeper(database=database, storage_changed=told.append)
        await keeper.first_sample()
        await keeper._sample()
        connection = await asyncpg.connect(database_url)
        try:
            await connection.execute(
                "CREATE OR REPLACE FUNCTION fencepost.clock() RETURNS timestamptz LANGUAGE plpgsql "
                "VOLATILE AS $$ BEGIN RAISE EXCEPTION SQLSTATE '57P03'; END $$"
            )
        finally:
            await connection.close()
        await keeper._sample()
        await keeper._sample()
        await _shift(database_url, 0)
        await keeper._sample()
    assert told == [True, False, True]


@pytest.mark.parametrize("state", ["57014", "57P01", "57P03", "53300", "40P01", "25006", "25P03"])
async def test_what_may_succeed_a_moment_later_is_a_storage_error(
    database_url: str, state: str
) -> None:
    failing = Statement(
        name="failing",
        text=f"DO $$ BEGIN RAISE EXCEPTION SQLSTATE '{state}'; END $$",
        parameters=(),
    )
    async with Database(database_url, hot_size=1, requests_size=1) as database:
        with pytest.raises(StorageUnavailable):
            await database.hot.execute(failing)
        with pytest.raises(StorageUnavailable):
            async with database.requests.transaction() as connection:
                await connection.execute(failing)
