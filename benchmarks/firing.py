"""Fires per second: jobs that are all due at one instant, fired by one or two server processes,
against the same inserts and updates in bare SQL in the same round.

The servers are there before the instant; the time counts from it to the moment that another
connection sees every run. Usage: python -m benchmarks.firing [--jobs 3000000] [--rounds 5]
[--schedulers 2] [--jobs-table 10000000] [--setting FIRE_BATCH_MAX=4000]
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import asyncpg
import uvloop

from benchmarks import floor
from benchmarks.measure import Cost, Meter, copy_database, postmaster_of
from benchmarks.setting import median, postgres, server

_FULL, _COPY = "fencepost_bench_firing_full", "fencepost_bench_firing"
# How long before the instant the servers are started.
_LEAD_S = 10.0
_POLL_S = 0.02

# The clock of the database, so that the instant is so many seconds ahead.
_SET_CLOCK = """
CREATE OR REPLACE FUNCTION fencepost.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
$$ SELECT clock_timestamp() + interval '{seconds} seconds' $$
"""
_SECONDS_LEFT = "SELECT extract(epoch FROM $1 - fencepost.clock())::float8"
_IS_ANY_DUE = """
SELECT EXISTS (
    SELECT FROM generate_series(0, 255) AS p (partition_id)
    CROSS JOIN LATERAL (
        SELECT FROM fencepost.job_schedules AS s
        WHERE s.partition_id = p.partition_id::smallint
          AND s.next_run_at IS NOT NULL AND NOT s.paused AND s.next_run_at <= $1
        LIMIT 1
    ) AS d
)
"""


async def product(
    url: str, *, jobs: int, schedulers: int = 1, settings: Sequence[str] = ()
) -> Cost:
    """What a fire costs when `jobs` are due at once; `url` is of a database of `floor.fill`."""
    probe = await floor.connect(url)
    environment = dict(f"FENCEPOST_{setting}".split("=", 1) for setting in settings)
    try:
        await probe.execute("CHECKPOINT")
        ahead = floor.DUE.timestamp() - time.time() - _LEAD_S
        await probe.execute(_SET_CLOCK.format(seconds=ahead))
        async with AsyncExitStack() as stack:
            pids: dict[str, int] = {}
            for number in range(1, schedulers + 1):
                _, pid = await stack.enter_async_context(server(url, **environment))
                pids[f"server {number}"] = pid
            meter = Meter(probe, await postmaster_of(probe), pids)
            left = await probe.fetchval(_SECONDS_LEFT, floor.DUE)
            if left < 0:
                raise RuntimeError("the servers took longer to start than there was time")
            await asyncio.sleep(left)
            before = await meter.read()
            while await probe.fetchval(_IS_ANY_DUE, floor.DUE):
                await asyncio.sleep(_POLL_S)
            after = await meter.read()
        made = await probe.fetchval("SELECT count(*) FROM fencepost.run_queue")
        assert made == jobs, f"{jobs} due, {made} runs"
        return await meter.cost(before, after, runs=jobs, seconds=after.at - before.at)
    finally:
        await probe.close()


async def _sizes(url: str) -> str:
    probe = await asyncpg.connect(url)
    try:
        rows = await probe.fetch(
            "SELECT relname, pg_relation_size(oid) / 1048576 AS mib FROM pg_class "
            "WHERE relname ~ '^(job_schedules|run_queue)' AND pg_relation_size(oid) >= 1048576 "
            "ORDER BY relname"
        )
    finally:
        await probe.close()
    return ", ".join(f"{row['relname']} {row['mib']} MiB" for row in rows)


async def main() -> None:
    """Interleaved rounds, then medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=300_000, help="due at one instant")
    parser.add_argument("--jobs-table", type=int, help="in the table; the others are not due")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedulers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--setting", action="append", default=[], help="NAME=VALUE of the servers")
    options = parser.parse_args()
    jobs: int = options.jobs
    ours: list[Cost] = []
    bare: list[Cost] = []
    with postgres(floor.SETTINGS) as dsn:
        started = time.perf_counter()
        table = options.jobs_table or jobs
        full = await floor.fill(dsn, _FULL, jobs=jobs, table=table)
        print(f"filled with {table:,} jobs in {time.perf_counter() - started:.0f} s")
        print(await _sizes(full), flush=True)
        for number in range(1, options.rounds + 1):
            url = await copy_database(dsn, _FULL, _COPY)
            ours.append(
                await product(
                    url, jobs=jobs, schedulers=options.schedulers, settings=options.setting
                )
            )
            used = sum(cpu for name, cpu in ours[-1].cpu_us.items() if name != "postgres")
            print(f"round {number}: {floor.told(ours[-1])}, servers {used:.1f} us", flush=True)
            if number == 1:
                print(await _sizes(url))
            url = await copy_database(dsn, _FULL, _COPY)
            bare.append(await floor.measured(url, jobs, floor.fire))
            print(f"round {number}: bare SQL {floor.told(bare[-1])}", flush=True)
    print(
        f"firing, {jobs:,} due of {table:,}, {options.schedulers} process(es): "
        f"{median([cost.rate for cost in ours]):,.0f} fires/s, "
        f"{median([o.rate / b.rate for o, b in zip(ours, bare, strict=True)]):.2f} of bare SQL "
        f"({median([cost.rate for cost in bare]):,.0f}/s); "
        f"WAL {median([cost.wal for cost in ours]):,.0f} B a fire and "
        f"{median([cost.page_images for cost in ours]):,.0f} B of page images"
    )


if __name__ == "__main__":
    uvloop.run(main())
