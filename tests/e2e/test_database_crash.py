"""A Postgres that crashes in the middle of the work, twice: nothing that was acknowledged is lost,
no attempt is given away a second time, and every run comes to its end.
"""

import asyncio
import time
from datetime import UTC
from pathlib import Path

import asyncpg
import grpc.aio
import pytest
from fencepost.v1 import (
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
    schedule_pb2,
)
from fencepost_server.store.migrate import migrate

from tests.checker import invariants
from tests.checker.history import Key, read_history
from tests.checker.recorder import record
from tests.checker.worker_log import handled_as_recorded, read_worker_logs
from tests.e2e.fleet import Server, fleet, start_worker
from tests.integration.own_postgres import own_postgres

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RUNS = 300
PARENT = "tenants/default"
_ENDED = "SELECT count(*) >= $1 FROM fencepost.job_runs"


async def test_a_database_that_crashes_loses_nothing_that_was_acknowledged(
    postgres_dir: Path, tmp_path: Path
) -> None:
    with own_postgres(postgres_dir, durable=True) as postgres, fleet() as processes:
        await migrate(postgres.dsn)
        await record(postgres.dsn)
        server = Server(postgres.dsn)
        processes.append(server)
        acknowledged = await _enqueue(server.address)
        processes += [
            start_worker(server.address, ["default"], tmp_path / str(number)) for number in range(2)
        ]
        for ended in (40, 120):
            await _until(postgres.dsn, _ENDED, ended)
            await asyncio.to_thread(postgres.crash)
            await asyncio.to_thread(postgres.start)
        await _until(postgres.dsn, _ENDED, RUNS + 20)
        await _pause(server.address)
        await _until(postgres.dsn, "SELECT count(*) <= $1 FROM fencepost.run_queue", 0)
        for process in processes[::-1]:
            assert process.stop() == 0, "\n".join(process.lines[-20:])
        history = await read_history(postgres.dsn)
    assert invariants.always(history) == []
    assert invariants.all_ended(history) == []
    assert handled_as_recorded(history, read_worker_logs(tmp_path)) == []
    assert len(acknowledged) == RUNS
    assert acknowledged - history.steps.keys() == set()
    assert {steps[-1].state for steps in history.steps.values()} == {"succeeded"}


async def _enqueue(address: str) -> set[Key]:
    """A job that fires every second, and runs of another one; the keys of the latter."""
    async with grpc.aio.insecure_channel(address) as channel:
        jobs = job_service_pb2_grpc.JobServiceStub(channel)
        runs = run_service_pb2_grpc.RunServiceStub(channel)
        ticking = job_pb2.Job(
            target=job_pb2.Target(kind="quick"),
            schedule=schedule_pb2.Schedule(overlap_policy=schedule_pb2.OVERLAP_POLICY_ALLOW),
        )
        ticking.schedule.interval.every.FromSeconds(1)
        asked = job_pb2.Job(target=job_pb2.Target(kind="slow"))
        for name, job in (("ticking", ticking), ("asked", asked)):
            await jobs.CreateJob(
                job_service_pb2.CreateJobRequest(parent=PARENT, job_name=name, job=job)
            )
        request = run_service_pb2.EnqueueRunRequest(job=f"{PARENT}/jobs/asked")
        answer = await runs.BatchEnqueueRuns(
            run_service_pb2.BatchEnqueueRunsRequest(parent=PARENT, requests=[request] * RUNS)
        )
    keys = [outcome.response.run.key for outcome in answer.outcomes]
    return {Key(key.job_id, key.scheduled_at.ToDatetime(tzinfo=UTC)) for key in keys}


async def _pause(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        jobs = job_service_pb2_grpc.JobServiceStub(channel)
        await jobs.PauseJob(
            job_service_pb2.PauseJobRequest(name=f"{PARENT}/jobs/ticking"), wait_for_ready=True
        )


async def _until(dsn: str, condition: str, bound: int) -> None:
    """Polls what nobody announces."""
    deadline = time.monotonic() + 120
    connection = await asyncpg.connect(dsn)
    try:
        while not await connection.fetchval(condition, bound):
            assert time.monotonic() < deadline, condition
            await asyncio.sleep(0.1)
    finally:
        await connection.close()
