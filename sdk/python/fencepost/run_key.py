"""The identity of a run as a value: its text form, its parts, and the span id of an attempt."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from fencepost.v1 import run_pb2

RunId = tuple[str, int, int]
"""(job_id, seconds, nanos): what keys are compared by, with nothing lost."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def run_id(key: run_pb2.RunKey) -> RunId:
    """The comparable form of a key as it came over the wire."""
    at = key.scheduled_at
    return key.job_id, at.seconds, at.nanos


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """A job and the instant the run stands for; `str()` is the idempotency key."""

    job_id: str
    seconds: int
    nanos: int

    @classmethod
    def of(cls, key: run_pb2.RunKey) -> RunKey:
        """From the wire."""
        at = key.scheduled_at
        return cls(job_id=key.job_id, seconds=at.seconds, nanos=at.nanos)

    @classmethod
    def parse(cls, text: str) -> RunKey:
        """From the text form. ValueError if it is not one."""
        job_id, slash, instant = text.partition("/")
        if not job_id or not slash or not instant.endswith("Z"):
            raise ValueError(f"a run key reads '{{job_id}}/2026-12-01T09:00:00Z', got {text!r}")
        at = datetime.fromisoformat(instant)
        elapsed = at - _EPOCH
        return cls(
            job_id=job_id,
            seconds=elapsed.days * 86400 + elapsed.seconds,
            nanos=elapsed.microseconds * 1000,
        )

    def to_message(self) -> run_pb2.RunKey:
        """For the wire."""
        key = run_pb2.RunKey(job_id=self.job_id)
        key.scheduled_at.seconds = self.seconds
        key.scheduled_at.nanos = self.nanos
        return key

    @property
    def scheduled_at(self) -> datetime:
        """The instant in UTC. For reading; no deadline follows from it."""
        return _EPOCH + timedelta(seconds=self.seconds, microseconds=self.nanos // 1000)

    @property
    def instant(self) -> str:
        """RFC 3339 with Z; six fractional digits unless it is a whole second."""
        whole = (_EPOCH + timedelta(seconds=self.seconds)).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{whole}.{self.nanos // 1000:06d}Z" if self.nanos else f"{whole}Z"

    def __str__(self) -> str:
        return f"{self.job_id}/{self.instant}"

    def span_id(self, attempt: int) -> str:
        """Span id of an attempt, 16 hex digits."""
        return hashlib.sha256(f"{self}/{attempt}".encode()).hexdigest()[:16]
