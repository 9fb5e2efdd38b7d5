"""The demo worker, as a user of the SDK would write one: three handlers and `run`."""

import asyncio
import logging
import sys

from fencepost import Client, Context, Retryable, Worker

_SLOW_STEPS = 4
_SLOW_STEP_S = 1.5


def build_worker(address: str) -> Worker:
    """A worker for the demo jobs of tenant default."""
    worker = Worker(Client(address), queues=["default"], slots=10, display_name="demo")

    @worker.handler("demo.hello")
    async def hello(payload: dict[str, str] | None, context: Context) -> str:
        # People try it with jobs of their own, which need not have a payload.
        name = (payload or {}).get("name", "world")
        context.logger.info("hello, %s", name)
        return f"hello, {name}"

    @worker.handler("demo.flaky")
    async def flaky(payload: object, context: Context) -> str:
        # Fails at the first attempt of every run, and succeeds at the next.
        if context.failure_count == 0:
            context.logger.info("fails on purpose, and is retried")
            raise Retryable("DEMO_FAILURE", "the first attempt always fails")
        return "worked at the second attempt"

    @worker.handler("demo.slow")
    async def slow(payload: object, context: Context) -> str:
        for step in range(1, _SLOW_STEPS + 1):
            await asyncio.sleep(_SLOW_STEP_S)
            context.raise_if_cancelled()
            context.progress(100 * step / _SLOW_STEPS, f"step {step} of {_SLOW_STEPS}")
        return "took its time"

    return worker


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    build_worker(sys.argv[1]).run()
