"""A running server whose Postgres goes away and comes back, or is not there from the start."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from fencepost.v1 import (
    job_pb2,
    job_service_pb2,
    run_service_pb2,
    schedule_pb2,
    worker_pb2,
)
from fencepost_server.store.migrate import migrate
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from tests.checker import invariants
from tests.checker.history import read_history
from tests.checker.recorder import record
from tests.integration.own_postgres import OwnPostgres, own_postgres
from tests.integration.running_server import (
    QUEUE,
    RunningServer,
    held,
    hello,
    key_of,
    running,
    success,
    until,
)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_ANSWER_S = 8.0


@pytest.fixture(scope="module")
def module_storage() -> Iterator[OwnPostgres]:
    """A migrated Postgres in a directory that the user Postgres runs as can enter."""
    with tempfile.TemporaryDirectory(prefix="fencepost-test-") as path:
        Path(path).chmod(0o711)
        with own_postgres(Path(path)) as postgres:
            asyncio.run(migrate(postgres.dsn))
            yield postgres


@pytest.fixture
def storage(module_storage: OwnPostgres) -> Iterator[OwnPostgres]:
    """The same, which the test may stop and start; it runs again afterwards."""
    yield module_storage
    module_storage.start()


def calls(server: RunningServer, run: worker_pb2.Assignment) -> dict[str, Callable[[], Any]]:
    """Calls that cannot be answered without the database."""
    job, name = "tenants/default/jobs/mail", f"tenants/default/jobs/{run.run.job_id}/runs/"
    name += "2026-01-01T00:00:00Z"
    requests, jobs, runs = run_service_pb2, server.jobs, server.runs
    subscriptions = [worker_pb2.QueueSubscription(queue=QUEUE)]
    return {
        "GetJob": lambda: jobs.GetJob(job_service_pb2.GetJobRequest(name=job)),
        "ListJobs": lambda: jobs.ListJobs(
            job_service_pb2.ListJobsRequest(parent="tenants/default")
        ),
        "CreateJob": lambda: jobs.CreateJob(
            job_service_pb2.CreateJobRequest(
                parent="tenants/default",
                job_name="new",
                job=job_pb2.Job(target=job_pb2.Target(kind="mail.send")),
            )
        ),
        "EnqueueRun": lambda: runs.EnqueueRun(requests.EnqueueRunRequest(job=job)),
        "GetRun": lambda: runs.GetRun(requests.GetRunRequest(name=name)),
        "ListRuns": lambda: runs.ListRuns(requests.ListRunsRequest(parent="tenants/default")),
        "WaitRun": lambda: runs.WaitRun(requests.WaitRunRequest(name=name)),
        "ClaimRuns": lambda: runs.ClaimRuns(
            requests.ClaimRunsRequest(subscriptions=subscriptions, wait=Duration(seconds=1))
        ),
        "CompleteRun": lambda: runs.CompleteRun(
            requests.CompleteRunRequest(completion=success(run))
        ),
    }


async def unavailable(call: Callable[[], Awaitable[Any]]) -> None:
    """The call answers soon, that the database is away and when to try again."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asyncio.wait_for(call(), _ANSWER_S)
    error = refused.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE, error
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(raw, bytes)
    status = status_pb2.Status.FromString(raw)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(retry)
    assert info.reason == "STORAGE_UNAVAILABLE"
    assert retry.retry_delay.ToMilliseconds() > 0


async def health_is(server: RunningServer, status: int) -> None:
    async def is_so() -> bool:
        return await server.storage_health() == status

    await until(is_so, what=f"the storage's health is {status}")


