"""Whatever text a worker reports, its run ends at the first try, and can be read and listed
afterwards: NUL, lone surrogates, bytes that are no text, in every field that takes any."""

import uuid
from typing import Any

import pytest
from fencepost.v1 import failure_pb2, payload_pb2, run_pb2, run_service_pb2, worker_pb2
from fencepost_server.domain.names import format_run
from google.protobuf.message import Message

from tests.integration.running_server import (
    QUEUE,
    RunningServer,
    held,
    key_of,
    running,
)

_NUL = "a\x00b"
_KEPT = "a\ufffdb"
_BINARY = payload_pb2.Payload(data=b"\x00\xff\xfe\xed\xa0\x80", content_type="application/x")
_JSON = [
    payload_pb2.Payload(json='"\x00"'),
    payload_pb2.Payload(json=r'"\u0000"'),
    payload_pb2.Payload(json=r'"\ud800"'),
    payload_pb2.Payload(json='{"a":1e100000}'),
    payload_pb2.Payload(json="\ufffe\U0010ffff\u2028\r\n"),
    payload_pb2.Payload(json="no json at all"),
    _BINARY,
]


def _failure(**fields: Any) -> worker_pb2.Completion:
    fields.setdefault("retry", failure_pb2.RETRY_DIRECTIVE_NEVER)
    return worker_pb2.Completion(failure=failure_pb2.Failure(**fields))


def _success(**fields: Any) -> worker_pb2.Completion:
    return worker_pb2.Completion(success=worker_pb2.Success(), **fields)


COMPLETIONS: list[worker_pb2.Completion] = [
    *(worker_pb2.Completion(success=worker_pb2.Success(result=each)) for each in _JSON),
    *(_failure(code="X", details=each) for each in _JSON),
    *(_success(progress=run_pb2.Progress(checkpoint=each)) for each in _JSON),
    _failure(message=_NUL),
    _failure(stack_trace=_NUL),
    _failure(code="A\x00B"),
    _failure(code="X", message="\ufffe\r\n\x1b[31m\u202e"),
    _success(progress=run_pb2.Progress(message=_NUL)),
    worker_pb2.Completion(cancelled=worker_pb2.Cancelled(message=_NUL)),
]


async def _claimed(server: RunningServer, count: int) -> list[worker_pb2.Assignment]:
    await server.make_job()
    await server.enqueue(count)
    request = run_service_pb2.ClaimRunsRequest(max_runs=count)
    request.subscriptions.add(queue=QUEUE)
    request.wait.FromSeconds(5)
    found: list[worker_pb2.Assignment] = []
    while len(found) < count:
        found += (await server.runs.ClaimRuns(request)).runs
    return found


async def test_every_text_ends_its_run_at_the_first_try(database_url: str) -> None:
    async with running(database_url) as server:
        claimed = await _claimed(server, len(COMPLETIONS))
        completions = []
        for assignment, each in zip(claimed, COMPLETIONS, strict=True):
            completion = worker_pb2.Completion(run=assignment.run, attempt=assignment.attempt)
            completion.MergeFrom(each)
            completions.append(completion)
        answer = await server.runs.BatchCompleteRuns(
            run_service_pb2.BatchCompleteRunsRequest(completions=completions)
        )
        for each, verdict in zip(COMPLETIONS, answer.verdicts, strict=True):
            assert verdict.verdict == worker_pb2.VERDICT_APPLIED, each
        assert not await server.query("SELECT FROM fencepost.run_queue")
        for completion in completions:
            await _check_read(server, completion)
        listed = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(parent="tenants/default", page_size=100)
        )
        assert len(listed.runs) == len(COMPLETIONS)


async def _check_read(server: RunningServer, completion: worker_pb2.Completion) -> None:
    key = key_of(completion.run)
    name = format_run("default", key.job_id, key.scheduled_at)
    run = (await server.runs.GetRun(run_service_pb2.GetRunRequest(name=name))).run
    states = {"success": "SUCCEEDED", "failure": "DEAD", "cancelled": "CANCELLED"}
    outcome = completion.WhichOneof("outcome")
    assert outcome is not None
    assert run_pb2.RunState.Name(run.state) == f"RUN_STATE_{states[outcome]}"
    # Payloads byte for byte, text with U+FFFD in the place of NUL.
    if outcome == "success":
        assert run.result == completion.success.result
        assert run.progress.checkpoint == completion.progress.checkpoint
        assert run.progress.message == completion.progress.message.replace("\x00", "\ufffd")
    if outcome == "failure":
        sent, kept = completion.failure, run.last_failure
        assert kept.details == sent.details
        assert (kept.message, kept.stack_trace) == (
            sent.message.replace("\x00", "\ufffd"),
            sent.stack_trace.replace("\x00", "\ufffd"),
        )
        assert kept.code == (sent.code.replace("\x00", "\ufffd") or "UNKNOWN")
        attempts = await server.runs.ListAttempts(run_service_pb2.ListAttemptsRequest(parent=name))
        assert attempts.attempts[0].failure == kept


async def test_every_text_of_a_heartbeat_keeps_its_lease(database_url: str) -> None:
    async with running(database_url) as server:
        progresses = [run_pb2.Progress(checkpoint=each) for each in _JSON]
        progresses.append(run_pb2.Progress(message=_NUL))
        claimed = await _claimed(server, len(progresses))
        runs = [held(each, progress=sent) for each, sent in zip(claimed, progresses, strict=True)]
        answer = await server.runs.HeartbeatRuns(
            run_service_pb2.HeartbeatRunsRequest(worker_id=str(uuid.uuid4()), runs=runs)
        )
        assert not answer.notices
        assert not answer.not_renewed
        stored = await server.query("SELECT count(progress) FROM fencepost.run_queue")
        assert stored[0][0] == len(progresses)


def _with_bad_bytes(request: Message, text: bytes) -> bytes:
    raw = request.SerializeToString()
    assert raw.count(text) == 1
    return raw.replace(text, b"\xff" * len(text))


@pytest.mark.parametrize("field", ["message", "stack_trace", "code"])
async def test_text_that_is_not_utf_8_is_refused_as_bad_input_and_changes_nothing(
    database_url: str, field: str
) -> None:
    """No protobuf text can carry it; the SDK repairs it before sending."""
    async with running(database_url) as server:
        [assignment] = await _claimed(server, 1)
        completion = _failure(**{field: "QQQQ"})
        completion.run.CopyFrom(assignment.run)
        completion.attempt = 1
        request = run_service_pb2.CompleteRunRequest(completion=completion)
        call = server.channel.unary_unary("/fencepost.v1.RunService/CompleteRun")
        with pytest.raises(Exception, match="valid UTF-8"):
            await call(_with_bad_bytes(request, b"QQQQ"), timeout=9)
        [row] = await server.query("SELECT state::text, attempt_open FROM fencepost.run_queue")
        assert tuple(row) == ("running", True)
