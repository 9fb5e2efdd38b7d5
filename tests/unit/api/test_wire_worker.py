"""What workers send and get: checked, bounded and repaired."""

from typing import Any

import pytest
from fencepost.v1 import failure_pb2, payload_pb2, run_pb2, worker_pb2
from fencepost_server.api.wire_worker import (
    read_completion,
    read_held,
    read_release,
    read_run_key,
    write_notice,
    write_refusal,
    write_retry,
    write_run_key,
    write_verdict,
)
from fencepost_server.clock import HOUR, SECOND
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine.verdicts import Judged, LeaseLostReason, Notice, Report, Verdict
from fencepost_server.errors import FencepostError, InvalidField, PayloadTooLarge
from fencepost_server.policy.outcome import Cancelled, Failed, Released, Snoozed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

JOB_ID = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
KEY = RunKey(JOB_ID, 1_796_115_600_000_412)


def wire_key() -> run_pb2.RunKey:
    message = run_pb2.RunKey()
    write_run_key(KEY, message)
    return message


def completion(**values: Any) -> worker_pb2.Completion:
    return worker_pb2.Completion(run=wire_key(), attempt=3, **values)


def report(message: worker_pb2.Completion) -> Report:
    read = read_completion(message)
    assert isinstance(read, Report)
    return read


def refused(message: worker_pb2.Completion) -> FencepostError:
    read = read_completion(message)
    assert isinstance(read, FencepostError)
    return read


def failure(**values: Any) -> tuple[Failed, failure_pb2.Failure]:
    read = report(completion(failure=failure_pb2.Failure(**values)))
    assert isinstance(read.ending, Failed)
    assert read.failure is not None
    kept = failure_pb2.Failure.FromString(read.failure)
    assert read.failure_code == kept.code
    return read.ending, kept


def test_a_run_key_survives_the_wire() -> None:
    assert read_run_key(wire_key(), field="run") == KEY
    assert str(KEY).endswith("/2026-12-01T09:00:00.000412Z")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("run.job_id", run_pb2.RunKey(job_id=JOB_ID.upper(), scheduled_at=Timestamp(seconds=1))),
        ("run.job_id", run_pb2.RunKey()),
        ("run.scheduled_at", run_pb2.RunKey(job_id=JOB_ID)),
        ("run.scheduled_at", run_pb2.RunKey(job_id=JOB_ID, scheduled_at=Timestamp(nanos=1))),
        ("run.scheduled_at", run_pb2.RunKey(job_id=JOB_ID, scheduled_at=Timestamp(nanos=-1000))),
        (
            "run.scheduled_at",
            run_pb2.RunKey(job_id=JOB_ID, scheduled_at=Timestamp(seconds=10**12)),
        ),
    ],
)
def test_malformed_run_keys_are_refused(field: str, message: run_pb2.RunKey) -> None:
    with pytest.raises(InvalidField) as error:
        read_run_key(message, field="run")
    assert error.value.field == field


def test_a_success_with_all_its_parts() -> None:
    read = report(
        completion(
            success=worker_pb2.Success(result=payload_pb2.Payload(json='{"a": "\x00"}')),
            timings=run_pb2.WorkerTimings(handling=Duration(seconds=2)),
            progress=run_pb2.Progress(percent=100),
        )
    )
    assert (read.key, read.attempt, read.ending) == (KEY, 3, None)
    assert payload_pb2.Payload.FromString(read.result or b"").json == '{"a": "\x00"}'
    assert run_pb2.WorkerTimings.FromString(read.timings or b"").handling.seconds == 2
    assert run_pb2.Progress.FromString(read.progress or b"").percent == 100
    assert report(completion(success=worker_pb2.Success())).result is None


def test_outcomes_become_endings() -> None:
    assert report(completion(cancelled=worker_pb2.Cancelled())).ending == Cancelled()
    snoozed = report(completion(snooze=worker_pb2.Snooze(delay=Duration(nanos=1))))
    assert snoozed.ending == Snoozed(delay=1)


