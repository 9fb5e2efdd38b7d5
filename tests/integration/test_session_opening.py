"""How worker sessions open: Hello, Welcome, inventory, and all that breaks a rule."""

import asyncio
import uuid
from typing import Any

import asyncpg
import grpc
import pytest
from fencepost.v1 import worker_pb2
from fencepost_server.api import session as session_module
from fencepost_server.api import work as work_module
from fencepost_server.clock import MILLISECOND
from google.protobuf.duration_pb2 import Duration

from tests.integration.definition_server import Refusal
from tests.integration.running_server import (
    QUEUE,
    RunningServer,
    held,
    hello,
    key_of,
    running,
    success,
)

_INVALID = grpc.StatusCode.INVALID_ARGUMENT


def _columns(run: worker_pb2.Assignment) -> tuple[str, int]:
    key = key_of(run.run)
    return key.job_id, key.scheduled_at


async def refused_hello(server: RunningServer, **values: Any) -> Refusal:
    async with server.stream() as session:
        await session.say(hello=hello(values.pop("worker_id", session.worker_id), **values))
        return await session.refused()


async def test_what_breaks_a_rule_of_the_session_ends_it(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(database_url) as server:
        found: dict[str, Refusal] = {}
        async with server.stream() as session:
            await session.say(credit_limit=5)
            found["credit first"] = await session.refused()
        async with server.stream() as session:
            await session.say(heartbeat=worker_pb2.Heartbeat(seq=1))
            found["heartbeat first"] = await session.refused()
        async with server.stream() as session:
            await session.call.done_writing()
            found["nothing"] = await session.refused()
        async with server.session() as session:
            await session.say(hello=hello(session.worker_id))
            found["second"] = await session.refused()
        async with server.session(credit=5) as session:
            await session.say(credit_limit=4)
            found["falling"] = await session.refused()
        async with server.stream() as session:
            await session.say(hello=hello(session.worker_id), credit_limit=-1)
            found["negative"] = await session.refused()
        monkeypatch.setattr(work_module, "HELLO_WAIT_S", 0.05)
        async with server.stream() as session:
            found["silent"] = await session.refused()
        for how, refusal in found.items():
            assert (refusal.code, refusal.reason) == (_INVALID, "PROTOCOL_VIOLATION"), how
            rule = "S4" if how in ("falling", "negative") else "S1"
            assert refusal.metadata["rule"] == rule, how
        assert found["falling"].fields == ["credit_limit"]
        assert "4" in found["falling"].message
        assert "5" in found["falling"].message


async def test_a_hello_is_checked_field_by_field(database_url: str) -> None:
    async with running(database_url) as server:
        subscription = worker_pb2.QueueSubscription
        cases: list[tuple[str, str, dict[str, Any]]] = [
            ("hello.worker_id", "me", {"worker_id": "me"}),
            ("hello.worker_id", "", {"worker_id": ""}),
            ("hello.worker_id", "A" * 8, {"worker_id": str(uuid.uuid4()).upper()}),
            ("hello.slots", "0", {"slots": 0}),
            ("hello.slots", "5001", {"slots": 5001}),
            ("hello.slots", "-1", {"slots": -1}),
            ("hello.display_name", "n", {"display_name": "n" * 129}),
            ("hello.display_name", "\x00", {"display_name": "\x00"}),
            ("hello.sdk.name", "s", {"sdk": worker_pb2.SdkInfo(name="s" * 129)}),
            ("hello.sdk.host", "\x00", {"sdk": worker_pb2.SdkInfo(host="\x00")}),
            ("hello.labels", "10000", {"labels": {f"l{n}": "" for n in range(10_000)}}),
            ("hello.features", "65", {"features": ["f"] * 65}),
            ("hello.inventory", "5001", {"inventory": [worker_pb2.HeldRun()] * 5001}),
            ("hello.subscriptions", "0", {"subscriptions": []}),
            ("hello.subscriptions", "65", {"subscriptions": [subscription(queue=QUEUE)] * 65}),
            (
                "hello.subscriptions[1].queue",
                QUEUE,
                {"subscriptions": [subscription(queue=QUEUE)] * 2},
            ),
            ("hello.subscriptions[0].queue", "x", {"subscriptions": [subscription(queue="x")]}),
            (
                "hello.subscriptions[0].kinds",
                "a b",
                {"subscriptions": [subscription(queue=QUEUE, kinds=["a b"])]},
            ),
            (
                "hello.subscriptions[0].kinds",
                "513",
                {"subscriptions": [subscription(queue=QUEUE, kinds=["k"] * 513)]},
            ),
            (
                "hello.subscriptions[0].weight",
                "1001",
                {"subscriptions": [subscription(queue=QUEUE, weight=1001)]},
            ),
            (
                "hello.subscriptions[0].max_in_flight",
                "-1",
                {"subscriptions": [subscription(queue=QUEUE, max_in_flight=-1)]},
            ),
        ]
        for field, value, values in cases:
            refusal = await refused_hello(server, **values)
            assert (refusal.code, refusal.reason) == (_INVALID, "INVALID_FIELD"), field
            assert refusal.fields == [field]
            assert value in refusal.metadata["value"] or value == "A" * 8
            assert refusal.metadata["allowed"]
        assert not await server.query("SELECT 1 FROM fencepost.workers")


async def test_queues_and_revisions_must_be_known(database_url: str) -> None:
    async with running(database_url) as server:
        queue = "tenants/default/queues/nowhere"
        refusal = await refused_hello(
            server, subscriptions=[worker_pb2.QueueSubscription(queue=queue)]
        )
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "QUEUE_NOT_FOUND")
        assert refusal.resource == queue
        tenant = "tenants/nobody/queues/default"
        refusal = await refused_hello(
            server, subscriptions=[worker_pb2.QueueSubscription(queue=tenant)]
        )
        assert refusal.code is grpc.StatusCode.NOT_FOUND
        refusal = await refused_hello(server, min_revision=2, max_revision=3)
        assert refusal.code is grpc.StatusCode.FAILED_PRECONDITION
        assert refusal.reason == "UNSUPPORTED_PROTOCOL"
        assert refusal.metadata == {"serverRevisions": "1-1", "workerRevisions": "2-3"}
        for low, high in ((0, 0), (2, 1), (0, 1), (-1, 1)):
            refusal = await refused_hello(server, min_revision=low, max_revision=high)
            assert refusal.reason == "PROTOCOL_VIOLATION"


