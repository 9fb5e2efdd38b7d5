"""The least that a run costs Postgres: fire, claim and complete as bare SQL in loops, on the tables
of the product, so that the same rows are there afterwards.

No policies, no next fires to look up, no fence against other owners, no worker. Other benchmarks
measure against it. Usage: python -m benchmarks.floor [--jobs 300000] [--rounds 5]
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import asyncpg
import uvloop
from fencepost_server.store.database import _HOT_SETTINGS
from fencepost_server.store.day_tables import DayTables

from benchmarks.measure import Cost, Meter, copy_database, postmaster_of
from benchmarks.setting import fresh_database, median, postgres

# Sized for the load, as a server would be: room between two checkpoints, and for hot pages.
SETTINGS = {
    "shared_buffers": "2GB",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "30min",
}
PARTITIONS = 256
RULES = 100
# Everything is due at this instant; the clock of the database is moved to it.
DUE = datetime(2030, 1, 1, 12, tzinfo=UTC)
_BATCH = 4000
_CLAIM_BATCH = 1000
_WORKER = "00000000-0000-7000-8000-000000000001"

# Jobs of 100 cron rules over all partitions, those that are due scattered among those that are not.
_FILL = """
INSERT INTO fencepost.kinds (name) VALUES ('noop');
INSERT INTO fencepost.schedules (rule_hash, rule)
SELECT sha256(i::text::bytea),
       jsonb_build_object('cron', jsonb_build_object('expressions', jsonb_build_array('0 12 1 1 *'),
                          'time_zone', 'UTC', 'dst_gap', 1, 'dst_fold', 1))
FROM generate_series(1, {rules}) AS i;
INSERT INTO fencepost.job_schedules
    (job_id, next_run_at, tenant_id, queue_id, kind_id, version, schedule_id, partition_id)
SELECT (lpad(to_hex(i), 12, '0') || '7' || substr(md5(i::text), 1, 17)
        || lpad(to_hex((i * 7919) % {partitions}), 2, '0'))::uuid,
       '{due}'::timestamptz + CASE WHEN i * {jobs} / {table} > (i - 1) * {jobs} / {table}
                                   THEN interval '0' ELSE (1 + i % 8000) * interval '1 hour' END,
       1, 1, 1, 1, 1 + i % {rules}, (i * 7919) % {partitions}
