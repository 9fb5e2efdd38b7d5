"""Puts the engine of one process together, and starts the loops of a scheduler."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fencepost_server.clock import SECOND, Duration
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.config import Config
from fencepost_server.engine.backfill_steps import BackfillSteps
from fencepost_server.engine.bulk_steps import BulkSteps
from fencepost_server.engine.claims import Claimer
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.engine.end_waits import EndWaits
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.forecast_count import ForecastCount
from fencepost_server.engine.governor import AHEAD, Governor
from fencepost_server.engine.handout import HandOuts
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.loops import Loops
from fencepost_server.engine.promoter import Promoter
from fencepost_server.engine.reaper import Reaper
from fencepost_server.engine.refill import Refills
from fencepost_server.engine.retention import Retention
from fencepost_server.engine.specs import SpecCache
from fencepost_server.engine.timekeeper import Timekeeper
from fencepost_server.engine.wake import Wakes
from fencepost_server.engine.watch import Watches
from fencepost_server.engine.workers import WorkerRegistry
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database

_SPECS_CACHED = 20_000
_BACKFILL_INTERVAL: Duration = SECOND
_FORECAST_INTERVAL: Duration = 10 * SECOND
_GOVERNOR_INTERVAL: Duration = AHEAD // 2
_MEMO_INTERVAL_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts behind the API of one process."""

    clock_keeper: Timekeeper
    catalogue: Catalogue
    specs: SpecCache
    wakes: Wakes
    lifecycle: Lifecycle
    claimer: Claimer
    dispatcher: Dispatcher
    workers: WorkerRegistry
    handouts: HandOuts
    watches: Watches
    waits: EndWaits


def build_engine(
    config: Config, database: Database, storage_told: Callable[[bool], None]
) -> Engine:
    """All parts but the loops; `storage_told` hears whether the database can be reached."""
    wakes = Wakes()
    specs = SpecCache(database.requests, size=_SPECS_CACHED)
    claimer = Claimer(pool=database.hot, clock=database.clock, specs=specs)
    dispatcher = Dispatcher(
        pool=database.hot,
        clock=database.clock,
        claimer=claimer,
        batch_max=config.claim_batch_max,
        poll=_micros(config.claim_poll_s),
    )
    wakes.lanes_woken.append(dispatcher.hint)
    wakes.places_woken.append(dispatcher.places_freed_elsewhere)
    dispatcher.book.tell_freed = wakes.places
    watches, waits = Watches(database=database, clock=database.clock), EndWaits()
    wakes.lanes_woken.append(lambda lanes, at: watches.hint())
    lifecycle = Lifecycle(
        database=database,
        clock=database.clock,
        specs=specs,
        wake=wakes,
        gather=_micros(config.tick_s),
        batch_max=config.tick_batch_max,
    )
    lifecycle.refills = Refills(
        pool=database.hot, clock=database.clock, claimer=claimer, dispatcher=dispatcher
    )
    handouts = HandOuts(dispatcher=dispatcher, claimer=claimer)
    handouts.handed_out.append(watches.hint)
    lifecycle.changed += [waits.ended, lambda keys: watches.hint()]
    return Engine(
        clock_keeper=Timekeeper(database=database, storage_changed=storage_told),
        catalogue=Catalogue(pool=database.requests),
        specs=specs,
        wakes=wakes,
        lifecycle=lifecycle,
        claimer=claimer,
        dispatcher=dispatcher,
        workers=WorkerRegistry(database=database, clock=database.clock),
        handouts=handouts,
        watches=watches,
        waits=waits,
    )


def start_scheduler(
    config: Config,
    database: Database,
    engine: Engine,
    retention: Retention,
    loops: Loops,
    *,
    failures: Mapping[str, bytes],
) -> None:
    """Everything that moves runs without being asked. `failures`: see `Reaper`."""
    scheduler = Scheduler(
        database=database,
        clock=database.clock,
        ownership=AllPartitions(),
        wake=engine.wakes,
        batch_max=config.fire_batch_max,
        concurrency=config.fire_concurrency,
        parks=config.catch_up_rate_per_tenant > 0,
    )
    governor = Governor(
        database=database,
        clock=database.clock,
        wake=engine.wakes,
        rate=config.catch_up_rate_per_tenant,
    )
    reaper = Reaper(
        database=database,
        clock=database.clock,
        lifecycle=engine.lifecycle,
        specs=engine.specs,
        heartbeat_interval=_micros(config.heartbeat_interval_s),
        failures=failures,
    )
    promoter = Promoter(database=database, clock=database.clock, wake=engine.wakes)
    backfills = BackfillSteps(database=database, clock=database.clock, wake=engine.wakes)
    scheduler.is_trusted = reaper.is_trusted = lambda: engine.clock_keeper.is_trusted
    bulk = BulkSteps(database=database, clock=database.clock, wake=engine.wakes, specs=engine.specs)
    forecasts = ForecastCount(database=database, clock=database.clock)
    backfills.is_trusted = bulk.is_trusted = scheduler.is_trusted
    governor.is_trusted = forecasts.is_trusted = scheduler.is_trusted
    engine.wakes.jobs_woken.append(scheduler.wake)
    engine.wakes.attempts_woken.append(lambda affected: reaper.look_soon())
    engine.lifecycle.serial_ended.append(promoter.ended)
    engine.wakes.ends_woken.append(promoter.ended)
    loops.start(
        "scheduler",
        scheduler.run(poll=_micros(config.fire_poll_s), contended=_micros(config.fire_contended_s)),
    )
    loops.start("memo", _forget(scheduler))
    loops.start("forecasts", forecasts.run(interval=_FORECAST_INTERVAL))
    loops.start("governor", governor.run(interval=_GOVERNOR_INTERVAL))
    loops.start("reaper", reaper.run(interval=_micros(config.reap_interval_s)))
    loops.start("backfills", backfills.run(interval=_BACKFILL_INTERVAL))
    loops.start("bulk", bulk.run(interval=_BACKFILL_INTERVAL))
    loops.start("promoter", promoter.run(interval=_micros(config.promote_interval_s)))
    loops.start("retention", retention.run(interval=_micros(config.retention_interval_s)))


async def _forget(scheduler: Scheduler) -> None:
    while True:
        await asyncio.sleep(_MEMO_INTERVAL_S)
        await scheduler.forget_old_fires()


def _micros(seconds: float) -> Duration:
    return int(seconds * SECOND)
