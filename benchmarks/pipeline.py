"""The barest form of our own path, as the floor that `delivery` is compared with: a server on
grpc.aio with one writer per stream, runs claimed under the fence, 128 of them in a message,
completions as a delete and an insert into history, verdicts after the commit.

It speaks the worker protocol, so that the lean client can work for it too, on bare tables of
its own; there is one queue, one job, no retry, cap, heartbeat or policy. Durable commits.
Usage: python -m benchmarks.pipeline [--runs 200000] [--rounds 3]
       python -m benchmarks.pipeline work ADDRESS RUNS   (the client's process)
"""

import argparse
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import asyncpg
import grpc.aio
import uvloop
from fencepost.v1 import run_service_pb2, worker_pb2

from benchmarks.measure import Cost, Meter, Worker, copy_database, drained, postmaster_of, wal_place
from benchmarks.pipeline_server import WORK
from benchmarks.setting import median, postgres

WINDOW = 1000
UNFINISHED = "SELECT EXISTS (SELECT FROM pipe_queue)"

TABLES = """
CREATE TABLE pipe_queue (
    job_id uuid, scheduled_at timestamptz, available_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL, claimed_at timestamptz, lease_until timestamptz,
    tenant_id int NOT NULL, queue_id int NOT NULL, kind_id int NOT NULL, version int NOT NULL,
    attempt int NOT NULL DEFAULT 0, state smallint NOT NULL DEFAULT 0, priority smallint NOT NULL,
    worker_id uuid, payload bytea, PRIMARY KEY (job_id, scheduled_at)
) WITH (fillfactor = 70);
CREATE INDEX pipe_queue_ready ON pipe_queue (queue_id, kind_id, priority, available_at)
    WHERE state = 0;
CREATE TABLE pipe_history (
    job_id uuid, scheduled_at timestamptz, available_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL, claimed_at timestamptz, ended_at timestamptz NOT NULL,
    tenant_id int NOT NULL, queue_id int NOT NULL, kind_id int NOT NULL, version int NOT NULL,
    attempt int NOT NULL, state smallint NOT NULL, priority smallint NOT NULL, worker_id uuid,
    payload bytea, PRIMARY KEY (job_id, scheduled_at)
);
"""
FILL = """
INSERT INTO pipe_queue (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id,
                        kind_id, version, priority)
SELECT '0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42', at, at, at, 1, 1, 1, 1, 0
FROM (SELECT date_trunc('second', now()) + i * interval '1 microsecond' AS at
      FROM generate_series(1, {runs}) AS i) AS r
"""


async def work(address: str, runs: int) -> None:
    """The client's process: completes what it gets, until it has seen `runs` verdicts."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(
            WORK,
            request_serializer=run_service_pb2.WorkRequest.SerializeToString,
            response_deserializer=run_service_pb2.WorkResponse.FromString,
        )()
        hello = worker_pb2.Hello(worker_id=str(uuid.uuid4()), min_revision=1, max_revision=1)
        await call.write(run_service_pb2.WorkRequest(hello=hello))
        await call.read()
        await call.write(run_service_pb2.WorkRequest(credit_limit=WINDOW))
        received = done = 0
        while done < runs:
            response = cast(run_service_pb2.WorkResponse, await call.read())
            match response.WhichOneof("event"):
                case "verdicts":
                    done += len(response.verdicts.verdicts)
                case "runs":
                    if not received:
                        print(f"first {time.monotonic()}", flush=True)
                    batch = response.runs
                    received += len(batch.runs)
                    request = run_service_pb2.WorkRequest(
                        credit_limit=received + WINDOW, received_batch_seq=batch.batch_seq
                    )
                    add = request.completions.completions.add
                    for assignment in batch.runs:
                        completion = add()
                        completion.run.CopyFrom(assignment.run)
                        completion.attempt = assignment.attempt
                        completion.success.SetInParent()
                    await call.write(request)
        print(f"last {time.monotonic()}", flush=True)
        await call.write(run_service_pb2.WorkRequest(goodbye=worker_pb2.Goodbye()))
        await call.done_writing()


async def fill(dsn: str, name: str, runs: int) -> None:
    """A database of the pipeline with `runs` queued runs, for copies to be made of."""
    admin = await asyncpg.connect(dsn)
    await admin.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
    await admin.execute(f'CREATE DATABASE "{name}"')
    await admin.close()
    connection = await asyncpg.connect(dsn.rsplit("/", 1)[0] + f"/{name}")
    await connection.execute(TABLES)
    await connection.execute(FILL.format(runs=runs))
    await connection.execute("VACUUM ANALYZE")
    await connection.close()


@asynccontextmanager
async def _serving(url: str) -> AsyncIterator[tuple[str, int]]:
    process = Worker([sys.executable, "-m", "benchmarks.pipeline_server", url])
    try:
        yield await process.line(), process.pid
    finally:
        await process.stop()


async def measure(url: str, *, runs: int, command: list[str] | None = None) -> Cost:
    """Drain a filled copy; `command` is another client, to be told address and runs."""
    async with _serving(url) as (address, pid):
        own = [sys.executable, "-m", "benchmarks.pipeline", "work", address, str(runs)]
        other = [*(command or ()), "--address", address, "--runs", str(runs)]
        connection = await asyncpg.connect(url)
        before = await wal_place(connection)
        worker = Worker(other if command else own)
        try:
            postmaster = await postmaster_of(connection)
            meter = Meter(connection, postmaster, {"server": pid, "workers": worker.pid})
            cost = await drained(
                connection, worker, meter, runs=runs, unfinished=UNFINISHED, wal_from=before
            )
            kept = await connection.fetchval("SELECT count(*) FROM pipe_history")
            assert kept == runs, f"{runs} runs, {kept} in history"
        finally:
            await worker.stop()
            await connection.close()
    return cost


async def main() -> None:
    """Rounds with the Python client, then the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates = []
    with postgres() as dsn:
        await fill(dsn, "fencepost_bench_pipe_full", options.runs)
        for number in range(1, options.rounds + 1):
            url = await copy_database(dsn, "fencepost_bench_pipe_full", "fencepost_bench_pipe")
            cost = await measure(url, runs=options.runs)
            rates.append(cost.rate)
            print(f"round {number}: {cost}", flush=True)
    print(f"pipeline, {options.runs:,} runs: median {median(rates):,.0f} runs/s")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work", address, runs]:
            uvloop.run(work(address, int(runs)))
        case _:
            uvloop.run(main())
