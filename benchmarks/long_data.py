"""Large tables for the long measurements: filled once, kept as template databases in the cluster,
and copied file by file for each measurement, whose clock begins where the fill says.

With FENCEPOST_BENCH_DATA=FOLDER the templates stay for the next benchmark.
"""

import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
from fencepost_server.dev.postgres_binaries import find_postgres, postgres_account
from fencepost_server.domain.job import JobSpec, Target
from fencepost_server.domain.schedule import CronSpec, IntervalSpec, Schedule, spec_to_json
from fencepost_server.policy.schedule import interned_spec
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.migrate import load_migrations, migrate, migrations_dir

from benchmarks.long_gauges import Connection, told
from benchmarks.measure import copy_database

# The first fire of all. The database clock of a measurement is moved so that it begins near it.
EPOCH = datetime(2030, 1, 15, 12, tzinfo=UTC)
# Every job fires once an hour: by a cron rule of its minute and second, or by an interval.
PERIOD_S = 3600
# In the order of their names.
QUEUES = ("import", "mail", "report", "sync")
KINDS = 5
_JOBS_PER_INTERVAL = 5
_numbers = itertools.count(1)

_NAMES = """
INSERT INTO fencepost.tenants (name, created_at, updated_at)
SELECT 'tenant-' || n, fencepost.clock(), fencepost.clock()
FROM generate_series(1, $1 - 1) AS n
"""
_QUEUES = """
INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at)
SELECT t.tenant_id, q.name, fencepost.clock(), fencepost.clock()
FROM fencepost.tenants AS t CROSS JOIN unnest($1::text[]) AS q (name)
ORDER BY t.tenant_id, q.name
"""
_KINDS = "INSERT INTO fencepost.kinds (name) SELECT 'kind-' || n FROM generate_series(1, $1) AS n"

# One row per job: its names, and when it fires. Consecutive jobs fire far apart, so that what
# is due at one instant lies scattered over the table, as in a database that has lived.
_PLAN = """
CREATE UNLOGGED TABLE public.plan AS
SELECT i, (lpad(to_hex({epoch_ms} - 86400000 + i / 8), 12, '0') || '7' || substr(m, 1, 3) || '8'
           || substr(m, 4, 13) || substr(m, 30, 2))::uuid AS job_id,
       ('x' || substr(m, 30, 2))::bit(8)::int AS partition_id,
       ((i * 1000003) % {jobs} / {rate})::int AS second,
       1 + (i % {tenants})::int AS tenant, 1 + (i / {tenants} % {queues})::int AS queue,
       1 + (i % {kinds})::int AS kind
FROM (SELECT i, md5(i::text) AS m FROM generate_series(0::bigint, {jobs} - 1) AS i) AS x
"""
_SCHEDULES = """
INSERT INTO fencepost.job_schedules
    (job_id, next_run_at, tenant_id, queue_id, kind_id, version, schedule_id, every_s,
     partition_id)
SELECT p.job_id, $1::timestamptz + p.second * interval '1 second', t.ids[p.tenant],
       q.ids[(p.tenant - 1) * $4 + p.queue], k.ids[p.kind], 1,
       CASE WHEN p.i % $3 > 0 THEN ($2::int[])[1 + p.second % 3600] END,
       CASE WHEN p.i % $3 = 0 THEN 3600 END, p.partition_id
FROM public.plan AS p
CROSS JOIN (SELECT array_agg(tenant_id ORDER BY tenant_id) AS ids FROM fencepost.tenants) AS t
CROSS JOIN (SELECT array_agg(queue_id ORDER BY tenant_id, name) AS ids FROM fencepost.queues
            WHERE name <> 'default') AS q
CROSS JOIN (SELECT array_agg(kind_id ORDER BY name) AS ids FROM fencepost.kinds) AS k
"""
_JOBS = """
INSERT INTO fencepost.jobs (job_id, tenant_id, name, version, created_at, updated_at)
SELECT p.job_id, t.ids[p.tenant], 'job-' || p.i, 1, $1, $1
FROM public.plan AS p
CROSS JOIN (SELECT array_agg(tenant_id ORDER BY tenant_id) AS ids FROM fencepost.tenants) AS t
"""
_VERSIONS = """
INSERT INTO fencepost.job_versions (job_id, version, spec, created_at)
SELECT p.job_id, 1,
       (CASE WHEN p.i % $3 = 0 THEN $4::text
             ELSE replace($2::text, '58 59',
                          p.second % 60 || ' ' || p.second % 3600 / 60) END)::jsonb
       || jsonb_build_object('target', jsonb_build_object(
              'kind', 'kind-' || p.kind, 'queue_name', ($5::text[])[p.queue])), $1
FROM public.plan AS p
"""


