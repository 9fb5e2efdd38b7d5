"""A database whose clock the test holds, made once and emptied between tests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from fencepost_server.clock import DAY, DatabaseClock, Instant, to_datetime


class HandClock(DatabaseClock):
    """Stands still until the test moves it."""

    def __init__(self, at: Instant) -> None:
        super().__init__()
        self.at = at

    def now(self) -> Instant:
        return self.at


@contextmanager
def own_database(postgres_dsn: str, template: str, name: str) -> Iterator[str]:
    """Connection string of a copy of the database `template`, dropped afterwards."""

    async def administer(statement: str) -> None:
        connection = await asyncpg.connect(postgres_dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(administer(f"CREATE DATABASE {name} TEMPLATE {template}"))
    try:
        yield urlunsplit(urlsplit(postgres_dsn)._replace(path=f"/{name}"))
    finally:
        asyncio.run(administer(f"DROP DATABASE {name} WITH (FORCE)"))


async def reset(dsn: str) -> None:
    """Empties a database that a world was built on before; its day tables stay."""
    raw = await asyncpg.connect(dsn, server_settings={"lock_timeout": "5s"})
    try:
        await raw.execute(
            """
            TRUNCATE fencepost.jobs, fencepost.job_versions, fencepost.job_schedules,
                fencepost.fire_skips, fencepost.run_queue, fencepost.job_runs,
                fencepost.job_runs_stray, fencepost.dead_letters, fencepost.run_attempts,
                fencepost.run_attempts_kept,
                fencepost.workers, fencepost.requests, fencepost.claim_requests,
                fencepost.operations, fencepost.catch_up_cursors,
                fencepost.release_cursors, fencepost.forecast_groups,
                fencepost.schedules, fencepost.schedule_fires, fencepost.kinds,
                fencepost.job_calendars, fencepost.calendars, fencepost.zones,
                fencepost.zone_moves, fencepost.run_keys, fencepost.run_changes CASCADE;
            DELETE FROM fencepost.queues WHERE name <> 'default' OR tenant_id NOT IN (
                SELECT tenant_id FROM fencepost.tenants WHERE name = 'default');
            UPDATE fencepost.queues SET paused = false, has_capped_jobs = false,
                max_in_flight = NULL, max_in_flight_per_key = NULL, rate_limit = NULL;
            TRUNCATE fencepost.queue_limits;
            UPDATE fencepost.tenants SET max_in_flight = NULL, default_retry_policy = DEFAULT;
            DELETE FROM fencepost.tenants WHERE name <> 'default';
            UPDATE fencepost.shard_state SET tzdata_version = '', watched_until = '-infinity';
            UPDATE fencepost.forecast_state SET count_id = 0, counted_at = NULL, next_at = DEFAULT;
            UPDATE fencepost.firing_state SET fired_at = DEFAULT, firing_since = DEFAULT;
            """
        )
    finally:
        await raw.close()


async def hold_clock(raw: "asyncpg.Connection[asyncpg.Record]", at: Instant) -> None:
    """From now on the database clock says `at`, and so does its reaper state."""
    await raw.execute("CREATE TABLE IF NOT EXISTS public.test_clock (at timestamptz NOT NULL)")
    await raw.execute("DELETE FROM public.test_clock")
    await raw.execute("INSERT INTO public.test_clock VALUES ($1)", to_datetime(at))
    await raw.execute(
        "CREATE OR REPLACE FUNCTION fencepost.clock() RETURNS timestamptz LANGUAGE sql VOLATILE "
        "AS 'SELECT at FROM public.test_clock'"
    )
    await raw.execute(
        "UPDATE fencepost.shard_state SET heartbeats_at = $1, no_reap_until = $1, "
        "retention_floor = $2",
        to_datetime(at),
        to_datetime(at - 30 * DAY),
    )
