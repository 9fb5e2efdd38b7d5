"""Clean-up: what nobody needs goes, what is needed stays, a pass takes a bounded part, and
servers that clean up at once do not get in each other's way.
"""

import asyncio
import uuid
from typing import Any

import asyncpg
import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, Instant, to_datetime
from fencepost_server.domain.run import RunKey
from fencepost_server.engine import cleanup
from fencepost_server.engine.cleanup import Cleanup
from fencepost_server.store import runs as run_store
from fencepost_server.store.jobs import bury

from tests.factories import NOON, job_spec
from tests.integration.world import World

OLD = NOON - 40 * DAY
FLOOR = NOON - 30 * DAY


@pytest.fixture
def cleaner(world: World) -> Cleanup:
    return Cleanup(database=world.database, history=30 * DAY)


async def prune(cleaner: Cleanup, now: Instant = NOON) -> None:
    await cleaner.prune(now, floor=now - 30 * DAY)


async def count(world: World, table: str, condition: str = "true", *values: Any) -> int:
    found: int = await world.value(
        f"SELECT count(*) FROM fencepost.{table} WHERE {condition}",  # noqa: S608
        *values,
    )
    return found


@pytest.fixture
async def job(world: World) -> str:
    return await world.add_job()


async def add_ended(
    world: World, job_id: str, at: Instant, table: str = "job_runs_stray", **more: Any
) -> None:
    """A run that ended at the instant it was due."""
    row = {
        "state": "dead" if table == "dead_letters" else "succeeded",
        "dead_reason": "max_failures" if table == "dead_letters" else None,
        "discarded_at": None,
        "version": 1,
        **more,
    }
    names = ", ".join(row)
    places = ", ".join(f"${n}" for n in range(3, len(row) + 3))
    await world.query(
        f"INSERT INTO fencepost.{table} (job_id, scheduled_at, available_at, created_at, ended_at, "  # noqa: S608
        "tenant_id, queue_id, kind_id, attempt, failure_count, lost_lease_count, snooze_count, "
        f"replay_count, origin, priority, {names}) "
        "SELECT s.job_id, $2, $2, $2, $2, s.tenant_id, s.queue_id, s.kind_id, 1, 0, 0, 0, 0, "
        f"'schedule', 0, {places} FROM fencepost.job_schedules AS s WHERE s.job_id = $1",
        job_id,
        to_datetime(at),
        *row.values(),
    )


# What only its age decides ------------------------------------------------------------------


async def test_strays_and_given_up_dead_letters_go_with_history(
    world: World, cleaner: Cleanup, job: str
) -> None:
    for at in (FLOOR - 1, FLOOR, NOON):
        await add_ended(world, job, at)
        await add_ended(world, job, at + 5, "dead_letters", discarded_at=to_datetime(at))
    await add_ended(world, job, NOON - 400 * DAY, "dead_letters")
    await prune(cleaner)
    assert await count(world, "job_runs_stray") == 2
    assert await count(world, "dead_letters", "discarded_at IS NOT NULL") == 2
    assert await count(world, "dead_letters", "discarded_at IS NULL") == 1, "never pruned"


async def test_a_pass_is_bounded_and_the_next_one_goes_on(
    world: World, cleaner: Cleanup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "ROWS_PER_STATEMENT", 3)
    monkeypatch.setattr(cleanup, "STATEMENTS_PER_PASS", 2)
    await world.query(
        "INSERT INTO fencepost.requests SELECT 1, 'm', n, '', '', $1 FROM generate_series(1, 8) n",
        to_datetime(OLD),
    )
    await prune(cleaner)
    assert await count(world, "requests") == 2
    await prune(cleaner)
    assert await count(world, "requests") == 0


