"""A steady load: many schedules of which some are due in each second, workers that complete the
runs; how late runs start, what it costs, and whether anything grows.

Usage: python -m benchmarks.steady [--schedules 10000000] [--rate 2800] [--seconds 600]
       [--servers 1] [--workers 1] [--slots 500] [--client sdk|lean]

Lateness is first_claimed_at - scheduled_at of history, and what the handlers of the SDK's workers
saw when they were called. FENCEPOST_BENCH_DATA=FOLDER keeps the filled tables for the next time.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import asyncpg
import uvloop

from benchmarks.lean import build
from benchmarks.long_data import EPOCH, KINDS, QUEUES, copied, jobs_template, settings
from benchmarks.long_gauges import (
    Connection,
    QueueSize,
    Shares,
    memory,
    memory_max,
    queue_size,
    shown_bytes,
    shown_shares,
    statements,
    told,
    watch_statements,
)
from benchmarks.measure import postmaster_of
from benchmarks.setting import percentile, postgres, server

# Servers and workers have this long to start before the first fire.
_LEAD_S = 15
_DRAIN_MAX_S = 120
_TENANT = "tenants/default"
# Handlers note how late they were called, in milliseconds by the database clock; more is cut.
_WORKER = """
import json, sys, time, logging
from array import array
from datetime import timedelta
from fencepost import Client, Context, Worker
logging.basicConfig(level=logging.WARNING)
address, slots, queues, kinds, offset = sys.argv[1:6]
offset = float(offset)
worker = Worker(Client(address), queues=queues.split(","), slots=int(slots))
counts = array("Q", [0]) * 60_001
async def noop(ctx: Context) -> None:
    late = time.time() + offset - ctx.scheduled_at.timestamp()
    counts[min(60_000, max(0, int(late * 1000)))] += 1
for kind in kinds.split(","):
    worker.handler(kind)(noop)
worker.run()
print(json.dumps({n: count for n, count in enumerate(counts) if count}))
"""


@dataclass(kw_only=True)
class Load:
    """A running load: its database, processes and where its clock is."""

    connection: Connection
    servers: Sequence[int]
    workers: Sequence["subprocess.Popen[str]"]
    shares: Shares
    samples: list[tuple[float, int, QueueSize]] = field(default_factory=list)

    async def sleep_until(self, seconds: float) -> None:
        """Until so long after the first fire, by the database clock."""
        left = await self.connection.fetchval(
            "SELECT extract(epoch FROM $1::timestamptz - fencepost.clock())::float8",
            EPOCH + timedelta(seconds=seconds),
        )
        await asyncio.sleep(max(0, left))

    async def sample(self, seconds: float) -> QueueSize:
        """One line of the table: how long is the queue, how large on disk, who works how much."""
        if any(worker.poll() is not None for worker in self.workers):
            raise RuntimeError("a worker has ended; what it said is above")
        waiting = await self.connection.fetchval("SELECT count(*) FROM fencepost.run_queue")
        size = await queue_size(self.connection)
        self.samples.append((seconds, waiting, size))
        server_memory = max(memory(pid) for pid in self.servers)
        told(
            f"{seconds:7.0f} {waiting:9,} {shown_bytes(size.table):>12} "
            f"{shown_bytes(size.indexes):>12} {size.dead:11,} {shown_bytes(server_memory):>10}  "
            f"{shown_shares(self.shares.since())}"
        )
        return size

    @staticmethod
    def title() -> None:
        """Above the lines of `sample`."""
        told(
            f"{'s':>7} {'live runs':>9} {'queue table':>12} {'indexes':>12} {'dead rows':>11} "
            f"{'server':>10}  CPU since the line before, of one core"
        )


@asynccontextmanager
async def load(url: str, options: argparse.Namespace) -> AsyncIterator[Load]:
    """Servers and workers on a database whose first fire is a few seconds away."""
    async with AsyncExitStack() as stack:
        connection = await asyncpg.connect(url)
        stack.push_async_callback(connection.close)
        await watch_statements(connection)
        started = [await stack.enter_async_context(server(url)) for _ in range(options.servers)]
        offset = await connection.fetchval(
            "SELECT extract(epoch FROM fencepost.clock() - clock_timestamp())::float8"
        )
        workers = []
        for number in range(options.workers):
            address, _ = started[number % len(started)]
            for command in _commands(options, address, offset):
                worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                stack.push_async_callback(_left, worker)
                workers.append(worker)
        pids = {f"server {n}": pid for n, (_, pid) in enumerate(started, start=1)}
        pids |= {f"worker {n}": each.pid for n, each in enumerate(workers, start=1)}
        yield Load(
            connection=connection,
            servers=[pid for _, pid in started],
            workers=workers,
            shares=Shares(pids, postmaster_pid=await postmaster_of(connection)),
        )


def _commands(options: argparse.Namespace, address: str, offset: float) -> list[list[str]]:
    """The processes of one worker: one of the SDK, or a lean client for each queue."""
    if options.client == "lean":
        program, slots = str(build()), str(options.slots // len(QUEUES))
        return [
            [program, "-address", address, "-slots", slots, "-queue", f"{_TENANT}/queues/{queue}"]
            for queue in QUEUES
        ]
    kinds = [f"kind-{n}" for n in range(1, KINDS + 1)]
    command = [sys.executable, "-c", _WORKER, address, str(options.slots)]
    return [[*command, ",".join(QUEUES), ",".join(kinds), str(offset)]]


async def _left(worker: "subprocess.Popen[str]") -> None:
    if worker.poll() is None:
        worker.terminate()
        await asyncio.to_thread(worker.communicate, None, 60)


async def drained(running: Load) -> None:
    """Until every run has ended; whatever the load was, it must come to an end."""
    deadline = time.monotonic() + _DRAIN_MAX_S
    while await running.connection.fetchval(
        "SELECT EXISTS (SELECT FROM fencepost.run_queue WHERE scheduled_at < $1)",
        running_until(running),
    ):
        if time.monotonic() > deadline:
            told(f"runs were left after {_DRAIN_MAX_S} s")
            return
        await asyncio.sleep(0.2)


def running_until(running: Load) -> datetime:
    """The instant up to which fires are counted: the last sample's."""
    return EPOCH + timedelta(seconds=running.samples[-1][0])


