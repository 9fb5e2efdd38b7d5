"""pgqueuer on asyncpg and uvloop, in large batches, its tables logged as by default."""
# mypy: disable-error-code="import-not-found, untyped-decorator, unused-ignore, import-untyped"

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import uvloop
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.core.qm import QueueManager
from pgqueuer.db import AsyncpgPoolDriver
from program import main

_FILL = 5000
_BATCH = 1000


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[Any]:
    async with asyncpg.create_pool(dsn, min_size=2, max_size=4) as pool:
        yield AsyncpgPoolDriver(pool)


class Pgqueuer:
    """See `program.Queue`."""

    async def prepare(self, dsn: str) -> None:
        async with _connected(dsn) as driver:
            await Queries(driver).install()

    async def fill(self, dsn: str, number: int) -> None:
        async with _connected(dsn) as driver:
            queries = Queries(driver)
            for start in range(0, number, _FILL):
                size = min(_FILL, number - start)
                await queries.enqueue(["noop"] * size, [None] * size, [0] * size)

    async def work(self, dsn: str, name: str, handle: Callable[[float], None]) -> None:
        async with _connected(dsn) as driver:
            manager = QueueManager(Queries(driver))

            @manager.entrypoint(name)
            async def handler(job: Any) -> None:
                handle(float(job.payload or 0))

            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, manager.shutdown.set)
            await manager.run(batch_size=_BATCH if name == "noop" else 10)

    async def produce(
        self, dsn: str, loop: Callable[[Callable[[float], Awaitable[None]]], Awaitable[None]]
    ) -> None:
        async with _connected(dsn) as driver:
            queries = Queries(driver)

            async def send(at: float) -> None:
                await queries.enqueue("stamp", str(at).encode())

            await loop(send)


if __name__ == "__main__":
    uvloop.run(main(Pgqueuer()))
