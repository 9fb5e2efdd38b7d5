"""A server process: what is opened first is closed last."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog
from grpc_health.v1 import health

from fencepost_server.api.serving import ListenError, serve_api, storage_told
from fencepost_server.api.wire_failure import server_failures
from fencepost_server.clock import SECOND, Duration
from fencepost_server.config import Config
from fencepost_server.engine.assembly import build_engine, start_scheduler
from fencepost_server.engine.loops import Loops, when_stored
from fencepost_server.engine.reaper import LeaseKeeper
from fencepost_server.engine.retention import Retention
from fencepost_server.engine.wake import (
    ATTEMPTS_CHANNEL,
    JOBS_CHANNEL,
    LANES_CHANNEL,
    PLACES_CHANNEL,
)
from fencepost_server.store.database import Database
from fencepost_server.store.migrate import MigrationError, check_schema
from fencepost_server.store.notify import Notifier

_log = structlog.get_logger("app")

_CLOCK_INTERVAL: Duration = SECOND
_LEASE_TICK: Duration = SECOND


class StartError(Exception):
    """The server cannot start, and waiting would not help."""


async def serve(config: Config, *, started: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

    `started(port)` is called when calls are answered. Raises StartError, or whatever a part
    of the server failed with.
    """
    _spare_the_collector()
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


def _spare_the_collector() -> None:
    """What was imported stays for good, and a claim makes thousands of objects that are gone with
    it: left alone, the collector would walk all modules again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


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
        engine = build_engine(config, database, storage_told(checks))
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
                channels=(JOBS_CHANNEL, LANES_CHANNEL, PLACES_CHANNEL, ATTEMPTS_CHANNEL),
                received=engine.wakes.heard,
                interval=int(config.notify_interval_s * SECOND),
            )
        )
        loops = await stack.enter_async_context(Loops())
        loops.start("clock", engine.clock_keeper.run(interval=_CLOCK_INTERVAL))
        loops.start("lifecycle", engine.lifecycle.run())
        loops.start("lease_keeper", keeper.run(interval=_LEASE_TICK))
        if "scheduler" in config.roles:
            start_scheduler(config, database, engine, retention, loops, failures=server_failures())
        if "api" in config.roles:
            try:
                await serve_api(config, database, engine, checks, loops, stopping, started)
            except ListenError as error:
                raise StartError(str(error)) from error
        else:
            _log.info("serving", roles=sorted(config.roles))
            await loops.until(stopping)
        _log.info("stopped")
