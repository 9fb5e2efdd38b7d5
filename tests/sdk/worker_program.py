"""A worker process for tests that send signals: address and grace come as arguments."""

from __future__ import annotations

import asyncio
import logging
import sys

from fencepost import Client, Timings, Worker

logging.basicConfig(level=logging.WARNING)
timings = Timings(reconnect_base=0.1, stop_wait=1.0)
worker = Worker(Client(sys.argv[1]), slots=2, prefetch=4, grace=float(sys.argv[2]), timings=timings)


@worker.handler("sleep_ms")
async def sleep_ms(ms: int) -> str:
    await asyncio.sleep(ms / 1000)
    return "slept"


@worker.handler("ignore_cancel")
async def ignore_cancel() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


@worker.handler("block_thread")
def block_thread() -> None:
    import time

    time.sleep(3600)


worker.run()