async def test_servers_that_clean_up_at_once_do_not_wait_for_each_other(
    world: World, cleaner: Cleanup, job: str
) -> None:
    """Rows that another server holds are left to it."""
    for n in range(5):
        await add_ended(world, job, OLD + n)
    await world.query(
        "INSERT INTO fencepost.requests SELECT 1, 'm', n, '', '', $1 FROM generate_series(1, 5) n",
        to_datetime(OLD),
    )
    other = await asyncpg.connect(world.dsn)
    try:
        async with other.transaction():
            await other.fetch("SELECT * FROM fencepost.job_runs_stray LIMIT 2 FOR UPDATE")
            await other.fetch("SELECT * FROM fencepost.requests LIMIT 2 FOR UPDATE")
            async with asyncio.timeout(10):
                await asyncio.gather(prune(cleaner), prune(cleaner))
            assert await count(world, "job_runs_stray") == 2
            assert await count(world, "requests") == 2
    finally:
        await other.close()
    await asyncio.gather(*(prune(cleaner) for _ in range(3)))
    assert await count(world, "job_runs_stray") == await count(world, "requests") == 0


# Versions -----------------------------------------------------------------------------------


async def add_version(world: World, job_id: str, version: int, at: Instant) -> None:
    """A newer version of the job, as an edit makes it."""
    await world.query(
        "INSERT INTO fencepost.job_versions (job_id, version, spec, created_at) "
        "SELECT job_id, $2, spec, $3 FROM fencepost.job_versions WHERE job_id = $1 AND version = 1",
        job_id,
        version,
        to_datetime(at),
    )
    await world.query("UPDATE fencepost.jobs SET version = $2 WHERE job_id = $1", job_id, version)


async def versions(world: World, job_id: str) -> list[int]:
    rows = await world.query(
        "SELECT version FROM fencepost.job_versions WHERE job_id = $1 ORDER BY 1", job_id
    )
    return [row["version"] for row in rows]


async def test_a_replaced_version_goes_thirty_days_after_it_was_replaced(
    world: World, cleaner: Cleanup, job: str
) -> None:
    await add_version(world, job, 2, NOON - 30 * DAY)
    await add_version(world, job, 3, NOON - 29 * DAY)
    await prune(cleaner)
    assert await versions(world, job) == [1, 2, 3], "exactly thirty days are not over yet"
    await prune(cleaner, NOON + 1)
    assert await versions(world, job) == [2, 3]
    await prune(cleaner, NOON + 300 * DAY)
    assert await versions(world, job) == [3], "the newest is never old"


@pytest.mark.parametrize("holder", ["live", "dead", "backfill"])
async def test_a_version_that_something_names_stays_until_it_does_not(
    world: World, cleaner: Cleanup, job: str, holder: str
) -> None:
    if holder == "live":
        await world.query(
            "INSERT INTO fencepost.run_queue (job_id, scheduled_at, available_at, created_at, "
            "tenant_id, queue_id, kind_id, version, state, origin, priority, lease_s, "
            "cancel_grace_s, attempt_timeout_s) SELECT job_id, $2, $2, $2, tenant_id, queue_id, "
            "kind_id, 1, 'queued', 'enqueue', 0, 30, 30, 60 FROM fencepost.job_schedules "
            "WHERE job_id = $1",
            job,
            to_datetime(NOON + 300 * DAY),
        )
    elif holder == "dead":
        await add_ended(world, job, OLD, "dead_letters")
    else:
        await world.query(
            "INSERT INTO fencepost.operations (operation_id, tenant_id, action, filter, rate, "
            "next_step_at, matched, created_at, job_id, version, since_at, until_at) "
            "VALUES ($2, 1, 'backfill', '', 1, $3, 1, $3, $1, 1, $3, $3)",
            job,
            str(uuid.uuid4()),
            to_datetime(OLD),
        )
    await add_version(world, job, 2, OLD)
    await prune(cleaner)
    assert await versions(world, job) == [1, 2]
    table = {"live": "run_queue", "dead": "dead_letters", "backfill": "operations"}[holder]
    await world.query(f"DELETE FROM fencepost.{table}")  # noqa: S608
    await prune(cleaner)
    assert await versions(world, job) == [1, 2], "looked at again after a day, not at once"
    await prune(cleaner, NOON + DAY + 1)
    assert await versions(world, job) == [2]


async def test_versions_that_stay_do_not_keep_others_from_going(
    world: World, cleaner: Cleanup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "_JUDGED_PER_STATEMENT", 2)
    monkeypatch.setattr(cleanup, "STATEMENTS_PER_PASS", 1)
    jobs = await world.add_jobs([f"job-{n}" for n in range(5)], job_spec())
    for n, each in enumerate(jobs):
        if n < 4:
            await add_ended(world, each, OLD, "dead_letters")
        await add_version(world, each, 2, OLD + n)
    for _ in range(3):
        await prune(cleaner)
    assert [len(await versions(world, each)) for each in jobs] == [2, 2, 2, 2, 1]


