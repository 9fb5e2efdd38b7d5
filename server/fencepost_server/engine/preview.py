"""Fires to come of a schedule, by the evaluator that fires, and the rule in words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from fencepost_server.clock import Instant, ceil_second, to_datetime
from fencepost_server.domain.schedule import CronSpec, Schedule
from fencepost_server.policy.cron import CronRule, Planned
from fencepost_server.policy.describe import describe, warnings
from fencepost_server.policy.schedule import bounded_rule, cron_rule
from fencepost_server.policy.zone import tzdata_version

# Suppressed and real fires that one answer looks at, whatever `count` asks for.
_CHUNK = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Planned fires oldest first, the rule in English, what to look at twice, zone data."""

    fires: Sequence[Planned]
    description: str
    warnings: Sequence[str]
    tzdata_version: str


def preview(
    schedule: Schedule,
    *,
    after: Instant,
    count: int,
    now: Instant,
    seed: str,
    anchor: Instant,
    fires_left: int | None,
) -> Preview:
    """At most `count` entries later than `after`, suppressed fires included.

    `anchor` stands in for that of an interval without one. `fires_left` ends the list after
    that many real fires; None: no limit. Raises InvalidSchedule.
    """
    planned: list[Planned] = []
    for one in islice(_planned(schedule, after, seed=seed, anchor=anchor), count):
        if fires_left is not None:
            if fires_left == 0:
                break
            fires_left -= one.skip_reason is None
        planned.append(one)
    return Preview(
        fires=planned,
        description=describe(schedule, seed=seed),
        warnings=warnings(schedule, now=now, seed=seed),
        tzdata_version=tzdata_version(),
    )


def _planned(
    schedule: Schedule, after: Instant, *, seed: str, anchor: Instant
) -> Iterator[Planned]:
    if isinstance(schedule.spec, CronSpec):
        yield from _planned_cron(schedule, cron_rule(schedule.spec, seed=seed), after)
        return
    rule = bounded_rule(schedule, anchor=ceil_second(anchor), seed=seed)
    at = rule.next_after(after)
    while at is not None:
        yield Planned(at=at, local_time=to_datetime(at).isoformat())
        at = rule.next_after(at)


def _planned_cron(schedule: Schedule, rule: CronRule, after: Instant) -> Iterator[Planned]:
    if schedule.start_at is not None:
        after = max(after, ceil_second(schedule.start_at) - 1)
    end_at = None if schedule.end_at is None else ceil_second(schedule.end_at)
    for one in rule.planned(after, _CHUNK):
        if end_at is not None and one.at >= end_at:
            return
        yield one
