"""The parts of what a worker reports, checked and in the form that is kept: failures, timings,
progress. Text that Postgres cannot hold never refuses the end of an attempt.
"""

from math import isfinite

from fencepost.v1 import failure_pb2, payload_pb2, run_pb2
from google.protobuf.duration_pb2 import Duration as DurationMessage

from fencepost_server.api import validate
from fencepost_server.api.wire_payload import read_payload
from fencepost_server.clock import DAY, SECOND, Duration
from fencepost_server.engine.reaper import QUEUE_TIMEOUT_CODE, TOTAL_TIMEOUT_CODE
from fencepost_server.engine.verdicts import TIMEOUT_CODE
from fencepost_server.errors import PayloadTooLarge
from fencepost_server.policy.outcome import Failed

DETAILS_BYTES_MAX = STACK_BYTES_MAX = 16 * 1024
CHECKPOINT_BYTES_MAX = MESSAGE_BYTES_MAX = 4 * 1024
NOTE_BYTES_MAX = 256
DELAY_MAX: Duration = 30 * DAY
UNKNOWN_CODE = "UNKNOWN"
_SERVER_FAILURES = (
    (
        TIMEOUT_CODE,
        failure_pb2.FAILURE_ORIGIN_ATTEMPT_TIMEOUT,
        "the attempt overran attempt_timeout and its worker did not end it",
    ),
    (
        QUEUE_TIMEOUT_CODE,
        failure_pb2.FAILURE_ORIGIN_QUEUE_TIMEOUT,
        "the run waited longer than queue_timeout for its next claim",
    ),
    (
        TOTAL_TIMEOUT_CODE,
        failure_pb2.FAILURE_ORIGIN_TOTAL_TIMEOUT,
        "the run overran total_timeout, all attempts together",
    ),
)
_CODE_CHARS_MAX = 63

# What a client may say of who decided that an attempt failed; all else is the handler.
_CLIENT_ORIGINS = frozenset(
    (failure_pb2.FAILURE_ORIGIN_SDK, failure_pb2.FAILURE_ORIGIN_ATTEMPT_TIMEOUT)
)


def server_failures() -> dict[str, bytes]:
    """What the server itself records of attempts and runs that are out of time, by code."""
    return {
        code: failure_pb2.Failure(code=code, message=message, origin=origin).SerializeToString(
            deterministic=True
        )
        for code, origin, message in _SERVER_FAILURES
    }


def read_failure(message: failure_pb2.Failure, *, field: str) -> tuple[failure_pb2.Failure, Failed]:
    """What is kept of a failure, rebuilt from known fields, and what it asks for."""
    kept = failure_pb2.Failure(
        code=_code(message.code, f"{field}.code"),
        message=bounded_text(
            message.message, field=f"{field}.message", bytes_max=MESSAGE_BYTES_MAX
        ),
        stack_trace=bounded_text(
            message.stack_trace, field=f"{field}.stack_trace", bytes_max=STACK_BYTES_MAX
        ),
        retry=message.retry,
        origin=(
            message.origin
            if message.origin in _CLIENT_ORIGINS
            else failure_pb2.FAILURE_ORIGIN_HANDLER
        ),
    )
    if message.HasField("details"):
        details = _bounded_payload(message.details, f"{field}.details", DETAILS_BYTES_MAX)
        if details is not None:
            kept.details.ParseFromString(details)
    retry_after = None
    if message.retry == failure_pb2.RETRY_DIRECTIVE_AFTER_DELAY:
        retry_after = read_delay(message.retry_delay, field=f"{field}.retry_delay")
        kept.retry_delay.seconds = retry_after // SECOND
        kept.retry_delay.nanos = retry_after % SECOND * 1000
    elif message.retry not in failure_pb2.RetryDirective.values():
        raise validate.refused(f"{field}.retry", message.retry, "NEVER (1) or AFTER_DELAY (2)")
    ending = Failed(
        code=kept.code,
        final=message.retry == failure_pb2.RETRY_DIRECTIVE_NEVER,
        retry_after=retry_after,
        timed_out=kept.origin == failure_pb2.FAILURE_ORIGIN_ATTEMPT_TIMEOUT,
        reported=True,
    )
    return kept, ending


def _code(code: str, field: str) -> str:
    if not code:
        return UNKNOWN_CODE
    if "\x00" in code:
        return code.replace("\x00", "\ufffd")[:_CODE_CHARS_MAX]
    return validate.failure_code(code, field=field)


def read_timings(message: run_pb2.WorkerTimings, *, field: str) -> bytes:
    """The stored form. Raises InvalidField."""
    kept = run_pb2.WorkerTimings()
    for name in ("buffered", "handling"):
        if message.HasField(name):
            sent = getattr(message, name)
            length = validate.duration(sent, field=f"{field}.{name}", minimum=0, round_up=True)
            getattr(kept, name).FromMicroseconds(length)
    return kept.SerializeToString(deterministic=True)


def read_delay(message: DurationMessage, *, field: str) -> Duration:
    """0 s to 30 d, finer than a microsecond rounded up. Raises InvalidField."""
    return validate.duration(message, field=field, minimum=0, maximum=DELAY_MAX, round_up=True)


def bounded_text(text: str, *, field: str, bytes_max: int) -> str:
    """Text within its bound; NUL becomes U+FFFD, so that it never refuses what it came with."""
    if not text:
        return text
    size = len(text) if text.isascii() else len(text.encode())
    if size > bytes_max:
        raise _too_large(field, size, bytes_max)
    return text.replace("\x00", "\ufffd")


def _bounded_payload(message: payload_pb2.Payload, field: str, bytes_max: int) -> bytes | None:
    size = len(message.json.encode()) if message.HasField("json") else len(message.data)
    if size > bytes_max:
        raise _too_large(field, size, bytes_max)
    return read_payload(message, field=field)


def _too_large(field: str, size: int, bytes_max: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"{field}: has {size} bytes, at most {bytes_max} are allowed",
        field=field,
        limitBytes=str(bytes_max),
        actualBytes=str(size),
    )


def read_progress(message: run_pb2.Progress, *, field: str) -> bytes:
    """The stored form. Raises InvalidField or PayloadTooLarge."""
    if not (isfinite(message.percent) and 0 <= message.percent <= 100):
        raise validate.refused(f"{field}.percent", message.percent, "0 to 100")
    kept = run_pb2.Progress(
        percent=message.percent,
        message=bounded_text(message.message, field=f"{field}.message", bytes_max=NOTE_BYTES_MAX),
    )
    if message.HasField("checkpoint"):
        found = _bounded_payload(message.checkpoint, f"{field}.checkpoint", CHECKPOINT_BYTES_MAX)
        if found is not None:
            kept.checkpoint.ParseFromString(found)
    return kept.SerializeToString(deterministic=True)