def settings(*, shared_buffers: str, autovacuum: bool = True) -> dict[str, str]:
    """Settings of a Postgres that is sized for the load."""
    found = {
        "shared_buffers": shared_buffers,
        "max_wal_size": "8GB",
        "maintenance_work_mem": "512MB",
        "autovacuum": "on" if autovacuum else "off",
    }
    library = find_postgres(postgres_account(), major=None).bin_dir.parent / "lib"
    if any(library.rglob("pg_stat_statements.so")):
        found["shared_preload_libraries"] = "pg_stat_statements"
        found["pg_stat_statements.track"] = "all"
    return found


async def jobs_template(dsn: str, *, jobs: int, rate: int, tenants: int = 1) -> str:
    """The name of a database with that many jobs, `rate` of them due in each second from EPOCH
    on. With several tenants, each has QUEUES of its own."""
    name = f"bench_jobs_{jobs}_{rate}_{tenants}_{_schema()}"
    if not await template_exists(dsn, name):
        await _fill_template(dsn, name, jobs=jobs, rate=rate, tenants=tenants)
    return name


@asynccontextmanager
async def copied(dsn: str, template: str, *, begin: datetime) -> AsyncIterator[str]:
    """A database for one measurement whose clock says `begin` now; its connection string."""
    began = time.monotonic()
    name = f"bench_work_{next(_numbers)}"
    url = await copy_template(dsn, template, name)
    try:
        await set_clock(url, begin)
        told(f"{template} copied in {time.monotonic() - began:.0f} s")
        yield url
    finally:
        await _administer(dsn, f'DROP DATABASE "{name}" WITH (FORCE)')


async def set_clock(url: str, at: datetime, *, still: bool = False) -> None:
    """The database clock says `at` now and goes on from there, or stands `still`; processes
    follow it from their start."""
    connection = await asyncpg.connect(url)
    try:
        offset = at - await connection.fetchval("SELECT clock_timestamp()")
        moving = f"clock_timestamp() + interval ''{offset.total_seconds():.6f} seconds''"
        says = f"timestamptz ''{at.isoformat()}''" if still else moving
        await connection.execute(
            "CREATE OR REPLACE FUNCTION fencepost.clock() RETURNS timestamptz LANGUAGE sql VOLATILE"
            f" AS 'SELECT {says}'"
        )
    finally:
        await connection.close()


