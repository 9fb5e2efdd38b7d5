"""Runs per second from queued to durably completed, through worker sessions, no-op handler.

Server, worker (the Python SDK) and Postgres are processes of one machine.
Usage: python -m benchmarks.delivery [--runs 50000] [--workers 1] [--slots 500] [--rounds 3]
"""

import argparse
import asyncio
import subprocess
import sys
import time

import asyncpg
import uvloop
from fencepost import Client, NewRun

from benchmarks.setting import cpu_seconds, fresh_database, median, postgres, server

_WORKER = """
import sys, logging
from fencepost import Client, Worker
logging.basicConfig(level=logging.WARNING)
worker = Worker(Client(sys.argv[1]), slots=int(sys.argv[2]), prefetch=int(sys.argv[3]))
@worker.handler("noop")
async def noop() -> None:
    return None
worker.run()
"""


async def _round(dsn: str, options: argparse.Namespace) -> tuple[float, float]:
    """Runs per second enqueued, and completed from the start of the workers."""
    url = await fresh_database(dsn, "fencepost_bench_delivery")
    probe = await asyncpg.connect(url)
    async with server(url) as (address, pid), Client(address) as client:
        job = await client.create_job("noop", kind="noop")
        started = time.perf_counter()
        made = await client.enqueue_many(NewRun(job=job.name) for _ in range(options.runs))
        enqueued = options.runs / (time.perf_counter() - started)
        assert len(made) == options.runs
        command = [
            sys.executable,
            "-c",
            _WORKER,
            address,
            str(options.slots),
            str(options.prefetch),
        ]
        workers = [subprocess.Popen(command) for _ in range(options.workers)]
        try:
            while not await probe.fetchval("SELECT count(*) FROM fencepost.job_runs"):
                await asyncio.sleep(0.01)
            started = time.perf_counter()
            first = await probe.fetchval("SELECT count(*) FROM fencepost.job_runs")
            used = [cpu_seconds(each) for each in (pid, *(w.pid for w in workers))]
            while await probe.fetchval("SELECT EXISTS (SELECT FROM fencepost.run_queue)"):
                await asyncio.sleep(0.02)
            left = options.runs - first
            completed = left / (time.perf_counter() - started)
            spent = [cpu_seconds(each) for each in (pid, *(w.pid for w in workers))]
            micros = [(b - a) / left * 1e6 for a, b in zip(used, spent, strict=True)]
            print(f"  CPU per run: server {micros[0]:.0f} µs, workers {sum(micros[1:]):.0f} µs")
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                await asyncio.to_thread(worker.wait, 30)
    ended = await probe.fetchval(
        "SELECT count(*) FROM fencepost.job_runs WHERE state = 'succeeded' AND attempt = 1"
    )
    assert ended == options.runs, f"{options.runs} runs, {ended} succeeded at the first attempt"
    await probe.close()
    return enqueued, completed


async def main() -> None:
    """Rounds, then medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates: list[float] = []
    enqueues: list[float] = []
    with postgres() as dsn:
        for number in range(1, options.rounds + 1):
            enqueued, completed = await _round(dsn, options)
            rates.append(completed)
            enqueues.append(enqueued)
            print(f"round {number}: {completed:,.0f} runs/s completed, {enqueued:,.0f}/s enqueued")
    print(
        f"delivery, {options.runs:,} runs, {options.workers} worker(s) of {options.slots} slots: "
        f"median {median(rates):,.0f} runs/s; enqueue median {median(enqueues):,.0f} runs/s"
    )


if __name__ == "__main__":
    uvloop.run(main())