def test_failures_keep_what_clients_may_say() -> None:
    ending, kept = failure(message="broken")
    assert ending == Failed(code="UNKNOWN", reported=True)
    assert (kept.code, kept.message) == ("UNKNOWN", "broken")
    assert kept.origin == failure_pb2.FAILURE_ORIGIN_HANDLER
    never, _ = failure(code="BAD", retry=failure_pb2.RETRY_DIRECTIVE_NEVER)
    assert never.final
    later, kept = failure(
        code="BUSY",
        retry=failure_pb2.RETRY_DIRECTIVE_AFTER_DELAY,
        retry_delay=Duration(seconds=90),
    )
    assert later.retry_after == 90 * SECOND
    assert kept.retry_delay.seconds == 90
    timed_out, kept = failure(code="T", origin=failure_pb2.FAILURE_ORIGIN_ATTEMPT_TIMEOUT)
    assert timed_out.timed_out
    assert timed_out.reported
    for origin, wanted in (
        (failure_pb2.FAILURE_ORIGIN_SDK, failure_pb2.FAILURE_ORIGIN_SDK),
        (failure_pb2.FAILURE_ORIGIN_LEASE_EXPIRED, failure_pb2.FAILURE_ORIGIN_HANDLER),
        (failure_pb2.FAILURE_ORIGIN_TOTAL_TIMEOUT, failure_pb2.FAILURE_ORIGIN_HANDLER),
    ):
        assert failure(code="T", origin=origin)[1].origin == wanted


def test_nul_never_refuses_a_failure() -> None:
    ending, kept = failure(code="A\x00B", message="c\x00d", stack_trace="\x00")
    assert ending.code == kept.code == "A\ufffdB"
    assert (kept.message, kept.stack_trace) == ("c\ufffdd", "\ufffd")


@pytest.mark.parametrize(
    ("reason", "field", "message"),
    [
        ("INVALID_FIELD", "completion.outcome", completion()),
        (
            "INVALID_FIELD",
            "completion.attempt",
            worker_pb2.Completion(run=wire_key(), success=worker_pb2.Success()),
        ),
        ("INVALID_FIELD", "completion.run.job_id", worker_pb2.Completion(attempt=1)),
        (
            "PAYLOAD_TOO_LARGE",
            "completion.success.result.json",
            completion(success=worker_pb2.Success(result=payload_pb2.Payload(json="x" * 262145))),
        ),
        (
            "PAYLOAD_TOO_LARGE",
            "completion.failure.stack_trace",
            completion(failure=failure_pb2.Failure(stack_trace="x" * 16385)),
        ),
        (
            "PAYLOAD_TOO_LARGE",
            "completion.failure.details",
            completion(
                failure=failure_pb2.Failure(
                    details=payload_pb2.Payload(data=b"x" * 16385, content_type="a/b")
                )
            ),
        ),
        (
            "PAYLOAD_TOO_LARGE",
            "completion.failure.message",
            completion(failure=failure_pb2.Failure(message="ä" * 2049)),
        ),
        (
            "INVALID_FIELD",
            "completion.failure.code",
            completion(failure=failure_pb2.Failure(code="lower")),
        ),
        (
            "INVALID_FIELD",
            "completion.failure.retry_delay",
            completion(
                failure=failure_pb2.Failure(
                    retry=failure_pb2.RETRY_DIRECTIVE_AFTER_DELAY,
                    retry_delay=Duration(seconds=31 * 86400),
                )
            ),
        ),
        (
            "INVALID_FIELD",
            "completion.snooze.delay",
            completion(snooze=worker_pb2.Snooze(delay=Duration(seconds=-1))),
        ),
        (
            "PAYLOAD_TOO_LARGE",
            "completion.progress.checkpoint",
            completion(
                success=worker_pb2.Success(),
                progress=run_pb2.Progress(checkpoint=payload_pb2.Payload(json="x" * 4097)),
            ),
        ),
        (
            "INVALID_FIELD",
            "completion.timings.handling",
            completion(
                success=worker_pb2.Success(),
                timings=run_pb2.WorkerTimings(handling=Duration(seconds=-1)),
            ),
        ),
    ],
)
def test_bad_completions_are_refused_with_their_field(
    reason: str, field: str, message: worker_pb2.Completion
) -> None:
    error = refused(message)
    assert (error.reason, error.field) == (reason, field)
    verdict = write_refusal(message, error)
    assert verdict.verdict == worker_pb2.VERDICT_INVALID
    assert (verdict.reason, verdict.run) == (reason, message.run)


