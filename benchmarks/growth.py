"""What a fire, a claim and a completion cost with few and with many jobs, with and without a
month of history, with one and with many tenants: ratios of the largest to the smallest.

Usage: python -m benchmarks.growth [--jobs 10000 1000000 10000000] [--history 0 50000000]
       [--tenants 1 10000] [--rounds 5] [--only jobs|history|tenants]

All sizes of a row of measurements are measured in turn, in the same cluster, about 10,000 runs
each time (--window); medians are printed. FENCEPOST_BENCH_DATA=FOLDER keeps the filled tables.
"""

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta

import asyncpg
import uvloop

from benchmarks.long_data import (
    EPOCH,
    PERIOD_S,
    QUEUES,
    copied,
    jobs_template,
    set_clock,
    settings,
)
from benchmarks.long_engine import PHASES, PhaseCost, phases, prepare
from benchmarks.long_gauges import Connection, told
from benchmarks.long_history import history_template
from benchmarks.setting import median, postgres

_RATE = 2800
_RATIO_MAX = 1.25

_TENANTS = """
WITH made AS (
    INSERT INTO fencepost.tenants (name, created_at, updated_at)
    SELECT 'other-' || n, fencepost.clock(), fencepost.clock() FROM generate_series(1, $1) AS n
    RETURNING tenant_id
)
INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at)
SELECT m.tenant_id, q.name, fencepost.clock(), fencepost.clock()
FROM made AS m CROSS JOIN unnest($2::text[]) AS q (name)
"""
# A run of each of the others waits for tomorrow.
_WAITING = """
INSERT INTO fencepost.run_queue
    (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version, state,
     origin, priority, lease_s, cancel_grace_s, attempt_timeout_s)
SELECT gen_random_uuid(), c.at + interval '1 day', c.at + interval '1 day', c.at, q.tenant_id,
       q.queue_id, k.kind_id, 1, 'queued', 'enqueue', 0, 30, 30, 3600
FROM fencepost.queues AS q
JOIN fencepost.tenants AS t ON t.tenant_id = q.tenant_id AND t.name LIKE 'other-%'
CROSS JOIN (SELECT min(kind_id) AS kind_id FROM fencepost.kinds) AS k
CROSS JOIN (SELECT fencepost.clock() AS at) AS c
"""


