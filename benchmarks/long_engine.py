"""Fire, claim and complete, one after the other, by the engine in this process: what each costs
per run in CPU, statements, rows, buffers and WAL."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fencepost_server.clock import MILLISECOND, DatabaseClock, Instant
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.retention import Retention
from fencepost_server.engine.specs import SpecCache
from fencepost_server.engine.verdicts import Report, Verdict
from fencepost_server.engine.wake import Wakes
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load
from fencepost_server.telemetry import configure_logging

from benchmarks.long_gauges import (
    Connection,
    difference,
    statements,
    table_counters,
    wal_position,
    wal_since,
    watch_statements,
)
from benchmarks.measure import postmaster_of, tree_cpu_seconds

BATCH = 500
PHASES = ("fire", "claim", "complete")
# As the SDK tells them: waited, then worked.
_TIMINGS = bytes.fromhex("0a0310c0841e120310c0841e")

_OTHERS = """
SELECT EXISTS (SELECT FROM pg_stat_activity
               WHERE datname = current_database() AND backend_type = 'client backend'
                 AND pid <> pg_backend_pid())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """What one of PHASES cost, per run but for `runs`: microseconds, bytes, numbers."""

    runs: int
    seconds: float
    postgres_us: float
    engine_us: float
    record_bytes: float
    image_bytes: float
    statements: float
    buffers: float
    inserted: float
    updated: float
    deleted: float
    rows_read: float
    read_by_table: Mapping[str, float]

    @property
    def wall_us(self) -> float:
        """From the beginning to the end of the phase."""
        return self.seconds / self.runs * 1e6


class StillClock(DatabaseClock):
    """Says one instant, as the database does: nothing more falls due during a measurement."""

    def __init__(self, at: Instant) -> None:
        super().__init__()
        self._at = at

    def now(self) -> Instant:
        """That instant."""
        return self._at


@asynccontextmanager
async def _engine(url: str) -> AsyncIterator[Database]:
    """Connections of their own for each phase: their counters are complete when they close."""
    async with Database(url, hot_size=2, requests_size=2) as database:
        row = await database.requests.fetch_one(load("upkeep")["clock"])
        assert row is not None
        database.clock = StillClock(row["clock"])
        yield database


async def prepare(url: str) -> None:
    """Day tables for the database's own time; from now on only warnings are logged."""
    configure_logging(level="warning", style="console")
    async with _engine(url) as database:
        retention = Retention(database=database, clock=database.clock, days=30, days_ahead=8)
        await retention.ensure_day_tables()


async def phases(url: str, connection: Connection) -> dict[str, PhaseCost]:
    """Fires all that is due, claims and completes it. `connection`: a superuser's, of the same
    database, whose clock stands still. Nothing else may work on the cluster meanwhile."""
    claimed: list[Claimed] = []

    async def fire(database: Database) -> int:
        scheduler = Scheduler(
            database=database,
            clock=database.clock,
            ownership=AllPartitions(),
            wake=Wakes(),
            batch_max=2000,
            concurrency=2,
        )
        return await scheduler.fire_due()

    async def claim(database: Database) -> int:
        claimed.extend(await _claim_all(database))
        return len(claimed)

    async def complete(database: Database) -> int:
        await _complete_all(database, claimed)
        return len(claimed)

    steps = zip(PHASES, (fire, claim, complete), strict=True)
    costs = {name: await _measured(url, connection, step) for name, step in steps}
    counts = {cost.runs for cost in costs.values()}
    assert len(counts) == 1, f"not all runs went all the way: {counts}"
    return costs


async def _measured(
    url: str, connection: Connection, step: Callable[[Database], Awaitable[int]]
) -> PhaseCost:
    await watch_statements(connection)
    postmaster = await postmaster_of(connection)
    tables = await table_counters(connection)
    begin = await wal_position(connection)
    async with _engine(url) as database:
        postgres, engine = tree_cpu_seconds(postmaster), time.process_time()
        began = time.perf_counter()
        runs = await step(database)
        seconds = time.perf_counter() - began
        engine = time.process_time() - engine
        postgres = tree_cpu_seconds(postmaster) - postgres
    wal = await wal_since(connection, begin)
    # Sessions tell what they read and wrote when they end.
    while await connection.fetchval(_OTHERS):
        await asyncio.sleep(0.01)
    own = [row for row in await statements(connection) if row["is_named"]]
    changed = await table_counters(connection)
    rows = {
        key: sum(
            counters[key] - tables.get(name, counters)[key] for name, counters in changed.items()
        )
        for key in ("inserted", "updated", "deleted", "seq_rows", "index_rows")
    }
    return PhaseCost(
        runs=runs,
        seconds=seconds,
        postgres_us=postgres / runs * 1e6,
        engine_us=engine / runs * 1e6,
        record_bytes=wal.record_bytes / runs,
        image_bytes=wal.image_bytes / runs,
        statements=sum(row["calls"] for row in own) / runs,
        buffers=sum(row["buffers"] for row in own) / runs,
        inserted=rows["inserted"] / runs,
        updated=rows["updated"] / runs,
        deleted=rows["deleted"] / runs,
        rows_read=(rows["seq_rows"] + rows["index_rows"]) / runs,
        read_by_table={
            name: (counters["seq_rows"] + counters["index_rows"]) / runs
            for name, counters in difference(changed, tables).items()
        },
    )


async def _claim_all(database: Database) -> list[Claimed]:
    """Everything that is ready, in batches, queue by queue."""
    specs = SpecCache(database.requests, size=20_000)
    claimer = Claimer(pool=database.hot, clock=database.clock, specs=specs)
    workers = [str(uuid.uuid4())] * BATCH
    lanes: dict[int, set[tuple[int, int]]] = {}
    for row in await database.hot.fetch(load("claims")["ready_lanes"], lanes_max=1_000_000):
        # As the dispatcher does: what waits for later is not asked for.
        if row["available_at"] <= database.clock.now():
            lanes.setdefault(row["queue_id"], set()).add((row["kind_id"], row["priority"]))
    found: list[Claimed] = []
    for queue_id, of_queue in lanes.items():
        while True:
            batch = await claimer.claim(
                queue_id, lanes=of_queue, worker_ids=workers, is_capped=False
            )
            found += batch
            if len(batch) < BATCH:
                break
    return found


async def _complete_all(database: Database, claimed: Sequence[Claimed]) -> None:
    lifecycle = Lifecycle(
        database=database,
        clock=database.clock,
        specs=SpecCache(database.requests, size=20_000),
        wake=Wakes(),
        gather=MILLISECOND,
        batch_max=BATCH,
    )
    ticking = asyncio.create_task(lifecycle.run())
    try:
        for first in range(0, len(claimed), BATCH):
            judged = await lifecycle.report(
                [
                    Report(key=run.key, attempt=run.attempt, ending=None, timings=_TIMINGS)
                    for run in claimed[first : first + BATCH]
                ]
            )
            assert all(each.verdict is Verdict.APPLIED for each in judged), "an end was refused"
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
