"""What a person should know of a cron rule before trusting it: its fires, the gaps between
them, and every clock change ahead with what it does under the chosen policies.

For `fencepost explain`, which needs no server; the fires are those of the evaluator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from fencepost_server.clock import DAY, SECOND, Duration, Instant
from fencepost_server.domain.schedule import CronSpec, DstGapPolicy, Schedule
from fencepost_server.policy.cron import CronRule, Planned
from fencepost_server.policy.describe import describe, warnings
from fencepost_server.policy.schedule import cron_rule
from fencepost_server.policy.zone import LAST_SECOND, Stretch

CLOCK_CHANGES_AHEAD: Duration = 2 * 366 * DAY
# Fires looked at for the smallest and the largest gap, unless two years hold fewer.
GAP_FIRES_MAX = 10_000
_GAP_FIRES_MIN = 6
# Times told one by one for each clock change.
NOTES_MAX = 3
_NOTES_LOOKED_AT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Elapsed time between two neighbouring fires."""

    length: Duration
    after: Instant
    until: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """The smallest and largest gap of fires under one offset, looked for until `until`.

    `changed` are those that a clock change makes longer or shorter than clocks show.
    """

    smallest: Gap | None
    largest: Gap | None
    changed: Sequence[Gap]
    until: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChange:
    """A change of offset, in seconds, and what it does to the rule.

    `notes` are the fires and suppressed fires it touches, at most NOTES_MAX; `more` counts
    the rest, up to 2,000. `utc_before` and `utc_after` are the UTC time of day, in seconds,
    of the first untouched fire after it, as it was and as it is.
    """

    at: Instant
    offset_before: int
    offset: int
    notes: Sequence[Planned]
    more: int
    first_fire: Instant | None
    utc_before: int
    utc_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything `fencepost explain` shows. `elapsed`: every hour is admitted."""

    rule: CronRule
    description: str
    fires: Sequence[Planned]
    gaps: Gaps
    elapsed: bool
    changes: Sequence[ClockChange]
    warnings: Sequence[str]


def explain(spec: CronSpec, *, now: Instant, count: int, seed: str = "") -> Explanation:
    """Explains the rule as seen at `now`, with at most `count` fires.

    `seed` is `{tenant}/{job_name}` and decides what `H` is. Raises InvalidSchedule.
    """
    rule = cron_rule(spec, seed=seed)
    schedule = Schedule(spec=spec)
    told_apart = tuple(f'"{fields.text}" in {rule.zone.name}: ' for fields in rule.fields)
    changes = rule.zone.changes(
        now // SECOND, min((now + CLOCK_CHANGES_AHEAD) // SECOND, LAST_SECOND)
    )
    return Explanation(
        rule=rule,
        description=describe(schedule, seed=seed),
        fires=rule.planned(now, count),
        gaps=_gaps(rule, now, changes),
        elapsed=all(fields.every_hour for fields in rule.fields),
        changes=[_clock_change(rule, change) for change in changes],
        warnings=[
            *_gap_warnings(rule, now),
            # What clock changes do is told in full by `changes`.
            *(
                text
                for text in warnings(schedule, now=now, seed=seed)
                if not text.startswith(told_apart)
            ),
        ],
    )


def _gap_warnings(rule: CronRule, now: Instant) -> list[str]:
    if rule.next_after(now) is not None:
        return []
    if rule.canonical.dst_gap is DstGapPolicy.SKIP:
        return [
            "It never fires: every time falls into an hour that clocks jump over, and the gap "
            "policy is skip."
        ]
    return ["It does not fire again: the calendar ends with the year 9998."]


def _gaps(rule: CronRule, now: Instant, changes: Sequence[Stretch]) -> Gaps:
    smallest: Gap | None = None
    largest: Gap | None = None
    starts = {change.start * SECOND for change in changes}
    until = now
    fires = islice(_fires(rule, now), GAP_FIRES_MAX)
    for count, (after, at) in enumerate(pairwise(fires)):
        if at > now + CLOCK_CHANGES_AHEAD and count >= _GAP_FIRES_MIN:
            break
        until = at
        if _offset(rule, after) != _offset(rule, at) or after in starts:
            continue
        gap = Gap(length=at - after, after=after, until=at)
        if smallest is None or gap.length < smallest.length:
            smallest = gap
        if largest is None or gap.length > largest.length:
            largest = gap
    changed = [gap for change in changes for gap in _changed_gaps(rule, change)]
    return Gaps(smallest=smallest, largest=largest, changed=changed, until=until)


def _changed_gaps(rule: CronRule, change: Stretch) -> Iterator[Gap]:
    """The gap that spans a change, if clocks alone would make another; and after a moved fire."""
    at = change.start * SECOND
    before, after = rule.prev_before(at), rule.next_after(at - 1)
    if before is None or after is None:
        return
    unmoved = cron_rule(replace(rule.canonical, time_zone="UTC"))
    local = before + _offset(rule, before) * SECOND
    regular = unmoved.next_after(local)
    if regular is None or regular - local != after - before:
        yield Gap(length=after - before, after=before, until=after)
    following = rule.next_after(after)
    if following is not None and any(
        one.note and one.skip_reason is None for one in _planned_within(rule, at, at)
    ):
        yield Gap(length=following - after, after=after, until=following)


def _clock_change(rule: CronRule, change: Stretch) -> ClockChange:
    # A doubled time begins before the change by as much as clocks go back, and the first
    # pass ends with it.
    back = max(change.offset_before - change.offset, 0)
    begin, end = change.start - back, change.start + back
    touched = [one for one in _planned_within(rule, begin * SECOND, end * SECOND) if one.note]
    regular = rule.next_after(max(end * SECOND - 1, change.start * SECOND))
    if regular is not None and rule.zone.stretch(regular // SECOND).start != change.start:
        regular = None
    local = 0 if regular is None else regular // SECOND + change.offset
    return ClockChange(
        at=change.start * SECOND,
        offset_before=change.offset_before,
        offset=change.offset,
        notes=touched[:NOTES_MAX],
        more=len(touched[NOTES_MAX:]),
        first_fire=regular,
        utc_before=(local - change.offset_before) % 86_400,
        utc_after=(local - change.offset) % 86_400,
    )


def _planned_within(rule: CronRule, first: Instant, last: Instant) -> list[Planned]:
    """At most _NOTES_LOOKED_AT; asked for in growing numbers, as a sparse rule is slow to walk."""
    count = 4
    while True:
        planned = rule.planned(first - 1, count)
        if len(planned) < count or planned[-1].at > last or count > _NOTES_LOOKED_AT:
            return [one for one in planned if one.at <= last]
        count *= 4


def _fires(rule: CronRule, after: Instant) -> Iterator[Instant]:
    at = rule.next_after(after)
    while at is not None:
        yield at
        at = rule.next_after(at)


def _offset(rule: CronRule, at: Instant) -> int:
    return rule.zone.stretch(min(at // SECOND, LAST_SECOND)).offset
