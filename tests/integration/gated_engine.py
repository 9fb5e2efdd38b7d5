"""The engine of one server process whose every statement waits for its turn, and the acts
that take part in interleavings."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from fencepost_server.clock import MILLISECOND, MINUTE, SECOND, Duration
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.domain.calendar import CalendarContent
from fencepost_server.domain.job import partition_of
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import RunKey
from fencepost_server.domain.schedule import IntervalSpec
from fencepost_server.engine.cancel import cancel_run
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.definition import Definition
from fencepost_server.engine.enqueue import EnqueueEntry, Enqueues
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.governor import Governor
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.job_update import JobUpdate
from fencepost_server.engine.jobs import Jobs
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.promoter import Promoter
from fencepost_server.engine.reaper import Reaper
from fencepost_server.engine.specs import SpecCache
from fencepost_server.engine.verdicts import Held, Judged, Renewal, Report
from fencepost_server.errors import JobNotFound
from fencepost_server.policy.outcome import Ending
from fencepost_server.store.calendars import CalendarSettings, CalendarStore
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.jobs import JobRecord

from tests.integration.interleavings import Gate, GatedPool
from tests.integration.ledger import Woken
from tests.integration.world import TIMEOUT_FAILURES, World

NAME = JobName(tenant="default", job="report")
CALENDAR = "holidays"
_PARTITION = partition_of(tenant=NAME.tenant, job_name=NAME.job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The acts of one process on the job `NAME` and its runs, each a call of the engine.

    What the engine refuses because of another act is returned, not raised.
    """

    world: World
    gate: Gate
    database: Database
    catalogue: Catalogue
    lifecycle: Lifecycle
    claimer: Claimer
    reaper: Reaper
    promoter: Promoter
    scheduler: Scheduler
    jobs: Jobs
    enqueues: Enqueues

    async def fire(self) -> int:
        """One pass of the scheduler, which found the job due when it looked."""
        return await self.scheduler._fire([_PARTITION])

    async def enqueue(self) -> bytes | JobNotFound:
        """An ad-hoc run that is due now."""
        origin = Origin(tenant="default", now=self.world.now)
        (outcome,) = await self.enqueues.enqueue(
            origin, [EnqueueEntry(job=NAME)], encode=lambda run: str(run.key).encode()
        )
        assert isinstance(outcome, bytes | JobNotFound), outcome
        return outcome

    async def claim(self, *, capped: bool = False) -> list[Claimed]:
        """Everything ready in the default queue, up to 5 runs."""
        kinds = await self.catalogue.kind_ids(["send"])
        return await self.claimer.claim(
            await self.catalogue.queue_id("default", "default"),
            lanes={(kind_id, 0) for kind_id in kinds.values()},
            worker_ids=[self.world.worker_id] * 5,
            is_capped=capped,
        )

    async def report(self, run: Claimed, ending: Ending | None = None) -> Judged:
        """The end of a run's attempt, told by its worker."""
        report = Report(key=run.key, attempt=run.attempt, ending=ending)
        (judged,) = await self.lifecycle.report([report])
        return judged

    async def heartbeat(self, run: Claimed) -> Renewal:
        """The worker still holds the run."""
        (renewal,) = await self.lifecycle.heartbeat([Held(run.key, run.attempt)])
        return renewal

    async def release(self) -> int:
        """Parked runs get their places, up to two of them."""
        governor = Governor(
            database=self.database, clock=self.database.clock, wake=Woken(), rate=1.0
        )
        return await governor._release([self.world.tenant_id], self.world.now)

    async def reap(self) -> int:
        """Lost leases and what is overdue are taken back."""
        return await self.reaper.reap()

    async def expire(self) -> int:
        """Waiting runs that are out of time are ended."""
        return await self.reaper.expire()

    async def sweep(self) -> int:
        """Waiting runs are freed where they may be."""
        return await self.promoter.sweep()

    async def sweep_ends(self) -> int:
        """Next fires are set where the end that they waited for has come."""
        return await self.promoter.sweep_ends()

    async def open_calendar(self) -> None:
        """The calendar excludes nothing any more."""
        open_days = CalendarSettings(description="", content=CalendarContent())
        store = CalendarStore(database=self.database)
        await store.update(self.world.tenant_id, CALENDAR, lambda _: open_days, now=self.world.now)

    async def cancel(self, key: RunKey, *, grace: Duration | None = None) -> bool:
        """One run is cancelled, if it is live."""
        async with self.database.requests.transaction() as connection:
            effects = await cancel_run(
                connection, key=key, reason="", grace=grace, now=self.world.now
            )
        return effects is not None

    async def pause(self) -> JobRecord | JobNotFound:
        """The job is paused."""
        try:
            return await self.jobs.pause(NAME, reason="", now=self.world.now)
        except JobNotFound as error:
            return error

    async def resume(self) -> JobRecord | JobNotFound:
        """The job is resumed; what it missed is judged."""
        try:
            return await self.jobs.resume(NAME, now=self.world.now)
        except JobNotFound as error:
            return error

    async def delete(self) -> None:
        """The job is deleted, and its runs are cancelled."""
        await self.jobs.delete(
            NAME, etag="", allow_missing=True, cancel_runs=True, now=self.world.now
        )

    async def slow_down(self) -> None:
        """An update of the time rule: half as often."""
        await self._update(_half_as_often)

    async def relabel(self) -> None:
        """An update of everything but the time rule."""
        await self._update(_relabelled)

    async def _update(self, change: Callable[[JobRecord], Definition]) -> None:
        origin = Origin(tenant="default", now=self.world.now)
        try:
            await self.jobs.update(
                origin, JobUpdate(name=NAME, change=change), encode=lambda _job, _made: b""
            )
        except JobNotFound:
            return


