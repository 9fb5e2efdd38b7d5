"""A TCP proxy between worker and fake server that can go silent without closing anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Passes bytes both ways until `freeze`; connections made later pass again."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._open: list[asyncio.Event] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""
        self.connections = 0

    def freeze(self) -> None:
        """Swallows everything on today's connections, both ways, from now on."""
        for passing in self._open:
            passing.clear()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from the worker."""
        self.connections += 1
        passing = asyncio.Event()
        passing.set()
        self._open.append(passing)
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            pump = asyncio.create_task(_pump(source, sink, passing))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def close(self) -> None:
        """Ends every connection."""
        for pump in list(self._pumps):
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, passing: asyncio.Event
) -> None:
    try:
        while data := await source.read(65536):
            if passing.is_set():
                sink.write(data)
                await sink.drain()
    except ConnectionError:
        return
    finally:
        sink.close()
        with suppress(ConnectionError):
            await sink.wait_closed()


@asynccontextmanager
async def proxying(target: str) -> AsyncIterator[Proxy]:
    """A proxy on a free port in front of `target`."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
