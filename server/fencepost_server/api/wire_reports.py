"""The reports of one message of a session, and the verdicts on them in one message.

What sessions say most, that a first attempt succeeded, is read and answered without an object
of its own per report; whatever is out of the ordinary is left to `wire_worker`.
"""

from collections.abc import Sequence

from fencepost.v1 import run_pb2, worker_pb2

from fencepost_server.api.wire_payload import read_payload
from fencepost_server.api.wire_worker import (
    Fenced,
    Read,
    read_completion,
    write_refusal,
    write_verdict,
)
from fencepost_server.clock import SECOND
from fencepost_server.domain.names import is_uuid
from fencepost_server.engine.verdicts import (
    SUCCESS_APPLIED,
    Judged,
    PlainSuccess,
    Report,
    attempt_of,
)
from fencepost_server.errors import FencepostError

# Instants below it, the year 2200, need no closer look.
_SECONDS_MAX = 7_258_118_400
_NANOS_PER_SECOND = 1_000_000_000


def read_completions(messages: Sequence[worker_pb2.Completion]) -> list[Read | PlainSuccess]:
    """A report for each, or why it is refused; never raises it."""
    return [_success(message) or read_completion(message) for message in messages]


def accepted(
    messages: Sequence[Fenced], read: Sequence[Read | PlainSuccess], verdicts: worker_pb2.Verdicts
) -> tuple[list[Fenced], list[Report | PlainSuccess]]:
    """Those that could be read, with what was read; the others get their verdicts at once."""
    told: list[Fenced] = []
    reports: list[Report | PlainSuccess] = []
    for message, each in zip(messages, read, strict=True):
        if isinstance(each, FencepostError):
            verdicts.verdicts.append(write_refusal(message, each))
        else:
            told.append(message)
            reports.append(each)
    return told, reports


def write_verdicts(
    messages: Sequence[Fenced],
    reports: Sequence[Report | PlainSuccess],
    judged: Sequence[Judged],
    verdicts: worker_pb2.Verdicts,
) -> None:
    """What was done with each."""
    for message, report, answer in zip(messages, reports, judged, strict=True):
        if answer is SUCCESS_APPLIED:
            verdict = verdicts.verdicts.add()
            verdict.run.CopyFrom(message.run)
            verdict.attempt = message.attempt
            verdict.verdict = worker_pb2.VERDICT_APPLIED
            verdict.run_state = run_pb2.RUN_STATE_SUCCEEDED
        else:
            verdicts.verdicts.append(write_verdict(*attempt_of(report), answer))


def _success(message: worker_pb2.Completion) -> PlainSuccess | None:
    """A plain success; None for everything else, also for what is to be refused."""
    if message.attempt != 1 or message.WhichOneof("outcome") != "success":
        return None
    run = message.run
    at = run.scheduled_at
    job_id, seconds, nanos = run.job_id, at.seconds, at.nanos
    if not (
        0 < seconds < _SECONDS_MAX
        and 0 <= nanos < _NANOS_PER_SECOND
        and not nanos % 1000
        and is_uuid(job_id)
    ):
        return None
    result = timings = None
    if message.success.ByteSize():
        try:
            result = read_payload(message.success.result, field="completion.success.result")
        except FencepostError:
            # Told by the one that refuses it for every path.
            return None
    if message.HasField("timings"):
        timings = _timings(message.timings)
        if timings is None:
            return None
    if message.HasField("progress"):
        return None
    return job_id, seconds * SECOND + nanos // 1000, result, timings


def _timings(message: run_pb2.WorkerTimings) -> bytes | None:
    """As `wire_failure.read_timings`; None if they are not both there in whole microseconds."""
    buffered, handling = message.buffered, message.handling
    for seconds, nanos in (
        (buffered.seconds, buffered.nanos),
        (handling.seconds, handling.nanos),
    ):
        if not (0 <= seconds < _SECONDS_MAX and 0 <= nanos < _NANOS_PER_SECOND) or nanos % 1000:
            return None
    message.DiscardUnknownFields()
    return message.SerializeToString()
