"""Puts a server process together: what is opened first is closed last.

The only place that constructs long-lived parts. A stopping server leaves in the order of
protocol §6: health, GOAWAY, drain of sessions, answers to what is under way, exit.
"""

import asyncio
import os
import signal
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version

import grpc.aio
import structlog
from fencepost.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    failure_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
)
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fencepost_server.api.admin import AdminServicer
from fencepost_server.api.fire_calls import FireCalls
from fencepost_server.api.jobs import JobServicer
from fencepost_server.api.limits import MESSAGE_BYTES_MAX
from fencepost_server.api.operation_calls import OperationCalls
from fencepost_server.api.page_tokens import PageTokens
from fencepost_server.api.runs import RunServicer
from fencepost_server.api.session import SessionParts
from fencepost_server.api.settlement import Settlement
from fencepost_server.api.status import StatusInterceptor
from fencepost_server.api.unary_calls import UnaryCalls
from fencepost_server.api.undecodable import UndecodableInterceptor
from fencepost_server.api.wire_worker import Assignments
from fencepost_server.api.work import WorkSessions
from fencepost_server.clock import DAY, SECOND, Duration
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.config import Config
from fencepost_server.engine.backfill import Operations
from fencepost_server.engine.backfill_steps import BackfillSteps
from fencepost_server.engine.claims import Claimer
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.engine.enqueue import Enqueues
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.forecast import Forecasts
from fencepost_server.engine.jobs import Jobs
from fencepost_server.engine.ledger import Ledger
from fencepost_server.engine.lifecycle import TIMEOUT_CODE, Lifecycle
from fencepost_server.engine.loops import Loops, when_stored
from fencepost_server.engine.promoter import Promoter
from fencepost_server.engine.reaper import LeaseKeeper, Reaper
from fencepost_server.engine.retention import Retention
from fencepost_server.engine.run_reads import RunReads
from fencepost_server.engine.specs import SpecCache
from fencepost_server.engine.timekeeper import Timekeeper
from fencepost_server.engine.unary_work import UnaryWork
from fencepost_server.engine.wake import JOBS_CHANNEL, LANES_CHANNEL, Wakes
from fencepost_server.engine.workers import WorkerRegistry
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.admin import AdminStore
from fencepost_server.store.calendars import CalendarStore
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.migrate import MigrationError, check_schema
from fencepost_server.store.notify import Notifier

_log = structlog.get_logger("app")

_SERVICES = (
    job_service_pb2.DESCRIPTOR.services_by_name["JobService"].full_name,
    run_service_pb2.DESCRIPTOR.services_by_name["RunService"].full_name,
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)
STORAGE_CHECK = "fencepost.storage"
_SPECS_CACHED = 20_000
_CLOCK_INTERVAL: Duration = SECOND
_LEASE_TICK: Duration = SECOND
_BACKFILL_INTERVAL: Duration = SECOND
_WORKERS_INTERVAL: Duration = SECOND
_MEMO_INTERVAL_S = 3600
_SETTLE_MAX_S = 10

# See protocol §8. One port belongs to one process: with SO_REUSEPORT a second server on the
# same port would silently take half of the calls.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_connection_age_ms", 2_400_000),
    ("grpc.max_connection_age_grace_ms", 120_000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
)


class StartError(Exception):
    """The server cannot start, and waiting would not help."""


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


