"""How sessions end in order: workers that leave, newer sessions, servers that leave."""

import asyncio

import grpc
import pytest
from fencepost.v1 import run_pb2, run_service_pb2, worker_pb2
from fencepost_server.api import work as work_module
from fencepost_server.clock import MILLISECOND, SECOND
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2

from tests.integration.running_server import (
    held,
    hello,
    json_payload,
    key_of,
    keys_of,
    running,
    success,
)

_STATES = "SELECT state::text, attempt FROM fencepost.run_queue ORDER BY scheduled_at"


def bad_entry() -> worker_pb2.HeldRun:
    run = run_pb2.RunKey(job_id="no id")
    return worker_pb2.HeldRun(run=run, attempt=1)


async def test_a_worker_that_drains_gets_no_more(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(3)
        async with server.session(credit=3) as session:
            runs = await session.runs(3)
            await session.say(drain=worker_pb2.WorkerDrain(reason="deploy"), credit_limit=50)
            ack = await session.hear("drain_ack")
            assert ack.last_batch_seq == session.last_seq
            (next_key,) = await server.enqueue(1)
            async with server.session(credit=1) as other:
                (run,) = await other.runs(1)
                assert key_of(run.run) == next_key
                await other.complete(success(run))
            await session.beat([held(each) for each in runs])
            assert session.kept("runs") == 0
            await session.complete(success(runs[0]))
            given_up = held(runs[1])
            given_up.progress.percent = 60
            await session.say(goodbye=worker_pb2.Goodbye(abandoned=[given_up, bad_entry()]))
            assert await session.ended() is grpc.StatusCode.OK
        rows = await server.query(_STATES)
        # Abandoned: free. Received and not named: its lease stands.
        assert [tuple(row) for row in rows] == [("queued", 1), ("running", 1)]
        (row,) = await server.query("SELECT outcome::text FROM fencepost.run_attempts")
        assert row["outcome"] == "released"
        # The next attempt goes on from there.
        (row,) = await server.query(
            "SELECT progress FROM fencepost.run_queue WHERE NOT attempt_open"
        )
        assert type(given_up.progress).FromString(row["progress"]).percent == 60


async def test_a_newer_session_replaces_the_older(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(1)
        async with server.session(credit=5) as older:
            (run,) = await older.runs(1)
            async with server.session(
                credit=5, worker_id=older.worker_id, inventory=[held(run)]
            ) as newer:
                drain = await older.hear("server_drain")
                assert drain.reason == worker_pb2.SERVER_DRAIN_REASON_REPLACED
                assert drain.close_after == Duration(seconds=30)
                keys = await server.enqueue(5)
                assert keys_of(await newer.runs(5)) == keys
                # The older one still answers, and ends without hiding the newer one.
                (verdict,) = await older.complete(success(run))
                assert verdict.verdict == worker_pb2.VERDICT_APPLIED
                await older.beat()
                assert older.kept("runs") == 0
                await older.call.done_writing()
                assert await older.ended() is grpc.StatusCode.OK
                await server.until(
                    "SELECT bool_and(state = 'ready') FROM fencepost.workers "
                    "WHERE worker_id = $1::uuid",
                    newer.worker_id,
                )
            monkeypatch.setattr(work_module, "CLOSE_AFTER", 100 * MILLISECOND)
        async with (
            server.session() as stubborn,
            server.session(worker_id=stubborn.worker_id),
        ):
            refusal = await stubborn.refused()
            assert refusal.code is grpc.StatusCode.UNAVAILABLE
            assert refusal.reason == "SERVER_DRAINING"


async def test_old_sessions_are_asked_to_move(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_module, "SESSION_AGE", 1)
    monkeypatch.setattr(work_module, "_AGE_LOOK_S", 0.05)
    async with running(database_url) as server, server.session() as session:
        drain = await session.hear("server_drain")
        assert drain.reason == worker_pb2.SERVER_DRAIN_REASON_REBALANCE
        await session.beat()


async def test_a_server_that_leaves_drains_its_sessions(database_url: str) -> None:
    async with running(database_url, drain_grace_s=20) as server:
        await server.make_job()
        await server.enqueue(2)
        async with server.session(credit=1) as session, server.session() as idle:
            (run,) = await session.runs(1)
            poll = asyncio.ensure_future(
                server.runs.ClaimRuns(
                    run_service_pb2.ClaimRunsRequest(
                        subscriptions=[
                            worker_pb2.QueueSubscription(
                                queue="tenants/default/queues/default", kinds=["other"]
                            )
                        ],
                        wait=Duration(seconds=30),
                    )
                )
            )
            watch = server.health.Watch(health_pb2.HealthCheckRequest(service=""))
            first = await watch.read()
            assert first.status == health_pb2.HealthCheckResponse.SERVING
            server.stopping.set()
            second = await watch.read()
            assert second.status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            for each in (session, idle):
                drain = await each.hear("server_drain")
                assert drain.reason == worker_pb2.SERVER_DRAIN_REASON_SHUTDOWN
                delay = drain.reconnect_delay
                assert 0 <= delay.seconds * SECOND + delay.nanos // 1000 <= 5 * SECOND
                assert drain.close_after == Duration(seconds=30)
            assert not (await poll).runs
            await idle.say(goodbye=worker_pb2.Goodbye())
            assert await idle.ended() is grpc.StatusCode.OK
            # New sessions are refused, on old connections and on new ones.
            async with server.stream() as late:
                try:
                    await late.say(hello=hello(late.worker_id))
                    await late.say(credit_limit=1)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    pass
                assert await late.ended() in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.CANCELLED,
                )
            # What is under way still gets its answers.
            ack = await session.beat([held(run)])
            assert not ack.not_renewed
            (verdict,) = await session.complete(success(run))
            assert verdict.verdict == worker_pb2.VERDICT_APPLIED
            await session.say(credit_limit=10)
            await session.beat()
            assert session.kept("runs") == 0
            assert not server.serving.done()
            await session.call.done_writing()
            assert await session.ended() is grpc.StatusCode.OK
            await asyncio.wait_for(server.serving, 10)
        rows = await server.query(_STATES)
        assert [tuple(row) for row in rows] == [("queued", 0)]


async def test_a_server_leaves_although_workers_stay(database_url: str) -> None:
    async with running(database_url, drain_grace_s=0.3) as server:
        await server.make_job(payload=json_payload("1"))
        await server.enqueue(1)
        async with server.session(credit=1) as session:
            await session.runs(1, receipt=False)
            server.stopping.set()
            assert await session.ended() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK)
            await asyncio.wait_for(server.serving, 10)
        # Settled before the process left.
        (row,) = await server.query(
            "SELECT undelivered, lease_until - fencepost.clock() FROM fencepost.run_queue"
        )
        assert row[0]
        assert row[1].total_seconds() <= 5
        (row,) = await server.query("SELECT state::text FROM fencepost.workers")
        assert row["state"] == "disconnected"