async def test_a_run_whose_version_is_gone_is_still_read(
    world: World, cleaner: Cleanup, job: str
) -> None:
    """It shows what the run itself has; labels and payload of the version are gone with it."""
    await add_ended(world, job, NOON - 20 * DAY)
    await add_version(world, job, 2, OLD)
    await prune(cleaner)
    assert await versions(world, job) == [2]
    key = RunKey(job, NOON - 20 * DAY)
    async with world.database.requests.connection() as connection:
        [run] = (await run_store.read(connection, [key], full=True)).values()
    assert (run.spec, run.version, run.state.name, dict(run.labels)) == (None, 1, "SUCCEEDED", {})
    assert run.job_name == "report"


# Deleted jobs -------------------------------------------------------------------------------


async def delete(world: World, job_id: str, at: Instant) -> None:
    async with world.database.requests.transaction() as connection:
        await bury(connection, job_id, now=at)


async def test_a_tombstone_goes_with_all_that_hangs_on_it(
    world: World, cleaner: Cleanup, job: str
) -> None:
    stays = await world.add_job("stays")
    await add_version(world, job, 2, OLD)
    for each in (job, stays):
        await world.query(
            "INSERT INTO fencepost.run_keys VALUES ($1, 'k', $2, 60, NULL)", each, to_datetime(NOON)
        )
    await delete(world, job, NOON - 31 * DAY - 1)
    await prune(cleaner)
    for table in ("jobs", "job_versions", "job_schedules", "run_keys"):
        assert await count(world, table, "job_id = $1", job) == 0, table
        assert await count(world, table, "job_id = $1", stays) == 1, table


async def test_a_tombstone_stays_for_a_month(world: World, cleaner: Cleanup, job: str) -> None:
    await delete(world, job, NOON - 31 * DAY)
    await prune(cleaner)
    assert await count(world, "jobs") == 1


@pytest.mark.parametrize("kept", ["job_runs_stray", "dead_letters", "job_runs", "fire_skips"])
async def test_a_tombstone_stays_while_anything_of_the_job_is_kept(
    world: World, cleaner: Cleanup, job: str, kept: str
) -> None:
    if kept == "fire_skips":
        await world.query(
            "INSERT INTO fencepost.fire_skips VALUES ($1, $2, $2, 'paused', NULL, 1, $2)",
            job,
            to_datetime(NOON),
        )
    else:
        await add_ended(world, job, NOON, kept)
    await delete(world, job, OLD)
    await prune(cleaner)
    assert await count(world, "jobs") == await count(world, "job_versions") == 1
    await world.query(f"DELETE FROM fencepost.{kept}")  # noqa: S608
    await prune(cleaner, NOON + DAY + 1)
    assert await count(world, "jobs") == await count(world, "job_versions") == 0


async def test_a_name_used_again_is_another_job(world: World, cleaner: Cleanup, job: str) -> None:
    await delete(world, job, OLD)
    again = await world.add_job()
    await prune(cleaner)
    rows = await world.query("SELECT job_id FROM fencepost.jobs")
    assert [str(row["job_id"]) for row in rows] == [again]


# Unique keys --------------------------------------------------------------------------------


async def test_keys_are_dropped_once_their_time_after_the_end_is_over(
    world: World, cleaner: Cleanup, job: str
) -> None:
    await add_ended(world, job, NOON)
    await world.enqueue(job, at=NOON + HOUR)
    await world.query(
        "INSERT INTO fencepost.run_keys "
        "SELECT job_id, 'live', scheduled_at, 60, NULL::timestamptz FROM fencepost.run_queue "
        "UNION ALL "
        "SELECT job_id, 'ended', scheduled_at, 60, NULL FROM fencepost.job_runs_stray"
    )
    await cleaner.forget_keys(NOON)
    assert await count(world, "run_keys") == 2
    await world.move(MINUTE + 1)
    await cleaner.forget_keys(world.now)
    rows = await world.query("SELECT unique_key, until FROM fencepost.run_keys")
    assert [(row["unique_key"], row["until"]) for row in rows] == [("live", None)]
