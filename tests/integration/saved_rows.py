"""Puts the rows of jobs and runs back to how they were saved, in one quick statement."""

import asyncpg

# With the condition that keeps a search in day tables to the days that tests use.
_TABLES = {
    "jobs": "true",
    "job_versions": "true",
    "job_schedules": "true",
    "fire_skips": "true",
    "run_queue": "true",
    "release_cursors": "true",
    "job_runs": "scheduled_at >= '2026-12-01' AND scheduled_at < '2026-12-02'",
    "job_runs_stray": "true",
    "dead_letters": "true",
    "run_attempts": "ended_at >= '2026-12-01' AND ended_at < '2026-12-02'",
    "requests": "true",
    "job_calendars": "true",
    "calendars": "true",
}


async def save_rows(raw: "asyncpg.Connection[asyncpg.Record]") -> None:
    """From now on `restore_rows` brings back the rows as they are now."""
    await raw.execute("DROP SCHEMA IF EXISTS saved CASCADE; CREATE SCHEMA saved")
    gone, back = [], []
    for table, condition in _TABLES.items():
        await raw.execute(f"CREATE TABLE saved.{table} AS TABLE fencepost.{table}")
        gone.append(f"DELETE FROM fencepost.{table} WHERE {condition};")  # noqa: S608 - named above
        back.append(f"INSERT INTO fencepost.{table} OVERRIDING SYSTEM VALUE TABLE saved.{table};")
    await raw.execute(
        "CREATE FUNCTION saved.restore() RETURNS void LANGUAGE plpgsql AS "
        f"$$ BEGIN {' '.join([*gone, *reversed(back)])} END $$"
    )


async def restore_rows(raw: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Forgets what happened since `save_rows`, which was called before."""
    await raw.execute("SELECT saved.restore()")
