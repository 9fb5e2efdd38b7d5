"""Values that tests build often, each with a valid default for everything not named."""

from datetime import UTC, datetime
from typing import Any

from fencepost_server.clock import MINUTE, Duration, Instant, from_datetime
from fencepost_server.domain.job import BackoffJitter, JobSpec, RetryPolicy, RunLimits, Target
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.domain.schedule import (
    CronSpec,
    IntervalSpec,
    MisfireAction,
    MisfirePolicy,
    OnceSpec,
    OverlapPolicy,
    Schedule,
    Spec,
)
from fencepost_server.policy.outcome import Failed, OpenAttempt

JOB_ID = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
# Tuesday, 1 December 2026, noon in UTC: a whole second, minute and hour.
NOON: Instant = from_datetime(datetime(2026, 12, 1, 12, tzinfo=UTC))


def every(duration: Duration = MINUTE, **fields: Any) -> Schedule:
    """An interval schedule; `fields` are those of `schedule`."""
    return schedule(IntervalSpec(every=duration), **fields)


def cron(expression: str = "* * * * *", zone: str = "UTC", **fields: Any) -> Schedule:
    """A cron schedule; `fields` are those of `schedule`."""
    return schedule(CronSpec(expressions=(expression,), time_zone=zone), **fields)


def once(at: Instant = NOON, **fields: Any) -> Schedule:
    """A one-off schedule; `fields` are those of `schedule`."""
    return schedule(OnceSpec(at=at), **fields)


def schedule(
    spec: Spec,
    *,
    misfire: MisfireAction = MisfireAction.RUN_ONCE,
    threshold: Duration = MINUTE,
    window: Duration | None = None,
    max_catch_up: int = 100,
    overlap: OverlapPolicy = OverlapPolicy.ALLOW,
    end_at: Instant | None = None,
    max_fires: int = 0,
    jitter: Duration = 0,
    exclude_calendars: tuple[str, ...] = (),
) -> Schedule:
    """A schedule that never overlaps unless told so."""
    return Schedule(
        spec=spec,
        end_at=end_at,
        max_fires=max_fires,
        misfire=MisfirePolicy(
            action=misfire, threshold=threshold, window=window, max_catch_up=max_catch_up
        ),
        overlap=overlap,
        jitter=jitter,
        exclude_calendars=exclude_calendars,
    )


def job_spec(
    schedule: Schedule | None = None,
    *,
    kind: str = "send",
    queue: str = "default",
    priority: int = 0,
    retry: RetryPolicy | None = None,
    **limits: Any,
) -> JobSpec:
    """A definition; `limits` are fields of RunLimits."""
    return JobSpec(
        target=Target(kind=kind, queue_name=queue, priority=priority),
        schedule=schedule,
        retry_policy=RetryPolicy() if retry is None else retry,
        limits=RunLimits.of(**limits),
    )


def plain_retry(**fields: Any) -> RetryPolicy:
    """A retry policy whose waits are exact: no jitter."""
    return RetryPolicy.of(jitter=BackoffJitter.NONE, **fields)


def open_attempt(**fields: Any) -> OpenAttempt:
    """The first attempt of a run, running and never failed."""
    values: dict[str, Any] = {
        "key": RunKey(JOB_ID, NOON),
        "attempt": 1,
        "state": RunState.RUNNING,
        "failure_count": 0,
        "lost_lease_count": 0,
        "snooze_count": 0,
        "cancel_requested": False,
        "cancel_cause": None,
        "cancel_reason": None,
    }
    return OpenAttempt(**(values | fields))


def failed(code: str = "BOOM", **fields: Any) -> Failed:
    """A failure that a worker reports."""
    return Failed(code=code, reported=True, **fields)
