"""The path without sessions: 32 callers, each with one ClaimRuns and one CompleteRun at a time,
from queued to the history row. The callers are one lean process: raw stubs, no SDK.

Usage: python -m benchmarks.unary [--runs 20000] [--callers 32]
"""

import argparse
import asyncio
import subprocess
import sys
import time
import uuid

import asyncpg
import grpc.aio
import uvloop
from fencepost import Client
from fencepost.v1 import run_service_pb2, run_service_pb2_grpc, worker_pb2

from benchmarks.setting import cpu_seconds, fresh_database, postgres, server

_QUEUE = "tenants/default/queues/default"
_BATCH = 1000
_DEADLINE_S = 40


async def _call(runs: run_service_pb2_grpc.RunServiceStub, left: list[int]) -> None:
    """Claims and completes one run after another until all are done."""
    worker_id = str(uuid.uuid4())
    claim = run_service_pb2.ClaimRunsRequest(
        subscriptions=[worker_pb2.QueueSubscription(queue=_QUEUE)],
        worker_id=worker_id,
        max_runs=1,
    )
    claim.wait.seconds = 1
    while left[0] > 0:
        answer = await runs.ClaimRuns(claim, timeout=_DEADLINE_S)  # type: ignore[misc]
        for run in answer.runs:
            await runs.CompleteRun(  # type: ignore[misc]
                run_service_pb2.CompleteRunRequest(
                    worker_id=worker_id,
                    completion=worker_pb2.Completion(
                        run=run.run, attempt=run.attempt, success=worker_pb2.Success()
                    ),
                ),
                timeout=_DEADLINE_S,
            )
            left[0] -= 1


async def _callers(address: str, callers: int, runs: int) -> None:
    left = [runs]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = run_service_pb2_grpc.RunServiceStub(channel)
        began = time.monotonic()
        await asyncio.gather(*(_call(stub, left) for _ in range(callers)))
        print(time.monotonic() - began, time.process_time())


async def _postgres_cpu(url: str) -> float:
    """What the server's backends used; the benchmark's own connection is left out."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(
            "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
        return sum(cpu_seconds(row["pid"]) for row in rows)
    finally:
        await connection.close()


async def main() -> None:
    """Runs per second, and microseconds of CPU per run of each process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--address", help="be the callers of this server")
    options = parser.parse_args()
    if options.address:
        await _callers(options.address, options.callers, options.runs)
        return
    with postgres() as dsn:
        url = await fresh_database(dsn, "fencepost_bench_unary")
        async with server(url) as (address, pid), Client(address) as client:
            job = await client.create_job("noop", kind="noop")
            made = 0
            while made < options.runs:
                count = min(_BATCH, options.runs - made)
                request = run_service_pb2.EnqueueRunRequest(job=job.name)
                async with grpc.aio.insecure_channel(address) as channel:
                    stub = run_service_pb2_grpc.RunServiceStub(channel)
                    await stub.BatchEnqueueRuns(
                        run_service_pb2.BatchEnqueueRunsRequest(
                            parent="tenants/default", requests=[request] * count
                        )
                    )
                made += count
            before, stored = cpu_seconds(pid), await _postgres_cpu(url)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "benchmarks.unary", "--address", address),
                *("--runs", str(options.runs), "--callers", str(options.callers)),
                stdout=subprocess.PIPE,
            )
            output, _ = await process.communicate()
            seconds, callers_cpu = map(float, output.split())
            server_cpu = cpu_seconds(pid) - before
            postgres_cpu = await _postgres_cpu(url) - stored
            connection = await asyncpg.connect(url)
            done = await connection.fetchval("SELECT count(*) FROM fencepost.job_runs")
            await connection.close()
    if done != options.runs:
        raise SystemExit(f"{done} of {options.runs} runs are in history")
    micros = " ".join(
        f"{name} {cpu / done * 1e6:.0f}"
        for name, cpu in (
            ("server", server_cpu),
            ("postgres", postgres_cpu),
            ("callers", callers_cpu),
        )
    )
    print(
        f"unary, {options.callers} callers: {done / seconds:,.0f} runs/s; "
        f"CPU in microseconds per run: {micros}"
    )


if __name__ == "__main__":
    uvloop.run(main())