async def serve(config: Config, *, started: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

    `started(port)` is called when calls are answered. Raises StartError, or whatever a part
    of the server failed with.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def told(number: signal.Signals) -> None:
        if stopping.is_set():
            _log.warning("ended_at_once", signal=number.name)
            os._exit(128 + number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)
    try:
        await run_server(config, stopping=stopping, started=started)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def run_server(
    config: Config,
    *,
    stopping: asyncio.Event,
    started: Callable[[int], None] | None = None,
) -> None:
    """As `serve`, until `stopping` is set."""
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(
            Database(
                config.database_url,
                hot_size=config.hot_pool_size,
                requests_size=config.request_pool_size,
            )
        )
        checks = health.aio.HealthServicer()
        engine = _engine(config, database, _storage_told(checks))
        retention = Retention(
            database=database,
            clock=database.clock,
            days=config.history_retention_days,
            days_ahead=config.day_tables_ahead,
        )
        retention.is_trusted = lambda: engine.clock_keeper.is_trusted
        keeper = LeaseKeeper(database=database, clock=database.clock, lifecycle=engine.lifecycle)

        async def prepare() -> None:
            await check_schema(config.database_url)
            await engine.clock_keeper.first_sample()
            await retention.ensure_day_tables()
            await keeper.tick()

        try:
            if not await when_stored(prepare, stopping):
                _log.info("stopped")
                return
        except MigrationError as error:
            raise StartError(str(error)) from error
        engine.wakes.notifier = await stack.enter_async_context(
            Notifier(
                config.database_url,
                channels=(JOBS_CHANNEL, LANES_CHANNEL),
                received=engine.wakes.heard,
                interval=_micros(config.notify_interval_s),
            )
        )
        loops = await stack.enter_async_context(Loops())
        loops.start("clock", engine.clock_keeper.run(interval=_CLOCK_INTERVAL))
        loops.start("lifecycle", engine.lifecycle.run())
        loops.start("lease_keeper", keeper.run(interval=_LEASE_TICK))
        if "scheduler" in config.roles:
            _start_scheduler(config, database, engine, retention, loops)
        if "api" in config.roles:
            await _serve_api(config, database, engine, checks, loops, stopping, started)
        else:
            _log.info("serving", roles=sorted(config.roles))
            await loops.until(stopping)
        _log.info("stopped")


def _engine(config: Config, database: Database, storage_told: Callable[[bool], None]) -> Engine:
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
    return Engine(
        clock_keeper=Timekeeper(database=database, storage_changed=storage_told),
        catalogue=Catalogue(pool=database.requests),
        specs=specs,
        wakes=wakes,
        lifecycle=Lifecycle(
            database=database,
            clock=database.clock,
            specs=specs,
            wake=wakes,
            gather=_micros(config.tick_s),
            batch_max=config.tick_batch_max,
        ),
        claimer=claimer,
        dispatcher=dispatcher,
        workers=WorkerRegistry(database=database, clock=database.clock),
    )


def _start_scheduler(
    config: Config, database: Database, engine: Engine, retention: Retention, loops: Loops
) -> None:
    scheduler = Scheduler(
        database=database,
        clock=database.clock,
        ownership=AllPartitions(),
        wake=engine.wakes,
        batch_max=config.fire_batch_max,
        concurrency=config.fire_concurrency,
        catch_up_rate=config.catch_up_rate_per_tenant,
    )
    timeout = failure_pb2.Failure(
        code=TIMEOUT_CODE,
        message="the attempt overran attempt_timeout and its worker did not end it",
        origin=failure_pb2.FAILURE_ORIGIN_ATTEMPT_TIMEOUT,
    )
    reaper = Reaper(
        database=database,
        clock=database.clock,
        lifecycle=engine.lifecycle,
        specs=engine.specs,
        heartbeat_interval=_micros(config.heartbeat_interval_s),
        failure=timeout.SerializeToString(deterministic=True),
    )
    promoter = Promoter(database=database, clock=database.clock, wake=engine.wakes)
    backfills = BackfillSteps(database=database, clock=database.clock, wake=engine.wakes)
    scheduler.is_trusted = reaper.is_trusted = lambda: engine.clock_keeper.is_trusted
    backfills.is_trusted = scheduler.is_trusted
    engine.wakes.jobs_woken.append(scheduler.wake)
    engine.lifecycle.serial_ended.append(promoter.ended)
    loops.start(
        "scheduler",
        scheduler.run(poll=_micros(config.fire_poll_s), contended=_micros(config.fire_contended_s)),
    )
    loops.start("memo", _forget(scheduler))
    loops.start("reaper", reaper.run(interval=_micros(config.reap_interval_s)))
    loops.start("backfills", backfills.run(interval=_BACKFILL_INTERVAL))
    loops.start("promoter", promoter.run(interval=_micros(config.promote_interval_s)))
    loops.start("retention", retention.run(interval=_micros(config.retention_interval_s)))


async def _serve_api(
    config: Config,
    database: Database,
    engine: Engine,
    checks: health.aio.HealthServicer,
    loops: Loops,
    stopping: asyncio.Event,
    started: Callable[[int], None] | None,
) -> None:
    settle = Settlement(lifecycle=engine.lifecycle)
    parts = SessionParts(
        clock=database.clock,
        lifecycle=engine.lifecycle,
        dispatcher=engine.dispatcher,
        workers=engine.workers,
        assignments=Assignments(),
        settle=settle,
    )
    sessions = WorkSessions(
        server_id=str(uuid.uuid4()),
        catalogue=engine.catalogue,
        parts=parts,
        heartbeat_interval=_micros(config.heartbeat_interval_s),
    )
    server = grpc.aio.server(
        interceptors=[StatusInterceptor(), UndecodableInterceptor()], options=_OPTIONS
    )
    unary = UnaryWork(
        database=database,
        clock=database.clock,
        claimer=engine.claimer,
        dispatcher=engine.dispatcher,
        lifecycle=engine.lifecycle,
    )
    page_token_key = b""

    async def read_key() -> None:
        nonlocal page_token_key
        page_token_key = await engine.catalogue.page_token_key()

    if not await when_stored(read_key, stopping):
        return
    page_tokens = PageTokens(key=page_token_key)
    runs = _add_services(config, database, engine, server, parts, sessions, unary, page_tokens)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if config.reflection:
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError as error:
        raise StartError(f"cannot listen on {config.listen}: {error}") from error
    loops.start("dispatcher", engine.dispatcher.run())
    loops.start("workers", engine.workers.run(interval=_WORKERS_INTERVAL))
    loops.start("rebalance", sessions.rebalance())
    await server.start()
    for name in ("", *_SERVICES):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    _log.info("serving", address=config.listen, port=port, roles=sorted(config.roles))
    if started is not None:
        started(port)
    try:
        await loops.until(stopping)
    finally:
        _log.info("draining", grace_s=config.drain_grace_s)
        await checks.enter_graceful_shutdown()
        engine.dispatcher.is_draining = True
        # GOAWAY first, or workers told to move would come back to this process.
        stop = asyncio.create_task(server.stop(config.drain_grace_s))
        await asyncio.sleep(0)
        runs.drain()
        sessions.drain()
        await stop
        await _settled(sessions, unary, engine.workers)


async def _settled(sessions: WorkSessions, unary: UnaryWork, workers: WorkerRegistry) -> None:
    """Until what workers left behind is stored; leases run out by themselves if it cannot be."""
    try:
        async with asyncio.timeout(_SETTLE_MAX_S):
            await sessions.drained()
            await unary.finish()
            await workers.write()
    except (StorageUnavailable, TimeoutError) as error:
        _log.warning("not_settled", error=repr(error))


def _add_services(
    config: Config,
    database: Database,
    engine: Engine,
    server: grpc.aio.Server,
    parts: SessionParts,
    sessions: WorkSessions,
    unary: UnaryWork,
    page_tokens: PageTokens,
) -> RunServicer:
    jobs = Jobs(database=database, catalogue=engine.catalogue, wake=engine.wakes)
    operations = Operations(database=database, catalogue=engine.catalogue)
    job_service_pb2_grpc.add_JobServiceServicer_to_server(
        JobServicer(
            jobs=jobs,
            fires=FireCalls(
                ledger=Ledger(database=database, catalogue=engine.catalogue),
                operations=operations,
                page_tokens=page_tokens,
            ),
            page_tokens=page_tokens,
        ),
        server,
    )
    admin = AdminServicer(
        store=AdminStore(database=database),
        catalogue=engine.catalogue,
        clock=database.clock,
        page_tokens=page_tokens,
        forecasts=Forecasts(database=database, clock=database.clock),
        calendars=CalendarStore(database=database),
        version=version("fencepost-server"),
        history_kept=config.history_retention_days * DAY,
    )
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    runs = RunServicer(
        enqueues=Enqueues(
            database=database, catalogue=engine.catalogue, specs=engine.specs, wake=engine.wakes
        ),
        reads=RunReads(database=database, catalogue=engine.catalogue),
        unary=UnaryCalls(
            work=unary,
            lifecycle=engine.lifecycle,
            catalogue=engine.catalogue,
            assignments=parts.assignments,
            workers=engine.workers,
            heartbeat_interval=_micros(config.heartbeat_interval_s),
        ),
        sessions=sessions,
        operations=OperationCalls(operations=operations, page_tokens=page_tokens),
        page_tokens=page_tokens,
    )
    run_service_pb2_grpc.add_RunServiceServicer_to_server(runs, server)
    return runs


def _storage_told(checks: health.aio.HealthServicer) -> Callable[[bool], None]:
    """Keeps the health check of the storage current."""
    pending: set[asyncio.Task[None]] = set()

    def told(reachable: bool) -> None:
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if reachable
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        setting = asyncio.get_running_loop().create_task(checks.set(STORAGE_CHECK, status))
        pending.add(setting)
        setting.add_done_callback(pending.discard)

    return told


async def _forget(scheduler: Scheduler) -> None:
    while True:
        await asyncio.sleep(_MEMO_INTERVAL_S)
        await scheduler.forget_old_fires()


def _micros(seconds: float) -> Duration:
    return int(seconds * SECOND)
