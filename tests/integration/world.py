"""The parts of the engine in one process, on a real database whose clock the test holds.

The database function `fencepost.clock()` and the process's clock both say what the test
says, so leases and fires move by hand and every instant is exact.
"""

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from fencepost_server.clock import (
    DAY,
    MILLISECOND,
    SECOND,
    DatabaseClock,
    Duration,
    Instant,
    to_datetime,
)
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.domain.job import JobSpec, make_job_id, partition_of
from fencepost_server.domain.run import Lane, RunKey
from fencepost_server.domain.schedule import CronSpec, spec_to_json
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.lifecycle import Judged, Lifecycle, Report
from fencepost_server.engine.promoter import Promoter
from fencepost_server.engine.reaper import LeaseKeeper, Reaper
from fencepost_server.engine.retention import Retention
from fencepost_server.engine.settle import Settled, settle
from fencepost_server.engine.specs import SpecCache
from fencepost_server.policy.outcome import Ending
from fencepost_server.policy.schedule import interned_spec
from fencepost_server.store import jobs as job_store
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.job_settings import JobSettings, NewJob
from fencepost_server.store.statements import load

from tests.factories import NOON, job_spec

_UPKEEP, _ENQUEUE = load("upkeep"), load("enqueue")
TIMEOUT_FAILURE = b"timed out"
# Heartbeats of the fleet are ticked at least this often, or the reaper pauses.
_TICK: Duration = 9 * SECOND


class HandClock(DatabaseClock):
    """Stands still until the test moves it."""

    def __init__(self, at: Instant) -> None:
        super().__init__()
        self.at = at

    def now(self) -> Instant:
        return self.at


@dataclass(slots=True)
class Woken:
    """Remembers the hints that the engine gave; `event` is set by each."""

    partitions: list[set[int]] = field(default_factory=list)
    lane_hints: list[tuple[set[Lane], Instant]] = field(default_factory=list)
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def jobs(self, partition_ids: Iterable[int]) -> None:
        self.partitions.append(set(partition_ids))
        self.event.set()

    def lanes(self, lanes: Iterable[Lane], *, at: Instant = 0) -> None:
        known = set(lanes)
        if known:
            self.lane_hints.append((known, at))
            self.event.set()


