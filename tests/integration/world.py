"""The parts of the engine in one process, on a real database whose clock the test holds.

The database function `fencepost.clock()` and the process's clock both say what the test
says, so leases and fires move by hand and every instant is exact.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from fencepost_server.clock import (
    MILLISECOND,
    SECOND,
    Duration,
    Instant,
    from_datetime,
    to_datetime,
)
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.domain.job import JobSpec, make_job_id, partition_of
from fencepost_server.domain.run import LOST_LEASE_WAIT_MAX, RunKey
from fencepost_server.domain.schedule import CronSpec, spec_to_json
from fencepost_server.engine.cancel import cancel_run
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.promoter import Promoter
from fencepost_server.engine.reaper import LeaseKeeper, Reaper
from fencepost_server.engine.retention import Retention
from fencepost_server.engine.settle import Settled, settle
from fencepost_server.engine.specs import SpecCache
from fencepost_server.engine.verdicts import Judged, Report
from fencepost_server.policy.outcome import Ending
from fencepost_server.policy.schedule import interned_spec
from fencepost_server.store import jobs as job_store
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.job_settings import JobSettings, NewJob
from fencepost_server.store.statements import load

from tests.factories import NOON, job_spec
from tests.integration.held_database import HandClock, hold_clock
from tests.integration.ledger import Ledger, Woken

_UPKEEP = load("upkeep")
TIMEOUT_FAILURE = b"timed out"
TIMEOUT_FAILURES = {
    "TIMEOUT": TIMEOUT_FAILURE,
    "QUEUE_TIMEOUT": b"waited too long",
    "TOTAL_TIMEOUT": b"took too long",
}
# Heartbeats of the fleet are ticked at least this often, or the reaper pauses.
_TICK: Duration = 9 * SECOND


@dataclass(kw_only=True)
class World(Ledger):
    """One process's engine without its loops; tests call the parts themselves."""

    dsn: str
    database: Database
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
        first = (self.now if at is None else at) + 1
        instants = [first + i for i in range(count)]
        rows = await self.raw.fetch(
            """
            INSERT INTO fencepost.run_queue
                (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id,
                 version, state, origin, priority, lease_s, cancel_grace_s, attempt_timeout_s,
                 max_in_flight, concurrency_key, labels, queue_timeout_s, wait_until, total_until)
            SELECT s.job_id, i.at, $3, $4, s.tenant_id, s.queue_id, s.kind_id, s.version, 'queued',
                   'enqueue', coalesce($5, s.priority), s.lease_s, s.cancel_grace_s,
                   s.attempt_timeout_s, s.max_in_flight, coalesce($6, s.concurrency_key), '{}',
                   s.queue_timeout_s, $3::timestamptz + s.queue_timeout_s * interval '1 second',
                   $3::timestamptz + s.total_timeout_s * interval '1 second'
            FROM fencepost.job_schedules AS s CROSS JOIN unnest($2::timestamptz[]) AS i (at)
            WHERE s.job_id = $1::uuid
            ON CONFLICT DO NOTHING
            RETURNING job_id, scheduled_at
            """,
            job_id,
            [to_datetime(at) for at in instants],
            to_datetime(max(self.now, first - 1)),
            to_datetime(self.now),
            priority,
            key or None,
        )
        return sorted(
            RunKey(str(row["job_id"]), from_datetime(row["scheduled_at"])) for row in rows
        )

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

    async def lose_lease(self) -> None:
        """The one running attempt loses its lease, and its run is due for the next claim."""
        await self.pass_time(31 * SECOND)
        assert await self.reaper.reap() == 1
        await self.pass_time(LOST_LEASE_WAIT_MAX)

    async def cancel(self, key: RunKey, *, reason: str = "", grace: Duration | None = None) -> bool:
        """Whether the run was live to be cancelled."""
        async with self.database.requests.transaction() as connection:
            effects = await cancel_run(
                connection, key=key, reason=reason, grace=grace, now=self.now
            )
        return effects is not None

    async def report(
        self, run: Claimed, ending: Ending | None = None, *, attempt: int | None = None, **more: Any
    ) -> Judged:
        """The verdict on one report about an attempt of a run."""
        [judged] = await self.lifecycle.report(
            [Report(key=run.key, attempt=attempt or run.attempt, ending=ending, **more)]
        )
        return judged


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
                await hold_clock(raw, at)
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
            failures=TIMEOUT_FAILURES,
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
