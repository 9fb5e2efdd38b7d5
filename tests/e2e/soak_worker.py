"""A worker process for fault tests: short and long handlers that say which attempt they were."""

import asyncio
import logging
import sys
from pathlib import Path

from fencepost import Client, Context, Worker

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.checker.worker_log import WorkerLog

logging.basicConfig(level=logging.WARNING)
address, tenants, log = sys.argv[1], sys.argv[2].split(","), WorkerLog(Path(sys.argv[3]))
worker = Worker(
    Client(address, tenant=tenants[0]),
    queues=[f"tenants/{tenant}/queues/default" for tenant in tenants],
    slots=60,
)


@worker.handler("quick")
async def quick(ctx: Context) -> dict[str, int]:
    return await handle(ctx, 0.005)


@worker.handler("slow")
async def slow(ctx: Context) -> dict[str, int]:
    return await handle(ctx, 1.5)


async def handle(ctx: Context, seconds: float) -> dict[str, int]:
    """Takes its time, and says when it began and when it came to its end."""
    log.write(run_key=str(ctx.run_key), attempt=ctx.attempt, event="start")
    await asyncio.sleep(seconds)
    log.write(run_key=str(ctx.run_key), attempt=ctx.attempt, event="end")
    return {"attempt": ctx.attempt}


worker.run()
