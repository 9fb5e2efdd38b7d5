"""Builds a job's definition out of the flags of `fencepost jobs create`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, timedelta
from enum import StrEnum
from typing import Any

from fencepost.v1 import job_pb2, payload_pb2, schedule_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost_server.cli.choices import DstFold, DstGap, Misfire, Overlap
from fencepost_server.cli.failure import usage
from fencepost_server.cli.values import (
    parse_duration,
    parse_instant,
    parse_labels,
    read_payload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFlags:
    """The flags as typed; None or empty where they were not."""

    name: str
    kind: str
    queue: str | None
    priority: int
    cron: Sequence[str]
    tz: str | None
    dst_gap: DstGap | None
    dst_fold: DstFold | None
    every: str | None
    after_completion: bool
    at: str | None
    delay: str | None
    start_at: str | None
    end_at: str | None
    max_fires: int
    exclude_calendar: Sequence[str]
    jitter: str | None
    overlap: Overlap | None
    misfire: Misfire | None
    misfire_threshold: str | None
    max_catch_up: int
    payload: str | None
    label: Sequence[str]
    description: str
    max_failures: int | None
    attempt_timeout: str | None
    queue_timeout: str | None
    total_timeout: str | None
    max_in_flight: int
    paused: bool


def build_job(flags: JobFlags, *, tenant: str) -> job_pb2.Job:
    """The definition to send. Raises CliError for flags that do not go together."""
    job = job_pb2.Job(
        description=flags.description,
        labels=parse_labels(flags.label),
        target=job_pb2.Target(kind=flags.kind, priority=flags.priority),
        paused=flags.paused,
    )
    if flags.queue is not None:
        full = flags.queue.startswith("tenants/")
        job.target.queue = flags.queue if full else f"tenants/{tenant}/queues/{flags.queue}"
    if flags.payload is not None:
        job.payload.CopyFrom(payload_pb2.Payload(json=read_payload(flags.payload)))
    if flags.max_failures is not None:
        job.retry_policy.max_failures = flags.max_failures
    if flags.attempt_timeout is not None:
        job.limits.attempt_timeout.CopyFrom(duration("--attempt-timeout", flags.attempt_timeout))
    if flags.queue_timeout is not None:
        job.limits.queue_timeout.CopyFrom(duration("--queue-timeout", flags.queue_timeout))
    if flags.total_timeout is not None:
        job.limits.total_timeout.CopyFrom(duration("--total-timeout", flags.total_timeout))
    if flags.max_in_flight:
        job.limits.max_in_flight = flags.max_in_flight
    schedule = _build_schedule(flags)
    if schedule is not None:
        job.schedule.CopyFrom(schedule)
    return job


def duration(flag: str, text: str) -> Duration:
    """A typed duration as the wire has it."""
    return _wire_duration(parse_duration(flag, text))


def timestamp(flag: str, text: str) -> Timestamp:
    """A typed instant as the wire has it."""
    at = Timestamp()
    at.FromDatetime(parse_instant(flag, text).astimezone(UTC))
    return at


def _wire_duration(value: timedelta) -> Duration:
    wire = Duration()
    wire.FromTimedelta(value)
    return wire


def _build_schedule(flags: JobFlags) -> schedule_pb2.Schedule | None:
    rules = {
        "--cron": bool(flags.cron),
        "--every": flags.every is not None,
        "--at": flags.at is not None,
        "--delay": flags.delay is not None,
    }
    chosen = [flag for flag, is_set in rules.items() if is_set]
    if len(chosen) > 1:
        raise usage(
            f"{' and '.join(chosen)} do not go together", why="a job has one schedule, or none"
        )
    _refuse_strays(flags, chosen)
    if not chosen:
        return None
    schedule = schedule_pb2.Schedule(
        max_fires=flags.max_fires, exclude_calendars=flags.exclude_calendar
    )
    if flags.cron:
        schedule.cron.CopyFrom(_cron(flags))
    elif flags.every is not None:
        schedule.interval.every.CopyFrom(duration("--every", flags.every))
        schedule.interval.after_completion = flags.after_completion
    elif flags.at is not None:
        schedule.once.at.CopyFrom(timestamp("--at", flags.at))
    elif flags.delay is not None:
        schedule.once.delay.CopyFrom(duration("--delay", flags.delay))
    if flags.start_at is not None:
        schedule.start_at.CopyFrom(timestamp("--start-at", flags.start_at))
    if flags.end_at is not None:
        schedule.end_at.CopyFrom(timestamp("--end-at", flags.end_at))
    if flags.jitter is not None:
        schedule.jitter.CopyFrom(duration("--jitter", flags.jitter))
    if flags.overlap is not None:
        schedule.overlap_policy = schedule_pb2.OverlapPolicy.Value(
            f"OVERLAP_POLICY_{_upper(flags.overlap)}"
        )
    _add_misfire_policy(flags, schedule)
    return schedule


def _refuse_strays(flags: JobFlags, chosen: Sequence[str]) -> None:
    """A flag that would have no effect is a mistake, not something to pass over."""
    needs: list[tuple[str, Any, tuple[str, ...]]] = [
        ("--tz", flags.tz, ("--cron",)),
        ("--dst-gap", flags.dst_gap, ("--cron",)),
        ("--dst-fold", flags.dst_fold, ("--cron",)),
        ("--after-completion", flags.after_completion, ("--every",)),
    ]
    any_rule = ("--cron", "--every", "--at", "--delay")
    for flag, value in (
        ("--start-at", flags.start_at),
        ("--end-at", flags.end_at),
        ("--max-fires", flags.max_fires),
        ("--exclude-calendar", flags.exclude_calendar),
        ("--jitter", flags.jitter),
        ("--overlap", flags.overlap),
        ("--misfire", flags.misfire),
        ("--misfire-threshold", flags.misfire_threshold),
        ("--max-catch-up", flags.max_catch_up),
    ):
        needs.append((flag, value, any_rule))
    for flag, value, rules in needs:
        if value and not set(rules) & set(chosen):
            raise usage(
                f"{flag} has no effect on job {flags.name!r}", why=f"it needs {' or '.join(rules)}"
            )


def _cron(flags: JobFlags) -> schedule_pb2.CronSpec:
    cron = schedule_pb2.CronSpec(expressions=flags.cron, time_zone=flags.tz or "")
    if flags.dst_gap is not None:
        cron.dst_gap = schedule_pb2.DstGapPolicy.Value(f"DST_GAP_POLICY_{_upper(flags.dst_gap)}")
    if flags.dst_fold is not None:
        cron.dst_fold = schedule_pb2.DstFoldPolicy.Value(
            f"DST_FOLD_POLICY_{_upper(flags.dst_fold)}"
        )
    return cron


def _add_misfire_policy(flags: JobFlags, schedule: schedule_pb2.Schedule) -> None:
    if flags.misfire is not None:
        schedule.misfire_policy.action = schedule_pb2.MisfireAction.Value(
            f"MISFIRE_ACTION_{_upper(flags.misfire)}"
        )
    if flags.misfire_threshold is not None:
        schedule.misfire_policy.threshold.CopyFrom(
            duration("--misfire-threshold", flags.misfire_threshold)
        )
    if flags.max_catch_up:
        schedule.misfire_policy.max_catch_up = flags.max_catch_up


def _upper(choice: StrEnum) -> str:
    return choice.value.upper().replace("-", "_")