async def _fill_template(dsn: str, name: str, *, jobs: int, rate: int, tenants: int) -> None:
    began = time.monotonic()
    unfinished = f"{name}_unfinished"
    await _administer(dsn, f'DROP DATABASE IF EXISTS "{unfinished}" WITH (FORCE)')
    await _administer(dsn, f'CREATE DATABASE "{unfinished}" TEMPLATE template0')
    url = _url(dsn, unfinished)
    await migrate(url)
    rules = await _intern_rules(url)
    connection = await asyncpg.connect(url, server_settings={"timezone": "UTC"})
    try:
        # Rows are made to fit; checking every reference would take longer than making them.
        await connection.execute("SET session_replication_role = replica")
        await connection.execute("SET synchronous_commit = off")
        await connection.execute(_NAMES, tenants)
        await connection.execute(_QUEUES, list(QUEUES))
        await connection.execute(_KINDS, KINDS)
        await connection.execute(
            _PLAN.format(
                jobs=jobs,
                rate=rate,
                tenants=tenants,
                queues=len(QUEUES),
                kinds=KINDS,
                epoch_ms=int(EPOCH.timestamp() * 1000),
            )
        )
        await connection.execute("UPDATE fencepost.schedules SET used_at = $1", EPOCH)
        every = _JOBS_PER_INTERVAL
        await _bulk(connection, "job_schedules", _SCHEDULES, EPOCH, rules, every, len(QUEUES))
        await _bulk(connection, "jobs", _JOBS, EPOCH - timedelta(days=1))
        await _bulk(
            connection,
            "job_versions",
            _VERSIONS,
            EPOCH - timedelta(days=1),
            _cron_spec(),
            every,
            _interval_spec(),
            list(QUEUES),
        )
        await connection.execute("DROP TABLE public.plan")
        await connection.execute("VACUUM (FREEZE, ANALYZE)")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()
    await finish_template(dsn, unfinished, name)
    told(f"{jobs:,} jobs made in {time.monotonic() - began:.0f} s")


async def _intern_rules(url: str) -> list[int]:
    """The schedule ids of "every hour at that minute and second", by the second of the hour."""
    async with Database(url, hot_size=1, requests_size=2) as database:
        rules = []
        for second in range(PERIOD_S):
            interned = interned_spec(_cron(second))
            assert interned is not None
            rules.append(spec_to_json(interned))
        return await Catalogue(pool=database.requests).schedule_ids(rules)


def _cron(second: int) -> CronSpec:
    return CronSpec(expressions=(f"{second % 60} {second // 60} * * * *",), time_zone="UTC")


def _cron_spec() -> str:
    """A definition whose rule is that of the 59th minute and 58th second."""
    return _spec(Schedule(spec=_cron(59 * 60 + 58)))


def _interval_spec() -> str:
    return _spec(Schedule(spec=IntervalSpec(every=PERIOD_S * 1_000_000)))


def _spec(schedule: Schedule) -> str:
    return json.dumps(JobSpec(target=Target(kind="any"), schedule=schedule).to_json())


async def _bulk(connection: Connection, table: str, insert: str, *arguments: Any) -> None:
    """Insert with no index but the primary key, whose order the rows come in, then index."""
    rows = await connection.fetch(
        "SELECT indexrelid::regclass::text AS name, pg_get_indexdef(indexrelid) AS made_by "
        "FROM pg_index WHERE indrelid = $1::text::regclass AND NOT indisprimary",
        f"fencepost.{table}",
    )
    for row in rows:
        await connection.execute(f"DROP INDEX {row['name']}")
    await connection.execute(insert, *arguments)
    for row in rows:
        await connection.execute(row["made_by"])


async def copy_template(dsn: str, template: str, name: str) -> str:
    """A copy that nothing is left to be written of; its connection string."""
    url = await copy_database(dsn, template, name)
    # What the copy left to write must not be written during the measurement.
    await _administer(dsn, "CHECKPOINT")
    return url


async def finish_template(dsn: str, unfinished: str, name: str) -> None:
    """The database is filled: it gets the name that it is looked for by."""
    await _administer(dsn, f'ALTER DATABASE "{unfinished}" RENAME TO "{name}"')


async def template_exists(dsn: str, name: str) -> bool:
    """Whether it was filled before."""
    connection = await asyncpg.connect(dsn)
    try:
        found: bool = await connection.fetchval(
            "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name
        )
        return found
    finally:
        await connection.close()


async def _administer(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _url(dsn: str, name: str) -> str:
    return dsn.rsplit("/", 1)[0] + f"/{name}"


def _schema() -> str:
    """Names the schema: what an older one was filled with is of no use."""
    checksums = "".join(each.checksum for each in load_migrations(migrations_dir()))
    return hashlib.sha256(checksums.encode()).hexdigest()[:8]