async def test_a_welcome_says_what_the_worker_must_know(database_url: str) -> None:
    async with (
        running(database_url, heartbeat_interval_s=7) as server,
        server.stream() as session,
    ):
        await session.say(
            hello=hello(
                session.worker_id, max_revision=9, features=["telepathy"], labels={"zone": "a"}
            )
        )
        welcome = await session.hear("welcome")
        assert 0 < len(welcome.session_id) <= 64
        assert 0 < len(welcome.server_id) <= 64
        assert (welcome.revision, list(welcome.features)) == (1, [])
        assert welcome.heartbeat_interval == Duration(seconds=7)
        assert welcome.heartbeat_ack_timeout == Duration(seconds=8)
        assert welcome.max_buffer_time == Duration(seconds=5)
        assert welcome.limits == worker_pb2.ServerLimits(
            max_payload_bytes=262_144,
            max_result_bytes=262_144,
            max_message_bytes=4_194_304,
            max_credit_window=1000,
            max_batch_entries=1000,
            max_held_runs=5000,
        )
        assert not welcome.notices
        await server.until(
            "SELECT state FROM fencepost.workers WHERE session_id = $1 AND slots = 10 "
            "AND display_name = 'tester' AND labels = '{\"zone\": \"a\"}'",
            welcome.session_id,
            want="ready",
        )
        await session.call.done_writing()
        assert await session.ended() is grpc.StatusCode.OK
        await server.until(
            "SELECT state FROM fencepost.workers WHERE session_id = $1",
            welcome.session_id,
            want="disconnected",
        )


