"""Fires per second: jobs that are all due at one instant, fired by one scheduler, against the
same inserts and updates in bare SQL.

Usage: python -m benchmarks.firing [--jobs 300000] [--rounds 3]
"""

import argparse
import asyncio
import time

import asyncpg
import uvloop
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.wake import Wakes
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

from benchmarks.setting import fresh_database, median, postgres

RULES = 100

_FILL = """
INSERT INTO fencepost.kinds (name) VALUES ('noop');
INSERT INTO fencepost.schedules (rule_hash, rule)
SELECT sha256(i::text::bytea),
       jsonb_build_object('cron', jsonb_build_object('expressions', jsonb_build_array('0 0 1 1 *'),
                          'time_zone', 'UTC', 'dst_gap', 1, 'dst_fold', 1))
FROM generate_series(1, {rules}) AS i;
INSERT INTO fencepost.job_schedules
    (job_id, next_run_at, tenant_id, queue_id, kind_id, version, schedule_id, partition_id)
SELECT (lpad(to_hex(i), 12, '0') || '7' || substr(md5(i::text), 1, 17)
        || lpad(to_hex((i * 7919) % 256), 2, '0'))::uuid,
       date_trunc('minute', fencepost.clock()), 1, 1, 1, 1, 1 + i % {rules}, (i * 7919) % 256
FROM generate_series(1::bigint, {jobs}) AS i;
-- Schedulers have been there all the time: what is due is our own backlog, and no outage.
UPDATE fencepost.firing_state
SET fired_at = fencepost.clock(), firing_since = fencepost.clock() - interval '{up}';
"""

# The least that firing has to write, partition by partition: advance the row, insert the run.
_FLOOR = """
WITH fired AS (
    UPDATE fencepost.job_schedules AS s
    SET last_scheduled_at = s.next_run_at, next_run_at = s.next_run_at + interval '1 hour',
        fire_count = s.fire_count + 1
    WHERE s.partition_id = $1 AND s.next_run_at <= fencepost.clock()
    RETURNING s.job_id, s.last_scheduled_at
)
INSERT INTO fencepost.run_queue
    (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version, state,
     origin, priority, lease_s, cancel_grace_s, attempt_timeout_s)
SELECT job_id, last_scheduled_at, last_scheduled_at, fencepost.clock(), 1, 1, 1, 1, 'queued',
       'schedule', 0, 30, 30, 3600
FROM fired
"""


async def _filled(dsn: str, jobs: int, *, up: str = "1 day") -> str:
    url = await fresh_database(dsn, "fencepost_bench_firing")
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_FILL.format(rules=RULES, jobs=jobs, up=up))
        await connection.execute("VACUUM ANALYZE fencepost.job_schedules")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()
    return url


async def _product(url: str, jobs: int) -> tuple[float, float]:
    """Fires per second, and WAL bytes per fire."""
    probe = await asyncpg.connect(url)
    async with Database(url, hot_size=4, requests_size=2) as database:
        await database.sample_clock(load("upkeep")["clock"])
        scheduler = Scheduler(
            database=database,
            clock=database.clock,
            ownership=AllPartitions(),
            wake=Wakes(),
            batch_max=2000,
            concurrency=2,
            parks=True,
        )
        before = await probe.fetchval("SELECT pg_current_wal_lsn()")
        started = time.perf_counter()
        fired = await scheduler.fire_due()
        seconds = time.perf_counter() - started
        written = await probe.fetchval("SELECT pg_current_wal_lsn() - $1::pg_lsn", before)
    made = await probe.fetchval("SELECT count(*) FROM fencepost.run_queue")
    await probe.close()
    assert fired == made == jobs, f"{jobs} due, {fired} fired, {made} runs"
    return jobs / seconds, float(written) / jobs


async def _floor(url: str, jobs: int) -> float:
    """Fires per second of two connections that take turns over the partitions."""
    partitions = iter(range(256))

    async def work() -> None:
        connection = await asyncpg.connect(url)
        for partition in partitions:
            await connection.execute(_FLOOR, partition)
        await connection.close()

    started = time.perf_counter()
    await asyncio.gather(work(), work())
    return jobs / (time.perf_counter() - started)


async def main() -> None:
    """Interleaved rounds, then medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates: list[float] = []
    floors: list[float] = []
    with postgres() as dsn:
        for number in range(1, options.rounds + 1):
            rate, wal = await _product(await _filled(dsn, options.jobs), options.jobs)
            floor = await _floor(await _filled(dsn, options.jobs), options.jobs)
            rates.append(rate)
            floors.append(floor)
            print(
                f"round {number}: {rate:,.0f} fires/s, {wal:,.0f} WAL bytes/fire; "
                f"bare SQL {floor:,.0f}/s; ratio {rate / floor:.2f}"
            )
    print(
        f"firing, {options.jobs:,} due: median {median(rates):,.0f} fires/s, "
        f"{median([r / f for r, f in zip(rates, floors, strict=True)]):.2f} of bare SQL"
    )


if __name__ == "__main__":
    uvloop.run(main())
