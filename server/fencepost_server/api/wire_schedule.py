"""Schedules between messages and the domain.

Shapes and single fields are checked here; whether the rule as a whole is acceptable is
for policy.schedule.validate to say.
"""

from typing import cast

from fencepost.v1 import schedule_pb2
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost_server.api import validate
from fencepost_server.api.wire_time import to_duration, to_timestamp
from fencepost_server.clock import SECOND, Instant, ceil_second
from fencepost_server.domain.names import check_calendar_name
from fencepost_server.domain.schedule import (
    CronSpec,
    DstFoldPolicy,
    DstGapPolicy,
    IntervalSpec,
    MisfireAction,
    MisfirePolicy,
    OnceSpec,
    OverlapPolicy,
    Schedule,
    Spec,
)
from fencepost_server.errors import NotImplementedYet
from fencepost_server.policy.schedule import (
    CALENDARS_MAX,
    CATCH_UP_MAX,
    FIRES_MAX,
    JITTER_MAX,
    ONCE_AHEAD_MAX,
    THRESHOLD_MAX,
    THRESHOLD_MIN,
    WINDOW_MIN,
)


def read_schedule(message: schedule_pb2.Schedule, *, now: Instant, field: str) -> Schedule:
    """The schedule; what is relative to receipt is counted from `now`.

    Raises InvalidField.
    """
    return Schedule(
        spec=_read_spec(message, now, field),
        start_at=_bound(
            message.start_at if message.HasField("start_at") else None, f"{field}.start_at"
        ),
        end_at=_bound(message.end_at if message.HasField("end_at") else None, f"{field}.end_at"),
        max_fires=validate.integer(
            message.max_fires, field=f"{field}.max_fires", minimum=0, maximum=FIRES_MAX
        ),
        misfire=_read_misfire(message.misfire_policy, f"{field}.misfire_policy"),
        overlap=validate.choice(
            message.overlap_policy, OverlapPolicy, field=f"{field}.overlap_policy"
        )
        or OverlapPolicy.SKIP,
        jitter=validate.duration(
            message.jitter, field=f"{field}.jitter", minimum=0, maximum=JITTER_MAX
        ),
        exclude_calendars=tuple(
            check_calendar_name(name, field=f"{field}.exclude_calendars[{index}]")
            for index, name in enumerate(message.exclude_calendars[: CALENDARS_MAX + 1])
        ),
    )


def write_schedule(schedule: Schedule) -> schedule_pb2.Schedule:
    """The message, with defaults spelled out."""
    message = schedule_pb2.Schedule(
        max_fires=schedule.max_fires,
        misfire_policy=_write_misfire(schedule.misfire),
        overlap_policy=cast("schedule_pb2.OverlapPolicy.ValueType", int(schedule.overlap)),
        exclude_calendars=schedule.exclude_calendars,
    )
    if schedule.jitter:
        message.jitter.CopyFrom(to_duration(schedule.jitter))
    if schedule.start_at is not None:
        message.start_at.CopyFrom(to_timestamp(schedule.start_at))
    if schedule.end_at is not None:
        message.end_at.CopyFrom(to_timestamp(schedule.end_at))
    match schedule.spec:
        case CronSpec() as cron:
            message.cron.expressions.extend(cron.expressions)
            message.cron.time_zone = cron.time_zone
            message.cron.dst_gap = cast("schedule_pb2.DstGapPolicy.ValueType", int(cron.dst_gap))
            message.cron.dst_fold = cast("schedule_pb2.DstFoldPolicy.ValueType", int(cron.dst_fold))
        case IntervalSpec() as interval:
            message.interval.every.CopyFrom(to_duration(interval.every))
            if interval.anchor is not None:
                message.interval.anchor.CopyFrom(to_timestamp(interval.anchor))
            message.interval.after_completion = interval.after_completion
        case OnceSpec() as once:
            message.once.at.CopyFrom(to_timestamp(once.at))
    return message