async def test_an_inventory_is_renewed_revived_or_refused(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(5)
        async with server.session(credit=5) as first:
            fine, lost, done, stolen, cancelled = await first.runs(5)
            (verdict,) = await first.complete(success(done))
            assert verdict.verdict == worker_pb2.VERDICT_APPLIED
            await first.break_off()
        await server.query("UPDATE fencepost.shard_state SET no_reap_until = fencepost.clock()")
        for run, change in (
            (fine, "lease_until = fencepost.clock() + interval '9 s'"),
            (lost, "lease_until = fencepost.clock() - interval '1 s'"),
            (stolen, "attempt = 2"),
            (
                cancelled,
                "cancel_requested = true, cancel_reason = 'enough', "
                "cancel_by = fencepost.clock() + interval '20 s'",
            ),
        ):
            await server.query(
                f"UPDATE fencepost.run_queue SET {change} WHERE job_id = $1::uuid "  # noqa: S608
                "AND scheduled_at = '1970-01-01Z'::timestamptz + $2 * interval '1 microsecond'",
                *_columns(run),
            )
        await server.until(
            "SELECT state::text FROM fencepost.run_queue WHERE lost_lease_count = 1",
            want="retrying",
        )
        unknown = held(fine)
        unknown.run.job_id = str(uuid.uuid4())
        broken = worker_pb2.HeldRun(attempt=1)
        broken.run.job_id = "no id"
        async with server.stream(worker_id=first.worker_id) as second:
            runs = [held(each) for each in (fine, lost, done, stolen, cancelled)]
            await second.say(hello=hello(second.worker_id, inventory=[*runs, unknown, broken]))
            welcome = await second.hear("welcome")
            notices = {
                (each.run.job_id, key_of(each.run).scheduled_at): each for each in welcome.notices
            }
            assert len(notices) == len(welcome.notices) == 5
            reasons = {
                how: notices[run.run.job_id, key_of(run.run).scheduled_at].lease_lost.reason
                for how, run in (
                    ("done", done),
                    ("stolen", stolen),
                    ("unknown", unknown),
                    ("broken", broken),
                )
            }
            assert reasons == {
                "done": worker_pb2.LEASE_LOST_REASON_ATTEMPT_CLOSED,
                "stolen": worker_pb2.LEASE_LOST_REASON_SUPERSEDED,
                "unknown": worker_pb2.LEASE_LOST_REASON_UNKNOWN_RUN,
                "broken": worker_pb2.LEASE_LOST_REASON_UNKNOWN_RUN,
            }
            asked = notices[cancelled.run.job_id, key_of(cancelled.run).scheduled_at]
            assert asked.cancel_requested.reason == "enough"
            assert 10 < asked.cancel_requested.grace_remaining.seconds <= 20
            rows = await server.query(
                "SELECT state::text, lost_lease_count, lease_until - fencepost.clock() AS left "
                "FROM fencepost.run_queue WHERE attempt = 1"
            )
            assert len(rows) == 3
            for row in rows:
                assert (row["state"], row["lost_lease_count"]) == ("running", 0)
                assert 20 < row["left"].total_seconds() <= 30


async def test_a_welcome_waits_for_runs_that_are_locked(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(1)
        async with server.session(credit=1) as first:
            (run,) = await first.runs(1)
            blocker = await asyncpg.connect(server.dsn)
            try:
                lock = blocker.transaction()
                await lock.start()
                await blocker.fetch("SELECT 1 FROM fencepost.run_queue FOR UPDATE")
                async with server.stream(worker_id=first.worker_id) as second:
                    await second.say(hello=hello(second.worker_id, inventory=[held(run)]))
                    refusal = await second.refused()
                    assert refusal.code is grpc.StatusCode.UNAVAILABLE
                    assert refusal.reason == "STORAGE_UNAVAILABLE"
                ack = await first.beat([held(run)])
                assert [key_of(each) for each in ack.not_renewed] == [key_of(run.run)]
                assert not ack.notices
                await lock.rollback()
            finally:
                await blocker.close()
            async with server.session(worker_id=first.worker_id, inventory=[held(run)]) as second:
                assert not (await second.beat([held(run)])).not_renewed


async def test_a_silent_session_is_ended(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "EXPIRED_AFTER", 200 * MILLISECOND)
    async with running(database_url) as server, server.session() as session:
        refusal = await session.refused()
        assert refusal.code is grpc.StatusCode.UNAVAILABLE
        assert refusal.reason == "SESSION_EXPIRED"


async def test_a_quiet_session_gets_no_runs_until_it_speaks(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "SILENT_AFTER", -1)
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(1)
        async with server.session(credit=1) as session:
            await session.beat()
            assert session.kept("runs") == 0
            monkeypatch.setattr(session_module, "SILENT_AFTER", 15_000 * MILLISECOND)
            assert len(await session.runs(1)) == 1


async def test_sessions_open_side_by_side(database_url: str) -> None:
    async with running(database_url) as server:

        async def one() -> str:
            async with server.stream() as session:
                await session.say(hello=hello(session.worker_id))
                welcome = await session.hear("welcome")
                await session.say(goodbye=worker_pb2.Goodbye())
                assert await session.ended() is grpc.StatusCode.OK
                session_id: str = welcome.session_id
                return session_id

        assert len(set(await asyncio.gather(*(one() for _ in range(20))))) == 20
