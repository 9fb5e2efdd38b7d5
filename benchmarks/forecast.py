"""How long a forecast takes where jobs are many: counted for the call, and counted beforehand.

Usage: python -m benchmarks.forecast [--jobs 1000000] [--tenants 50] [--rules 1000]
"""

import argparse
import time

import asyncpg
import uvloop
from fencepost_server.engine.forecast import Forecasts
from fencepost_server.engine.forecast_count import ForecastCount
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

from benchmarks.setting import fresh_database, postgres

_FILL = """
-- A forecast reads the whole table; its indexes would only take time.
DROP INDEX fencepost.job_schedules_due;
DROP INDEX fencepost.job_schedules_awaiting;
ALTER TABLE fencepost.job_schedules DROP CONSTRAINT job_schedules_pkey;
INSERT INTO fencepost.schedules (rule_hash, rule)
SELECT sha256(i::text::bytea),
       jsonb_build_object('cron', jsonb_build_object(
           'expressions', jsonb_build_array(format('%s %s * * *', i % 60, i / 60 % 24)),
           'time_zone', 'UTC', 'dst_gap', 1, 'dst_fold', 1))
FROM generate_series(1, {rules}) AS i;
INSERT INTO fencepost.job_schedules
    (job_id, next_run_at, tenant_id, queue_id, kind_id, version, schedule_id, every_s, partition_id)
SELECT gen_random_uuid(),
       date_trunc('day', fencepost.clock()) + interval '1 day' + CASE WHEN i % 10 < 7
           THEN (1 + i % {rules}) % 1440 * interval '1 minute'
           ELSE i % 60 * interval '1 minute' END,
       1 + i / 10 % {tenants}, 1, 1, 1,
       CASE WHEN i % 10 < 7 THEN 1 + i % {rules} END, CASE WHEN i % 10 >= 7 THEN 3600 END,
       i % 256
FROM generate_series(1::bigint, {jobs}) AS i;
"""


async def _measure(database: Database, what: str, jobs_live_max: int) -> None:
    forecasts = Forecasts(database=database, clock=database.clock, jobs_live_max=jobs_live_max)
    for tenant_id in (None, 1):
        whose = "all tenants" if tenant_id is None else "one tenant"
        started = time.perf_counter()
        try:
            found = await forecasts.get(tenant_id=tenant_id, hours=24)
        except StorageUnavailable as error:
            print(
                f"{what}, {whose}: {error.__cause__!r} after {time.perf_counter() - started:.1f} s"
            )
        else:
            print(
                f"{what}, {whose}: {time.perf_counter() - started:.2f} s, "
                f"{sum(found.fires_per_minute):,} fires"
            )


async def main() -> None:
    """The same forecasts twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--rules", type=int, default=1000)
    options = parser.parse_args()
    with postgres() as dsn:
        url = await fresh_database(dsn, "fencepost_bench_forecast")
        connection = await asyncpg.connect(url)
        await connection.execute(_FILL.format(**vars(options)))
        await connection.execute("VACUUM ANALYZE fencepost.job_schedules")
        await connection.close()
        async with Database(url, hot_size=1, requests_size=2) as database:
            await database.sample_clock(load("upkeep")["clock"])
            print(f"{options.jobs:,} jobs")
            await _measure(database, "counted for the call", options.jobs * 2)
            count = ForecastCount(database=database, clock=database.clock, jobs_live_max=0)
            started = time.perf_counter()
            assert await count.count(), "nobody else counts"
            print(f"counting beforehand: {time.perf_counter() - started:.2f} s, half of it pauses")
            await _measure(database, "counted beforehand", 0)


if __name__ == "__main__":
    uvloop.run(main())
