"""What the scheduling row of a job repeats of its definition, and a whole job to insert."""

from dataclasses import dataclass

from fencepost_server.clock import SECOND, Duration, Instant
from fencepost_server.domain.job import JobSpec
from fencepost_server.domain.schedule import IntervalSpec, MisfirePolicy, OverlapPolicy

_SECONDS_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """What `job_schedules` repeats of a definition: ids, and seconds for durations."""

    queue_id: int
    kind_id: int
    schedule_id: int | None
    every_s: int | None
    after_completion: bool
    jitter_s: int
    has_calendars: bool
    end_at: Instant | None
    max_fires: int | None
    misfire: str
    misfire_after_s: int
    misfire_window_s: int | None
    overlap: str
    priority: int
    lease_s: int
    cancel_grace_s: int
    attempt_timeout_s: int
    queue_timeout_s: int | None
    total_timeout_s: int | None
    max_in_flight: int | None
    concurrency_key: str | None

    @classmethod
    def of(
        cls, spec: JobSpec, *, queue_id: int, kind_id: int, schedule_id: int | None
    ) -> "JobSettings":
        """The settings of a definition whose names are interned; seconds are rounded up."""
        schedule, limits = spec.schedule, spec.limits
        misfire = MisfirePolicy() if schedule is None else schedule.misfire
        overlap = OverlapPolicy.SKIP if schedule is None else schedule.overlap
        interval = schedule.spec if schedule is not None else None
        return cls(
            queue_id=queue_id,
            kind_id=kind_id,
            schedule_id=schedule_id,
            every_s=_seconds(interval.every) if isinstance(interval, IntervalSpec) else None,
            after_completion=isinstance(interval, IntervalSpec) and interval.after_completion,
            jitter_s=0 if schedule is None else _seconds(schedule.jitter),
            has_calendars=schedule is not None and bool(schedule.exclude_calendars),
            end_at=None if schedule is None else schedule.end_at,
            max_fires=(schedule.max_fires or None) if schedule is not None else None,
            misfire=misfire.action.name.lower(),
            misfire_after_s=_seconds(misfire.threshold),
            misfire_window_s=None if misfire.window is None else _seconds(misfire.window),
            overlap=overlap.name.lower(),
            priority=spec.target.priority,
            lease_s=_seconds(limits.lease_ttl),
            cancel_grace_s=_seconds(limits.cancel_grace),
            attempt_timeout_s=_seconds(limits.attempt_timeout),
            queue_timeout_s=None
            if limits.queue_timeout is None
            else _seconds(limits.queue_timeout),
            total_timeout_s=None
            if limits.total_timeout is None
            else _seconds(limits.total_timeout),
            max_in_flight=limits.max_in_flight,
            concurrency_key=limits.concurrency_key or None,
        )

    @property
    def is_capped(self) -> bool:
        """Whether claims must count the runs of this job or of its key."""
        return self.max_in_flight is not None or self.concurrency_key is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to insert."""

    job_id: str
    name: str
    spec: JobSpec
    payload: bytes | None
    settings: JobSettings
    next_run_at: Instant | None
    paused: bool
    pause_reason: str
    partition_id: int


def _seconds(length: Duration) -> int:
    # What does not fit into an int of Postgres is 68 years or more: no bound in practice.
    return min(-(-length // SECOND), _SECONDS_MAX)