@dataclass(kw_only=True)
class World:
    """One process's engine without its loops; tests call the parts themselves."""

    dsn: str
    database: Database
    raw: "asyncpg.Connection[asyncpg.Record]"
    woken: Woken
    catalogue: Catalogue
    specs: SpecCache
    lifecycle: Lifecycle
    claimer: Claimer
    keeper: LeaseKeeper
    reaper: Reaper
    promoter: Promoter
    retention: Retention
    scheduler: Scheduler
    tenant_id: int
    worker_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    # Time ----------------------------------------------------------------------------------

    @property
    def now(self) -> Instant:
        return self.database.clock.now()

    async def move_to(self, at: Instant) -> None:
        """Both clocks say `at` from now on."""
        clock = self.database.clock
        assert isinstance(clock, HandClock), "this world runs on real time"
        await self.raw.execute("UPDATE public.test_clock SET at = $1", to_datetime(at))
        clock.at = at

    async def move(self, duration: Duration) -> None:
        """Time passes while nobody heartbeats for anybody."""
        await self.move_to(self.now + duration)

    async def pass_time(self, duration: Duration) -> None:
        """As `move`, in a healthy fleet: the reaper has no reason to pause."""
        until = self.now + duration
        while self.now < until:
            await self.move_to(min(until, self.now + _TICK))
            await self.keeper.tick()

    # Jobs and runs -------------------------------------------------------------------------

    async def add_job(
        self,
        name: str = "report",
        spec: JobSpec | None = None,
        *,
        next_run_at: Instant | None = None,
        paused: bool = False,
        payload: bytes | None = None,
    ) -> str:
        """The id of a new job that fires at `next_run_at` next."""
        ids = await self.add_jobs(
            [name], job_spec() if spec is None else spec, next_run_at, paused, payload
        )
        return ids[0]

    async def add_jobs(
        self,
        names: Sequence[str],
        spec: JobSpec,
        next_run_at: Instant | None = None,
        paused: bool = False,
        payload: bytes | None = None,
    ) -> list[str]:
        """The ids of jobs that differ in their names only."""
        queue_id = await self.queue_id(spec.target.queue_name)
        kinds = await self.catalogue.kind_ids([spec.target.kind])
        schedule_id = None
        if spec.schedule is not None and isinstance(spec.schedule.spec, CronSpec):
            interned = interned_spec(spec.schedule.spec)
            assert interned is not None
            schedule_id = (await self.catalogue.schedule_ids([spec_to_json(interned)]))[0]
        settings = JobSettings.of(
            spec, queue_id=queue_id, kind_id=kinds[spec.target.kind], schedule_id=schedule_id
        )
        jobs = []
        for name in names:
            partition_id = partition_of(tenant="default", job_name=name)
            job_id = make_job_id(now=self.now, partition_id=partition_id, entropy=os.urandom(9))
            jobs.append(
                NewJob(
                    job_id=job_id,
                    name=name,
                    spec=spec,
                    payload=payload,
                    settings=settings,
                    next_run_at=next_run_at,
                    paused=paused,
                    pause_reason="",
                    partition_id=partition_id,
                )
            )
        async with self.database.requests.transaction() as connection:
            made = await job_store.insert(
                connection, jobs, tenant_id=self.tenant_id, trace_context=None, now=self.now
            )
        assert len(made) == len(names), "a name was taken"
        return [job.job_id for job in jobs]

    async def queue_id(self, name: str) -> int:
        """The queue of that name, made if need be."""
        found = await self.catalogue.find_queue_ids(self.tenant_id, [name])
        if name in found:
            return found[name]
        await self.raw.execute(
            "INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at) "
            "VALUES ($1, $2, now(), now()) ON CONFLICT DO NOTHING",
            self.tenant_id,
            name,
        )
        return await self.catalogue.queue_id("default", name)

    async def enqueue(
        self,
        job_id: str,
        count: int = 1,
        *,
        at: Instant | None = None,
        key: str | None = None,
        priority: int | None = None,
    ) -> list[RunKey]:
        """Ad-hoc runs of a job, due `at` (now) and the microseconds after it."""
        row = await self.raw.fetchrow(
            "SELECT * FROM fencepost.job_schedules WHERE job_id = $1::uuid", job_id
        )
        assert row is not None
        first = (self.now if at is None else at) + 1
        instants = [first + i for i in range(count)]
        rows = await self.database.requests.fetch(
            _ENQUEUE["insert_enqueued"],
            tenant_id=self.tenant_id,
            now=self.now,
            job_ids=[job_id] * count,
            scheduled_ats=instants,
            available_ats=[max(self.now, first - 1)] * count,
            queue_ids=[row["queue_id"]] * count,
            kind_ids=[row["kind_id"]] * count,
            versions=[row["version"]] * count,
            priorities=[row["priority"] if priority is None else priority] * count,
            leases_s=[row["lease_s"]] * count,
            graces_s=[row["cancel_grace_s"]] * count,
            timeouts_s=[row["attempt_timeout_s"]] * count,
            job_caps=[row["max_in_flight"]] * count,
            concurrency_keys=[key or row["concurrency_key"]] * count,
            payloads=[None] * count,
            labels=[json.dumps({})] * count,
            trace_contexts=[None] * count,
        )
        return sorted(RunKey(str(row["job_id"]), row["scheduled_at"]) for row in rows)

    async def settle(self, job_ids: Sequence[str], **options: Any) -> Settled:
        """`settle` in a transaction of its own, at now."""
        async with self.database.requests.transaction() as connection:
            return await settle(connection, job_ids=job_ids, now=self.now, **options)

    async def claim(
        self,
        count: int = 1,
        *,
        queue: str = "default",
        capped: bool = False,
        worker_id: str | None = None,
    ) -> list[Claimed]:
        """Up to `count` ready runs of a queue, whatever their kind."""
        queue_id = await self.queue_id(queue)
        rows = await self.database.hot.fetch(load("claims")["ready_lanes"], lanes_max=1000)
        lanes = {(r["kind_id"], r["priority"]) for r in rows if r["queue_id"] == queue_id}
        if not lanes:
            return []
        return await self.claimer.claim(
            queue_id,
            lanes=lanes,
            worker_ids=[worker_id or self.worker_id] * count,
            is_capped=capped,
        )

    async def started(self, spec: JobSpec | None = None, name: str = "report") -> Claimed:
        """A new job with one ad-hoc run, claimed."""
        await self.enqueue(await self.add_job(name, spec))
        [run] = await self.claim()
        return run

    async def report(
        self, run: Claimed, ending: Ending | None = None, *, attempt: int | None = None, **more: Any
    ) -> Judged:
        """The verdict on one report about an attempt of a run."""
        [judged] = await self.lifecycle.report(
            [Report(key=run.key, attempt=attempt or run.attempt, ending=ending, **more)]
        )
        return judged

    # Looking -------------------------------------------------------------------------------

    async def query(self, sql: str, *arguments: Any) -> list[asyncpg.Record]:
        rows: list[asyncpg.Record] = await self.raw.fetch(sql, *arguments)
        return rows

    async def value(self, sql: str, *arguments: Any) -> Any:
        return await self.raw.fetchval(sql, *arguments)

    async def live(self, key: RunKey) -> asyncpg.Record:
        """The row of a live run."""
        rows = await self.query(
            "SELECT * FROM fencepost.run_queue WHERE job_id = $1::uuid AND scheduled_at = $2",
            key.job_id,
            to_datetime(key.scheduled_at),
        )
        assert rows, f"{key} is not live"
        return rows[0]

    async def ended(self, key: RunKey, table: str = "job_runs") -> asyncpg.Record:
        """The row of an ended run; no live row is left."""
        rows = await self.query(
            f"SELECT * FROM fencepost.{table} "  # noqa: S608 - a table that the test names
            "WHERE job_id = $1::uuid AND scheduled_at = $2",
            key.job_id,
            to_datetime(key.scheduled_at),
        )
        assert rows, f"{key} is not in {table}"
        left = await self.value(
            "SELECT count(*) FROM fencepost.run_queue "
            "WHERE job_id = $1::uuid AND scheduled_at = $2",
            key.job_id,
            to_datetime(key.scheduled_at),
        )
        assert left == 0, f"{key} is in two places"
        return rows[0]

    async def runs_of(self, job_id: str) -> list[tuple[int, str, str]]:
        """Seconds after noon, state and origin of a job's live runs, oldest first."""
        rows = await self.query(
            "SELECT scheduled_at, state, origin FROM fencepost.run_queue "
            "WHERE job_id = $1::uuid ORDER BY scheduled_at",
            job_id,
        )
        return [(_after_noon(r["scheduled_at"]), r["state"], r["origin"]) for r in rows]

    async def skips_of(self, job_id: str) -> list[tuple[int, int, str, int | None]]:
        """First, last, reason and stand-in of a job's skipped stretches, oldest first."""
        rows = await self.query(
            "SELECT first_at, last_at, reason, stand_in_at FROM fencepost.fire_skips "
            "WHERE job_id = $1::uuid ORDER BY first_at, reason",
            job_id,
        )
        return [
            (
                _after_noon(r["first_at"]),
                _after_noon(r["last_at"]),
                r["reason"],
                None if r["stand_in_at"] is None else _after_noon(r["stand_in_at"]),
            )
            for r in rows
        ]

    async def next_of(self, job_id: str) -> int | None:
        """Seconds after noon of a job's next fire."""
        at = await self.value(
            "SELECT next_run_at FROM fencepost.job_schedules WHERE job_id = $1::uuid", job_id
        )
        return None if at is None else _after_noon(at)

    async def attempts_of(self, key: RunKey) -> list[tuple[int, str, bool]]:
        """Number, outcome and lateness of a run's recorded attempts."""
        rows = await self.query(
            "SELECT attempt, outcome, late FROM fencepost.run_attempts "
            "WHERE job_id = $1::uuid AND scheduled_at = $2 ORDER BY attempt",
            key.job_id,
            to_datetime(key.scheduled_at),
        )
        return [(r["attempt"], r["outcome"], r["late"]) for r in rows]


