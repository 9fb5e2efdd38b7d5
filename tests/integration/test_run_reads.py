"""GetRun, ListAttempts, WaitRun and CancelRun over a real socket and database."""

import asyncio
import time
from typing import Any

from fencepost.v1 import failure_pb2, job_service_pb2, run_pb2, run_service_pb2, worker_pb2
from google.protobuf.duration_pb2 import Duration

from tests.integration.definition_server import refusal
from tests.integration.run_calls import one_of_each
from tests.integration.run_server import WORKER, RunServer, serving

TENANT = "tenants/default"
DUE = run_pb2.RUN_STATE_QUEUED


async def attempts(server: RunServer, run: run_pb2.Run, **values: Any) -> list[run_pb2.Attempt]:
    response = await server.runs.ListAttempts(
        run_service_pb2.ListAttemptsRequest(parent=run.name, **values)
    )
    return list(response.attempts)


async def test_a_run_reads_the_same_wherever_it_is(database_url: str) -> None:
    async with serving(database_url) as server:
        runs = await one_of_each(server)
        for state, run in runs.items():
            found = await server.get(run)
            assert run_pb2.RunState.Name(found.state) == f"RUN_STATE_{state.upper()}"
            assert (found.name, found.key, found.created_at) == (run.name, run.key, run.created_at)
            assert found.HasField("ended_at") == (state in ("succeeded", "dead", "cancelled"))
            assert found.HasField("lease_until") == (state == "running")
        done = await server.get(runs["succeeded"])
        assert (done.result.json, done.worker) == ('"done"', f"workers/{WORKER}")
        dead = await server.get(runs["dead"])
        assert dead.dead_reason == run_pb2.DEAD_REASON_NOT_RETRYABLE
        assert dead.last_failure.stack_trace == "line 1"
        assert dead.last_failure.origin == failure_pb2.FAILURE_ORIGIN_HANDLER
        cancelled = await server.get(runs["cancelled"])
        assert cancelled.cancel_cause == run_pb2.CANCEL_CAUSE_REQUESTED
        assert cancelled.cancel_reason == "enough"
        basic = await server.runs.GetRun(
            run_service_pb2.GetRunRequest(name=dead.name, view=run_service_pb2.RUN_VIEW_BASIC)
        )
        assert basic.run.last_failure.message == "no such street"
        assert not basic.run.last_failure.stack_trace
        assert not basic.run.HasField("limits")


