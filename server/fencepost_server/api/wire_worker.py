"""What travels between workers and the server, in both paths, to and from the engine's terms.

Reading checks every field; an entry that is refused is an error of its own and never ends
the batch or the stream that it came in.
"""

from typing import Protocol, TypeAlias, cast

import structlog
from fencepost.v1 import run_pb2, worker_pb2

from fencepost_server.api import validate
from fencepost_server.api.wire_failure import (
    MESSAGE_BYTES_MAX,
    NOTE_BYTES_MAX,
    bounded_text,
    read_delay,
    read_failure,
    read_progress,
    read_timings,
)
from fencepost_server.api.wire_payload import read_payload
from fencepost_server.clock import HOUR, SECOND, Duration
from fencepost_server.domain.names import is_uuid
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.verdicts import Held, Judged, Notice, Report, Verdict
from fencepost_server.errors import FencepostError, InvalidField, PayloadTooLarge
from fencepost_server.policy.outcome import (
    UNSUPPORTED_KIND_WAIT,
    Cancelled,
    Released,
    Snoozed,
)

RELEASE_DELAY_MAX: Duration = HOUR
RETRY_AFTER: Duration = SECOND
_ATTEMPT_MAX = 2**31 - 1
# Instants below it need no closer look on the hot path.
_YEAR_2200 = 7_258_118_400
_log = structlog.get_logger("wire_worker")


# A report in the engine's terms, or why it is never acceptable as sent.
Read: TypeAlias = Report | FencepostError


class Fenced(Protocol):
    """A message that is about one attempt of a run."""

    @property
    def run(self) -> run_pb2.RunKey: ...
    @property
    def attempt(self) -> int: ...


