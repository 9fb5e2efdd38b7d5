"""A month of history for the long measurements: ended runs in the day tables before EPOCH."""

import asyncio
import time
from datetime import UTC, date, datetime, timedelta

import asyncpg
from fencepost_server.store.day_tables import DayTables

from benchmarks.long_data import (
    EPOCH,
    PERIOD_S,
    copy_template,
    finish_template,
    template_exists,
)
from benchmarks.long_gauges import Connection, told

HISTORY_DAYS = 30
_DAYS_AHEAD = 8

# A day of history, of runs that succeeded at the first attempt, spread over jobs and the day.
_HISTORY = """
INSERT INTO fencepost.{table}
    (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, ended_at,
     tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
     snooze_count, replay_count, state, origin, priority, worker_id, timings)
SELECT p.job_id, a.at, a.at, a.at + interval '3 ms', a.at + interval '9 ms',
       a.at + interval '9 ms', a.at + interval '20 ms', p.tenant_id, p.queue_id, p.kind_id, 1, 1,
       0, 0, 0, 0, 'succeeded', 'schedule', 0, '0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42',
       '\\x0a0510c0843d120510c0843d'
FROM (
    SELECT s.*, row_number() OVER () - 1 AS i,
           extract(epoch FROM s.next_run_at - $6::timestamptz)::int AS second
    FROM fencepost.job_schedules AS s
) AS p
CROSS JOIN generate_series($3::int, $4::int - 1) AS n
CROSS JOIN LATERAL (
    SELECT $1::timestamptz + ((p.second + (n + p.i % ($2::int / 3600)) * 3600) % $2::int)
                             * interval '1 second' AS at
) AS a
WHERE p.i * 1000003 % $7 < $5
"""


async def history_template(dsn: str, jobs_name: str, *, rows: int) -> str:
    """As `jobs_name`, with that many ended runs in the day tables before EPOCH."""
    name = f"{jobs_name}_history_{rows}"
    if await template_exists(dsn, name):
        return name
    began = time.monotonic()
    unfinished = f"{name}_unfinished"
    url = await copy_template(dsn, jobs_name, unfinished)
    await _fill_history(url, rows)
    await finish_template(dsn, unfinished, name)
    told(f"{rows:,} ended runs made in {time.monotonic() - began:.0f} s")
    return name


async def _fill_history(url: str, rows: int) -> None:
    tables = DayTables(url)
    connection = await asyncpg.connect(url)
    try:
        jobs = await connection.fetchval("SELECT count(*) FROM fencepost.job_schedules")
        days = [EPOCH.date() - timedelta(days=n) for n in range(HISTORY_DAYS)]
        counts = [rows // HISTORY_DAYS + (n < rows % HISTORY_DAYS) for n in range(HISTORY_DAYS)]
        todo = list(zip(days, counts, strict=True))
        # One makes rows while the other makes indexes.
        made = await asyncio.gather(*(_fill_days(url, todo, jobs=jobs) for _ in range(2)))
        assert sum(made) == rows, f"{sum(made)} rows were made instead of {rows}"
        await tables.ensure(days[-1], EPOCH.date() + timedelta(days=_DAYS_AHEAD))
        await tables.index_before(EPOCH.date(), tables_max=HISTORY_DAYS)
        await connection.execute("VACUUM (FREEZE, ANALYZE) fencepost.job_runs")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()


async def _fill_days(url: str, todo: list[tuple[date, int]], *, jobs: int) -> int:
    """Takes days from the list until there are none; the rows made."""
    connection = await asyncpg.connect(url, server_settings={"timezone": "UTC"})
    made = 0
    try:
        await connection.execute("SET session_replication_role = replica")
        await connection.execute("SET synchronous_commit = off")
        while todo:
            day, count = todo.pop()
            made += await _fill_day(connection, day, jobs=jobs, count=count)
    finally:
        await connection.close()
    return made


async def _fill_day(connection: Connection, day: date, *, jobs: int, count: int) -> int:
    """One day table, filled before it is attached, which makes its indexes; the rows made."""
    table = f"job_runs_{day:%Y%m%d}"
    low, high = f"{day} 00:00:00+00", f"{day + timedelta(days=1)} 00:00:00+00"
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    # The day of EPOCH is half over.
    seconds = int(min(timedelta(days=1), EPOCH - start).total_seconds())
    await connection.execute(
        f"CREATE TABLE fencepost.{table} "
        "(LIKE fencepost.job_runs INCLUDING DEFAULTS INCLUDING CONSTRAINTS, "
        f"CONSTRAINT day CHECK (scheduled_at >= '{low}' AND scheduled_at < '{high}'))"
    )
    fill = _HISTORY.format(table=table)
    # Whole hours of all jobs first, then of a part of them.
    whole, rest = divmod(count, jobs)
    assert whole < seconds // PERIOD_S, f"{jobs} jobs cannot end {count} runs in a day"
    made = 0
    for first, last, part in ((0, whole, jobs), (whole, whole + 1, rest)):
        if last > first and part:
            tag = await connection.execute(fill, start, seconds, first, last, part, EPOCH, jobs)
            made += int(tag.rsplit(" ", 1)[-1])
    await connection.execute(
        f"ALTER TABLE fencepost.job_runs ATTACH PARTITION fencepost.{table} "
        f"FOR VALUES FROM ('{low}') TO ('{high}')"
    )
    await connection.execute(f"ALTER TABLE fencepost.{table} DROP CONSTRAINT day")
    return made