async def test_names_by_id_and_of_deleted_jobs(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        by_id = run.name.replace("/jobs/mail/", f"/jobs/{run.key.job_id}/")
        response = await server.runs.GetRun(run_service_pb2.GetRunRequest(name=by_id))
        assert response.run.name == run.name
        await server.jobs.DeleteJob(job_service_pb2.DeleteJobRequest(name=f"{TENANT}/jobs/mail"))
        response = await server.runs.GetRun(run_service_pb2.GetRunRequest(name=by_id))
        assert response.run.name == by_id
        assert response.run.job == f"{TENANT}/jobs/mail"
        gone = await refusal(server.get(run))
        assert (gone.reason, gone.resource) == ("RUN_NOT_FOUND", run.name)
        never = by_id.rpartition("/")[0] + "/2020-01-01T00:00:00Z"
        missing = await refusal(server.runs.GetRun(run_service_pb2.GetRunRequest(name=never)))
        assert missing.reason == "RUN_NOT_FOUND"


async def test_attempts_of_runs_in_every_state(database_url: str) -> None:
    async with serving(database_url) as server:
        runs = await one_of_each(server)
        (done,) = await attempts(server, runs["succeeded"])
        assert (done.attempt, done.outcome) == (1, run_pb2.ATTEMPT_OUTCOME_SUCCEEDED)
        assert done.worker == f"workers/{WORKER}"
        assert done.HasField("ended_at")
        assert done.HasField("claimed_at")
        assert len(done.span_id) == 16
        (dead,) = await attempts(server, runs["dead"])
        assert dead.failure.code == "BAD_ADDRESS"
        (running,) = await attempts(server, runs["running"])
        assert running.outcome == run_pb2.ATTEMPT_OUTCOME_UNSPECIFIED
        assert not running.HasField("ended_at")
        assert await attempts(server, runs["queued"]) == []
        assert await attempts(server, runs["cancelled"]) == []


async def test_attempts_page_newest_first(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        for _ in range(3):
            (claimed,) = (await server.claim()).runs
            await server.complete(claimed, snooze=worker_pb2.Snooze())
        await server.claim()
        found: list[int] = []
        token = ""
        while True:
            response = await server.runs.ListAttempts(
                run_service_pb2.ListAttemptsRequest(parent=run.name, page_size=1, page_token=token)
            )
            found += [attempt.attempt for attempt in response.attempts]
            token = response.next_page_token
            if not token:
                break
        assert found == [4, 3, 2, 1]
        assert (await server.get(run)).snooze_count == 3


async def test_wait_answers_when_the_run_has_ended(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        waiting = asyncio.ensure_future(
            server.runs.WaitRun(run_service_pb2.WaitRunRequest(name=run.name), timeout=40)
        )
        (claimed,) = (await server.claim(wait_s=5)).runs
        assert not waiting.done()
        await server.complete(claimed)
        answer = await waiting
        assert answer.ended
        assert answer.run.state == run_pb2.RUN_STATE_SUCCEEDED
        again = await server.runs.WaitRun(run_service_pb2.WaitRunRequest(name=run.name))
        assert again == answer


async def test_wait_answers_as_it_is_when_time_is_up_or_the_server_leaves(
    database_url: str,
) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        started = time.monotonic()
        short = await server.runs.WaitRun(
            run_service_pb2.WaitRunRequest(name=run.name, wait=Duration(nanos=200_000_000))
        )
        assert not short.ended
        assert short.run.state == DUE
        assert time.monotonic() - started >= 0.2
        long = asyncio.ensure_future(
            server.runs.WaitRun(run_service_pb2.WaitRunRequest(name=run.name))
        )
        (claimed,) = (await server.claim(wait_s=5)).runs
        server.servicer.drain()
        answer = await asyncio.wait_for(long, timeout=10)
        assert not answer.ended
        assert claimed.attempt == 1
        refused = await refusal(
            server.runs.WaitRun(
                run_service_pb2.WaitRunRequest(name=run.name, wait=Duration(seconds=31))
            )
        )
        assert refused.fields == ["wait"]


async def test_cancel_of_a_running_run_asks_its_worker(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        (claimed,) = (await server.claim()).runs
        response = await server.runs.CancelRun(
            run_service_pb2.CancelRunRequest(
                name=run.name, reason="stop", grace=Duration(seconds=7)
            )
        )
        assert response.run.state == run_pb2.RUN_STATE_RUNNING
        assert response.run.cancel_requested
        beat = await server.runs.HeartbeatRuns(
            run_service_pb2.HeartbeatRunsRequest(
                worker_id=WORKER,
                runs=[worker_pb2.HeldRun(run=claimed.run, attempt=claimed.attempt)],
            )
        )
        (notice,) = beat.notices
        assert notice.cancel_requested.reason == "stop"
        assert 0 < notice.cancel_requested.grace_remaining.seconds <= 7
        await server.complete(claimed, cancelled=worker_pb2.Cancelled(message="stopped"))
        ended = await server.get(run)
        assert ended.state == run_pb2.RUN_STATE_CANCELLED
        assert not ended.cancel_requested
        again = await server.runs.CancelRun(
            run_service_pb2.CancelRunRequest(name=run.name, reason="other")
        )
        assert again.run == ended
        missing = run.name.rpartition("/")[0] + "/2020-01-01T00:00:00Z"
        refused = await refusal(
            server.runs.CancelRun(run_service_pb2.CancelRunRequest(name=missing))
        )
        assert refused.reason == "RUN_NOT_FOUND"