def read_run_key(message: run_pb2.RunKey, *, field: str) -> RunKey:
    """The identity of a run. Raises InvalidField."""
    job_id = message.job_id
    if not is_uuid(job_id):
        raise validate.refused(
            f"{field}.job_id", job_id, "lower-case UUID text of 36 characters, as in Job.job_id"
        )
    if not message.HasField("scheduled_at"):
        raise validate.missing(f"{field}.scheduled_at", "the instant of the run key")
    at = message.scheduled_at
    seconds, nanos = at.seconds, at.nanos
    if 0 <= seconds < _YEAR_2200 and 0 <= nanos < 1_000_000_000 and not nanos % 1000:
        return RunKey(job_id, seconds * SECOND + nanos // 1000)
    return RunKey(job_id, validate.instant(at, field=f"{field}.scheduled_at"))


def write_run_key(key: RunKey, into: run_pb2.RunKey) -> None:
    """Fills an empty key."""
    into.job_id = key.job_id
    into.scheduled_at.seconds = key.scheduled_at // SECOND
    into.scheduled_at.nanos = key.scheduled_at % SECOND * 1000


def read_attempt(message: Fenced, *, field: str) -> tuple[RunKey, int]:
    """The run and the fence that a message is about. Raises InvalidField."""
    key = read_run_key(message.run, field=f"{field}.run")
    if message.attempt < 1:
        raise validate.refused(f"{field}.attempt", message.attempt, f"1 to {_ATTEMPT_MAX}")
    return key, message.attempt


# Ends of attempts -------------------------------------------------------------------------


def read_completion(message: worker_pb2.Completion, *, field: str = "completion") -> Read:
    """A report, or the refusal that its verdict INVALID tells; never raises it."""
    try:
        return _completion(message, field)
    except FencepostError as error:
        return error


def read_release(message: worker_pb2.Release, *, field: str = "release") -> Read:
    """As `read_completion`, for a run that is given back."""
    try:
        key, attempt = read_attempt(message, field=field)
        delay = validate.duration(
            message.delay,
            field=f"{field}.delay",
            minimum=0,
            maximum=RELEASE_DELAY_MAX,
            round_up=True,
        )
    except FencepostError as error:
        return error
    if message.reason == worker_pb2.RELEASE_REASON_UNSUPPORTED_KIND:
        delay = max(delay, UNSUPPORTED_KIND_WAIT)
    return Report(key=key, attempt=attempt, ending=Released(delay=delay))


def _completion(message: worker_pb2.Completion, field: str) -> Report:
    key, attempt = read_attempt(message, field=field)
    timings = progress = None
    if message.HasField("timings"):
        timings = read_timings(message.timings, field=f"{field}.timings")
    if message.HasField("progress"):
        progress = read_progress(message.progress, field=f"{field}.progress")
    outcome = message.WhichOneof("outcome")
    if outcome == "success":
        result = None
        if message.success.HasField("result"):
            result = read_payload(message.success.result, field=f"{field}.success.result")
        return Report(
            key=key,
            attempt=attempt,
            ending=None,
            result=result,
            timings=timings,
            progress=progress,
        )
    if outcome == "failure":
        kept, ending = read_failure(message.failure, field=f"{field}.failure")
        return Report(
            key=key,
            attempt=attempt,
            ending=ending,
            failure=kept.SerializeToString(deterministic=True),
            failure_code=kept.code,
            timings=timings,
            progress=progress,
        )
    if outcome == "snooze":
        bounded_text(
            message.snooze.reason, field=f"{field}.snooze.reason", bytes_max=NOTE_BYTES_MAX
        )
        delay = read_delay(message.snooze.delay, field=f"{field}.snooze.delay")
        return Report(
            key=key,
            attempt=attempt,
            ending=Snoozed(delay=delay),
            timings=timings,
            progress=progress,
        )
    if outcome == "cancelled":
        bounded_text(
            message.cancelled.message,
            field=f"{field}.cancelled.message",
            bytes_max=MESSAGE_BYTES_MAX,
        )
        return Report(
            key=key, attempt=attempt, ending=Cancelled(), timings=timings, progress=progress
        )
    raise validate.missing(f"{field}.outcome", "one of success, failure, snooze, cancelled")


# Heartbeats -------------------------------------------------------------------------------


def read_held(message: worker_pb2.HeldRun, *, field: str, drop_bad_progress: bool = False) -> Held:
    """One held run. Raises InvalidField or PayloadTooLarge.

    With `drop_bad_progress` (sessions, which have no answer for it) progress that is refused
    is logged and left out: the lease is worth more.
    """
    key, attempt = read_attempt(message, field=field)
    if not message.HasField("progress"):
        return Held(key, attempt)
    try:
        return Held(key, attempt, read_progress(message.progress, field=f"{field}.progress"))
    except (InvalidField, PayloadTooLarge) as error:
        if not drop_bad_progress:
            raise
        _log.warning("progress_refused", run=str(key), attempt=attempt, error=error.message)
        return Held(key, attempt)


def write_notice(notice: Notice) -> worker_pb2.RunNotice:
    """What a worker must know about a run it holds."""
    message = worker_pb2.RunNotice(attempt=notice.attempt)
    write_run_key(notice.key, message.run)
    if notice.lost is not None:
        message.lease_lost.reason = cast("worker_pb2.LeaseLostReason.ValueType", int(notice.lost))
        message.lease_lost.current_attempt = notice.current_attempt
    else:
        message.cancel_requested.reason = notice.cancel_reason
        message.cancel_requested.grace_remaining.FromMicroseconds(notice.grace)
    return message


# Verdicts ---------------------------------------------------------------------------------


def write_verdict(key: RunKey, attempt: int, judged: Judged) -> worker_pb2.AttemptVerdict:
    """What was done with a report."""
    message = worker_pb2.AttemptVerdict(
        attempt=attempt, verdict=cast("worker_pb2.Verdict.ValueType", int(judged.verdict))
    )
    write_run_key(key, message.run)
    if judged.verdict is Verdict.RETRY:
        message.retry_after.FromMicroseconds(RETRY_AFTER)
        return message
    if judged.run_state is not None:
        message.run_state = cast("run_pb2.RunState.ValueType", int(judged.run_state))
    if judged.verdict is Verdict.STALE_ATTEMPT:
        message.current_attempt = judged.current_attempt
    elif judged.verdict is Verdict.INVALID:
        message.reason = "UNKNOWN_ATTEMPT"
        message.message = unknown_attempt_text(key, attempt, judged.current_attempt)
    return message


def write_refusal(message: Fenced, error: FencepostError) -> worker_pb2.AttemptVerdict:
    """INVALID, for an entry that could not be read: its key and attempt as they came."""
    return worker_pb2.AttemptVerdict(
        run=message.run,
        attempt=message.attempt,
        verdict=worker_pb2.VERDICT_INVALID,
        reason=error.reason,
        message=error.message,
    )


def write_retry(message: Fenced, *, after: Duration = RETRY_AFTER) -> worker_pb2.AttemptVerdict:
    """RETRY, for an entry that could not be stored just now."""
    verdict = worker_pb2.AttemptVerdict(
        run=message.run, attempt=message.attempt, verdict=worker_pb2.VERDICT_RETRY
    )
    verdict.retry_after.FromMicroseconds(after)
    return verdict


def unknown_attempt_text(key: RunKey, attempt: int, current: int) -> str:
    """The one text for an attempt that was never handed out."""
    return f"attempt {attempt} of {key} was never handed out; the newest is {current}"
