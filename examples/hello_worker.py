"""A worker with two handlers, one async and one in a thread. Stop it with Ctrl-C: it drains.

Needs a server on localhost:7600; create_job.py and enqueue.py give it something to do.
"""

from __future__ import annotations

import logging

from fencepost import Client, Context, Worker

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
worker = Worker(Client("localhost:7600"), queues=["default"], slots=10)


@worker.handler("hello")
async def hello(name: str | None, ctx: Context) -> str:
    """Async handlers run in the worker's event loop."""
    ctx.logger.info("hello %s, this is attempt %d of %s", name, ctx.attempt, ctx.run_key)
    return f"hello {name or 'world'}"


@worker.handler("hello.sync")
def hello_sync(name: str | None) -> str:
    """Sync handlers run in threads, one for each slot."""
    return f"hello {name or 'world'}"


if __name__ == "__main__":
    worker.run()