@pytest.mark.parametrize(
    ("reason", "delay_s", "wanted"),
    [
        (worker_pb2.RELEASE_REASON_UNSPECIFIED, 0, 0),
        (worker_pb2.RELEASE_REASON_UNSUPPORTED_KIND, 0, 5 * SECOND),
        (worker_pb2.RELEASE_REASON_UNSUPPORTED_KIND, 60, 60 * SECOND),
        (worker_pb2.RELEASE_REASON_OVERLOADED, 3600, HOUR),
    ],
)
def test_releases(reason: Any, delay_s: int, wanted: int) -> None:
    read = read_release(
        worker_pb2.Release(
            run=wire_key(), attempt=3, reason=reason, delay=Duration(seconds=delay_s)
        )
    )
    assert read == Report(key=KEY, attempt=3, ending=Released(delay=wanted))


def test_a_release_for_too_long_is_refused() -> None:
    read = read_release(worker_pb2.Release(run=wire_key(), attempt=3, delay=Duration(seconds=3601)))
    assert isinstance(read, InvalidField)
    assert read.field == "release.delay"


def test_bad_progress_is_refused_or_left_out() -> None:
    message = worker_pb2.HeldRun(
        run=wire_key(), attempt=3, progress=run_pb2.Progress(message="x" * 257)
    )
    with pytest.raises(PayloadTooLarge):
        read_held(message, field="runs[0]")
    held = read_held(message, field="runs[0]", drop_bad_progress=True)
    assert (held.key, held.attempt, held.progress) == (KEY, 3, None)
    nan = worker_pb2.HeldRun(
        run=wire_key(), attempt=3, progress=run_pb2.Progress(percent=float("nan"))
    )
    with pytest.raises(InvalidField):
        read_held(nan, field="runs[0]")


def test_verdicts_say_what_belongs_to_them() -> None:
    stale = write_verdict(KEY, 3, Judged(Verdict.STALE_ATTEMPT, 5, RunState.RUNNING))
    assert (stale.run, stale.attempt, stale.current_attempt) == (wire_key(), 3, 5)
    assert stale.run_state == run_pb2.RUN_STATE_RUNNING
    unknown = write_verdict(KEY, 9, Judged(Verdict.INVALID, 5, RunState.RUNNING))
    assert (unknown.reason, unknown.current_attempt) == ("UNKNOWN_ATTEMPT", 0)
    assert "attempt 9" in unknown.message
    retry = write_verdict(KEY, 3, Judged(Verdict.RETRY))
    assert retry.retry_after.seconds == 1
    assert retry.run_state == run_pb2.RUN_STATE_UNSPECIFIED
    assert write_retry(completion()) == retry


def test_notices() -> None:
    lost = write_notice(Notice(KEY, 3, lost=LeaseLostReason.SUPERSEDED, current_attempt=4))
    assert lost.lease_lost.reason == worker_pb2.LEASE_LOST_REASON_SUPERSEDED
    assert lost.lease_lost.current_attempt == 4
    asked = write_notice(Notice(KEY, 3, cancel_reason="stop", grace=0))
    assert asked.WhichOneof("notice") == "cancel_requested"
    assert asked.cancel_requested.reason == "stop"
