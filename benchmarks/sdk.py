"""A worker process of the Python SDK for measurements: handlers that do nothing, or that tell
how long ago the moment in their payload was.

It says `first` and `last` with seconds of the monotonic clock at its first run and at the last
one that was wanted. Usage: python -m benchmarks.sdk work|stamp ADDRESS SESSIONS SLOTS RUNS
"""

import asyncio
import logging
import signal
import sys
import time

import uvloop
from fencepost import Client, Worker

HANDLED = "noop"
_PREFETCH = 500


def command(
    address: str, *, sessions: int, slots: int, runs: int, stamp: bool = False
) -> list[str]:
    """What starts it. `slots` are of all sessions together."""
    return [
        sys.executable,
        "-m",
        "benchmarks.sdk",
        "stamp" if stamp else "work",
        address,
        *map(str, (sessions, slots, runs)),
    ]


async def _work(mode: str, address: str, sessions: int, slots: int, runs: int) -> None:
    logging.basicConfig(level=logging.WARNING)
    seen = 0

    async def noop() -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            print(f"first {time.monotonic()}", flush=True)
        if seen == runs:
            print(f"last {time.monotonic()}", flush=True)

    async def stamp(asked_at: float) -> None:
        print((time.monotonic() - asked_at) * 1000, flush=True)

    each = max(1, slots // sessions)
    workers = [
        Worker(
            Client(address),
            slots=each,
            prefetch=min(_PREFETCH, each) if mode == "work" else 0,
            handle_signals=False,
        )
        for _ in range(sessions)
    ]
    for worker in workers:
        worker.handler(HANDLED)(stamp if mode == "stamp" else noop)

    def leave() -> None:
        for worker in workers:
            worker.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
    await asyncio.gather(*(worker.run_async() for worker in workers))


if __name__ == "__main__":
    chosen, server, *numbers = sys.argv[1:]
    uvloop.run(_work(chosen, server, *map(int, numbers)))
