"""The unary path of workers over a real socket and database: heartbeats, completions, releases."""

from typing import Any

import grpc.aio
from fencepost.v1 import (
    failure_pb2,
    job_pb2,
    payload_pb2,
    run_pb2,
    run_service_pb2,
    worker_pb2,
)
from google.protobuf.duration_pb2 import Duration

from tests.integration.definition_server import refusal
from tests.integration.run_calls import fence
from tests.integration.run_server import WORKER, RunServer, json_payload, serving

OTHER_WORKER = "0197a4c2-7d1e-7b1a-9c55-000000000002"


async def batch(server: RunServer, completions: list[worker_pb2.Completion]) -> list[Any]:
    response = await server.runs.BatchCompleteRuns(
        run_service_pb2.BatchCompleteRunsRequest(completions=completions)
    )
    return list(response.verdicts)


async def test_heartbeats_renew_keep_progress_and_tell_what_is_lost(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        (held,) = (await server.claim()).runs
        before = (await server.get(run)).lease_until
        progress = run_pb2.Progress(percent=50, message="half\x00way")
        beat = await server.runs.HeartbeatRuns(
            run_service_pb2.HeartbeatRunsRequest(
                worker_id=WORKER,
                runs=[
                    worker_pb2.HeldRun(**fence(held), progress=progress),
                    worker_pb2.HeldRun(run=held.run, attempt=9),
                ],
            )
        )
        (lost,) = beat.notices
        assert lost.attempt == 9
        assert lost.lease_lost.reason == worker_pb2.LEASE_LOST_REASON_UNKNOWN_RUN
        assert not beat.not_renewed
        after = await server.get(run)
        assert after.lease_until.ToNanoseconds() > before.ToNanoseconds()
        assert after.progress.message == "half\ufffdway"
        for field, request in (
            ("worker_id", run_service_pb2.HeartbeatRunsRequest()),
            (
                "runs[0].progress.percent",
                run_service_pb2.HeartbeatRunsRequest(
                    worker_id=WORKER,
                    runs=[
                        worker_pb2.HeldRun(**fence(held), progress=run_pb2.Progress(percent=101))
                    ],
                ),
            ),
        ):
            assert (await refusal(server.runs.HeartbeatRuns(request))).fields == [field]


async def test_complete_turns_refusals_into_statuses(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        (first,) = (await server.claim()).runs
        applied = await server.complete(first, snooze=worker_pb2.Snooze())
        assert applied.verdict.verdict == worker_pb2.VERDICT_APPLIED
        assert applied.verdict.run_state == run_pb2.RUN_STATE_RETRYING
        (second,) = (await server.claim()).runs
        stale = await refusal(server.complete(first))
        assert (stale.reason, stale.metadata["currentAttempt"]) == ("STALE_ATTEMPT", "2")
        assert stale.code is grpc.StatusCode.FAILED_PRECONDITION
        second.attempt = 7
        unknown = await refusal(server.complete(second))
        assert (unknown.reason, unknown.metadata["currentAttempt"]) == ("UNKNOWN_ATTEMPT", "2")
        second.attempt = 2
        large = await refusal(
            server.complete(second, success=worker_pb2.Success(result=json_payload("x" * 262145)))
        )
        assert large.reason == "PAYLOAD_TOO_LARGE"
        empty = await refusal(
            server.runs.CompleteRun(
                run_service_pb2.CompleteRunRequest(
                    completion=worker_pb2.Completion(**fence(second))
                )
            )
        )
        assert empty.fields == ["completion.outcome"]
        done = await server.complete(second)
        assert done.verdict.run_state == run_pb2.RUN_STATE_SUCCEEDED
        again = await server.complete(second)
        assert again.verdict.verdict == worker_pb2.VERDICT_ALREADY_APPLIED
        second.run.scheduled_at.nanos = 0
        assert (await refusal(server.complete(second))).reason == "RUN_NOT_FOUND"
        assert (await server.get(run)).attempt == 2


async def test_a_run_that_was_cancelled_by_force_is_terminal(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        run = await server.enqueue("mail")
        (claimed,) = (await server.claim()).runs
        await server.query(
            "UPDATE fencepost.run_queue SET state = 'retrying', lease_until = NULL RETURNING 1"
        )
        await server.runs.CancelRun(run_service_pb2.CancelRunRequest(name=run.name))
        refused = await refusal(server.complete(claimed))
        assert (refused.reason, refused.metadata["runState"]) == ("RUN_TERMINAL", "CANCELLED")


async def test_a_timeout_that_the_worker_reports_ends_the_run_by_its_word(
    database_url: str,
) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail", retry_policy=job_pb2.RetryPolicy(max_failures=1))
        run = await server.enqueue("mail")
        (claimed,) = (await server.claim()).runs
        timeout = failure_pb2.Failure(
            code="TIMEOUT", origin=failure_pb2.FAILURE_ORIGIN_ATTEMPT_TIMEOUT
        )
        done = await server.complete(claimed, failure=timeout)
        assert done.verdict.run_state == run_pb2.RUN_STATE_DEAD
        again = await server.complete(claimed, failure=timeout)
        assert again.verdict.verdict == worker_pb2.VERDICT_ALREADY_APPLIED
        response = await server.runs.ListAttempts(
            run_service_pb2.ListAttemptsRequest(parent=run.name)
        )
        assert response.attempts[0].outcome == run_pb2.ATTEMPT_OUTCOME_TIMED_OUT


async def test_batches_have_a_verdict_each(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        for _ in range(4):
            await server.enqueue("mail")
        held = list((await server.claim(max_runs=4)).runs)
        nul = failure_pb2.Failure(code="BAD\x00CODE", message="a\x00b")
        verdicts = await batch(
            server,
            [
                worker_pb2.Completion(**fence(held[0]), success=worker_pb2.Success()),
                worker_pb2.Completion(**fence(held[0]), success=worker_pb2.Success()),
                worker_pb2.Completion(run=held[1].run, attempt=5, success=worker_pb2.Success()),
                worker_pb2.Completion(**fence(held[1])),
                worker_pb2.Completion(),
                worker_pb2.Completion(**fence(held[2]), failure=nul),
                worker_pb2.Completion(
                    **fence(held[3]),
                    failure=failure_pb2.Failure(details=payload_pb2.Payload(json="x" * 16385)),
                ),
            ],
        )
        assert [verdict.verdict for verdict in verdicts] == [
            worker_pb2.VERDICT_APPLIED,
            worker_pb2.VERDICT_ALREADY_APPLIED,
            worker_pb2.VERDICT_INVALID,
            worker_pb2.VERDICT_INVALID,
            worker_pb2.VERDICT_INVALID,
            worker_pb2.VERDICT_APPLIED,
            worker_pb2.VERDICT_INVALID,
        ]
        assert [verdicts[i].reason for i in (2, 3, 4, 6)] == [
            "UNKNOWN_ATTEMPT",
            "INVALID_FIELD",
            "INVALID_FIELD",
            "PAYLOAD_TOO_LARGE",
        ]
        assert verdicts[6].run == held[3].run
        rows = await server.query(
            "SELECT failure_code FROM fencepost.run_queue WHERE failure_code IS NOT NULL"
        )
        assert rows[0]["failure_code"] == "BAD\ufffdCODE"
        assert (await refusal(batch(server, []))).fields == ["completions"]


async def test_released_runs_are_free_again(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        runs = [await server.enqueue("mail") for _ in range(3)]
        held = list((await server.claim(max_runs=3)).runs)
        response = await server.runs.ReleaseRuns(
            run_service_pb2.ReleaseRunsRequest(
                releases=[
                    worker_pb2.Release(**fence(held[0])),
                    worker_pb2.Release(
                        **fence(held[1]), reason=worker_pb2.RELEASE_REASON_UNSUPPORTED_KIND
                    ),
                    worker_pb2.Release(**fence(held[2]), delay=Duration(seconds=3601)),
                ]
            )
        )
        assert [verdict.verdict for verdict in response.verdicts] == [
            worker_pb2.VERDICT_APPLIED,
            worker_pb2.VERDICT_APPLIED,
            worker_pb2.VERDICT_INVALID,
        ]
        (again,) = (await server.claim(max_runs=3)).runs
        assert (again.run, again.attempt) == (runs[0].key, 2)
        unsupported = await server.get(runs[1])
        assert unsupported.state == run_pb2.RUN_STATE_QUEUED
        wait = unsupported.available_at.ToNanoseconds() - server.now() * 1000
        assert 3 * 10**9 < wait <= 5 * 10**9


async def test_while_the_database_is_away_nothing_is_refused_for_good(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        await server.enqueue("mail")
        (held,) = (await server.claim()).runs
        await server.database.hot.__aexit__(None, None, None)
        verdicts = await batch(
            server,
            [
                worker_pb2.Completion(**fence(held), success=worker_pb2.Success()),
                worker_pb2.Completion(),
            ],
        )
        assert [verdict.verdict for verdict in verdicts] == [
            worker_pb2.VERDICT_RETRY,
            worker_pb2.VERDICT_INVALID,
        ]
        assert verdicts[0].retry_after.seconds == 1
        released = await server.runs.ReleaseRuns(
            run_service_pb2.ReleaseRunsRequest(releases=[worker_pb2.Release(**fence(held))])
        )
        assert released.verdicts[0].verdict == worker_pb2.VERDICT_RETRY
        refused = await refusal(server.complete(held))
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.reason == "STORAGE_UNAVAILABLE"