async def _told_lateness(running: Load) -> None:
    for name, since, until in (
        ("start of the run (claim after its instant)", "scheduled_at", "first_claimed_at"),
        ("  of which fire after its instant", "scheduled_at", "created_at"),
        ("  of which claim after the fire", "created_at", "first_claimed_at"),
        ("stored end after the claim", "claimed_at", "ended_at"),
    ):
        late = await running.connection.fetchval(
            f"""
            SELECT percentile_disc(ARRAY[0.5, 0.99, 0.999, 1.0]) WITHIN GROUP (
                       ORDER BY extract(epoch FROM {until} - {since}) * 1000)::float8[]
            FROM fencepost.job_runs WHERE scheduled_at >= $1 AND scheduled_at < $2
            """,
            EPOCH,
            running_until(running),
        )
        p50, p99, p999, worst = late or [float("nan")] * 4
        told(
            f"{name}, by history: p50 {p50:.0f} ms, p99 {p99:.0f} ms, p99.9 {p999:.0f} ms, "
            f"max {worst:.0f} ms"
        )


async def _told_handlers(running: Load) -> None:
    counts: dict[int, int] = {}
    for worker in running.workers:
        worker.terminate()
        output, _ = await asyncio.to_thread(worker.communicate, None, 60)
        try:
            found = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            continue  # Another client, which does not tell.
        for late, count in found.items():
            counts[int(late)] = counts.get(int(late), 0) + count
    total = sum(counts.values())
    if total == 0:
        return
    found = {}
    for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)):
        left = share * total
        for late in sorted(counts):
            left -= counts[late]
            if left <= 0:
                break
        found[name] = late
    shown = ", ".join(f"{name} {late} ms" for name, late in found.items())
    told(f"lateness of the handler, by the workers, {total:,} calls: {shown}")


