"""What the programs of the Python queues share: their commands, and what their handlers say."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Protocol


class Queue(Protocol):
    """What a program has to do with its queue."""

    async def prepare(self, dsn: str) -> None: ...
    async def fill(self, dsn: str, number: int) -> None: ...
    async def work(self, dsn: str, name: str, handle: Callable[[float], None]) -> None: ...
    async def produce(
        self, dsn: str, loop: Callable[[Callable[[float], Awaitable[None]]], Awaitable[None]]
    ) -> None: ...


def counter(wanted: int) -> Callable[[float], None]:
    """A handler that says `first` and `last` with seconds of the monotonic clock."""
    seen = 0

    def handle(_: float) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            print(f"first {time.monotonic()}", flush=True)
        if seen == wanted:
            print(f"last {time.monotonic()}", flush=True)

    return handle


def stamp(at: float) -> None:
    """A handler that says how many milliseconds ago a moment was."""
    print((time.monotonic() - at) * 1000, flush=True)


async def main(queue: Queue) -> None:
    """Runs `prepare DSN`, `fill DSN N`, `work DSN N`, `stamp DSN` or `produce DSN N MS`."""
    match sys.argv[1:]:
        case ["prepare", dsn]:
            await queue.prepare(dsn)
        case ["fill", dsn, number]:
            await queue.fill(dsn, int(number))
        case ["work", dsn, number]:
            await queue.work(dsn, "noop", counter(int(number)))
        case ["stamp", dsn]:
            await queue.work(dsn, "stamp", stamp)
        case ["produce", dsn, number, pause]:

            async def loop(send: Callable[[float], Awaitable[None]]) -> None:
                for _ in range(int(number)):
                    await send(time.monotonic())
                    await asyncio.sleep(float(pause) / 1000)

            await queue.produce(dsn, loop)
        case other:
            raise SystemExit(f"unknown command {other}")
