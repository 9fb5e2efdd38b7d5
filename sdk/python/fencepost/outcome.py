"""How a handler says what happened, and how that becomes the outcome on the wire."""

from __future__ import annotations

import re
import traceback

from fencepost.durations import Seconds, to_duration, to_seconds
from fencepost.payload import PayloadError, encode_payload
from fencepost.text import cut, cut_middle
from fencepost.v1 import failure_pb2, payload_pb2, run_pb2, worker_pb2

MAX_CODE = 63
MAX_MESSAGE_BYTES = 4 * 1024
MAX_STACK_BYTES = 16 * 1024
MAX_DETAILS_BYTES = 16 * 1024
MAX_REASON_BYTES = 256
MAX_DELAY = 30 * 86400.0

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Outcome(Exception):
    """Base of what a handler raises on purpose."""


class Retryable(Outcome):
    """The attempt failed; retry by the job's policy, or after `after` seconds."""

    def __init__(
        self,
        code: str,
        message: str = "",
        *,
        after: Seconds | None = None,
        details: object = None,
    ) -> None:
        super().__init__(message or code)
        self.code, self.message, self.details = str(code), str(message), details
        self.after = None if after is None else _delay(after, "after")


class Fatal(Outcome):
    """The attempt failed and no retry can help: the run becomes a dead letter."""

    def __init__(self, code: str, message: str = "", *, details: object = None) -> None:
        super().__init__(message or code)
        self.code, self.message, self.details = str(code), str(message), details


class Snooze(Outcome):
    """Neither an error nor done: run again later. Uses no retry budget."""

    def __init__(
        self,
        delay: Seconds = 0,
        *,
        seconds: float = 0,
        minutes: float = 0,
        hours: float = 0,
        reason: str = "",
    ) -> None:
        total = to_seconds(delay) + seconds + 60 * minutes + 3600 * hours
        self.delay = _delay(total, "delay")
        self.reason = reason
        super().__init__(reason or f"snoozed for {self.delay:g} s")


class RunCancelled(Outcome):
    """Raised by `ctx.raise_if_cancelled()` when the run is to stop."""


def _delay(length: Seconds, name: str) -> float:
    seconds = to_seconds(length)
    if not 0 <= seconds <= MAX_DELAY:
        raise ValueError(f"{name} must be 0 s to 30 d, got {length!r}")
    return seconds


def set_result(completion: worker_pb2.Completion, result: object, max_bytes: int) -> None:
    """Success with this result; a failure if it cannot be sent."""
    if result is None:
        completion.success.SetInParent()
        return
    try:
        payload = encode_payload(result)
    except Exception as error:  # noqa: BLE001 - a model's own code, and the slot must be freed
        refuse(completion, "RESULT_NOT_SERIALIZABLE", _text_of(error))
        return
    size = _body_size(payload)
    if size > max_bytes:
        text = f"the result has {size} bytes, at most {max_bytes} are allowed"
        refuse(completion, "RESULT_TOO_LARGE", text)
    elif payload is not None:
        completion.success.result.CopyFrom(payload)


def _body_size(payload: payload_pb2.Payload | None) -> int:
    if payload is None:
        return 0
    return len(payload.data) or len(payload.json.encode())


def set_error(completion: worker_pb2.Completion, error: BaseException) -> None:
    """The outcome that an exception out of a handler stands for."""
    try:
        _set_error(completion, error)
    except Exception as broken:  # noqa: BLE001 - an exception of the user's own making
        name = type(error).__name__
        refuse(completion, "BROKEN_EXCEPTION", f"{name} cannot be reported: {_text_of(broken)}")
        completion.failure.ClearField("retry")


def _set_error(completion: worker_pb2.Completion, error: BaseException) -> None:
    if isinstance(error, Snooze):
        completion.snooze.delay.CopyFrom(to_duration(error.delay))
        completion.snooze.reason = cut(error.reason, MAX_REASON_BYTES)
        return
    failure = completion.failure
    failure.origin = failure_pb2.FAILURE_ORIGIN_HANDLER
    failure.message = cut(_message_of(error), MAX_MESSAGE_BYTES)
    failure.stack_trace = cut_middle(_stack_of(error), MAX_STACK_BYTES)
    if isinstance(error, Retryable | Fatal):
        failure.code = failure_code(error.code)
        _set_details(failure, error.details)
        if isinstance(error, Fatal):
            failure.retry = failure_pb2.RETRY_DIRECTIVE_NEVER
        elif error.after is not None:
            failure.retry = failure_pb2.RETRY_DIRECTIVE_AFTER_DELAY
            failure.retry_delay.CopyFrom(to_duration(error.after))
    elif isinstance(error, Exception):
        failure.code = failure_code(type(error).__name__)
    else:
        failure.code = "PANIC"


def set_timeout(completion: worker_pb2.Completion, limit: float) -> None:
    """The failure of an attempt that overran its time, `limit` in seconds."""
    failure = completion.failure
    failure.code = "TIMEOUT"
    failure.origin = failure_pb2.FAILURE_ORIGIN_ATTEMPT_TIMEOUT
    failure.message = f"the attempt ran longer than attempt_timeout, {limit:g} s"


def refuse(completion: worker_pb2.Completion, code: str, message: str) -> None:
    """A failure the SDK itself decided on, final."""
    failure = completion.failure
    failure.code = code
    failure.message = cut(message, MAX_MESSAGE_BYTES)
    failure.origin = failure_pb2.FAILURE_ORIGIN_SDK
    failure.retry = failure_pb2.RETRY_DIRECTIVE_NEVER


def set_timings(completion: worker_pb2.Completion, buffered: float, handling: float) -> None:
    """Durations in seconds, measured by the monotonic clock."""
    timings: run_pb2.WorkerTimings = completion.timings
    for field, seconds in ((timings.buffered, buffered), (timings.handling, handling)):
        whole = int(seconds)
        field.seconds = whole
        field.nanos = int((seconds - whole) * 1e6) * 1000


def failure_code(name: str) -> str:
    """UPPER_SNAKE_CASE of a class name or of a code in any spelling."""
    spelled = _WORD.sub("_", name) if not name.isupper() else name
    code = re.sub(r"[^A-Za-z0-9]+", "_", spelled).strip("_").upper()
    return code[:MAX_CODE] or "UNKNOWN"


def _message_of(error: BaseException) -> str:
    return error.message if isinstance(error, Retryable | Fatal) else _text_of(error)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not lose the failure
        return f"{type(error).__name__} whose text cannot be shown"


def _stack_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - as above
        return ""


def _set_details(failure: failure_pb2.Failure, details: object) -> None:
    if details is None:
        return
    try:
        payload = encode_payload(details)
    except PayloadError as error:
        failure.message = cut(f"{failure.message} (details left out: {error})", MAX_MESSAGE_BYTES)
        return
    if payload is not None and payload.ByteSize() <= MAX_DETAILS_BYTES:
        failure.details.CopyFrom(payload)
    else:
        text = f"{failure.message} (details left out: over {MAX_DETAILS_BYTES} bytes)"
        failure.message = cut(text, MAX_MESSAGE_BYTES)