def not_served(field: str) -> NotImplementedYet:
    """The refusal of a field that this version does not serve."""
    return NotImplementedYet(f"{field}: not served by this version; leave it unset", field=field)


def _read_spec(message: schedule_pb2.Schedule, now: Instant, field: str) -> Spec:
    match message.WhichOneof("spec"):
        case "cron":
            return _read_cron(message.cron, f"{field}.cron")
        case "interval":
            return _read_interval(message.interval, f"{field}.interval")
        case "once":
            return OnceSpec(at=_read_once(message.once, now, f"{field}.once"))
        case _:
            raise validate.missing(field, "one of cron, interval, once")


def _read_cron(message: schedule_pb2.CronSpec, field: str) -> CronSpec:
    gap = validate.choice(message.dst_gap, DstGapPolicy, field=f"{field}.dst_gap")
    fold = validate.choice(message.dst_fold, DstFoldPolicy, field=f"{field}.dst_fold")
    return CronSpec(
        expressions=tuple(
            validate.text(expression, field=f"{field}.expressions[{index}]")
            for index, expression in enumerate(message.expressions)
        ),
        time_zone=validate.text(message.time_zone, field=f"{field}.time_zone") or "UTC",
        dst_gap=gap or DstGapPolicy.RUN_AFTER_GAP,
        dst_fold=fold or DstFoldPolicy.FIRST,
    )


def _read_interval(message: schedule_pb2.IntervalSpec, field: str) -> IntervalSpec:
    if not message.HasField("every"):
        raise validate.missing(f"{field}.every", "whole seconds, 1 s to 366 d")
    anchor = None
    if message.HasField("anchor"):
        anchor = validate.whole_second(message.anchor, field=f"{field}.anchor")
    return IntervalSpec(
        every=validate.duration(message.every, field=f"{field}.every", minimum=0),
        anchor=anchor,
        after_completion=message.after_completion,
    )


def _read_once(message: schedule_pb2.OnceSpec, now: Instant, field: str) -> Instant:
    match message.WhichOneof("when"):
        case "at":
            return validate.whole_second(message.at, field=f"{field}.at")
        case "delay":
            delay = validate.duration(
                message.delay,
                field=f"{field}.delay",
                minimum=0,
                maximum=ONCE_AHEAD_MAX,
                round_up=True,
            )
            # The limit is on the delay, not on the second it is rounded up to.
            return min(ceil_second(now + delay), (now + ONCE_AHEAD_MAX) // SECOND * SECOND)
        case _:
            return now // SECOND * SECOND


def _read_misfire(message: schedule_pb2.MisfirePolicy, field: str) -> MisfirePolicy:
    default = MisfirePolicy()
    action = validate.choice(message.action, MisfireAction, field=f"{field}.action")
    threshold = validate.optional_duration(
        message.threshold,
        field=f"{field}.threshold",
        minimum=THRESHOLD_MIN,
        maximum=THRESHOLD_MAX,
    )
    max_catch_up = validate.optional_integer(
        message.max_catch_up, field=f"{field}.max_catch_up", minimum=1, maximum=CATCH_UP_MAX
    )
    return MisfirePolicy(
        action=action or default.action,
        threshold=threshold or default.threshold,
        window=validate.optional_duration(
            message.window, field=f"{field}.window", minimum=WINDOW_MIN
        ),
        max_catch_up=max_catch_up or default.max_catch_up,
    )


def _write_misfire(policy: MisfirePolicy) -> schedule_pb2.MisfirePolicy:
    message = schedule_pb2.MisfirePolicy(
        action=cast("schedule_pb2.MisfireAction.ValueType", int(policy.action)),
        threshold=to_duration(policy.threshold),
        max_catch_up=policy.max_catch_up,
    )
    if policy.window is not None:
        message.window.CopyFrom(to_duration(policy.window))
    return message


def _bound(value: Timestamp | None, field: str) -> Instant | None:
    return None if value is None else validate.whole_second(value, field=field)