FROM generate_series(1::bigint, {table}) AS i;
"""

_FIRE = """
WITH due AS MATERIALIZED (
    SELECT s.*
    FROM unnest($1::smallint[]) AS p (partition_id)
    CROSS JOIN LATERAL (
        SELECT s.ctid AS tid, s.job_id, s.next_run_at, s.tenant_id, s.queue_id, s.kind_id,
               s.version, s.priority, s.lease_s, s.cancel_grace_s, s.attempt_timeout_s
        FROM fencepost.job_schedules AS s
        WHERE s.partition_id = p.partition_id
          AND s.next_run_at IS NOT NULL AND NOT s.paused AND s.next_run_at <= $2
        ORDER BY s.next_run_at
        LIMIT $3
    ) AS s
    ORDER BY s.job_id
), fired AS (
    UPDATE fencepost.job_schedules AS s
    SET last_scheduled_at = d.next_run_at, next_run_at = d.next_run_at + interval '1 year',
        fire_count = s.fire_count + 1
    FROM due AS d
    WHERE s.ctid = d.tid
    RETURNING d.*
), made AS (
    INSERT INTO fencepost.run_queue
        (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version,
         state, origin, priority, lease_s, cancel_grace_s, attempt_timeout_s)
    SELECT job_id, next_run_at, next_run_at, $2, tenant_id, queue_id, kind_id, version, 'queued',
           'schedule', priority, lease_s, cancel_grace_s, attempt_timeout_s
    FROM fired
)
SELECT count(*) FROM fired
"""

_CLAIM = """
WITH ready AS MATERIALIZED (
    SELECT q.ctid AS tid
    FROM fencepost.run_queue AS q
    WHERE q.queue_id = 1 AND q.kind_id = 1 AND q.priority = 0
      AND q.state IN ('queued', 'retrying') AND q.available_at >= $4 AND q.available_at <= $1
    ORDER BY q.available_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
UPDATE fencepost.run_queue AS q
SET state = 'running', attempt = q.attempt + 1, attempt_open = true,
    lease_until = $1::timestamptz + interval '30 seconds', claimed_at = $1, first_claimed_at = $1,
    worker_id = $3
FROM ready AS r
WHERE q.ctid = r.tid
RETURNING q.job_id, q.scheduled_at
"""

_COMPLETE = """
WITH gone AS (
    DELETE FROM fencepost.run_queue AS q
    USING (
        SELECT r.tid
        FROM unnest($1::uuid[], $2::timestamptz[]) AS e (job_id, scheduled_at)
        CROSS JOIN LATERAL (
            SELECT x.ctid AS tid FROM fencepost.run_queue AS x
            WHERE x.job_id = e.job_id AND x.scheduled_at = e.scheduled_at
            LIMIT 1
        ) AS r
    ) AS e
    WHERE q.ctid = e.tid AND q.attempt = 1
    RETURNING q.*
)
INSERT INTO fencepost.job_runs
    (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, ended_at,
     tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count, snooze_count,
     replay_count, state, origin, priority, worker_id)
SELECT job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, $3,
       tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
       snooze_count, replay_count, 'succeeded', origin, priority, worker_id
FROM gone
"""


async def fill(dsn: str, name: str, *, jobs: int, table: int | None = None) -> str:
    """A database with `jobs` due at DUE among `table` in all, and a day table for that day."""
    url = await fresh_database(dsn, name)
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            _FILL.format(
                rules=RULES, partitions=PARTITIONS, due=DUE, jobs=jobs, table=table or jobs
            )
        )
        await connection.execute("VACUUM ANALYZE fencepost.job_schedules")
    finally:
        await connection.close()
    await DayTables(url).ensure(DUE.date(), DUE.date())
    return url


async def connect(url: str) -> asyncpg.Connection:
    """A connection with the settings of the product's hot statements."""
    return await asyncpg.connect(url, server_settings={**_HOT_SETTINGS, "timezone": "UTC"})


async def fire(connections: Sequence[asyncpg.Connection]) -> None:
    """Advance every job that is due and make its run, each connection in its own partitions."""

    async def work(place: int) -> None:
        mine = list(range(place, PARTITIONS, len(connections)))
        while await connections[place].fetchval(_FIRE, mine, DUE, _BATCH // len(mine)):
            pass

    await asyncio.gather(*(work(place) for place in range(len(connections))))


async def carry_out(connections: Sequence[asyncpg.Connection]) -> None:
    """Claim what is ready, batch by batch, and complete each before the next."""

    async def work(connection: asyncpg.Connection) -> None:
        # A lower bound, so that scans begin behind the entries of what is gone.
        while rows := await connection.fetch(_CLAIM, DUE, _CLAIM_BATCH, _WORKER, DUE):
            keys = sorted((row["job_id"], row["scheduled_at"]) for row in rows)
            await connection.execute(_COMPLETE, *map(list, zip(*keys, strict=True)), DUE)

    await asyncio.gather(*(work(connection) for connection in connections))


async def measured(
    url: str, runs: int, act: Callable[[Sequence[asyncpg.Connection]], Awaitable[None]]
) -> Cost:
    """What an act of two connections costs for each of its runs, from a checkpoint on."""
    probe = await asyncpg.connect(url)
    # They stay open until the last reading: the CPU of one that ends is counted late.
    connections = [await connect(url) for _ in range(2)]
    try:
        await probe.execute("CHECKPOINT")
        meter = Meter(probe, await postmaster_of(probe), {})
        before = await meter.read()
        await act(connections)
        after = await meter.read()
        return await meter.cost(before, after, runs=runs, seconds=after.at - before.at)
    finally:
        for connection in [probe, *connections]:
            await connection.close()


async def counted(url: str, table: str) -> int:
    """The rows of a table."""
    probe = await asyncpg.connect(url)
    try:
        return int(await probe.fetchval(f"SELECT count(*) FROM fencepost.{table}"))
    finally:
        await probe.close()


def told(cost: Cost) -> str:
    """One line of a cost."""
    return (
        f"{cost.rate:,.0f}/s, Postgres {cost.cpu_us['postgres']:.1f} us, "
        f"WAL {cost.wal:,.0f} B + {cost.page_images:,.0f} B page images"
    )


async def main() -> None:
    """Rounds of all three, then medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    jobs: int = options.jobs
    fires: list[Cost] = []
    runs: list[Cost] = []
    with postgres(SETTINGS) as dsn:
        await fill(dsn, "fencepost_floor_full", jobs=jobs)
        for number in range(1, options.rounds + 1):
            url = await copy_database(dsn, "fencepost_floor_full", "fencepost_floor")
            fires.append(await measured(url, jobs, fire))
            made = await counted(url, "run_queue")
            runs.append(await measured(url, jobs, carry_out))
            ended = await counted(url, "job_runs")
            assert made == ended == jobs, f"{jobs} due, {made} runs made, {ended} ended"
            print(f"round {number}: fire {told(fires[-1])}")
            print(f"round {number}: claim + complete {told(runs[-1])}", flush=True)
    for name, costs in (("fire", fires), ("claim + complete", runs)):
        print(
            f"bare SQL, {jobs:,} runs: {name} {median([cost.rate for cost in costs]):,.0f}/s, "
            f"{median([cost.cpu_us['postgres'] for cost in costs]):.1f} us of Postgres, "
            f"{median([cost.wal for cost in costs]):,.0f} B of WAL"
        )


if __name__ == "__main__":
    uvloop.run(main())
