"""The unary path of workers over a real socket and database: long polls and named leases."""

import asyncio
from typing import Any

import asyncpg
import pytest
from fencepost.v1 import (
    job_pb2,
    run_pb2,
    run_service_pb2,
    worker_pb2,
)
from fencepost_server.clock import SECOND
from fencepost_server.domain.run import RunKey, span_id, trace_id
from google.protobuf.duration_pb2 import Duration

from tests.integration.definition_server import refusal
from tests.integration.run_calls import fence
from tests.integration.run_server import QUEUE, WORKER, RunServer, json_payload, serving

OTHER_WORKER = "0197a4c2-7d1e-7b1a-9c55-000000000002"


async def lease(server: RunServer, run: run_pb2.Run, **values: Any) -> Any:
    return await server.runs.LeaseRun(
        run_service_pb2.LeaseRunRequest(run=run.key, worker_id=WORKER, **values)
    )


async def set_queue(server: RunServer, change: str) -> None:
    await server.query(f"UPDATE fencepost.queues SET {change} RETURNING 1")  # noqa: S608


async def test_an_assignment_has_all_that_a_handler_needs(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job(
            "mail",
            payload=json_payload("1"),
            labels={"team": "web"},
            limits=job_pb2.RunLimits(
                attempt_timeout=Duration(seconds=90), lease_ttl=Duration(seconds=20)
            ),
        )
        own = await server.enqueue("mail")
        other = await server.enqueue("mail", payload=json_payload("2"), labels={"a": "b"})
        answer = await server.claim(max_runs=10)
        assert answer.worker_id == WORKER
        assert answer.heartbeat_interval == Duration(seconds=10)
        assert [run.run for run in answer.runs] == [own.key, other.key]
        first, second = answer.runs
        assert (first.attempt, first.queue, first.kind) == (1, QUEUE, "mail.send")
        assert first.job == "tenants/default/jobs/mail"
        assert (first.payload.json, second.payload.json) == ("1", "2")
        assert dict(first.labels) == {"team": "web"}
        assert dict(second.labels) == {"team": "web", "a": "b"}
        assert first.lease_ttl == Duration(seconds=20)
        assert 15 <= first.lease_remaining.seconds <= 20
        assert first.attempt_timeout == Duration(seconds=90)
        assert first.max_failures == 5
        key = RunKey(
            own.key.job_id,
            own.key.scheduled_at.seconds * SECOND + own.key.scheduled_at.nanos // 1000,
        )
        assert first.trace_context.traceparent == f"00-{trace_id(key)}-{span_id(key, 1)}-01"
        assert own.trace_context.traceparent == f"00-{trace_id(key)}-{span_id(key, 0)}-01"
        (seen,) = server.workers.seen
        assert seen["worker_id"] == WORKER


async def test_a_poll_answers_as_soon_as_there_is_a_run(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        polling = asyncio.ensure_future(server.claim(wait_s=20))
        run = await server.enqueue("mail")
        answer = await asyncio.wait_for(polling, timeout=10)
        assert [each.run for each in answer.runs] == [run.key]


async def test_a_poll_hears_of_a_run_that_gets_due(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail", delay=Duration(nanos=300_000_000))
        assert not (await server.claim()).runs
        answer = await asyncio.wait_for(server.claim(wait_s=20), timeout=10)
        assert [each.run for each in answer.runs] == [run.key]


async def test_a_poll_without_work_ends_empty(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail", target=job_pb2.Target(kind="mail.send"))
        await server.enqueue("mail")
        answer = await server.claim(wait_s=0.2, worker_id=OTHER_WORKER)
        assert len(answer.runs) == 1
        subscription = worker_pb2.QueueSubscription(queue=QUEUE, kinds=["sms.send"])
        await server.enqueue("mail")
        request = run_service_pb2.ClaimRunsRequest(
            subscriptions=[subscription], wait=Duration(nanos=100_000_000)
        )
        empty = await server.runs.ClaimRuns(request)
        assert not empty.runs
        assert not empty.HasField("retry_after")
        assert len(empty.worker_id) == 36


async def test_many_polls_share_the_runs(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        polls = [asyncio.ensure_future(server.claim(max_runs=5, wait_s=20)) for _ in range(10)]
        runs = [await server.enqueue("mail") for _ in range(10)]
        got: list[str] = []
        while len(got) < len(runs):
            done, pending = await asyncio.wait(
                polls, return_when=asyncio.FIRST_COMPLETED, timeout=10
            )
            assert done, "a run waits although somebody polls"
            got += [str(run.run) for each in done for run in each.result().runs]
            polls = list(pending)
        assert len(set(got)) == len(got)
        for poll in polls:
            poll.cancel()


async def test_a_request_id_gets_the_same_claims_again(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        for _ in range(4):
            await server.enqueue("mail")
        first = await server.claim(max_runs=2, request_id="one")
        again = await server.claim(max_runs=2, request_id="one")
        assert [fence(run) for run in again.runs] == [fence(run) for run in first.runs]
        assert len(first.runs) == 2
        refused = await refusal(server.claim(max_runs=1, request_id="one"))
        assert refused.reason == "REQUEST_ID_REUSED"
        await server.complete(first.runs[0])
        rest = await server.claim(max_runs=2, request_id="one")
        assert [fence(run) for run in rest.runs] == [fence(first.runs[1])]
        both = await asyncio.gather(*(server.claim(max_runs=2, request_id="two") for _ in range(5)))
        assert all(len(answer.runs) == 2 for answer in both)
        assert len({str(fence(run)) for answer in both for run in answer.runs}) == 2


async def test_an_empty_answer_does_not_use_up_a_request_id(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        assert not (await server.claim(request_id="one")).runs
        await server.enqueue("mail")
        assert len((await server.claim(request_id="one")).runs) == 1


async def test_the_servers_worker_id_is_that_of_the_first_call(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        await server.enqueue("mail")
        request = run_service_pb2.ClaimRunsRequest(
            subscriptions=[worker_pb2.QueueSubscription(queue=QUEUE)], request_id="one"
        )
        first = await server.runs.ClaimRuns(request)
        assert len(first.worker_id) == 36
        assert await server.runs.ClaimRuns(request) != run_service_pb2.ClaimRunsResponse()
        assert (await server.runs.ClaimRuns(request)).worker_id == first.worker_id


async def test_a_paused_queue_and_a_leaving_server_say_when_to_ask_again(
    database_url: str,
) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        await set_queue(server, "paused = true")
        paused = await server.claim(wait_s=20)
        assert not paused.runs
        assert paused.retry_after.seconds == 5
        limited = await lease(server, run)
        assert limited.refusal == run_service_pb2.LEASE_REFUSAL_LIMITED
        await set_queue(server, "paused = false")
        assert len((await server.claim()).runs) == 1
        polling = asyncio.ensure_future(server.claim(wait_s=20))
        assert (await server.get(run)).state == run_pb2.RUN_STATE_RUNNING
        server.servicer.drain()
        left = await asyncio.wait_for(polling, timeout=10)
        assert not left.runs
        assert left.HasField("retry_after")


async def test_a_claim_of_a_caller_that_has_gone_is_given_back(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        # A locked table holds the claim back until its caller has gone.
        locker = await asyncpg.connect(server.dsn)
        locked = locker.transaction()
        await locked.start()
        await locker.execute("LOCK TABLE fencepost.run_attempts IN ACCESS EXCLUSIVE MODE")
        call = server.runs.ClaimRuns(
            run_service_pb2.ClaimRunsRequest(
                subscriptions=[worker_pb2.QueueSubscription(queue=QUEUE)], worker_id=WORKER
            )
        )
        claiming = """SELECT 1 FROM pg_stat_activity
            WHERE query LIKE '/* claim_runs %' AND wait_event_type = 'Lock'"""
        while not await server.query(claiming):
            await server.get(run)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while not server.work.is_settling:
            await server.get(run)
        await locked.rollback()
        await locker.close()
        await server.work.finish()
        back = await server.get(run)
        assert (back.state, back.attempt) == (run_pb2.RUN_STATE_QUEUED, 1)
        response = await server.runs.ListAttempts(
            run_service_pb2.ListAttemptsRequest(parent=run.name)
        )
        (attempt,) = response.attempts
        assert attempt.outcome == run_pb2.ATTEMPT_OUTCOME_UNDELIVERED
        assert [each.attempt for each in (await server.claim()).runs] == [2]


async def test_claims_obey_caps(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail", limits=job_pb2.RunLimits(max_in_flight=2))
        runs = [await server.enqueue("mail") for _ in range(4)]
        first = await server.claim(max_runs=10)
        assert len(first.runs) == 2
        assert not (await server.claim(max_runs=10)).runs
        refused = await lease(server, runs[3])
        assert refused.refusal == run_service_pb2.LEASE_REFUSAL_LIMITED
        await server.complete(first.runs[0])
        taken = await lease(server, runs[3])
        assert taken.assignment.run == runs[3].key
        assert not (await server.claim(max_runs=10)).runs


async def test_a_deadline_that_is_too_near_is_refused(database_url: str) -> None:
    async with serving(database_url) as server:
        refused = await refusal(
            server.runs.ClaimRuns(
                run_service_pb2.ClaimRunsRequest(
                    subscriptions=[worker_pb2.QueueSubscription(queue=QUEUE)]
                ),
                timeout=4,
            )
        )
        assert refused.fields == ["wait"]
        assert "deadline" in refused.message


async def test_bad_claims_are_refused(database_url: str) -> None:
    async with serving(database_url) as server:
        cases: list[tuple[str, dict[str, Any]]] = [
            ("max_runs", {"max_runs": 1001}),
            ("worker_id", {"worker_id": "me"}),
            ("wait", {"wait": Duration(seconds=31)}),
        ]
        for field, values in cases:
            values.setdefault("wait", Duration())
            request = run_service_pb2.ClaimRunsRequest(
                subscriptions=[worker_pb2.QueueSubscription(queue=QUEUE)], **values
            )
            assert (await refusal(server.runs.ClaimRuns(request))).fields == [field]
        none = await refusal(server.runs.ClaimRuns(run_service_pb2.ClaimRunsRequest()))
        assert none.fields == ["subscriptions"]
        unknown = run_service_pb2.ClaimRunsRequest(
            subscriptions=[worker_pb2.QueueSubscription(queue="tenants/default/queues/nope")]
        )
        assert (await refusal(server.runs.ClaimRuns(unknown))).reason == "QUEUE_NOT_FOUND"


async def test_lease_refusals(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        taken = await lease(server, run, request_id="one")
        assert taken.assignment.attempt == 1
        assert taken.run_state == run_pb2.RUN_STATE_RUNNING
        assert (await lease(server, run, request_id="one")).assignment.attempt == 1
        leased = await lease(server, run)
        assert leased.refusal == run_service_pb2.LEASE_REFUSAL_LEASED
        assert 0 < leased.retry_after.seconds <= 30
        await server.complete(taken.assignment)
        ended = await lease(server, run)
        assert ended.refusal == run_service_pb2.LEASE_REFUSAL_ENDED
        assert ended.run_state == run_pb2.RUN_STATE_SUCCEEDED
        assert not ended.HasField("assignment")
        later = await server.enqueue("mail", delay=Duration(seconds=600))
        not_due = await lease(server, later)
        assert not_due.refusal == run_service_pb2.LEASE_REFUSAL_NOT_DUE
        assert 590 <= not_due.retry_after.seconds <= 600
        await server.query("UPDATE fencepost.run_queue SET state = 'blocked' RETURNING 1")
        blocked = await lease(server, later)
        assert blocked.refusal == run_service_pb2.LEASE_REFUSAL_BLOCKED
        assert blocked.run_state == run_pb2.RUN_STATE_BLOCKED
        unknown = run_pb2.Run(key=later.key)
        unknown.key.scheduled_at.nanos = (unknown.key.scheduled_at.nanos + 1000) % 10**9
        assert (await refusal(lease(server, unknown))).reason == "RUN_NOT_FOUND"
        unknown.key.scheduled_at.nanos = 1
        assert (await refusal(lease(server, unknown))).fields == ["run.scheduled_at"]


async def test_only_one_of_many_leases_a_run(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        answers = await asyncio.gather(*(lease(server, run) for _ in range(20)))
        assert sum(answer.HasField("assignment") for answer in answers) == 1
