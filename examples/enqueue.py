"""Enqueues one run and waits for its result, then many at once.

Needs hello_worker.py running.
"""

from __future__ import annotations

import asyncio

from fencepost import AlreadyExists, Client, FencepostError, NewRun


async def main() -> None:
    """Prints the result of one run and the outcome of many."""
    async with Client("localhost:7600") as client:
        try:
            # A job without a schedule runs only when somebody asks for it.
            await client.create_job("greet", kind="hello", queue="default")
        except AlreadyExists:
            print("greet is already there")

        run = await client.enqueue("greet", "Grace", labels={"asked-by": "examples"})
        ended = await client.wait(run, timeout=60)
        print(f"{ended.name}: {ended.result.json}")

        outcomes = await client.enqueue_many(
            NewRun(job="greet", payload=f"number {n}", delay=n / 100) for n in range(2_500)
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, FencepostError)]
        print(f"{len(outcomes) - len(refused)} enqueued, {len(refused)} refused")


if __name__ == "__main__":
    asyncio.run(main())
