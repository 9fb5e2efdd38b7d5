"""What a job is: its definition as stored per version, and how its id is made.

Retry policy and limits remember which of their fields somebody set, because a field that
nobody set may still get its value from the queue or the tenant.
"""

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Self, TypeVar

from fencepost_server.clock import HOUR, SECOND, Duration, Instant
from fencepost_server.domain.schedule import Schedule

PRIORITY_MAX = 9
DEFAULT_QUEUE = "default"
# 9999-12-31T23:59:59Z: a later fire has no text form, so no job has one.
LAST_INSTANT: Instant = 253_402_300_799 * SECOND


class JobState(IntEnum):
    """Lifecycle of a definition; numbers as in the contract."""

    ACTIVE = 1
    PAUSED = 2
    FINISHED = 3


class BackoffJitter(IntEnum):
    """The random part of a backoff; numbers as in the contract."""

    FULL = 1
    PROPORTIONAL = 2
    NONE = 3


class StartMode(IntEnum):
    """When a worker may call the handler; numbers as in the contract."""

    ON_DELIVERY = 1
    CONFIRMED = 2


class LeaseUncertainAction(IntEnum):
    """What the SDK does when it cannot renew a lease; numbers as in the contract."""

    STOP = 1
    CONTINUE = 2


_Settings = TypeVar("_Settings", bound="_LayeredSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayeredSettings:
    """Settings whose every field has a default, and which know the fields that were set."""

    explicit: frozenset[str] = frozenset()

    @classmethod
    def of(cls, **values: Any) -> Self:
        """These fields set, the others at their defaults."""
        return cls(explicit=frozenset(values), **values)

    def over(self: _Settings, below: _Settings) -> _Settings:
        """Field by field: what is set here, else what is set in `below`, else the default."""
        names = self.explicit | below.explicit
        values = {name: getattr(self if name in self.explicit else below, name) for name in names}
        return type(self).of(**values)

    def to_json(self) -> dict[str, Any]:
        """The fields that were set, in the order of their definition."""
        return {
            each.name: _json_value(getattr(self, each.name))
            for each in fields(self)
            if each.name in self.explicit
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy(_LayeredSettings):
    """Retry budget and pace; durations in microseconds."""

    max_failures: int = 5
    max_lost_leases: int = 5
    base: Duration = 10 * SECOND
    cap: Duration = HOUR
    jitter: BackoffJitter = BackoffJitter.FULL
    non_retryable_codes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        values = dict(data)
        if "jitter" in values:
            values["jitter"] = BackoffJitter(values["jitter"])
        if "non_retryable_codes" in values:
            values["non_retryable_codes"] = tuple(values["non_retryable_codes"])
        return cls.of(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits(_LayeredSettings):
    """Time and concurrency bounds of runs; durations in microseconds, None is "no bound"."""

    attempt_timeout: Duration = HOUR
    queue_timeout: Duration | None = None
    total_timeout: Duration | None = None
    lease_ttl: Duration = 30 * SECOND
    cancel_grace: Duration = 30 * SECOND
    max_in_flight: int | None = None
    concurrency_key: str = ""
    start_mode: StartMode = StartMode.ON_DELIVERY
    lease_uncertain_action: LeaseUncertainAction = LeaseUncertainAction.STOP

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        values = dict(data)
        if "start_mode" in values:
            values["start_mode"] = StartMode(values["start_mode"])
        if "lease_uncertain_action" in values:
            values["lease_uncertain_action"] = LeaseUncertainAction(
                values["lease_uncertain_action"]
            )
        return cls.of(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where runs go: last part of the queue's name, handler name, 0 to 9 (9 is soonest)."""

    queue_name: str = DEFAULT_QUEUE
    kind: str
    priority: int = 0

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {"queue_name": self.queue_name, "kind": self.kind, "priority": self.priority}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The versioned definition of a job, without its payload (kept beside it as bytes)."""

    target: Target
    display_name: str = ""
    description: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    schedule: Schedule | None = None
    retry_policy: RetryPolicy = RetryPolicy()
    limits: RunLimits = RunLimits()

    def to_json(self) -> dict[str, Any]:
        """What `job_versions.spec` holds; equal definitions give equal documents."""
        data: dict[str, Any] = {"target": self.target.to_json()}
        if self.display_name:
            data["display_name"] = self.display_name
        if self.description:
            data["description"] = self.description
        if self.labels:
            data["labels"] = dict(sorted(self.labels.items()))
        if self.schedule is not None:
            data["schedule"] = self.schedule.to_json()
        if self.retry_policy.explicit:
            data["retry_policy"] = self.retry_policy.to_json()
        if self.limits.explicit:
            data["limits"] = self.limits.to_json()
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        schedule = data.get("schedule")
        return cls(
            target=Target.from_json(data["target"]),
            display_name=data.get("display_name", ""),
            description=data.get("description", ""),
            labels=data.get("labels", {}),
            schedule=None if schedule is None else Schedule.from_json(schedule),
            retry_policy=RetryPolicy.from_json(data.get("retry_policy", {})),
            limits=RunLimits.from_json(data.get("limits", {})),
        )


def job_state(
    *, paused: bool, has_schedule: bool, next_run_at: Instant | None, awaits_end: bool = False
) -> JobState:
    """The state that the stored columns add up to; `awaits_end`: a run decides next_run_at."""
    if paused:
        return JobState.PAUSED
    if has_schedule and next_run_at is None and not awaits_end:
        return JobState.FINISHED
    return JobState.ACTIVE


def partition_of(*, tenant: str, job_name: str) -> int:
    """The partition, 0 to 255, of every job that ever has this name."""
    return hashlib.sha256(f"{tenant}/{job_name}".encode()).digest()[0]


def partition_of_id(job_id: str) -> int:
    """The partition that a job id carries in its last byte."""
    return int(job_id[-2:], 16)


def make_job_id(*, now: Instant, partition_id: int, entropy: bytes) -> str:
    """A UUIDv7 as lower-case text; `entropy` is 9 random bytes, the last byte the partition."""
    assert len(entropy) == 9, "a job id takes 9 random bytes"
    value = (now // 1000).to_bytes(6, "big") + entropy + bytes([partition_id])
    number = int.from_bytes(value, "big")
    number = number & ~(0xF << 76) | (0x7 << 76)
    number = number & ~(0x3 << 62) | (0x2 << 62)
    return str(uuid.UUID(int=number))


def _json_value(value: Any) -> Any:
    if isinstance(value, IntEnum):
        return int(value)
    return list(value) if isinstance(value, tuple) else value
