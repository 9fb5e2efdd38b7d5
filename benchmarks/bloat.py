"""The run queue under a lasting load: how large its table and indexes get, first with vacuum free
to work, then while somebody holds a snapshot open.

Usage: python -m benchmarks.bloat [--rate 7000] [--seconds 1200] [--snapshot-seconds 600]
       [--after-seconds 120]

Fires make the load, workers of the SDK complete it. --rate is meant to be 70 % of what
benchmarks.delivery and benchmarks.firing reach together on the machine. Sizes are held against
a fresh queue: what it needs in the first minute of the load, and what a table takes into which
the runs that passed while the snapshot was held are inserted and nothing else.
"""

import argparse
from datetime import timedelta

import asyncpg
import uvloop

from benchmarks.lean import build
from benchmarks.long_data import EPOCH, PERIOD_S, copied, jobs_template, settings
from benchmarks.long_gauges import QueueSize, memory_max, shown_bytes, told
from benchmarks.setting import postgres
from benchmarks.steady import Load, arguments, drained, load

_FRESH_S = 60
_RATIO_MAX = 3

_FRESH = """
CREATE SCHEMA fresh;
CREATE TABLE fresh.run_queue (LIKE fencepost.run_queue INCLUDING ALL);
ALTER TABLE fresh.run_queue SET (fillfactor = {fillfactor});
"""
_FRESH_ROWS = """
INSERT INTO fresh.run_queue
    (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version, state,
     origin, priority, lease_s, cancel_grace_s, attempt_timeout_s)
SELECT s.job_id, s.last_scheduled_at, s.last_scheduled_at, s.last_scheduled_at, s.tenant_id,
       s.queue_id, s.kind_id, s.version, 'queued', 'schedule', 0, s.lease_s, s.cancel_grace_s,
       s.attempt_timeout_s
FROM fencepost.job_schedules AS s
WHERE s.last_scheduled_at IS NOT NULL
LIMIT $1
"""


async def _fresh_size(running: Load, runs: int) -> QueueSize:
    """What so many waiting runs take in a table that nothing else was ever in."""
    connection = running.connection
    options = await connection.fetchval(
        "SELECT reloptions FROM pg_class WHERE oid = 'fencepost.run_queue'::regclass"
    )
    found = dict(option.split("=") for option in options or [])
    await connection.execute(_FRESH.format(fillfactor=found.get("fillfactor", 100)))
    tag = await connection.execute(_FRESH_ROWS, runs, timeout=600)
    made = int(tag.rsplit(" ", 1)[-1])
    row = await connection.fetchrow(
        "SELECT pg_table_size('fresh.run_queue') AS table, "
        "pg_indexes_size('fresh.run_queue') AS indexes"
    )
    await connection.execute("DROP SCHEMA fresh CASCADE")
    assert row is not None
    # There may have been fewer jobs than runs.
    scale = runs / made
    return QueueSize(table=int(row["table"] * scale), indexes=int(row["indexes"] * scale), dead=0)


async def _phase(running: Load, begin: float, seconds: float, every: float) -> QueueSize:
    """Lines until `begin + seconds`; the largest size."""
    largest = QueueSize(table=0, indexes=0, dead=0)
    at = begin
    while at < begin + seconds:
        at = min(begin + seconds, at + every)
        await running.sleep_until(at)
        largest = max(largest, await running.sample(at), key=lambda size: size.total)
    return largest


def _told_ratio(name: str, size: QueueSize, fresh: QueueSize, what: str) -> None:
    ratio = size.total / fresh.total
    told(
        f"{name}: {shown_bytes(size.total)}, {ratio:.2f} × {what} ({shown_bytes(fresh.total)}): "
        f"{'within' if ratio <= _RATIO_MAX else 'OVER'} {_RATIO_MAX} ×"
    )


async def _run(dsn: str, options: argparse.Namespace) -> None:
    if options.client == "lean":
        build()  # While no clock runs.
    total = options.seconds + options.snapshot_seconds + options.after_seconds
    jobs = int(options.rate * min(total, PERIOD_S))
    template = await jobs_template(dsn, jobs=jobs, rate=options.rate)
    begin = EPOCH - timedelta(seconds=15)
    async with copied(dsn, template, begin=begin) as url, load(url, options) as running:
        await running.sleep_until(0)
        Load.title()
        running.shares.since()
        fresh = await _phase(running, 0, min(_FRESH_S, options.seconds), options.every)
        left = options.seconds - min(_FRESH_S, options.seconds)
        lasting = await _phase(running, options.seconds - left, left, options.every)
        if left == 0:
            lasting = fresh
        told("a snapshot is held open from here")
        holder = await asyncpg.connect(url)
        transaction = holder.transaction(isolation="repeatable_read", readonly=True)
        await transaction.start()
        await holder.fetchval("SELECT count(*) FROM fencepost.tenants")
        held = await _phase(running, options.seconds, options.snapshot_seconds, options.every)
        await transaction.rollback()
        await holder.close()
        told("and is gone from here")
        after = await _phase(
            running,
            options.seconds + options.snapshot_seconds,
            options.after_seconds,
            options.every,
        )
        await drained(running)
        first = "the first minute"
        _told_ratio(f"after {options.seconds:.0f} s of load at most", lasting, fresh, first)
        _told_ratio("while the snapshot was held at most", held, fresh, first)
        if options.snapshot_seconds:
            passed = int(options.rate * options.snapshot_seconds)
            size = await _fresh_size(running, passed)
            what = f"{passed:,} fresh runs"
            _told_ratio("while the snapshot was held at most", held, size, what)
        _told_ratio("afterwards at most", after, fresh, first)
        told(f"server memory at most {shown_bytes(max(map(memory_max, running.servers)))}")


def main() -> None:
    """A table over time, then ratios."""
    parser = arguments(__doc__)
    parser.set_defaults(rate=7000, seconds=1200, every=30)
    parser.add_argument("--snapshot-seconds", type=float, default=600)
    parser.add_argument("--after-seconds", type=float, default=120)
    options = parser.parse_args()
    with postgres(settings(shared_buffers=options.shared_buffers)) as dsn:
        uvloop.run(_run(dsn, options))


if __name__ == "__main__":
    main()
