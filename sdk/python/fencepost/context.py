"""What a handler knows about its run, and how it reports progress and hears of a cancel."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Generator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from fencepost.durations import duration_seconds
from fencepost.outcome import RunCancelled
from fencepost.payload import PayloadError, decode_payload, encode_payload
from fencepost.run_key import RunKey
from fencepost.text import cut
from fencepost.v1 import failure_pb2, payload_pb2, run_pb2, worker_pb2

MAX_CHECKPOINT_BYTES = 4 * 1024
MAX_PROGRESS_MESSAGE_BYTES = 256

_logger = logging.getLogger("fencepost.handler")
_current: ContextVar[Context] = ContextVar("fencepost_context")


class Cause(enum.Enum):
    """Why a handler is asked to stop."""

    CANCELLED = "cancelled"
    """Somebody cancelled the run."""
    LEASE_LOST = "lease_lost"
    """The run is no longer this worker's; whatever the handler returns is dropped."""
    LEASE_UNCERTAIN = "lease_uncertain"
    """The lease could not be renewed in time; another worker may soon have the run."""
    TIMEOUT = "timeout"
    """attempt_timeout is over."""
    SHUTDOWN = "shutdown"
    """The worker is leaving and its grace is over; the run goes to another worker."""


class _Done:
    """Awaitable that is done: `progress` serves async and sync handlers alike."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_DONE = _Done()


class Context:
    """One attempt of one run, as its handler sees it."""

    __slots__ = (
        "_assignment",
        "_cause",
        "_event",
        "_key",
        "_logger",
        "_progress",
        "_progress_version",
        "_received_at",
    )

    def __init__(self, assignment: worker_pb2.Assignment, received_at: float) -> None:
        self._assignment = assignment
        self._received_at = received_at
        self._key: RunKey | None = None
        self._cause: Cause | None = None
        self._event: threading.Event | None = None
        self._logger: logging.LoggerAdapter[logging.Logger] | None = None
        self._progress: run_pb2.Progress | None = None
        self._progress_version = 0

    @property
    def run_key(self) -> RunKey:
        """Which run this is; `str()` of it is the text form."""
        if self._key is None:
            self._key = RunKey.of(self._assignment.run)
        return self._key

    @property
    def idempotency_key(self) -> str:
        """Stable over attempts, retries and replays: for stores that do each effect once."""
        return str(self.run_key)

    @property
    def attempt(self) -> int:
        """Number of this claim, from 1."""
        return self._assignment.attempt

    @property
    def fencing_token(self) -> int:
        """Rising with every claim: for stores that refuse a lower token than they have seen."""
        return self._assignment.attempt

    @property
    def scheduled_at(self) -> datetime:
        """The instant the run stands for, UTC."""
        return self.run_key.scheduled_at

    @property
    def kind(self) -> str:
        """The handler's name."""
        return self._assignment.kind

    @property
    def job(self) -> str:
        """tenants/{tenant}/jobs/{job_name}"""
        return self._assignment.job

    @property
    def queue(self) -> str:
        """tenants/{tenant}/queues/{queue_name}"""
        return self._assignment.queue

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the run."""
        return dict(self._assignment.labels)

    @property
    def failure_count(self) -> int:
        """Failures before this attempt, 0 or more."""
        return self._assignment.failure_count

    @property
    def max_failures(self) -> int:
        """The failure with this number is final."""
        return self._assignment.max_failures

    @property
    def deadline(self) -> float:
        """When attempt_timeout is over, on the clock of `time.monotonic()`."""
        timeout = duration_seconds(self._assignment.attempt_timeout)
        return self._received_at + timeout if timeout else float("inf")

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, 0 or more."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether the handler is asked to stop; `cause` says why."""
        return self._cause is not None

    @property
    def cause(self) -> Cause | None:
        """Why the handler is asked to stop. None: it is not."""
        return self._cause

    def raise_if_cancelled(self) -> None:
        """For sync handlers: raises RunCancelled when the run is to stop."""
        if self._cause is not None:
            raise RunCancelled(self._cause.value)

    def wait_cancelled(self, timeout: float | None = None) -> bool:
        """For sync handlers: blocks up to `timeout` seconds; True when asked to stop."""
        if self._event is None:
            self._event = threading.Event()
            if self._cause is not None:
                self._event.set()
        return self._event.wait(timeout)

    def progress(self, percent: float = 0.0, message: str = "", checkpoint: object = None) -> _Done:
        """Tells how far the handler is; travels with the next heartbeat. May be awaited.

        `percent` 0 to 100, `message` cut to 256 bytes, `checkpoint` (kept for the next
        attempt; None leaves the last one) at most 4 KiB: ValueError beyond that.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be 0 to 100, got {percent!r}")
        progress = run_pb2.Progress(
            percent=percent, message=cut(message, MAX_PROGRESS_MESSAGE_BYTES)
        )
        payload = encode_payload(checkpoint)
        if payload is not None:
            size = payload.ByteSize()
            if size > MAX_CHECKPOINT_BYTES:
                raise ValueError(
                    f"checkpoint has {size} bytes, at most {MAX_CHECKPOINT_BYTES} are allowed"
                )
            progress.checkpoint.CopyFrom(payload)
        else:
            last = self._last_progress()
            if last is not None and last.HasField("checkpoint"):
                progress.checkpoint.CopyFrom(last.checkpoint)
        self._progress = progress
        self._progress_version += 1
        return _DONE

    def last_checkpoint(self, as_type: Any = Any) -> Any:
        """The newest checkpoint, of this attempt or an earlier one; None without any.

        PayloadError if it does not fit `as_type`.
        """
        last = self._last_progress()
        if last is None or not last.HasField("checkpoint"):
            return None
        return decode_payload(last.checkpoint, as_type)

    @property
    def last_failure(self) -> failure_pb2.Failure | None:
        """The newest failure of an earlier attempt; None without any."""
        present = self._assignment.HasField("last_failure")
        return self._assignment.last_failure if present else None

    @property
    def trace(self) -> payload_pb2.TraceContext:
        """W3C trace context whose span is this attempt: the parent of the handler's span."""
        return self._assignment.trace_context

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records carry run_key, attempt and kind."""
        if self._logger is None:
            extra = {"run_key": str(self.run_key), "attempt": self.attempt, "kind": self.kind}
            self._logger = logging.LoggerAdapter(_logger, extra)
        return self._logger

    def _last_progress(self) -> run_pb2.Progress | None:
        if self._progress is not None:
            return self._progress
        present = self._assignment.HasField("progress")
        return self._assignment.progress if present else None

    def _cancel(self, cause: Cause) -> bool:
        """Marks the context cancelled; False if it already was."""
        if self._cause is not None:
            return False
        self._cause = cause
        if self._event is not None:
            self._event.set()
        return True


def current_context() -> Context:
    """The context of the handler this code runs in. LookupError outside of one."""
    return _current.get()


__all__ = ["Cause", "Context", "PayloadError", "current_context"]
