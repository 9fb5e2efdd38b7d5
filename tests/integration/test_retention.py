"""History's length: tables ahead of time, old ones dropped without holding anybody up."""

import asyncio
from collections.abc import AsyncIterator
from datetime import date, timedelta

import asyncpg
import pytest
from fencepost_server.clock import DAY, HOUR, SECOND, from_datetime, to_datetime
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.backfill import BackfillAsked, Operations
from fencepost_server.engine.retention import Retention
from fencepost_server.engine.verdicts import Held
from fencepost_server.errors import InvalidField
from fencepost_server.policy.outcome import Failed
from fencepost_server.store.day_tables import DayTables
from fencepost_server.store.statements import load

from tests.factories import NOON, every, job_spec
from tests.integration.world import World, build

TODAY = to_datetime(NOON).date()


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    """A world of its own for each test, because they make and drop tables."""
    async with build(database_url) as world:
        yield world


async def _days(world: World, parent: str = "job_runs") -> list[date]:
    rows = await world.query(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = $1::text::regclass AND NOT i.inhdetachpending ORDER BY 1",
        f"fencepost.{parent}",
    )
    return [date.fromisoformat(row["relname"].rsplit("_", 1)[1]) for row in rows]


def _span(first: int, last: int) -> list[date]:
    return [TODAY + timedelta(days=n) for n in range(first, last + 1)]


def _retention(world: World, *, days: int = 30, ahead: int = 7) -> Retention:
    return Retention(
        database=world.database, clock=world.database.clock, days=days, days_ahead=ahead
    )


async def _attempts(world: World, key: RunKey) -> list[int]:
    """The recorded attempts of a run as ListAttempts reads them."""
    rows = await world.database.requests.fetch(
        load("run_reads")["list_attempts"],
        job_id=key.job_id,
        scheduled_at=key.scheduled_at,
        since=NOON - DAY,
        before=100,
        page_max=50,
    )
    return [row["attempt"] for row in rows]


async def _bounds(world: World) -> tuple[date, date]:
    row = (await world.query("SELECT history_from, history_until FROM fencepost.shard_state"))[0]
    return row["history_from"].date(), row["history_until"].date()


async def test_tables_are_made_from_yesterday_to_days_ahead(database_url: str) -> None:
    async with build(database_url, day_tables=False) as world:
        await _retention(world).ensure_day_tables()
        assert await _days(world) == await _days(world, "run_attempts") == _span(-1, 7)
        assert await _bounds(world) == (TODAY - timedelta(days=1), TODAY + timedelta(days=8))
        await world.move(DAY)
        await _retention(world).ensure_day_tables()
        assert await _days(world) == _span(-1, 8)


async def test_servers_that_start_together_make_each_table_once(database_url: str) -> None:
    async with build(database_url, day_tables=False) as world:
        await asyncio.gather(*(_retention(world, ahead=3).ensure_day_tables() for _ in range(5)))
        assert await _days(world) == await _days(world, "run_attempts") == _span(-1, 3)


async def test_old_tables_go_two_at_a_time_after_their_days(world: World) -> None:
    retention = _retention(world, days=3, ahead=1)
    await world.move(7 * DAY)
    kept = []
    for _ in range(4):
        await retention.keep()
        kept.append((await _days(world))[0])
    assert kept[0] == TODAY + timedelta(days=1)
    # Nothing before the floor is left: the first table is that of three days ago or newer.
    assert kept[-1] >= TODAY + timedelta(days=4)
    left = await world.value(
        "SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relname ~ $1",
        f"_{TODAY:%Y%m%d}$",
    )
    assert left == 0


async def test_a_day_is_kept_for_all_of_its_retention(world: World) -> None:
    retention = _retention(world, days=3, ahead=1)
    await world.move_to(NOON + 3 * DAY + 11 * HOUR)
    await retention.keep()
    assert TODAY in await _days(world)
    await world.move(HOUR)
    await retention.keep()
    assert TODAY not in await _days(world)


async def test_the_floor_is_raised_an_hour_before_a_table_goes(world: World) -> None:
    retention = _retention(world, days=3, ahead=1)
    midnight = from_datetime(to_datetime(NOON).replace(hour=0))
    last_hour = midnight + 4 * DAY - HOUR
    for moment, day in ((last_hour - 1, TODAY), (last_hour, TODAY + timedelta(days=1))):
        await world.move_to(moment)
        await retention.keep()
        floor = await world.value("SELECT retention_floor FROM fencepost.shard_state")
        assert floor.date() == day
        assert (await _bounds(world))[0] >= day
        assert TODAY in await _days(world)


async def test_a_run_of_a_day_that_is_about_to_go_ends_among_the_strays(world: World) -> None:
    run = await world.started()
    await world.move_to(NOON + 3 * DAY + 11 * HOUR)
    await _retention(world, days=3, ahead=1).keep()
    await world.report(run)
    assert (await world.ended(run.key, "job_runs_stray"))["state"] == "succeeded"


