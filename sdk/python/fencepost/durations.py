"""Seconds, timedeltas and datetimes to and from the protocol's durations and timestamps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

Seconds = float | int | timedelta
"""A length of time: seconds as a number, or a timedelta."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_seconds(length: Seconds) -> float:
    """Any accepted length of time as seconds."""
    return length.total_seconds() if isinstance(length, timedelta) else float(length)


def duration_seconds(duration: Duration) -> float:
    """A protocol duration as seconds."""
    return duration.seconds + duration.nanos / 1e9


def to_duration(length: Seconds) -> Duration:
    """A protocol duration, whole microseconds. ValueError if negative or not a number."""
    seconds = to_seconds(length)
    if not 0 <= seconds < 1e11:
        raise ValueError(f"a duration must be 0 s or more, got {length!r}")
    microseconds = round(seconds * 1e6)
    return Duration(seconds=microseconds // 1_000_000, nanos=(microseconds % 1_000_000) * 1000)


def to_timestamp(instant: datetime) -> Timestamp:
    """A protocol timestamp. ValueError without a time zone: local time is a guess."""
    if instant.tzinfo is None:
        raise ValueError(f"an instant needs a time zone, got {instant!r}")
    microseconds = (instant - _EPOCH) // _MICROSECOND
    seconds, rest = divmod(microseconds, 1_000_000)
    return Timestamp(seconds=seconds, nanos=rest * 1000)


def to_datetime(timestamp: Timestamp) -> datetime:
    """A UTC datetime, cut to whole microseconds."""
    return _EPOCH + timedelta(seconds=timestamp.seconds, microseconds=timestamp.nanos // 1000)
