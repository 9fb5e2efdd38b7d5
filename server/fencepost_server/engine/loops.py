"""The long-lived coroutines of a process, and the steps of its start that need the database.

A loop that fails stops the process; a start whose database is away waits for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self

import structlog

from fencepost_server.clock import SECOND, Duration
from fencepost_server.errors import StorageUnavailable

_log = structlog.get_logger("app")

_RETRY: Duration = SECOND // 2


class Loops:
    """The loops of one process; they are cancelled when the `async with` block ends."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run it until the block ends; it must not end by itself."""
        running = asyncio.create_task(work, name=name)
        self._running.add(running)
        running.add_done_callback(self._ended)

    async def until(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set; raises what a loop failed with."""
        stop = asyncio.create_task(stopping.wait())
        failed = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({stop, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            failed.cancel()
        if self._error is not None:
            raise self._error

    def _ended(self, running: asyncio.Task[None]) -> None:
        if running.cancelled() or self._error is not None:
            return
        self._error = running.exception() or AssertionError(f"{running.get_name()} ended")
        _log.error("loop_failed", loop=running.get_name(), exc_info=self._error)
        self._failed.set()


async def when_stored(step: Callable[[], Awaitable[None]], stopping: asyncio.Event) -> bool:
    """Do a step of the start, again and again while the database is away.

    False: `stopping` was set first. Whatever else the step raises passes.
    """
    stop = asyncio.create_task(stopping.wait())
    doing = asyncio.create_task(_repeat(step))
    try:
        await asyncio.wait({stop, doing}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            await doing
            return True
        return False
    finally:
        stop.cancel()
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)


async def _repeat(step: Callable[[], Awaitable[None]]) -> None:
    told = False
    while True:
        try:
            await step()
        except StorageUnavailable as error:
            if not told:
                _log.warning("waiting_for_storage", error=repr(error.__cause__))
                told = True
            await asyncio.sleep(_RETRY / SECOND)
        else:
            return
