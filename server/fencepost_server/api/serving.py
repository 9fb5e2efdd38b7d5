"""Puts the API of one process together and serves it until the process is to leave.

It leaves in the order of protocol §6: health, GOAWAY, drain of sessions, answers to what is
under way.
"""

import asyncio
import uuid
from collections.abc import Callable
from importlib.metadata import version

import grpc.aio
import structlog
from fencepost.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    job_service_pb2,
    job_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
)
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fencepost_server.api.admin import AdminServicer
from fencepost_server.api.dead_letter_calls import DeadLetterCalls
from fencepost_server.api.explain_calls import ExplainCalls, subscriptions_of
from fencepost_server.api.fire_calls import FireCalls
from fencepost_server.api.jobs import JobServicer
from fencepost_server.api.limits import MESSAGE_BYTES_MAX
from fencepost_server.api.operation_calls import OperationCalls
from fencepost_server.api.page_tokens import PageTokens
from fencepost_server.api.plain_batch import PlainBatchCalls
from fencepost_server.api.runs import RunServicer
from fencepost_server.api.session import SessionParts
from fencepost_server.api.settlement import Settlement
from fencepost_server.api.status import StatusInterceptor
from fencepost_server.api.unary_calls import UnaryCalls
from fencepost_server.api.undecodable import UndecodableInterceptor
from fencepost_server.api.watch_calls import WatchCalls
from fencepost_server.api.wire_assignment import Assignments
from fencepost_server.api.wire_run import read_remembered, write_enqueued, write_remembered
from fencepost_server.api.work import WorkSessions
from fencepost_server.clock import DAY, SECOND, Duration
from fencepost_server.config import Config
from fencepost_server.engine.assembly import Engine
from fencepost_server.engine.backfill import Operations
from fencepost_server.engine.bulk import BulkUpdates
from fencepost_server.engine.dead_letters import DeadLetters
from fencepost_server.engine.enqueue import Enqueues
from fencepost_server.engine.explain_run import RunExplanations
from fencepost_server.engine.forecast import Forecasts
from fencepost_server.engine.jobs import Jobs
from fencepost_server.engine.ledger import Ledger
from fencepost_server.engine.loops import Loops, when_stored
from fencepost_server.engine.notices import NoticeBoard
from fencepost_server.engine.plain_enqueue import PlainEnqueues
from fencepost_server.engine.run_reads import RunReads
from fencepost_server.engine.single_enqueue import Answers, SingleEnqueues
from fencepost_server.engine.unary_work import UnaryWork
from fencepost_server.engine.workers import WorkerRegistry
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.admin import AdminStore
from fencepost_server.store.calendars import CalendarStore
from fencepost_server.store.database import Database

_log = structlog.get_logger("app")

_SERVICES = (
    job_service_pb2.DESCRIPTOR.services_by_name["JobService"].full_name,
    run_service_pb2.DESCRIPTOR.services_by_name["RunService"].full_name,
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)
STORAGE_CHECK = "fencepost.storage"
_WORKERS_INTERVAL: Duration = SECOND
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


class ListenError(Exception):
    """The address cannot be listened on."""


async def serve_api(
    config: Config,
    database: Database,
    engine: Engine,
    checks: health.aio.HealthServicer,
    loops: Loops,
    stopping: asyncio.Event,
    started: Callable[[int], None] | None,
) -> None:
    """Serves until `stopping` is set, then drains. Raises ListenError, or what a loop failed
    with. `started(port)` is called when calls are answered.
    """
    settle = Settlement(lifecycle=engine.lifecycle)
    notices = NoticeBoard(lifecycle=engine.lifecycle)
    engine.wakes.attempts_woken.append(notices.affected)
    engine.lifecycle.places_freed.append(engine.dispatcher.places_freed)
    parts = SessionParts(
        clock=database.clock,
        lifecycle=engine.lifecycle,
        dispatcher=engine.dispatcher,
        workers=engine.workers,
        assignments=Assignments(),
        settle=settle,
        notices=notices,
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
        raise ListenError(f"cannot listen on {config.listen}: {error}") from error
    loops.start("dispatcher", engine.dispatcher.run())
    loops.start("workers", engine.workers.run(interval=_WORKERS_INTERVAL))
    loops.start("rebalance", sessions.rebalance())
    loops.start("watch_sessions", sessions.watch())
    loops.start("watches", engine.watches.run())
    loops.start("changes", engine.watches.prune_run())
    loops.start("notices", notices.run())
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
        await _settled(runs, sessions, unary, engine.workers)


async def _settled(
    runs: RunServicer, sessions: WorkSessions, unary: UnaryWork, workers: WorkerRegistry
) -> None:
    """Until what workers left behind is stored; leases run out by themselves if it cannot be."""
    try:
        async with asyncio.timeout(_SETTLE_MAX_S):
            await runs.finish()
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
        queue_changed=engine.wakes.look_everywhere,
        catalogue=engine.catalogue,
        clock=database.clock,
        page_tokens=page_tokens,
        forecasts=Forecasts(database=database, clock=database.clock),
        calendars=CalendarStore(database=database),
        version=version("fencepost-server"),
        history_kept=config.history_retention_days * DAY,
    )
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    reads = RunReads(
        database=database, catalogue=engine.catalogue, wake=engine.wakes, waits=engine.waits
    )
    enqueues = Enqueues(
        database=database, catalogue=engine.catalogue, specs=engine.specs, wake=engine.wakes
    )
    runs = RunServicer(
        enqueues=enqueues,
        singles=SingleEnqueues(
            database=database,
            catalogue=engine.catalogue,
            specs=engine.specs,
            wake=engine.wakes,
            handouts=engine.handouts,
            enqueues=enqueues,
            answers=Answers(
                encode=write_enqueued, remember=write_remembered, recall=read_remembered
            ),
        ),
        reads=reads,
        unary=UnaryCalls(
            work=unary,
            lifecycle=engine.lifecycle,
            catalogue=engine.catalogue,
            assignments=parts.assignments,
            workers=engine.workers,
            heartbeat_interval=_micros(config.heartbeat_interval_s),
        ),
        sessions=sessions,
        operations=OperationCalls(
            operations=operations,
            bulk=BulkUpdates(database=database, catalogue=engine.catalogue),
            page_tokens=page_tokens,
        ),
        dead_letters=DeadLetterCalls(
            dead_letters=DeadLetters(
                database=database, catalogue=engine.catalogue, specs=engine.specs, wake=engine.wakes
            )
        ),
        watching=WatchCalls(
            watches=engine.watches,
            reads=reads,
            catalogue=engine.catalogue,
            page_tokens=page_tokens,
        ),
        explaining=ExplainCalls(
            explanations=RunExplanations(
                database=database,
                clock=database.clock,
                reads=reads,
                subscriptions_of=subscriptions_of,
            )
        ),
        page_tokens=page_tokens,
    )
    run_service_pb2_grpc.add_RunServiceServicer_to_server(runs, server)
    PlainBatchCalls(
        enqueues=PlainEnqueues(
            database=database, catalogue=engine.catalogue, specs=engine.specs, wake=engine.wakes
        ),
        otherwise=runs.BatchEnqueueRuns,
    ).add_to_server(server)
    return runs


def storage_told(checks: health.aio.HealthServicer) -> Callable[[bool], None]:
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


def _micros(seconds: float) -> Duration:
    return int(seconds * SECOND)
