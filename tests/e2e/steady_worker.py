"""A worker process whose handler of kind "steady" takes 50 ms."""

import asyncio
import logging
import sys

from fencepost import Client, Context, Worker

logging.basicConfig(level=logging.WARNING)
worker = Worker(Client(sys.argv[1]), queues=sys.argv[2].split(","), slots=40)


@worker.handler("steady")
async def steady(ctx: Context) -> None:
    """Takes its time."""
    await asyncio.sleep(0.05)


worker.run()