async def test_a_table_that_is_being_read_is_kept_and_writers_do_not_wait(world: World) -> None:
    retention = _retention(world, days=3, ahead=1)
    await world.move(5 * DAY)
    await retention.ensure_day_tables()
    reader = await asyncpg.connect(world.dsn)
    try:
        await reader.execute("BEGIN; SELECT count(*) FROM fencepost.job_runs")
        passing = asyncio.create_task(retention.keep())
        run = await world.started()
        async with asyncio.timeout(5):
            await world.report(run)
            assert (await world.ended(run.key))["state"] == "succeeded"
            await passing
        assert TODAY in await _days_with_pending(world)
        # What else a pass does is not held up by the reader either, however often it comes.
        await world.query("UPDATE fencepost.shard_state SET retention_floor = 'epoch'")
        await world.query(
            "INSERT INTO fencepost.fire_skips VALUES "
            "(gen_random_uuid(), $1, $1, 'misfire', NULL, 1, $1)",
            to_datetime(NOON - 300 * DAY),
        )
        await retention.keep()
        assert await world.value("SELECT count(*) FROM fencepost.fire_skips") == 0
    finally:
        await reader.close()
    for _ in range(3):
        await retention.keep()
    assert TODAY not in await _days_with_pending(world)
    assert await _leftovers(world) == 0


async def _days_with_pending(world: World) -> set[date]:
    rows = await world.query(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^job_runs_[0-9]{8}$'"
    )
    return {date.fromisoformat(row["relname"][-8:]) for row in rows}


async def _leftovers(world: World) -> int:
    count: int = await world.value(
        "SELECT count(*) FROM pg_class c WHERE relkind = 'r' "
        "AND relname ~ '^(job_runs|run_attempts)_[0-9]{8}$' "
        "AND NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid)"
    )
    return count


async def test_servers_that_drop_together_do_not_fail(world: World) -> None:
    await world.move(9 * DAY)
    keepers = [_retention(world, days=2, ahead=1) for _ in range(4)]
    for _ in range(4):
        await asyncio.gather(*(keeper.keep() for keeper in keepers))
    assert (await _days(world))[0] >= TODAY + timedelta(days=7)
    assert await _leftovers(world) == 0


async def test_a_gap_between_the_tables_makes_the_days_before_it_strays(world: World) -> None:
    run = await world.started()
    tables = DayTables(world.dsn)
    await tables.ensure(TODAY + timedelta(days=4), TODAY + timedelta(days=5))
    await world.retention._set_bounds()
    assert await _bounds(world) == (TODAY + timedelta(days=4), TODAY + timedelta(days=6))
    await world.report(run)
    assert (await world.ended(run.key, "job_runs_stray"))["state"] == "succeeded"


async def test_what_else_would_grow_is_pruned(world: World) -> None:
    job = await world.add_job(spec=job_spec(every()), next_run_at=NOON)
    await world.query(
        "INSERT INTO fencepost.fire_skips SELECT $1::uuid, $2::timestamptz - n * interval '1 day', "
        "$2::timestamptz - n * interval '1 day', 'misfire', NULL, 1, $2 "
        "FROM generate_series(1, 40) AS n",
        job,
        to_datetime(NOON),
    )
    await world.query(
        "INSERT INTO fencepost.claim_requests (request_id, worker_id, body_hash, expires_at) "
        "SELECT n, gen_random_uuid(), '', $1::timestamptz + (n - 3) * interval '1 second' "
        "FROM generate_series(1, 5) AS n",
        to_datetime(NOON),
    )
    await world.retention.keep()
    assert await world.value("SELECT count(*) FROM fencepost.fire_skips") == 30
    assert await world.value("SELECT count(*) FROM fencepost.claim_requests") == 3


async def test_the_queue_is_vacuumed_beside_open_transactions(world: World) -> None:
    await world.enqueue(await world.add_job(), 100)
    async with world.raw.transaction():
        await world.query("SELECT count(*) FROM fencepost.run_queue")
        async with asyncio.timeout(10):
            await DayTables(world.dsn).vacuum_queue()
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 100