async def test_everything_comes_back_by_itself(storage: OwnPostgres) -> None:
    dsn = storage.dsn
    await record(dsn)
    async with running(dsn, claim_poll_s=20) as server, running(dsn) as other:
        await server.make_job()
        often = schedule_pb2.Schedule(
            interval=schedule_pb2.IntervalSpec(every=Duration(seconds=1)),
            overlap_policy=schedule_pb2.OVERLAP_POLICY_ALLOW,
        )
        ticking = await server.make_job(
            "ticking", schedule=often, target=job_pb2.Target(kind="tick")
        )
        await server.enqueue(2)
        mails = worker_pb2.QueueSubscription(queue=QUEUE, kinds=["mail.send"])
        async with server.session(credit=2, subscriptions=[mails]) as session:
            kept, ended = await session.runs(2)
            await health_is(server, _SERVING)
            storage.stop()
            await health_is(server, _NOT_SERVING)
            await asyncio.gather(*map(unavailable, calls(server, kept).values()))
            answer = await server.runs.BatchCompleteRuns(
                run_service_pb2.BatchCompleteRunsRequest(completions=[success(kept)])
            )
            assert [each.verdict for each in answer.verdicts] == [worker_pb2.VERDICT_RETRY]
            async with server.stream() as late:
                await late.say(hello=hello(late.worker_id, inventory=[held(kept)]))
                refusal = await late.refused()
                assert (refusal.code, refusal.reason) == (
                    grpc.StatusCode.UNAVAILABLE,
                    "STORAGE_UNAVAILABLE",
                )
            ack = await session.beat([held(kept)])
            assert [key_of(each) for each in ack.not_renewed] == [key_of(kept.run)]
            (verdict,) = await session.complete(success(ended))
            assert verdict.verdict == worker_pb2.VERDICT_RETRY
            # The other services are as healthy as before: the process itself is fine.
            assert await server.check("") == _SERVING
            storage.start()
            await health_is(server, _SERVING)
            await health_is(other, _SERVING)
            # The session never ended, and what it had to say again is taken.
            (verdict,) = await session.complete(success(ended))
            assert verdict.verdict == worker_pb2.VERDICT_APPLIED
            ack = await session.beat([held(kept)])
            assert not ack.not_renewed
            assert not ack.notices
            await server.until(
                "SELECT no_reap_until > fencepost.clock() + interval '20 s' "
                "FROM fencepost.shard_state"
            )
            (row,) = await server.query("SELECT fencepost.clock() AS now")
            await server.until(
                "SELECT count(*) > 0 FROM fencepost.run_queue WHERE job_id = $1::uuid "
                "AND created_at > $2",
                ticking.job_id,
                row["now"],
            )
            await server.until(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fencepost-notify'",
                want=2,
            )
            await session.say(credit_limit=4)
            await server.enqueue(1)
            assert len(await session.runs(1)) == 1
            # A run made by the other server comes by its hint, long before the next poll.
            keys = await other.enqueue(1)
            (hinted,) = await asyncio.wait_for(session.runs(1), 10)
            assert key_of(hinted.run) == keys[0]
    assert invariants.always(await read_history(dsn)) == []


async def test_a_server_leaves_while_its_storage_is_away(storage: OwnPostgres) -> None:
    async with running(storage.dsn, drain_grace_s=0.5) as server:
        await server.make_job("leaving", target=job_pb2.Target(kind="leave"))
        await server.enqueue(1, job="leaving")
        kind = worker_pb2.QueueSubscription(queue=QUEUE, kinds=["leave"])
        async with server.session(credit=1, subscriptions=[kind]) as session:
            await session.runs(1, receipt=False)
            storage.stop()
            server.stopping.set()
            drain = await session.hear("server_drain")
            assert drain.reason == worker_pb2.SERVER_DRAIN_REASON_SHUTDOWN
            await asyncio.wait_for(server.serving, 20)
            assert server.serving.exception() is None


async def test_a_server_waits_for_its_storage(storage: OwnPostgres) -> None:
    storage.stop()
    start = asyncio.get_running_loop().call_later(0.7, storage.start)
    async with running(storage.dsn) as server:
        assert start.when() < asyncio.get_running_loop().time()
        assert (await server.make_job("late")).name == "tenants/default/jobs/late"
