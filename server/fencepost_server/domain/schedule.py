"""What a schedule is: when a job fires, and what happens to fires that come late or meet
a live run. The API builds these values from requests, the store keeps them as JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

from fencepost_server.clock import MINUTE, Duration, Instant


class DstGapPolicy(IntEnum):
    """What to do with a local time that clocks jump over. Numbers are the proto's."""

    RUN_AFTER_GAP = 1
    SKIP = 2


class DstFoldPolicy(IntEnum):
    """What to do with a local time that comes twice. Numbers are the proto's."""

    FIRST = 1
    LAST = 2
    BOTH = 3


class MisfireAction(IntEnum):
    """What to do with fires that are handled too late. Numbers are the proto's."""

    RUN_ONCE = 1
    SKIP = 2
    CATCH_UP = 3


class OverlapPolicy(IntEnum):
    """What to do with a fire while a run of the job is live. Numbers are the proto's."""

    SKIP = 1
    QUEUE_ONE = 2
    QUEUE_ALL = 3
    ALLOW = 4
    CANCEL_PREVIOUS = 5


class SkipReason(IntEnum):
    """Why a fire made no run. Numbers are the proto's."""

    MISFIRE = 1
    OVERLAP = 2
    PAUSED = 3
    EXCLUDED = 4
    DST_GAP = 5
    DST_FOLD = 6
    EXPIRED = 7
    QUOTA = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CronSpec:
    """Wall-clock recurrence: the union of 1 to 16 cron expressions in one IANA zone."""

    expressions: tuple[str, ...]
    time_zone: str = "UTC"
    dst_gap: DstGapPolicy = DstGapPolicy.RUN_AFTER_GAP
    dst_fold: DstFoldPolicy = DstFoldPolicy.FIRST


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSpec:
    """Elapsed-time recurrence: anchor + n × every. No anchor: the job's creation.

    With `after_completion` the anchor is only the first fire, and `every` counts from the end
    of each fire's run.
    """

    every: Duration
    anchor: Instant | None = None
    after_completion: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OnceSpec:
    """A single fire."""

    at: Instant


Spec: TypeAlias = CronSpec | IntervalSpec | OnceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MisfirePolicy:
    """A fire handled later than `threshold` is a misfire; older than `window`, it is dropped.

    No `window`: no bound. `max_catch_up` counts runs, for CATCH_UP only.
    """

    action: MisfireAction = MisfireAction.RUN_ONCE
    threshold: Duration = MINUTE
    window: Duration | None = None
    max_catch_up: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a job fires. Fires lie in [start_at, end_at); `max_fires` 0 means no limit.

    `jitter` delays runs by a stable part of it; `exclude_calendars` are names of the tenant's.
    """

    spec: Spec
    start_at: Instant | None = None
    end_at: Instant | None = None
    max_fires: int = 0
    misfire: MisfirePolicy = field(default_factory=MisfirePolicy)
    overlap: OverlapPolicy = OverlapPolicy.SKIP
    jitter: Duration = 0
    exclude_calendars: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values in a stable order; equal schedules give equal dictionaries."""
        value: dict[str, Any] = {
            "spec": spec_to_json(self.spec),
            "start_at": self.start_at,
            "end_at": self.end_at,
            "max_fires": self.max_fires,
            "misfire": {
                "action": int(self.misfire.action),
                "threshold": self.misfire.threshold,
                "window": self.misfire.window,
                "max_catch_up": self.misfire.max_catch_up,
            },
            "overlap": int(self.overlap),
        }
        # Only what is set: documents of versions stored before stay as they are.
        if self.jitter:
            value["jitter"] = self.jitter
        if self.exclude_calendars:
            value["exclude_calendars"] = list(self.exclude_calendars)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Schedule":
        """The schedule that `to_json` wrote. Raises KeyError or ValueError on anything else."""
        misfire = value["misfire"]
        return cls(
            spec=spec_from_json(value["spec"]),
            start_at=value["start_at"],
            end_at=value["end_at"],
            max_fires=value["max_fires"],
            misfire=MisfirePolicy(
                action=MisfireAction(misfire["action"]),
                threshold=misfire["threshold"],
                window=misfire["window"],
                max_catch_up=misfire["max_catch_up"],
            ),
            overlap=OverlapPolicy(value["overlap"]),
            jitter=value.get("jitter", 0),
            exclude_calendars=tuple(value.get("exclude_calendars", ())),
        )


def spec_to_json(spec: Spec) -> dict[str, Any]:
    """The time rule alone, for interning: one key that names its kind."""
    match spec:
        case CronSpec():
            return {
                "cron": {
                    "expressions": list(spec.expressions),
                    "time_zone": spec.time_zone,
                    "dst_gap": int(spec.dst_gap),
                    "dst_fold": int(spec.dst_fold),
                }
            }
        case IntervalSpec():
            interval = {"every": spec.every, "anchor": spec.anchor}
            if spec.after_completion:
                interval["after_completion"] = True
            return {"interval": interval}
        case OnceSpec():
            return {"once": {"at": spec.at}}


def spec_from_json(value: Mapping[str, Any]) -> Spec:
    """The time rule that `spec_to_json` wrote. Raises KeyError or ValueError on anything else."""
    match value:
        case {"cron": cron}:
            return CronSpec(
                expressions=tuple(cron["expressions"]),
                time_zone=cron["time_zone"],
                dst_gap=DstGapPolicy(cron["dst_gap"]),
                dst_fold=DstFoldPolicy(cron["dst_fold"]),
            )
        case {"interval": interval}:
            return IntervalSpec(
                every=interval["every"],
                anchor=interval["anchor"],
                after_completion=interval.get("after_completion", False),
            )
        case {"once": once}:
            return OnceSpec(at=once["at"])
        case _:
            raise ValueError(f"not a time rule: {sorted(value)}")
