"""GetRun, ListRuns, ListAttempts, WaitRun and CancelRun over a real socket and database."""

import asyncio
import time
from typing import Any

from fencepost.v1 import failure_pb2, job_pb2, job_service_pb2, run_pb2, run_service_pb2, worker_pb2
from fencepost_server.clock import SECOND, to_datetime
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.integration.definition_server import refusal
from tests.integration.run_server import WORKER, RunServer, json_payload, serving

TENANT = "tenants/default"
DUE = run_pb2.RUN_STATE_QUEUED


def stamp(at: int) -> Timestamp:
    return Timestamp(seconds=at // SECOND, nanos=at % SECOND * 1000)


async def listed(
    server: RunServer, parent: str = TENANT, *, page_size: int = 1000, **values: Any
) -> list[run_pb2.Run]:
    """Every page of a list."""
    runs: list[run_pb2.Run] = []
    token = ""
    for _ in range(100):
        response = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(
                parent=parent, page_size=page_size, page_token=token, **values
            )
        )
        runs += response.runs
        token = response.next_page_token
        if not token:
            return runs
    raise AssertionError("the list did not end")


async def names(server: RunServer, parent: str = TENANT, **values: Any) -> set[str]:
    return {run.name for run in await listed(server, parent, **values)}


async def attempts(server: RunServer, run: run_pb2.Run, **values: Any) -> list[run_pb2.Attempt]:
    response = await server.runs.ListAttempts(
        run_service_pb2.ListAttemptsRequest(parent=run.name, **values)
    )
    return list(response.attempts)


async def one_of_each(server: RunServer) -> dict[str, run_pb2.Run]:
    """Runs in most of the states there are."""
    await server.make_job("mail", labels={"team": "web"})
    await server.make_job("sms", target=job_pb2.Target(kind="sms.send"))
    runs: dict[str, run_pb2.Run] = {}
    for state in ("succeeded", "dead", "retrying", "running"):
        run = await server.enqueue("mail", labels={"state": state})
        (claimed,) = (await server.claim()).runs
        assert claimed.run == run.key
        if state == "succeeded":
            await server.complete(
                claimed, success=worker_pb2.Success(result=json_payload('"done"'))
            )
        elif state == "dead":
            await server.complete(
                claimed,
                failure=failure_pb2.Failure(
                    code="BAD_ADDRESS",
                    message="no such street",
                    stack_trace="line 1",
                    retry=failure_pb2.RETRY_DIRECTIVE_NEVER,
                ),
            )
        elif state == "retrying":
            await server.complete(
                claimed,
                failure=failure_pb2.Failure(
                    code="TIMED",
                    retry=failure_pb2.RETRY_DIRECTIVE_AFTER_DELAY,
                    retry_delay=Duration(seconds=3600),
                ),
            )
        runs[state] = run
    runs["queued"] = await server.enqueue("sms", delay=Duration(seconds=600))
    runs["cancelled"] = await server.enqueue("sms", delay=Duration(seconds=60))
    await server.runs.CancelRun(
        run_service_pb2.CancelRunRequest(name=runs["cancelled"].name, reason="enough")
    )
    return runs


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


async def test_a_list_shows_every_run_once_newest_first(database_url: str) -> None:
    async with serving(database_url) as server:
        runs = await one_of_each(server)
        for page_size in (1, 2, 1000):
            found = await listed(server, page_size=page_size)
            keys = [(run.key.scheduled_at.ToNanoseconds(), run.key.job_id) for run in found]
            assert keys == sorted(keys, reverse=True)
            assert {run.name for run in found} == {run.name for run in runs.values()}
            assert len(found) == len(runs)
        sms = {runs["queued"].name, runs["cancelled"].name}
        assert await names(server, f"{TENANT}/jobs/sms", page_size=1) == sms
        assert await names(server, f"{TENANT}/jobs/-") == {run.name for run in runs.values()}
        assert await names(server, f"{TENANT}/jobs/nothing") == set()


