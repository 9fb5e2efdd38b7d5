"""ReplayRun, DiscardRun, BatchUpdateRuns and ListDeadLetterGroups over gRPC."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from fencepost.v1 import (
    failure_pb2,
    job_pb2,
    job_service_pb2,
    operation_pb2,
    payload_pb2,
    run_pb2,
    run_service_pb2,
)
from fencepost_server.clock import SECOND
from fencepost_server.engine.bulk_steps import BulkSteps
from fencepost_server.engine.specs import SpecCache
from fencepost_server.engine.wake import Wakes
from google.protobuf.duration_pb2 import Duration

from tests.integration.definition_server import refusal
from tests.integration.run_server import RunServer, json_payload, serving

TENANT = "tenants/default"
JOB = f"{TENANT}/jobs/mail"
REPLAY = operation_pb2.OPERATION_ACTION_REPLAY
runs = run_service_pb2


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[RunServer]:
    async with serving(database_url) as running:
        yield running


async def dead(server: RunServer, count: int = 1, code: str = "BAD_ADDRESS") -> list[run_pb2.Run]:
    """Runs of the job `mail` that died, oldest first."""
    made = [await server.enqueue("mail", payload=json_payload('"old"')) for _ in range(count)]
    claimed = (await server.claim(max_runs=count)).runs
    assert len(claimed) == count
    failure = failure_pb2.Failure(
        code=code,
        message="no such street",
        stack_trace="line 1",
        retry=failure_pb2.RETRY_DIRECTIVE_NEVER,
    )
    for run in claimed:
        await server.complete(run, failure=failure)
    return made


def update(text: str = "state:DEAD", **values: Any) -> run_service_pb2.BatchUpdateRunsRequest:
    fields: dict[str, Any] = {"parent": TENANT, "filter": text, "action": REPLAY}
    return runs.BatchUpdateRunsRequest(**(fields | values))


async def test_a_dead_letter_keeps_what_people_need_to_decide(server: RunServer) -> None:
    await server.make_job("mail")
    [run] = await dead(server)
    kept = await server.get(run)
    assert kept.state == run_pb2.RUN_STATE_DEAD
    assert kept.dead_reason == run_pb2.DEAD_REASON_NOT_RETRYABLE
    assert kept.payload.json == '"old"'
    assert (kept.last_failure.code, kept.last_failure.stack_trace) == ("BAD_ADDRESS", "line 1")
    attempts = await server.runs.ListAttempts(runs.ListAttemptsRequest(parent=run.name))
    assert [each.failure.stack_trace for each in attempts.attempts] == ["line 1"]


async def test_replay_with_an_edited_payload_and_the_newest_version(server: RunServer) -> None:
    await server.make_job("mail")
    [run] = await dead(server)
    await server.jobs.UpdateJob(
        job_service_pb2.UpdateJobRequest(
            job=job_pb2.Job(name=JOB, target=job_pb2.Target(kind="mail.post"))
        )
    )
    request = runs.ReplayRunRequest(
        name=run.name,
        payload=payload_pb2.Payload(json='"new"'),
        use_newest_version=True,
        reason="moved",
        request_id="once",
    )
    replayed = (await server.runs.ReplayRun(request)).run
    assert (replayed.name, replayed.state) == (run.name, run_pb2.RUN_STATE_QUEUED)
    assert (replayed.kind, replayed.job_version, replayed.replay_count) == ("mail.post", 2, 1)
    assert replayed.attempt == 1
    # The answer may have been lost: the same call again is no second replay.
    assert (await server.runs.ReplayRun(request)).run == replayed
    [claimed] = (await server.claim()).runs
    assert (claimed.attempt, claimed.payload.json, claimed.kind) == (2, '"new"', "mail.post")
    await server.complete(claimed)
    refused = await refusal(server.runs.ReplayRun(runs.ReplayRunRequest(name=run.name)))
    assert refused.code == grpc.StatusCode.FAILED_PRECONDITION
    assert (refused.reason, refused.metadata["runState"]) == ("RUN_NOT_DEAD", "SUCCEEDED")


async def test_a_replay_with_the_newest_version_has_its_concurrency_key(server: RunServer) -> None:
    def limits(key: str) -> job_pb2.RunLimits:
        return job_pb2.RunLimits(concurrency_key=key)

    await server.make_job("mail", limits=limits("{label.customer}"))
    made = [
        await server.enqueue("mail", labels={"customer": "c7"}, **values)
        for values in ({}, {}, {"concurrency_key": "mine"})
    ]
    assert [run.concurrency_key for run in made] == ["c7", "c7", "mine"]
    failure = failure_pb2.Failure(code="X", retry=failure_pb2.RETRY_DIRECTIVE_NEVER)
    for run in (await server.claim(max_runs=3)).runs:
        await server.complete(run, failure=failure)
    await server.jobs.UpdateJob(
        job_service_pb2.UpdateJobRequest(
            job=job_pb2.Job(name=JOB, limits=limits("{label.customer}-{payload.order}"))
        )
    )
    replayed = [
        (await server.runs.ReplayRun(request)).run
        for request in (
            runs.ReplayRunRequest(name=made[0].name),
            runs.ReplayRunRequest(
                name=made[1].name, use_newest_version=True, payload=json_payload('{"order": 5}')
            ),
            runs.ReplayRunRequest(name=made[2].name, use_newest_version=True),
        )
    ]
    assert [run.concurrency_key for run in replayed] == ["c7", "c7-5", "mine"]


async def test_a_replayed_run_takes_its_unique_key_back_if_it_is_free(server: RunServer) -> None:
    await server.make_job("mail")

    async def enqueue(keep_s: int = 3600) -> run_pb2.Run:
        key = run_pb2.UniqueKey(
            key="order-7",
            on_conflict=run_pb2.UNIQUE_CONFLICT_ACTION_REJECT,
            keep_for=Duration(seconds=keep_s),
        )
        return await server.enqueue("mail", unique_key=key)

    async def die(run: run_pb2.Run) -> None:
        [claimed] = (await server.claim()).runs
        assert claimed.run == run.key
        failure = failure_pb2.Failure(code="X", retry=failure_pb2.RETRY_DIRECTIVE_NEVER)
        await server.complete(claimed, failure=failure)

    first = await enqueue(keep_s=1)
    await die(first)
    # What its key is kept for is over, and nobody else has taken it.
    await server.query("UPDATE fencepost.dead_letters SET ended_at = ended_at - interval '1 hour'")
    await server.runs.ReplayRun(runs.ReplayRunRequest(name=first.name))
    refused = await refusal(enqueue())
    assert (refused.reason, refused.resource) == ("UNIQUE_KEY_HELD", first.name)
    await die(first)
    await server.query("UPDATE fencepost.dead_letters SET ended_at = ended_at - interval '2 days'")
    second = await enqueue()
    # Held by another run now: the replay goes on without it.
    replayed = (await server.runs.ReplayRun(runs.ReplayRunRequest(name=first.name))).run
    assert replayed.state == run_pb2.RUN_STATE_QUEUED
    refused = await refusal(enqueue())
    assert refused.resource == second.name


async def test_discard_is_final_and_may_be_repeated(server: RunServer) -> None:
    await server.make_job("mail")
    [run] = await dead(server)
    request = runs.DiscardRunRequest(name=run.name, reason="a test")
    given_up = (await server.runs.DiscardRun(request)).run
    assert given_up.state == run_pb2.RUN_STATE_DEAD
    assert given_up.HasField("discarded_at")
    assert (await server.runs.DiscardRun(request)).run == given_up
    refused = await refusal(server.runs.ReplayRun(runs.ReplayRunRequest(name=run.name)))
    assert refused.reason == "RUN_DISCARDED"


async def test_a_bulk_replay_is_looked_at_tried_and_done(server: RunServer) -> None:
    await server.make_job("mail")
    made = await dead(server, 8)
    seen = await server.runs.BatchUpdateRuns(update("kind:mail.send", dry_run=True))
    assert not seen.HasField("operation")
    assert seen.matched == 8
    assert list(seen.samples) == [run.name for run in [*made[:5], made[-1]]]
    request = update("kind:mail.send", max_runs=2, stop_when_failing=0.5, request_id="canary")
    operation = (await server.runs.BatchUpdateRuns(request)).operation
    assert operation.state == operation_pb2.OPERATION_STATE_RUNNING
    assert (operation.rate, operation.stop_when_failing) == (50, 0.5)
    assert (operation.matched, operation.filter) == (8, "kind:mail.send")
    assert (await server.runs.BatchUpdateRuns(request)).operation == operation
    steps = BulkSteps(
        database=server.database,
        clock=server.database.clock,
        wake=Wakes(),
        specs=SpecCache(server.database.requests, size=100),
    )
    while await steps.step():
        pass
    claimed = (await server.claim(max_runs=5)).runs
    assert len(claimed) == 2
    await server.complete(claimed[0])
    get = runs.GetOperationRequest(name=operation.name)
    done = (await server.runs.GetOperation(get)).operation
    assert done.state == operation_pb2.OPERATION_STATE_DONE
    assert (done.changed, done.changed_ended, done.changed_dead) == (2, 1, 0)


_BAD: list[tuple[dict[str, Any], str]] = [
    ({"parent": "tenants/"}, "parent"),
    ({"filter": ""}, "filter"),
    ({"filter": "   "}, "filter"),
    ({"filter": "state:SUCCEEDED"}, "filter"),
    ({"filter": "state:QUEUED"}, "filter"),
    ({"filter": "state:DEAD", "action": operation_pb2.OPERATION_ACTION_CANCEL}, "filter"),
    ({"filter": "colour:red"}, "filter"),
    ({"filter": f"kind:{'k' * 2100}"}, "filter"),
    ({"action": 0}, "action"),
    ({"action": operation_pb2.OPERATION_ACTION_BACKFILL}, "action"),
    ({"action": 77}, "action"),
    ({"rate": 0.01}, "rate"),
    ({"rate": 10_001}, "rate"),
    ({"rate": float("nan")}, "rate"),
    ({"stop_when_failing": 1.1}, "stop_when_failing"),
    ({"stop_when_failing": -0.1}, "stop_when_failing"),
    ({"stop_when_failing": float("nan")}, "stop_when_failing"),
    (
        {"action": operation_pb2.OPERATION_ACTION_DISCARD, "stop_when_failing": 0.1},
        "stop_when_failing",
    ),
    (
        {"action": operation_pb2.OPERATION_ACTION_DISCARD, "use_newest_version": True},
        "use_newest_version",
    ),
    ({"max_runs": -1}, "max_runs"),
    ({"reason": "r" * 257}, "reason"),
    ({"request_id": "i" * 37}, "request_id"),
]


async def test_bad_updates_name_the_field(server: RunServer) -> None:
    for values, field in _BAD:
        request = update()
        for name, value in values.items():
            setattr(request, name, value)
        refused = await refusal(server.runs.BatchUpdateRuns(request))
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT, values
        assert refused.fields == [field], values
    assert await server.query("SELECT * FROM fencepost.operations") == []


async def test_groups_say_what_is_dead(server: RunServer) -> None:
    await server.make_job("mail")
    await dead(server, 2)
    made = await dead(server, 1, code="FULL_BOX")
    found = await server.runs.ListDeadLetterGroups(runs.ListDeadLetterGroupsRequest(parent=TENANT))
    assert (found.grouped, found.total_groups) == (3, 2)
    newest, older = found.groups
    assert (newest.failure_code, newest.count, newest.sample_run) == ("FULL_BOX", 1, made[0].name)
    assert (older.failure_code, older.count, older.job) == ("BAD_ADDRESS", 2, JOB)
    assert (older.kind, older.sample_message) == ("mail.send", "no such street")
    assert older.dead_reason == run_pb2.DEAD_REASON_NOT_RETRYABLE
    assert older.oldest_ended_at.ToMicroseconds() <= older.newest_ended_at.ToMicroseconds()
    assert newest.newest_ended_at.ToMicroseconds() <= server.now() + SECOND
    one = await server.runs.ListDeadLetterGroups(
        runs.ListDeadLetterGroupsRequest(
            parent=JOB, filter="last_failure.code:BAD_ADDRESS", page_size=1
        )
    )
    assert [group.count for group in one.groups] == [2]
    none = await server.runs.ListDeadLetterGroups(
        runs.ListDeadLetterGroupsRequest(parent=TENANT, filter="state:QUEUED")
    )
    assert not none.groups
    negative = runs.ListDeadLetterGroupsRequest(parent=TENANT, page_size=-1)
    refused = await refusal(server.runs.ListDeadLetterGroups(negative))
    assert (refused.code, refused.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["page_size"])
