"""Instants and durations in the form that messages carry."""

from google.protobuf.duration_pb2 import Duration as DurationMessage
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost_server.clock import SECOND, Duration, Instant


def to_timestamp(at: Instant) -> Timestamp:
    """The instant, to the microsecond."""
    return Timestamp(seconds=at // SECOND, nanos=at % SECOND * 1000)


def to_duration(length: Duration) -> DurationMessage:
    """The duration, to the microsecond; not negative."""
    return DurationMessage(seconds=length // SECOND, nanos=length % SECOND * 1000)