async def test_thirty_midnights_with_a_drop_that_is_held_up_for_most_of_them(world: World) -> None:
    """A reader that never ends holds up drops, never the tables to come."""
    retention = _retention(world, days=7, ahead=7)
    await retention.ensure_day_tables()
    midnight = from_datetime(to_datetime(NOON).replace(hour=0))
    reader = await asyncpg.connect(world.dsn)
    try:
        for night in range(1, 31):
            if night == 9:
                await reader.execute("BEGIN; SELECT count(*) FROM fencepost.job_runs")
            if night == 24:
                await reader.execute("COMMIT")
            await world.move_to(midnight + night * DAY)
            await retention.keep()
            today = to_datetime(world.now).date()
            days = await _days(world)
            for parent in (days, await _days(world, "run_attempts")):
                assert (parent[-1] - today).days >= 7
            assert await _bounds(world) == (
                max(days[0], today - timedelta(days=7)),
                days[-1] + timedelta(days=1),
            )
            # Whoever ends a run tonight has a table for it.
            run = await world.started(name=f"job-{night}")
            await world.report(run)
            assert (await world.ended(run.key))["state"] == "succeeded"
    finally:
        await reader.close()
    for _ in range(15):
        await retention.keep()
    assert await _days(world) == await _days(world, "run_attempts")
    assert (await _days(world))[0] == to_datetime(world.now).date() - timedelta(days=7)
    assert await _leftovers(world) == 0


async def test_a_live_run_of_a_dropped_day_stays_and_its_end_is_recorded(world: World) -> None:
    """Live runs are in no day table, so no drop can take them."""
    retention = _retention(world, days=7, ahead=1)
    run = await world.started()
    waiting = (await world.enqueue(await world.add_job("later"), at=NOON + HOUR))[0]
    for _ in range(9):
        await world.pass_time(9 * SECOND)
        await world.lifecycle.heartbeat([Held(key=run.key, attempt=run.attempt)])
        await world.move(DAY)
        await world.keeper.tick()
        await retention.keep()
    assert TODAY not in await _days(world)
    states = {
        row["scheduled_at"]: row["state"]
        for row in await world.query("SELECT scheduled_at, state FROM fencepost.run_queue")
    }
    assert states == {
        to_datetime(run.key.scheduled_at): "running",
        to_datetime(waiting.scheduled_at): "queued",
    }
    await world.report(run)
    assert (await world.ended(run.key, "job_runs_stray"))["state"] == "succeeded"


async def test_no_second_run_is_made_for_an_instant_whose_history_is_gone(world: World) -> None:
    """The floor, and what the job has fired already, outlive the dropped day."""
    retention = _retention(world, days=3, ahead=1)
    job = await world.add_job(spec=job_spec(every()), next_run_at=NOON)
    await world.scheduler.fire_due()
    [run] = await world.claim()
    await world.report(run)
    await world.query("UPDATE fencepost.job_schedules SET paused = true WHERE job_id = $1", job)
    await world.move(9 * DAY)
    for _ in range(6):
        await retention.keep()
    assert await world.value("SELECT count(*) FROM fencepost.job_runs") == 0
    operations = Operations(database=world.database, catalogue=world.catalogue)
    with pytest.raises(InvalidField) as refused:
        await operations.backfill(
            BackfillAsked(
                name=JobName(tenant="default", job="report"),
                since=NOON,
                until=NOON + HOUR,
                rate=10.0,
                max_runs=100,
                allows_overlap=True,
                reason="",
                dry_run=False,
                request=None,
            ),
            now=world.now,
            encode=lambda made: b"",
        )
    assert "since: history before" in str(refused.value)
    last = await world.value("SELECT last_scheduled_at FROM fencepost.job_schedules")
    assert last == to_datetime(NOON)
    [late] = await world.enqueue(job, at=NOON)
    assert late.scheduled_at % SECOND != 0, "an ad-hoc run never takes the key of a fire"


async def test_attempts_of_a_dead_letter_outlive_their_day_and_go_with_it(world: World) -> None:
    """A dead letter is kept until a person decides, and so is everything that led to it."""
    retention = _retention(world, days=7, ahead=1)
    letter = await world.started(name="letter")
    await world.report(letter, Failed(code="BROKEN", reported=True))
    await world.pass_time(HOUR)
    [again] = await world.claim()
    await world.report(again, Failed(code="BROKEN", reported=True, final=True))
    other = await world.started(name="other")
    await world.report(other, Failed(code="BROKEN", reported=True))
    await world.pass_time(HOUR)
    [done] = await world.claim()
    await world.report(done)
    for _ in range(12):
        await world.move(DAY)
        await world.keeper.tick()
        await retention.keep()
    assert TODAY not in await _days(world, "run_attempts")
    assert await _attempts(world, letter.key) == [2, 1]
    assert await _attempts(world, other.key) == []
    await world.database.requests.fetch(
        load("dead_letters")["discard_dead_letters"],
        job_ids=[letter.key.job_id],
        scheduled_ats=[letter.key.scheduled_at],
        died_until=world.now,
        reason="",
        now=world.now,
    )
    for _ in range(20):
        await world.move(DAY)
        await world.keeper.tick()
        await retention.keep()
    assert await _attempts(world, letter.key) == []
    assert await world.value("SELECT count(*) FROM fencepost.run_attempts_kept") == 0
