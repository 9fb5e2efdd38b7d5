"""Instants and durations, and the process's view of the database clock.

Everything in the server counts whole microseconds: an `Instant` since
1970-01-01T00:00:00Z, a `Duration` between two instants (docs/adr/0002). Only the store
reads the database clock; everything else gets `now` from a `Clock` at the edge and passes
it on.
"""

import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Protocol, TypeAlias

Instant: TypeAlias = int
Duration: TypeAlias = int

MILLISECOND: Duration = 1_000
SECOND: Duration = 1_000_000
MINUTE: Duration = 60 * SECOND
HOUR: Duration = 60 * MINUTE
DAY: Duration = 24 * HOUR

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock(Protocol):
    """Where the edges get `now` from."""

    def now(self) -> Instant:
        """The database clock's instant, as well as this process knows it."""
        ...


class DatabaseClock:
    """The database clock, followed by an offset to the monotonic clock of this process.

    A sample whose round trip took longer than `ROUND_TRIP_MAX` is discarded: its midpoint
    says too little.
    """

    ROUND_TRIP_MAX = 50 * MILLISECOND

    def __init__(self) -> None:
        self._offset: int | None = None

    def now(self) -> Instant:
        """The database clock's instant. Needs one accepted sample."""
        assert self._offset is not None, "the database clock was never sampled"
        return _monotonic() + self._offset

    @property
    def is_set(self) -> bool:
        """Whether a sample was accepted yet."""
        return self._offset is not None

    def sample(self, *, asked_at: int, answered_at: int, database_at: Instant) -> Duration | None:
        """Take a reading; returns the step it made, or None if it was discarded.

        `asked_at` and `answered_at` are `monotonic()` readings around the query.
        """
        if answered_at - asked_at > self.ROUND_TRIP_MAX and self._offset is not None:
            return None
        offset = database_at - (asked_at + answered_at) // 2
        step = 0 if self._offset is None else offset - self._offset
        self._offset = offset
        return step


def _monotonic() -> int:
    return time.monotonic_ns() // 1000


def monotonic() -> int:
    """Microseconds of the process's monotonic clock, for timeouts and samples."""
    return _monotonic()


def from_datetime(value: datetime) -> Instant:
    """The instant of an aware datetime."""
    return (value - _EPOCH) // timedelta(microseconds=1)


def to_datetime(at: Instant) -> datetime:
    """The instant as an aware datetime in UTC."""
    return _EPOCH + timedelta(microseconds=at)


def format_instant(at: Instant) -> str:
    """RFC 3339 with `Z`; six fractional digits only when not a whole second.

    This is the text form inside run keys and run names (protocol N5).
    """
    second, fraction = divmod(at, SECOND)
    return f"{_format_second(second)}.{fraction:06d}Z" if fraction else f"{_format_second(second)}Z"


@lru_cache(maxsize=4096)
def _format_second(second: int) -> str:
    """Without zone. Cached because runs share seconds: it is half the price of a span id."""
    return to_datetime(second * SECOND).replace(tzinfo=None).isoformat()


def ceil_second(at: Instant) -> Instant:
    """Rounded up to a whole second, as nominal instants are (protocol N4)."""
    return -(-at // SECOND) * SECOND