async def _told_counts(running: Load, expected: int) -> None:
    row = await running.connection.fetchrow(
        """
        SELECT count(*) AS ended, count(*) FILTER (WHERE state = 'succeeded') AS succeeded,
               count(*) FILTER (WHERE attempt > 1) AS repeated,
               (SELECT count(*) FROM fencepost.run_queue
                WHERE scheduled_at >= $1 AND scheduled_at < $2) AS live,
               (SELECT count(*) FROM fencepost.dead_letters) AS dead,
               (SELECT count(*) FROM fencepost.fire_skips) AS skips
        FROM fencepost.job_runs WHERE scheduled_at >= $1 AND scheduled_at < $2
        """,
        EPOCH,
        running_until(running),
    )
    assert row is not None
    made = row["ended"] + row["live"] + row["dead"]
    failures = row["ended"] - row["succeeded"] + row["dead"]
    told(
        f"fires expected {expected:,}, made {made:,} ({'exact' if made == expected else 'WRONG'}); "
        f"succeeded {row['succeeded']:,}, live {row['live']:,}, failures {failures:,}, second "
        f"attempts {row['repeated']:,}, skips {row['skips']:,}"
    )


def _told_flat(running: Load) -> None:
    """The last third of the backlog against the second one."""
    waits = [waiting for _, waiting, _ in running.samples]
    third = len(waits) // 3
    if third < 1:
        return
    middle, last = sum(waits[third : 2 * third]) / third, sum(waits[-third:]) / third
    flat = last <= 1.25 * middle + 1000
    told(
        f"live runs: median {percentile(waits, 0.5):,.0f}, second third {middle:,.0f} on average, "
        f"last third {last:,.0f}: {'flat' if flat else 'GROWING'}"
    )


async def _run(dsn: str, options: argparse.Namespace) -> None:
    if options.client == "lean":
        build()  # While no clock runs.
    template = await jobs_template(dsn, jobs=options.schedules, rate=options.rate)
    begin = EPOCH - timedelta(seconds=_LEAD_S)
    async with copied(dsn, template, begin=begin) as url, load(url, options) as running:
        await running.sleep_until(0)
        Load.title()
        running.shares.since()
        whole = Shares({}, postmaster_pid=await postmaster_of(running.connection))
        seconds = 0.0
        while seconds < options.seconds:
            seconds = min(options.seconds, seconds + options.every)
            await running.sleep_until(seconds)
            await running.sample(seconds)
        told(f"Postgres over all: {shown_shares(whole.since())}")
        await drained(running)
        await _told_counts(running, options.rate * options.seconds)
        await _told_lateness(running)
        await _told_handlers(running)
        _told_flat(running)
        most = max(memory_max(pid) for pid in running.servers)
        told(f"server memory at most {shown_bytes(most)}")
        told_statements(await statements(running.connection), options.seconds)


def told_statements(rows: Sequence[asyncpg.Record], seconds: float) -> None:
    """The statements that took the most time, if Postgres was asked to keep count."""
    for row in rows[:12]:
        told(
            f"  {row['name'][:30]:<30} {row['calls'] / seconds:8.1f} calls/s "
            f"{row['ms'] / row['calls']:8.2f} ms {row['rows'] / row['calls']:8.1f} rows "
            f"{row['buffers'] / row['calls']:9.1f} buffers a call, "
            f"{row['ms'] / seconds / 10:6.2f} % of a core"
        )


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every measurement under a steady load takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=10_000_000)
    parser.add_argument("--rate", type=int, default=2800, help="fires per second")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--every", type=float, default=20, help="seconds between two lines")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--client", choices=("sdk", "lean"), default="sdk")
    parser.add_argument("--shared-buffers", default="2GB")
    return parser


def main() -> None:
    """A table over time, then the sums."""
    parser = arguments(__doc__)
    options = parser.parse_args()
    if options.rate * options.seconds > options.schedules or options.seconds > 3600:
        parser.error("--rate times --seconds is at most --schedules, and --seconds at most 3600")
    with postgres(settings(shared_buffers=options.shared_buffers)) as dsn:
        uvloop.run(_run(dsn, options))


if __name__ == "__main__":
    main()