def _after_noon(at: Any) -> int:
    return int((at - to_datetime(NOON)).total_seconds())


@asynccontextmanager
async def build(
    dsn: str, *, at: Instant | None = NOON, day_tables: bool = True, hot_size: int = 6
) -> AsyncIterator[World]:
    """An engine whose time begins `at`; None: it runs on real time."""
    raw = await asyncpg.connect(dsn, server_settings={"timezone": "UTC"})
    try:
        async with Database(dsn, hot_size=hot_size, requests_size=4) as database:
            if at is None:
                await database.sample_clock(_UPKEEP["clock"])
            else:
                await _hold_clock(raw, at)
                database.clock = HandClock(at)
            world = await _assemble(dsn, database, raw)
            if day_tables:
                await world.retention.ensure_day_tables()
            await world.keeper.tick()
            lifecycle = asyncio.create_task(world.lifecycle.run())
            try:
                yield world
            finally:
                lifecycle.cancel()
                await asyncio.gather(lifecycle, return_exceptions=True)
    finally:
        await raw.close()


async def reset(dsn: str) -> None:
    """Empties a database that a world was built on before; its day tables stay."""
    raw = await asyncpg.connect(dsn, server_settings={"lock_timeout": "5s"})
    try:
        await raw.execute(
            """
            TRUNCATE fencepost.jobs, fencepost.job_versions, fencepost.job_schedules,
                fencepost.fire_skips, fencepost.run_queue, fencepost.job_runs,
                fencepost.job_runs_stray, fencepost.dead_letters, fencepost.run_attempts,
                fencepost.workers, fencepost.requests, fencepost.claim_requests,
                fencepost.schedules, fencepost.schedule_fires, fencepost.kinds;
            DELETE FROM fencepost.queues WHERE name <> 'default';
            UPDATE fencepost.queues SET paused = false, has_capped_jobs = false,
                max_in_flight = NULL, max_in_flight_per_key = NULL;
            UPDATE fencepost.tenants SET max_in_flight = NULL;
            UPDATE fencepost.shard_state SET tzdata_version = '';
            """
        )
    finally:
        await raw.close()