@asynccontextmanager
async def engines(world: World, count: int) -> AsyncIterator[list[Engine]]:
    """The engines of `count` processes on the world's database and clock."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_engine(world)) for _ in range(count)]


@asynccontextmanager
async def _engine(world: World) -> AsyncIterator[Engine]:
    gate = Gate()
    database = Database(world.dsn, hot_size=1, requests_size=1)
    database.clock = clock = world.database.clock
    database.hot = GatedPool(world.dsn, hot=True, gate=gate)
    database.requests = GatedPool(world.dsn, hot=False, gate=gate)
    async with database:
        wake = Woken()
        specs = SpecCache(database.requests, size=100)
        catalogue = Catalogue(pool=database.requests)
        lifecycle = Lifecycle(
            database=database,
            clock=clock,
            specs=specs,
            wake=wake,
            gather=MILLISECOND,
            batch_max=500,
        )
        engine = Engine(
            world=world,
            gate=gate,
            database=database,
            catalogue=catalogue,
            lifecycle=lifecycle,
            claimer=Claimer(pool=database.hot, clock=clock, specs=specs),
            reaper=Reaper(
                database=database,
                clock=clock,
                lifecycle=lifecycle,
                specs=specs,
                heartbeat_interval=10 * SECOND,
                failures=TIMEOUT_FAILURES,
            ),
            promoter=Promoter(database=database, clock=clock, wake=wake),
            scheduler=Scheduler(
                database=database,
                clock=clock,
                ownership=AllPartitions(),
                wake=wake,
                batch_max=500,
                concurrency=2,
            ),
            jobs=Jobs(database=database, catalogue=catalogue, wake=wake),
            enqueues=Enqueues(database=database, catalogue=catalogue, specs=specs, wake=wake),
        )
        stores = asyncio.create_task(lifecycle.run())
        try:
            yield engine
        finally:
            stores.cancel()
            await asyncio.gather(stores, return_exceptions=True)


def _half_as_often(job: JobRecord) -> Definition:
    schedule = job.spec.schedule
    assert schedule is not None
    assert isinstance(schedule.spec, IntervalSpec)
    slower = replace(schedule, spec=replace(schedule.spec, every=2 * MINUTE))
    return Definition(spec=replace(job.spec, schedule=slower), payload=job.payload)


def _relabelled(job: JobRecord) -> Definition:
    relabelled = replace(job.spec, labels={"team": "night"})
    return Definition(spec=relabelled, payload=job.payload)
