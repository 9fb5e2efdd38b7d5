"""Runs on their way to workers: credits, batches, receipts, and what a broken stream leaves."""

from collections import Counter

import pytest
from fencepost.v1 import admin_service_pb2, job_pb2, run_service_pb2, worker_pb2
from fencepost_server.api import session as session_module
from fencepost_server.api import settlement as settlement_module
from fencepost_server.clock import MILLISECOND, SECOND

from tests.integration.running_server import (
    QUEUE,
    RunningServer,
    held,
    json_payload,
    key_of,
    keys_of,
    running,
    success,
)

_RUNNING = "SELECT count(*) FROM fencepost.run_queue WHERE state = 'running'"


async def make_queue(server: RunningServer, name: str) -> str:
    """A second queue and a job whose runs go there."""
    await server.admin.CreateQueue(
        admin_service_pb2.CreateQueueRequest(parent="tenants/default", queue_name=name)
    )
    queue = f"tenants/default/queues/{name}"
    await server.make_job(name, target=job_pb2.Target(queue=queue, kind="mail.send"))
    return queue


async def test_no_more_runs_than_the_ceiling(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        keys = await server.enqueue(12)
        async with server.session(credit=3) as first:
            got = await first.runs(3)
            # A full round of the dispatcher, in which the first worker has no credit.
            async with server.session(credit=2) as second:
                others = await second.runs(2)
                assert keys_of(got) + keys_of(others) == keys[:5]
            await first.complete(*map(success, got))
            await first.beat(credit_limit=3)
            assert first.kept("runs") == 0
            await first.say(credit_limit=4)
            (more,) = await first.runs(1)
            assert key_of(more.run) == keys[5]
            await first.beat()
            assert (first.received, first.kept("runs")) == (4, 0)


async def test_the_window_is_a_thousand_runs(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        for _ in range(2):
            await server.enqueue(600)
        async with server.session(credit=2**63 - 1) as session:
            got = await session.runs(1000, receipt=False)
            await session.beat()
            assert (len(got), session.kept("runs")) == (1000, 0)
            assert (await server.query(_RUNNING))[0][0] == 1000
            # A receipt alone moves the window on.
            await session.say(received_batch_seq=1)
            first_batch = 1000 - sum(1 for _ in got[128:])
            more = await session.runs(first_batch, receipt=False)
            assert session.received == 1000 + len(more) == 1000 + first_batch


async def test_two_workers_share_the_backlog(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        async with server.session(credit=10) as first, server.session(credit=10) as second:
            keys = await server.enqueue(20)
            got = await first.runs(10), await second.runs(10)
            assert sorted(keys_of(got[0]) + keys_of(got[1])) == sorted(keys)
            assert {len(each) for each in got} == {10}


async def test_kinds_filter_what_a_worker_gets(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.make_job("sms", target=job_pb2.Target(kind="sms.send"))
        mails, texts = await server.enqueue(2), await server.enqueue(2, job="sms")
        kinds = worker_pb2.QueueSubscription(queue=QUEUE, kinds=["sms.send", "never.seen"])
        async with server.session(credit=10, subscriptions=[kinds]) as picky:
            got = await picky.runs(2)
            assert keys_of(got) == texts
            assert {each.kind for each in got} == {"sms.send"}
            async with server.session(credit=10) as any_kind:
                assert keys_of(await any_kind.runs(2)) == mails
            await picky.beat()
            assert picky.kept("runs") == 0


async def test_max_in_flight_bounds_one_queue(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        fast = await make_queue(server, "fast")
        await server.enqueue(5)
        await server.enqueue(5, job="fast")
        subscriptions = [
            worker_pb2.QueueSubscription(queue=QUEUE, max_in_flight=2),
            worker_pb2.QueueSubscription(queue=fast),
        ]
        async with server.session(credit=20, subscriptions=subscriptions) as session:
            got = await session.runs(7)
            assert Counter(each.queue for each in got) == {QUEUE: 2, fast: 5}
            await session.beat()
            assert session.kept("runs") == 0
            bounded = [each for each in got if each.queue == QUEUE]
            await session.complete(success(bounded[0]))
            (fourth,) = await session.runs(1)
            assert fourth.queue == QUEUE
            # One ends by a call instead: two full inventories without it free its place.
            await server.runs.CompleteRun(
                run_service_pb2.CompleteRunRequest(completion=success(bounded[1]))
            )
            for seq in (101, 102):
                await session.say(
                    heartbeat=worker_pb2.Heartbeat(
                        seq=seq, runs=[held(fourth)], complete_inventory=True
                    )
                )
                assert (await session.hear("heartbeat_ack")).seq == seq
            (fifth,) = await session.runs(1)
            assert fifth.queue == QUEUE


async def test_weights_share_a_workers_credit(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        heavy = await make_queue(server, "heavy")
        await server.enqueue(100)
        await server.enqueue(100, job="heavy")
        subscriptions = [
            worker_pb2.QueueSubscription(queue=QUEUE, weight=1),
            worker_pb2.QueueSubscription(queue=heavy, weight=3),
        ]
        async with server.session(subscriptions=subscriptions) as session:
            # Both queues are known to have runs before there is credit for one.
            await session.beat()
            await session.say(credit_limit=40)
            count = Counter(each.queue for each in await session.runs(40))
            assert sum(count.values()) == 40
            assert count[heavy] > count[QUEUE] >= 5


async def test_batches_are_bounded_in_bytes(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        sizes = [100_000, 100_000, 100_000, 250_000, 250_000, 10, 10]
        keys = []
        for size in sizes:
            payload = json_payload('"' + "x" * size + '"')
            keys += await server.enqueue(1, payload=payload)
        async with server.session(credit=10) as session:
            got = await session.runs(len(sizes))
            assert keys_of(got) == keys
            assert [len(each.payload.json) - 2 for each in got] == sizes
            assert session.last_seq >= 4


async def test_what_a_broken_stream_held_goes_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "RECEIPT_LAG_MAX", 60 * SECOND)
    monkeypatch.setattr(session_module, "WRITE_WAIT_MAX", 60 * SECOND)
    async with running(database_url) as server:
        await server.make_job(payload=json_payload('"' + "x" * 200_000 + '"'))
        await server.enqueue(100)
        async with server.session(credit=100, read=False) as session:
            await server.until(_RUNNING, want=100)
            # From here on no more than three batches are taken from the stream: all others are
            # more than its windows hold.
            session.read(ahead=1)
            await session.hear("welcome")
            batch = await session.hear("runs")
            (received,) = batch.runs
            await session.say(
                received_batch_seq=batch.batch_seq,
                heartbeat=worker_pb2.Heartbeat(seq=1, runs=[held(received)]),
            )
            await server.until(
                "SELECT count(*) = 1 FROM fencepost.run_queue "
                "WHERE lease_until > claimed_at + lease_s * interval '1 second'"
            )
            await session.break_off()
            # Unwritten: free at once. Written: a short lease. Received: untouched.
            await server.until(
                "SELECT count(*) > 0 FROM fencepost.run_queue WHERE state = 'queued'"
            )
            await server.until("SELECT bool_or(undelivered) FROM fencepost.run_queue")
            rows = await server.query(
                "SELECT state::text, undelivered, count(*), "
                "min(lease_until - fencepost.clock()) AS least, "
                "max(lease_until - fencepost.clock()) AS most, "
                "sum(failure_count + lost_lease_count) AS budget "
                "FROM fencepost.run_queue GROUP BY 1, 2"
            )
            found = {(row["state"], row["undelivered"]): row for row in rows}
            assert found["running", False]["count"] == 1
            assert found["running", False]["least"].total_seconds() > 20
            assert found["running", True]["count"] >= 1
            assert 3 < found["running", True]["most"].total_seconds() <= 5
            assert found["queued", False]["count"] >= 1
            assert sum(row["count"] for row in rows) == 100
            assert sum(row["budget"] for row in rows) == 0
            (row,) = await server.query(
                "SELECT count(*), array_agg(DISTINCT outcome::text) AS outcomes "
                "FROM fencepost.run_attempts"
            )
            assert row["count"] == found["queued", False]["count"]
            assert row["outcomes"] == ["undelivered"]


async def test_a_run_without_receipt_is_soon_free_again(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement_module, "UNRECEIPTED_FUSE", 200 * MILLISECOND)
    async with running(database_url) as server:
        await server.make_job()
        keys = await server.enqueue(1)
        await server.query("UPDATE fencepost.shard_state SET no_reap_until = fencepost.clock()")
        async with server.session(credit=1) as first:
            await first.runs(1, receipt=False)
            await first.break_off()
        async with server.session(credit=1) as second:
            (again,) = await second.runs(1)
            assert ([key_of(again.run)], again.attempt) == (keys, 2)
            (row,) = await server.query(
                "SELECT failure_count + lost_lease_count FROM fencepost.run_queue"
            )
            assert row[0] == 0
            (row,) = await server.query("SELECT outcome::text FROM fencepost.run_attempts")
            assert row["outcome"] == "undelivered"


async def test_a_worker_may_say_that_it_has_a_run_after_all(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(1)
        async with server.session(credit=1) as first:
            (run,) = await first.runs(1, receipt=False)
            await first.break_off()
        await server.until("SELECT undelivered FROM fencepost.run_queue")
        async with server.session(worker_id=first.worker_id, inventory=[held(run)]) as second:
            (row,) = await server.query(
                "SELECT undelivered, lease_until - fencepost.clock() FROM fencepost.run_queue"
            )
            assert not row[0]
            assert row[1].total_seconds() > 20
            (verdict,) = await second.complete(success(run))
            assert verdict.verdict == worker_pb2.VERDICT_APPLIED


async def test_runs_nobody_reads_are_taken_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "WRITE_WAIT_MAX", 50 * MILLISECOND)
    monkeypatch.setattr(session_module, "RECEIPT_LAG_MAX", 100 * MILLISECOND)
    async with running(database_url) as server:
        await server.make_job(payload=json_payload('"' + "x" * 200_000 + '"'))
        keys = await server.enqueue(100)
        async with server.session(credit=100, read=False) as slow:
            await server.until(_RUNNING, want=100)
            # What was not yet written goes to somebody who reads; nothing more comes here
            # before a receipt.
            async with server.session(credit=100) as fast:
                got = await fast.runs(1)
                slow.read()
                await slow.hear("welcome")
                await slow.beat()
                written = slow.kept("runs")
                assert 0 < written < 100
                got += await fast.runs(100 - written - len(got))
                mine = await slow.runs(written)
                assert sorted(keys_of(mine) + keys_of(got)) == sorted(keys)


async def test_no_runs_while_receipts_lag(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "RECEIPT_LAG_MAX", -1)
    async with running(database_url, claim_poll_s=60) as server:
        await server.make_job()
        async with server.session(credit=10) as session:
            monkeypatch.setattr(session_module, "RECEIPT_LAG_MAX", 0)
            await server.enqueue(1)
            (first,) = await session.runs(1, receipt=False)
            await server.enqueue(1)
            await session.beat([held(first)])
            assert session.kept("runs") == 0
            # The receipt itself brings the next one, long before any poll.
            await session.say(received_batch_seq=1)
            assert len(await session.runs(1)) == 1


async def test_answers_nobody_reads_are_bounded(database_url: str) -> None:
    async with running(database_url) as server, server.session(read=False) as session:
        bad = worker_pb2.Completions(completions=[worker_pb2.Completion(attempt=1)] * 1000)
        sent = 0
        for _ in range(40):
            await session.say(completions=bad)
            sent += 1000
        session.read()
        await session.hear("welcome")
        verdicts = await session.verdicts(sent)
        assert len(verdicts) == sent
        assert {each.verdict for each in verdicts} == {worker_pb2.VERDICT_INVALID}
