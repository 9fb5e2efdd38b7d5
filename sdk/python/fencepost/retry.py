"""When a unary call is sent again, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass

import grpc

from fencepost.errors import FencepostError

_AGAIN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        # A server that is leaving answers calls it had queued with CANCELLED; our own
        # cancellation never comes back as a status.
        grpc.StatusCode.CANCELLED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRetry:
    """Repeats of one call, all with the same ids."""

    max_attempts: int = 5
    base: float = 0.1
    """Seconds; the wait after failure n is random up to min(cap, base * 2^n)."""
    cap: float = 2.0
    """Seconds."""

    def wait(self, error: FencepostError, failures: int) -> float | None:
        """Seconds until the next try; None: give up. `failures` counts from 1."""
        if failures >= self.max_attempts:
            return None
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return error.retry_after  # without RetryInfo it is final
        if error.code not in _AGAIN:
            return None
        jittered = random.uniform(0, min(self.cap, self.base * 2**failures))
        return max(jittered, error.retry_after or 0.0)


class Backoff:
    """Full-jitter pace of reconnects: 0 to 0.5 s first, then up to 15 s, fresh after health."""

    def __init__(self, *, base: float = 0.5, cap: float = 15.0) -> None:
        self._base = base
        self._cap = cap
        self._failures = 0

    def next_delay(self) -> float:
        """Seconds to wait before the next try; each call counts as one more failure."""
        bound = min(self._cap, self._base * 2 ** min(self._failures, 10))
        self._failures += 1
        return random.uniform(0, bound)

    def reset(self) -> None:
        """To be called after 30 s of health."""
        self._failures = 0