async def test_a_run_that_moves_between_pages_is_seen_once(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        made = [await server.enqueue("mail") for _ in range(6)]
        seen: list[str] = []
        token = ""
        for _ in made:
            response = await server.runs.ListRuns(
                run_service_pb2.ListRunsRequest(parent=TENANT, page_size=1, page_token=token)
            )
            seen += [run.name for run in response.runs]
            token = response.next_page_token
            # The oldest waiting run ends: first those not seen yet, then those seen.
            (claimed,) = (await server.claim()).runs
            await server.complete(claimed)
        assert token == ""
        assert sorted(seen) == sorted(run.name for run in made)


async def test_filters(database_url: str) -> None:
    async with serving(database_url) as server:
        runs = await one_of_each(server)
        by_state = {state: run.name for state, run in runs.items()}
        mail = {by_state[s] for s in ("succeeded", "dead", "retrying", "running")}
        sms = {by_state["queued"], by_state["cancelled"]}
        cases: list[tuple[str, set[str]]] = [
            ("state=RUNNING", {by_state["running"]}),
            ("state:DEAD,RETRYING", {by_state["dead"], by_state["retrying"]}),
            ("state!=DEAD kind=mail.send", mail - {by_state["dead"]}),
            ("state=CANCELLED", {by_state["cancelled"]}),
            ("job=sms", sms),
            (f"job={runs['queued'].key.job_id}", sms),
            ("job!=sms", mail),
            ("job=ma*", mail),
            ("kind:sms*", sms),
            ("queue=default", mail | sms),
            ("queue=other", set()),
            (f"queue={TENANT}/queues/default state=SUCCEEDED", {by_state["succeeded"]}),
            (f"worker=workers/{WORKER}", mail),
            ("last_failure.code=BAD_ADDRESS", {by_state["dead"]}),
            ("origin=ENQUEUE", mail | sms),
            ("origin=SCHEDULE", set()),
            ("dead_reason=NOT_RETRYABLE", {by_state["dead"]}),
            ("cancel_cause:REQUESTED", {by_state["cancelled"]}),
            ("labels.state=running", {by_state["running"]}),
            ("labels.team=web", mail),
            ("labels:team", mail),
            ("labels.team!=web", sms),
            (
                "ended_at>2020-01-01T00:00:00Z",
                {by_state[s] for s in ("succeeded", "dead")} | {by_state["cancelled"]},
            ),
            ("created_at<2020-01-01T00:00:00Z", set()),
            ("scheduled_at>=2020-01-01T00:00:00Z state=SUCCEEDED", {by_state["succeeded"]}),
            ("scheduled_at<2020-01-01T00:00:00Z", set()),
            ("state=DEAD state=RUNNING", set()),
        ]
        for text, wanted in cases:
            assert await names(server, filter=text) == wanted, text
        assert await names(server, f"{TENANT}/jobs/mail", filter="state=DEAD,QUEUED") == {
            by_state["dead"]
        }
        for text in ("unique_key=x", "created_at=2020-01-01T00:00:00Z,2021-01-01T00:00:00Z"):
            refused = await refusal(listed(server, filter=text))
            assert refused.reason == "FILTER_NOT_SUPPORTED"
            assert refused.metadata["filterField"] == text.partition("=")[0]


async def test_sparse_lists_go_on_where_the_scan_ended(database_url: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("fencepost_server.engine.run_reads.LIST_SCAN_MAX", 3)
    async with serving(database_url) as server:
        await server.make_job("mail")
        made = [await server.enqueue("mail", labels={"n": str(n % 4)}) for n in range(16)]
        for _ in range(8):
            (claimed,) = (await server.claim()).runs
            await server.complete(claimed)
        wanted = {run.name for n, run in enumerate(made) if n % 4 == 0}
        found = await listed(server, filter="labels.n=0", page_size=2)
        assert len(found) == len(wanted)
        assert {run.name for run in found} == wanted


async def test_old_history_is_looked_at_when_the_filter_says_so(database_url: str) -> None:
    async with serving(database_url) as server:
        job = await server.make_job("mail")
        old = server.now() // SECOND * SECOND - 20 * 86400 * SECOND
        await server.query(
            """INSERT INTO fencepost.job_runs_stray
            (job_id, scheduled_at, available_at, created_at, ended_at, tenant_id, queue_id,
             kind_id, version, attempt, failure_count, lost_lease_count, snooze_count,
             replay_count, state, origin, priority)
            SELECT s.job_id, $2, $2, $2, $2, s.tenant_id, s.queue_id, s.kind_id, 1, 1, 0, 0, 0, 0,
                   'succeeded', 'schedule', 0
            FROM fencepost.job_schedules s WHERE s.job_id = $1 RETURNING 1""",
            job.job_id,
            to_datetime(old),
        )
        recent = await server.runs.ListRuns(run_service_pb2.ListRunsRequest(parent=TENANT))
        assert not recent.runs
        assert recent.searched_since.ToSeconds() < server.now() // SECOND - 6 * 86400
        everything = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(
                parent=TENANT, filter="scheduled_at>2020-01-01T00:00:00Z"
            )
        )
        assert len(everything.runs) == 1
        assert not everything.HasField("searched_since")
        live = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(parent=TENANT, filter="state=QUEUED,DEAD")
        )
        assert not live.HasField("searched_since")


async def test_page_tokens_belong_to_their_query(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        for _ in range(3):
            await server.enqueue("mail")
        first = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(parent=TENANT, page_size=1)
        )
        refused = await refusal(
            server.runs.ListRuns(
                run_service_pb2.ListRunsRequest(
                    parent=TENANT, filter="state=QUEUED", page_token=first.next_page_token
                )
            )
        )
        assert refused.reason == "INVALID_PAGE_TOKEN"


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


async def test_methods_of_later_versions_are_refused(database_url: str) -> None:
    async with serving(database_url) as server:
        for call in (
            server.runs.ReplayRun(run_service_pb2.ReplayRunRequest()),
            server.runs.DiscardRun(run_service_pb2.DiscardRunRequest()),
            server.runs.BatchUpdateRuns(run_service_pb2.BatchUpdateRunsRequest()),
            server.runs.ExplainRun(run_service_pb2.ExplainRunRequest()),
            server.runs.GetOperation(run_service_pb2.GetOperationRequest()),
            server.runs.ListOperations(run_service_pb2.ListOperationsRequest()),
            server.runs.StopOperation(run_service_pb2.StopOperationRequest()),
            server.runs.WatchRuns(run_service_pb2.WatchRunsRequest()).read(),
        ):
            assert "not served" in (await refusal(call)).message
