"""Enqueue to handler on an idle server: one EnqueueRun every 20 ms, from the start of the call
to the start of the handler in a worker process, by the machine's monotonic clock.

Usage: python -m benchmarks.latency [--runs 500]
"""

import argparse
import asyncio
import subprocess
import sys
import time

import uvloop
from fencepost import Client

from benchmarks.setting import fresh_database, percentile, postgres, server

_WORKER = """
import sys, time, logging
from fencepost import Client, Worker
logging.basicConfig(level=logging.WARNING)
worker = Worker(Client(sys.argv[1]), slots=10)
@worker.handler("stamp")
async def stamp(asked_at: float) -> None:
    print((time.monotonic() - asked_at) * 1000, flush=True)
worker.run()
"""

_WARM = 50


async def main() -> None:
    """Percentiles in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    options = parser.parse_args()
    with postgres() as dsn:
        url = await fresh_database(dsn, "fencepost_bench_latency")
        async with server(url) as (address, _), Client(address) as client:
            job = await client.create_job("stamp", kind="stamp")
            worker = subprocess.Popen(
                [sys.executable, "-c", _WORKER, address], stdout=subprocess.PIPE, text=True
            )
            assert worker.stdout is not None
            lines = worker.stdout
            # The first runs wait for the worker to start, and warm plans and caches.
            for _ in range(_WARM):
                await client.enqueue(job.name, payload=time.monotonic())
            for _ in range(_WARM):
                await asyncio.to_thread(lines.readline)
            calls: list[float] = []
            handed_out = 0
            for _ in range(options.runs):
                asked_at = time.monotonic()
                run = await client.enqueue(job.name, payload=asked_at)
                calls.append((time.monotonic() - asked_at) * 1000)
                # Already with the worker when the call is answered.
                handed_out += run.attempt == 1
                await asyncio.sleep(0.02)
            waits = [float(await asyncio.to_thread(lines.readline)) for _ in range(options.runs)]
            worker.terminate()
            await asyncio.to_thread(worker.wait, 30)
    print(
        f"enqueue to handler, idle, {len(waits)} runs: p50 {percentile(waits, 0.5):.1f} ms, "
        f"p99 {percentile(waits, 0.99):.1f} ms, max {max(waits):.1f} ms; the call alone p50 "
        f"{percentile(calls, 0.5):.1f} ms, p99 {percentile(calls, 0.99):.1f} ms; "
        f"{handed_out} handed out in the commit of their enqueue"
    )


if __name__ == "__main__":
    uvloop.run(main())