async def _hold_clock(raw: "asyncpg.Connection[asyncpg.Record]", at: Instant) -> None:
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


async def _assemble(
    dsn: str, database: Database, raw: "asyncpg.Connection[asyncpg.Record]"
) -> World:
    woken = Woken()
    clock = database.clock
    specs = SpecCache(database.requests, size=1000)
    lifecycle = Lifecycle(
        database=database,
        clock=clock,
        specs=specs,
        wake=woken,
        gather=5 * MILLISECOND,
        batch_max=500,
    )
    catalogue = Catalogue(pool=database.requests)
    return World(
        dsn=dsn,
        database=database,
        raw=raw,
        woken=woken,
        catalogue=catalogue,
        specs=specs,
        lifecycle=lifecycle,
        claimer=Claimer(pool=database.hot, clock=clock, specs=specs),
        keeper=LeaseKeeper(database=database, clock=clock, lifecycle=lifecycle),
        reaper=Reaper(
            database=database,
            clock=clock,
            lifecycle=lifecycle,
            specs=specs,
            heartbeat_interval=10 * SECOND,
            failure=TIMEOUT_FAILURE,
        ),
        promoter=Promoter(database=database, clock=clock, wake=woken),
        retention=Retention(database=database, clock=clock, days=30, days_ahead=1),
        scheduler=Scheduler(
            database=database,
            clock=clock,
            ownership=AllPartitions(),
            wake=woken,
            batch_max=500,
            concurrency=2,
        ),
        tenant_id=await catalogue.tenant_id("default"),
    )
