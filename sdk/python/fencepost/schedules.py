"""Short forms of the schedules most jobs need."""

from __future__ import annotations

from datetime import datetime

from fencepost.durations import Seconds, to_duration, to_timestamp
from fencepost.v1 import schedule_pb2

Schedule = schedule_pb2.Schedule


def cron(*expressions: str, time_zone: str = "UTC") -> Schedule:
    """Wall-clock recurrence: 1 to 16 expressions (a union) in one IANA time zone."""
    if not expressions:
        raise ValueError("cron needs at least one expression")
    spec = schedule_pb2.CronSpec(expressions=expressions, time_zone=time_zone)
    return Schedule(cron=spec)


def every(interval: Seconds, *, after_completion: bool = False) -> Schedule:
    """Elapsed-time recurrence; `interval` in seconds or as a timedelta."""
    spec = schedule_pb2.IntervalSpec(every=to_duration(interval), after_completion=after_completion)
    return Schedule(interval=spec)


def once(at: datetime | None = None, *, delay: Seconds | None = None) -> Schedule:
    """A single fire: at an instant, after a delay counted by the server, or now."""
    if at is not None and delay is not None:
        raise ValueError("once takes `at` or `delay`, not both")
    if at is not None:
        return Schedule(once=schedule_pb2.OnceSpec(at=to_timestamp(at)))
    if delay is not None:
        return Schedule(once=schedule_pb2.OnceSpec(delay=to_duration(delay)))
    return Schedule(once=schedule_pb2.OnceSpec())