@dataclass(kw_only=True)
class Size:
    """One database of a row of measurements."""

    title: str
    url: str
    connection: Connection
    jobs: int
    window_s: int
    costs: list[dict[str, PhaseCost]] = field(default_factory=list)

    async def measure(self) -> None:
        """Fires the next window and brings it to its end."""
        number = len(self.costs)
        seconds = -(-self.jobs // _RATE)
        windows = max(1, seconds // self.window_s)
        hour, window = divmod(number, windows)
        at = EPOCH + timedelta(seconds=hour * PERIOD_S + (window + 1) * self.window_s - 0.5)
        await set_clock(self.url, at, still=True)
        self.costs.append(await phases(self.url, self.connection))
        # As the product does every 15 s.
        await self.connection.execute("VACUUM (TRUNCATE off) fencepost.run_queue")

    def of(self, phase: str, value: str) -> float:
        """The median over the rounds, the first left out."""
        kept = self.costs[1:] or self.costs
        return median([getattr(each[phase], value) for each in kept])


async def _size(
    stack: AsyncExitStack,
    dsn: str,
    template: str,
    *,
    title: str,
    jobs: int,
    window: int,
    others: int = 0,
) -> Size:
    url = await stack.enter_async_context(copied(dsn, template, begin=EPOCH - timedelta(minutes=1)))
    await prepare(url)
    connection = await asyncpg.connect(url)
    stack.push_async_callback(connection.close)
    if others:
        await connection.execute(_TENANTS, others, list(QUEUES))
        await connection.execute(_WAITING)
        await connection.execute("ANALYZE fencepost.queues, fencepost.run_queue")
    return Size(title=title, url=url, connection=connection, jobs=jobs, window_s=window)


async def _by_jobs(stack: AsyncExitStack, dsn: str, options: argparse.Namespace) -> list[Size]:
    sizes = []
    for jobs in options.jobs:
        template = await jobs_template(dsn, jobs=jobs, rate=_RATE)
        title = f"{jobs:,} jobs"
        sizes.append(
            await _size(stack, dsn, template, title=title, jobs=jobs, window=options.window)
        )
    return sizes


async def _by_history(stack: AsyncExitStack, dsn: str, options: argparse.Namespace) -> list[Size]:
    jobs = options.history_jobs
    sizes = []
    for rows in options.history:
        template = await jobs_template(dsn, jobs=jobs, rate=_RATE)
        if rows:
            template = await history_template(dsn, template, rows=rows)
        title = f"{rows:,} ended runs"
        sizes.append(
            await _size(stack, dsn, template, title=title, jobs=jobs, window=options.window)
        )
    return sizes


async def _by_tenants(stack: AsyncExitStack, dsn: str, options: argparse.Namespace) -> list[Size]:
    """Others that only are there and wait, then runs of all tenants at once."""
    jobs = options.history_jobs
    template = await jobs_template(dsn, jobs=jobs, rate=_RATE)
    most = max(options.tenants)
    sizes = [
        await _size(
            stack,
            dsn,
            template,
            title=f"{tenants:,} tenants, one busy",
            jobs=jobs,
            window=options.window,
            others=tenants - 1,
        )
        for tenants in options.tenants
    ]
    spread = await jobs_template(dsn, jobs=jobs, rate=_RATE, tenants=most)
    title = f"{most:,} tenants, all busy"
    sizes.append(await _size(stack, dsn, spread, title=title, jobs=jobs, window=options.window))
    return sizes


def _told(sizes: Sequence[Size]) -> None:
    told(
        f"{'':<28} {'':<9} {'Postgres':>9} {'engine':>9} {'wall':>9} {'buffers':>8} "
        f"{'statements':>11} {'WAL':>9} {'images':>9}  per run; ratios to the first"
    )
    values = ("postgres_us", "engine_us", "wall_us", "buffers")
    for phase in PHASES:
        for size in sizes:
            ratios = [size.of(phase, v) / (sizes[0].of(phase, v) or 1) for v in values]
            told(
                f"{size.title:<28} {phase:<9} {size.of(phase, 'postgres_us'):6.0f} µs "
                f"{size.of(phase, 'engine_us'):6.0f} µs {size.of(phase, 'wall_us'):6.0f} µs "
                f"{size.of(phase, 'buffers'):8.1f} {size.of(phase, 'statements'):11.4f} "
                f"{size.of(phase, 'record_bytes'):7.0f} B {size.of(phase, 'image_bytes'):7.0f} B  "
                + " ".join(f"{ratio:5.2f}" for ratio in ratios)
                + ("" if ratios[2] <= _RATIO_MAX else f"  wall OVER {_RATIO_MAX}")
            )
    for size in sizes:
        total = sum(size.of(phase, "wall_us") for phase in PHASES)
        first = sum(sizes[0].of(phase, "wall_us") for phase in PHASES)
        told(f"{size.title:<28} together  {total:6.0f} µs, {total / first:.2f} of the first")


async def _run(dsn: str, options: argparse.Namespace) -> None:
    rows = {"jobs": _by_jobs, "history": _by_history, "tenants": _by_tenants}
    for name, make in rows.items():
        if options.only not in ("", name):
            continue
        async with AsyncExitStack() as stack:
            sizes = await make(stack, dsn, options)
            for number in range(options.rounds + 1):
                for size in sizes:
                    await size.measure()
                    told(
                        f"round {number}, {size.title}: {size.costs[-1]['fire'].runs:,} runs, "
                        + ", ".join(f"{p} {size.costs[-1][p].wall_us:.0f} µs" for p in PHASES)
                    )
            told(f"== {name}")
            _told(sizes)


def main() -> None:
    """A table per row of measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, nargs="*", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--history", type=int, nargs="*", default=[0, 50_000_000])
    parser.add_argument("--history-jobs", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, nargs="*", default=[1, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--window", type=int, default=4, help="seconds of fires in a round, 2,800 in each"
    )
    parser.add_argument("--only", choices=("jobs", "history", "tenants"), default="")
    parser.add_argument("--shared-buffers", default="2GB")
    options = parser.parse_args()
    with postgres(settings(shared_buffers=options.shared_buffers, autovacuum=False)) as dsn:
        uvloop.run(_run(dsn, options))


if __name__ == "__main__":
    main()
