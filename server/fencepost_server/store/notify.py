"""NOTIFY and LISTEN on connections of their own, as hints between processes.

Sending is coalesced: one NOTIFY per interval and channel, outside every transaction that
writes, without waiting for the disk. A hint that is lost costs at most a poll interval.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeAlias

import asyncpg
import structlog

from fencepost_server.clock import SECOND, Duration
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import translated

_log = structlog.get_logger("notify")

Received: TypeAlias = Callable[[str, str], None]

# Postgres refuses 8,000 bytes; a longer hint is cut to "look everywhere".
_PAYLOAD_MAX = 7000
_RETRY: Duration = SECOND


class Notifier:
    """Sends hints on `channels` and hands those of other processes to `received`.

    Runs as an async context manager; `hint` never blocks and never fails.
    """

    def __init__(
        self, dsn: str, *, channels: tuple[str, ...], received: Received, interval: Duration
    ) -> None:
        """`received(channel, payload)` is called for every hint that arrives."""
        self._dsn = dsn
        self._channels = channels
        self._received = received
        self._interval = interval
        self._pending: dict[str, set[str]] = {}
        self._ready = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._runner = asyncio.create_task(self._run(), name="notifier")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._runner is not None
        self._runner.cancel()
        await asyncio.gather(self._runner, return_exceptions=True)

    def hint(self, channel: str, parts: set[str]) -> None:
        """Tell other processes about `parts`, soon."""
        pending = self._pending.setdefault(channel, set())
        if len(pending) < _PAYLOAD_MAX:
            pending |= parts
        self._ready.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._connected()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            await asyncio.sleep(_RETRY / SECOND)

    async def _connected(self) -> None:
        """One connection's life: listen, and send what is pending."""
        lost = asyncio.Event()
        async with translated():
            connection = await asyncpg.connect(
                self._dsn,
                timeout=5,
                server_settings={
                    "application_name": "fencepost-notify",
                    "synchronous_commit": "off",
                },
            )
        try:

            def ended(_: object) -> None:
                lost.set()
                self._ready.set()

            connection.add_termination_listener(ended)
            own_pid = connection.get_server_pid()

            def heard(_: object, pid: int, channel: str, payload: object) -> None:
                if pid != own_pid:
                    self._received(channel, str(payload))

            async with translated():
                for channel in self._channels:
                    await connection.add_listener(channel, heard)
                while not lost.is_set():
                    await self._ready.wait()
                    await asyncio.sleep(self._interval / SECOND)
                    self._ready.clear()
                    pending, self._pending = self._pending, {}
                    for channel, parts in pending.items():
                        payload = " ".join(sorted(parts))
                        if len(payload) > _PAYLOAD_MAX:
                            payload = ""
                        await connection.execute("SELECT pg_notify($1, $2)", channel, payload)
        finally:
            async with translated():
                await connection.close(timeout=2)
