"""A worker process for fault tests: short and long handlers that say which attempt they were."""

import asyncio
import logging
import sys

from fencepost import Client, Context, Worker

logging.basicConfig(level=logging.WARNING)
address, tenants = sys.argv[1], sys.argv[2].split(",")
worker = Worker(
    Client(address, tenant=tenants[0]),
    queues=[f"tenants/{tenant}/queues/default" for tenant in tenants],
    slots=60,
)


@worker.handler("quick")
async def quick(ctx: Context) -> dict[str, int]:
    await asyncio.sleep(0.005)
    return {"attempt": ctx.attempt}


@worker.handler("slow")
async def slow(ctx: Context) -> dict[str, int]:
    await asyncio.sleep(1.5)
    return {"attempt": ctx.attempt}


worker.run()
