"""Lays the runs, skipped stretches and suppressed fires of one job out as entries of its
ledger, newest first, so that every nominal fire is in exactly one of them.

Pure: the engine reads the rows, asks here, and stops when its page is full. Fires of a
stretch are counted only when the entry is asked for, and only up to COUNT_MAX.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fencepost_server.clock import SECOND, Instant, format_instant
from fencepost_server.domain.fire import Fire, FireDisposition
from fencepost_server.domain.schedule import SkipReason
from fencepost_server.policy.cron import CronRule, Planned
from fencepost_server.policy.exclusion import ExcludingRule
from fencepost_server.policy.schedule import BoundedRule, IntervalRule, Rule

# Counting 10,000 fires of a cron rule takes about a tenth of a second.
COUNT_MAX = 10_000
CAPPED_DETAIL = f"{COUNT_MAX} fires or more: counting stops there"
_UNKNOWN_RULE = "the definition that made these fires is no longer kept, so they are not counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Neighbouring fires from `first` to `last`, themselves fires, with one fate."""

    first: Instant
    last: Instant
    disposition: FireDisposition
    reason: SkipReason | None
    version: int
    decided_at: Instant | None = None
    stand_in: Instant | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressed:
    """A fire that a clock change ruled out, by the rule of `version`."""

    planned: Planned
    version: int


# The rule of a version, where a fire of it is given (any will do for an interval); None: the
# definition is no longer kept, or had no schedule.
RuleOf = Callable[[int, Instant], Rule | None]


def lay_out(
    runs: Sequence[Fire],
    stretches: Sequence[Stretch],
    suppressed: Sequence[Suppressed],
    rule_of: RuleOf,
    *,
    first: Instant,
    until: Instant,
) -> Iterator[Fire]:
    """The entries of [first, until), newest first; a stretch that crosses a bound is cut.

    Suppressed fires are not cut: at one instant they come after the others. `runs` are
    entries of one fire; a run that was made later takes its fire out of a stretch.
    """
    instants = sorted(run.first for run in runs)
    points = sorted(one.planned.at for one in suppressed)

    def pieces(stretch: Stretch) -> Iterator[Fire]:
        low, high = max(stretch.first, first), min(stretch.last, until - 1)
        cuts = [
            (at, at) for at in instants[bisect_left(instants, low) : bisect_right(instants, high)]
        ]
        # An entry of its own instant splits: what is not before it comes first.
        cuts += [
            (at, at - 1) for at in points[bisect_left(points, low) : bisect_right(points, high)]
        ]
        return _pieces(stretch, rule_of(stretch.version, stretch.first), low, high, cuts)

    merged = heapq.merge(
        sorted((run for run in runs if first <= run.first < until), key=_order, reverse=True),
        _suppressed_entries(suppressed),
        *(pieces(stretch) for stretch in sorted(stretches, key=lambda s: s.last, reverse=True)),
        key=_order,
        reverse=True,
    )
    return _joined(merged)


def counted(fire: Fire, rule: Rule | None) -> Fire:
    """The entry with the number of its fires, at most COUNT_MAX; costs at most as many steps."""
    if fire.first == fire.last or fire.count > 1:
        return fire
    if rule is None:
        return replace(fire, count=2, detail=fire.detail or _UNKNOWN_RULE)
    count = count_between(rule, fire.first, fire.last)
    if count >= COUNT_MAX:
        return replace(fire, count=count, detail=fire.detail or CAPPED_DETAIL)
    return replace(fire, count=count)


def count_between(rule: Rule, first: Instant, last: Instant, *, limit: int = COUNT_MAX) -> int:
    """Fires from `first` to `last`, both of them fires, whatever the rule says; at most `limit`."""
    inner = rule.rule if isinstance(rule, BoundedRule) else rule
    if isinstance(inner, IntervalRule):
        return min((last - first) // inner.every + 1, limit)
    count, at = 1, rule.next_after(first)
    while at is not None and at < last and count < limit:
        count += 1
        at = rule.next_after(at)
    return min(count + (first < last), limit)


def local_time(at: Instant, rule: Rule | None) -> str:
    """Wall clock in the rule's zone; UTC if it has none."""
    while isinstance(rule, BoundedRule | ExcludingRule):
        rule = rule.rule
    if isinstance(rule, CronRule):
        return rule.local_time(at)
    return format_instant(at // SECOND * SECOND).replace("Z", "+00:00")


def _order(fire: Fire) -> tuple[Instant, int]:
    """Entries do not interleave; at one instant a fire comes before what was suppressed."""
    return (fire.last, 0 if was_suppressed(fire) else 1)


def was_suppressed(fire: Fire) -> bool:
    """Whether a clock change ruled the fire out, which the rule alone decides."""
    return fire.reason in (SkipReason.DST_GAP, SkipReason.DST_FOLD)


def _pieces(
    stretch: Stretch,
    rule: Rule | None,
    low: Instant,
    high: Instant,
    cuts: list[tuple[Instant, Instant]],
) -> Iterator[Fire]:
    """What the cuts leave of a stretch within [low, high], newest first."""
    # The bounds as a last cut end the walk.
    for begin, end in [*sorted(cuts, key=lambda cut: cut[1], reverse=True), (low - 1, low - 1)]:
        last = _last_fire(stretch, rule, high)
        above = _first_fire(stretch, rule, end + 1)
        if last is not None and above is not None and last >= above > end:
            yield Fire(
                first=above,
                last=last,
                disposition=stretch.disposition,
                reason=stretch.reason,
                version=stretch.version,
                run_at=stretch.stand_in,
                decided_at=stretch.decided_at,
                local_time=local_time(above, rule),
                detail=stretch.detail,
            )
        high = min(high, begin - 1)


def _first_fire(stretch: Stretch, rule: Rule | None, at: Instant) -> Instant | None:
    """The first fire of a stretch that is not before `at`."""
    if at <= stretch.first:
        return stretch.first
    found = None if rule is None else rule.next_after(at - 1)
    if found is not None and found <= stretch.last:
        return found
    return stretch.last if at <= stretch.last else None


def _last_fire(stretch: Stretch, rule: Rule | None, at: Instant) -> Instant | None:
    """The last fire of a stretch that is not after `at`."""
    if at >= stretch.last:
        return stretch.last
    found = None if rule is None else rule.prev_before(at + 1)
    if found is not None and found >= stretch.first:
        return found
    return stretch.first if at >= stretch.first else None


def _suppressed_entries(suppressed: Sequence[Suppressed]) -> Iterator[Fire]:
    for one in sorted(suppressed, key=lambda s: (s.planned.at, s.planned.local_time), reverse=True):
        yield Fire(
            first=one.planned.at,
            last=one.planned.at,
            disposition=FireDisposition.SKIPPED,
            reason=one.planned.skip_reason,
            version=one.version,
            decided_at=one.planned.at,
            local_time=one.planned.local_time,
            detail=one.planned.note,
        )


def _joined(entries: Iterator[Fire]) -> Iterator[Fire]:
    """Neighbours that clock changes suppressed for one reason are one entry."""
    newer: Fire | None = None
    for fire in entries:
        if (
            newer is not None
            and was_suppressed(newer)
            and (newer.reason, newer.version) == (fire.reason, fire.version)
        ):
            newer = replace(fire, last=newer.last, count=newer.count + 1)
            continue
        if newer is not None:
            yield newer
        newer = fire
    if newer is not None:
        yield newer
