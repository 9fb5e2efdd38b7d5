"""Fires of cron expressions in a time zone, with a policy for clock changes.

`policy.schedule` compiles and caches rules; the engine asks them for the next fire. A
matching wall-clock time is mapped to UTC stretch by stretch of constant offset, never by
trying UTC minutes one after the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from heapq import merge
from itertools import islice, takewhile

from fencepost_server.clock import SECOND, Instant
from fencepost_server.domain.schedule import CronSpec, DstFoldPolicy, DstGapPolicy, SkipReason
from fencepost_server.errors import InvalidSchedule
from fencepost_server.policy.cron_calendar import CronFields, LocalTimes
from fencepost_server.policy.cron_parse import parse_cron
from fencepost_server.policy.zone import (
    DAY_SECONDS,
    FIRST_SECOND,
    LAST_SECOND,
    Stretch,
    Zone,
    load_zone,
)
from fencepost_server.policy.zone_source import ZoneSource

EXPRESSIONS_MAX = 16

# The next date that an expression admits is at most 40 years away. Only a rule whose every
# time falls into a gap that is skipped finds nothing in this span.
_HORIZON = 48 * 366 * DAY_SECONDS
# Local times and UTC are never further apart than this.
_OFFSET_MAX = 2 * DAY_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A fire, or with `skip_reason` one that a clock change suppresses.

    `local_time` is RFC 3339 in the rule's zone; without offset if it does not exist. `note`
    is one sentence when a clock change moved, dropped or doubled the fire, else empty.
    """

    at: Instant
    local_time: str
    skip_reason: SkipReason | None = None
    note: str = ""


def compile_cron(
    spec: CronSpec,
    *,
    seed: str = "",
    path: str = "schedule.cron",
    zones: ZoneSource | None = None,
) -> "CronRule":
    """The rule of a spec; `seed` is `{tenant}/{job_name}` and decides what `H` is.

    `zones` is other zone data than the pinned one.

    Raises InvalidSchedule, with field paths under `path`.
    """
    count = len(spec.expressions)
    if not 1 <= count <= EXPRESSIONS_MAX:
        raise InvalidSchedule(
            f"expressions: {count} given; allowed: 1 to {EXPRESSIONS_MAX}",
            field=f"{path}.expressions",
            value=str(count),
            allowed=f"1 to {EXPRESSIONS_MAX}",
        )
    zone = load_zone(spec.time_zone, field=f"{path}.time_zone", source=zones)
    parsed = {
        fields.text: fields
        for fields in (
            parse_cron(expression, seed=seed, path=f"{path}.expressions[{index}]")
            for index, expression in enumerate(spec.expressions)
        )
    }
    return CronRule(spec, zone, tuple(parsed.values()))


class CronRule:
    """A compiled spec. Fires are whole seconds from 1900 to 9998, strictly increasing."""

    __slots__ = ("_expressions", "canonical", "fields", "zone")

    def __init__(self, spec: CronSpec, zone: Zone, fields: tuple[CronFields, ...]) -> None:
        self.fields = fields
        # The same fires from any seed, so equal rules can share one interned row.
        self.canonical = CronSpec(
            expressions=tuple(one.text for one in fields),
            time_zone=spec.time_zone,
            dst_gap=spec.dst_gap,
            dst_fold=spec.dst_fold,
        )
        self.zone = zone
        self._expressions = tuple(
            _Expression(one, zone, spec.dst_gap, spec.dst_fold) for one in fields
        )

    def next_after(self, at: Instant) -> Instant | None:
        """The first fire strictly later than `at`; None if there is none."""
        second = max(at // SECOND + 1, FIRST_SECOND)
        found = None
        for expression in self._expressions:
            one = expression.at_or_after(second)
            if one is not None and (found is None or one < found):
                found = one
        return None if found is None else found * SECOND

    def prev_before(self, at: Instant) -> Instant | None:
        """The last fire strictly earlier than `at`; None if there is none."""
        second = min((at - 1) // SECOND, LAST_SECOND)
        found = None
        for expression in self._expressions:
            one = expression.at_or_before(second)
            if one is not None and (found is None or one > found):
                found = one
        return None if found is None else found * SECOND

    def between(self, after: Instant, until: Instant, limit: int) -> list[Instant]:
        """The first `limit` fires later than `after` and not later than `until`."""
        found: list[Instant] = []
        at = self.next_after(after)
        while at is not None and at <= until and len(found) < limit:
            found.append(at)
            at = self.next_after(at)
        return found

    def matches(self, at: Instant) -> bool:
        """Whether `at` is a fire."""
        return at % SECOND == 0 and self.next_after(at - 1) == at

    def local_time(self, at: Instant) -> str:
        """Wall clock of an instant in the rule's zone, RFC 3339 with offset."""
        second = min(max(at // SECOND, FIRST_SECOND), LAST_SECOND)
        return _format_local(second, self.zone.stretch(second).offset)

    def planned(self, after: Instant, count: int) -> list[Planned]:
        """At most `count` fires and suppressed fires later than `after`, in order.

        Suppressed ones are those that the DST policies rule out; one that another of the
        expressions fires at is not among them.
        """
        return list(islice(self._plan(after, count), count))

    def planned_between(self, first: Instant, until: Instant) -> Iterator[Planned]:
        """As `planned`, of [first, until); computed as they are asked for."""
        return takewhile(lambda one: one.at < until, self._plan(first - 1, DAY_SECONDS))

    def _plan(self, after: Instant, count: int) -> Iterator[Planned]:
        second = max(after // SECOND + 1, FIRST_SECOND)
        streams = [expression.plan(second, count) for expression in self._expressions]
        group: list[Planned] = []
        for one in merge(*streams, key=lambda planned: planned.at):
            if group and group[0].at != one.at:
                yield from _settle(group)
                group = []
            group.append(one)
        yield from _settle(group)


def _settle(group: list[Planned]) -> Iterator[Planned]:
    """What the expressions say of one instant: a fire wins over a fold that drops it."""
    fires = [one for one in group if one.skip_reason is None]
    gaps = {one.local_time: one for one in group if one.skip_reason is SkipReason.DST_GAP}
    folds = [one for one in group if one.skip_reason is SkipReason.DST_FOLD]
    yield from sorted(gaps.values(), key=lambda one: one.local_time)
    if fires:
        yield max(fires, key=lambda one: one.note)
    elif folds:
        yield folds[0]


class _Expression:
    """One expression in its zone; all arguments and results are UTC seconds.

    Running on elapsed time (every hour admitted) is the same as firing at each instant whose
    wall clock matches: nothing for a gap, both passes of a fold.
    """

    __slots__ = ("_elapsed", "_first", "_last", "_run_after_gap", "_times", "_zone")

    def __init__(
        self, fields: CronFields, zone: Zone, gap: DstGapPolicy, fold: DstFoldPolicy
    ) -> None:
        self._times = LocalTimes(fields)
        self._zone = zone
        self._elapsed = fields.every_hour
        self._run_after_gap = gap is DstGapPolicy.RUN_AFTER_GAP and not self._elapsed
        self._first = fold is DstFoldPolicy.FIRST and not self._elapsed
        self._last = fold is DstFoldPolicy.LAST and not self._elapsed

    def at_or_after(self, second: int) -> int | None:
        """The first fire not before `second`."""
        horizon = min(second + _HORIZON, LAST_SECOND)
        while second <= horizon:
            stretch = self._zone.stretch(second)
            if second == stretch.start and self._fires_after_gap(stretch):
                return second
            low, high = self._local_bounds(stretch)
            local = self._times.at_or_after(max(low, second + stretch.offset))
            if local is None:
                return None
            if local < high:
                return local - stretch.offset
            whole = second == stretch.start
            second = stretch.end
            # Nothing matches from the start of this stretch to `local`, so no fold repeats a
            # match before it: years without one are passed in one step.
            if whole:
                second = max(second, local - _OFFSET_MAX)
        return None

    def at_or_before(self, second: int) -> int | None:
        """The last fire not after `second`."""
        horizon = max(second - _HORIZON, FIRST_SECOND)
        while second >= horizon:
            stretch = self._zone.stretch(second)
            low, high = self._local_bounds(stretch)
            local = self._times.at_or_before(min(high - 1, second + stretch.offset))
            if local is not None and local >= low:
                return local - stretch.offset
            if self._fires_after_gap(stretch):
                return stretch.start
            if local is None:
                return None
            whole = second == stretch.end - 1
            second = stretch.start - 1
            if whole:
                second = min(second, local + _OFFSET_MAX)
        return None

    def _local_bounds(self, stretch: Stretch) -> tuple[int, int]:
        """Local seconds [low, high) that fire in this stretch, passes ruled out left away."""
        low = high = stretch.offset
        if self._first and stretch.offset_before > low:
            low = stretch.offset_before
        if self._last and stretch.offset_after < high:
            high = stretch.offset_after
        return stretch.start + low, stretch.end + high

    def _fires_after_gap(self, stretch: Stretch) -> bool:
        if not self._run_after_gap or stretch.offset <= stretch.offset_before:
            return False
        local = self._times.at_or_after(stretch.start + stretch.offset_before)
        return local is not None and local < stretch.start + stretch.offset

    def plan(self, second: int, gap_max: int) -> Iterator[Planned]:
        """Every fire and every suppressed fire not before `second`, `gap_max` for each gap."""
        horizon = min(second + _HORIZON, LAST_SECOND)
        while second <= horizon:
            stretch = self._zone.stretch(second)
            if second == stretch.start and not self._elapsed:
                yield from islice(self._plan_gap(stretch), gap_max)
            local = self._times.at_or_after(second + stretch.offset)
            while local is not None and local < stretch.end + stretch.offset:
                yield self._plan_local(local, stretch)
                local = self._times.at_or_after(local + 1)
                horizon = min(second + _HORIZON, LAST_SECOND)
            if local is None:
                return
            whole = second == stretch.start
            second = max(stretch.end, local - _OFFSET_MAX) if whole else stretch.end

    def _plan_gap(self, stretch: Stretch) -> Iterator[Planned]:
        first, end = stretch.start + stretch.offset_before, stretch.start + stretch.offset
        local = self._times.at_or_after(first) if end > first else None
        while local is not None and local < end:
            missing = f"{_wall(local)} does not exist here: clocks jump over it"
            if self._run_after_gap:
                yield Planned(
                    at=stretch.start * SECOND,
                    local_time=_format_local(stretch.start, stretch.offset),
                    note=f"{missing}, so it fires at the first instant after.",
                )
                return
            yield Planned(
                at=stretch.start * SECOND,
                local_time=_wall(local),
                skip_reason=SkipReason.DST_GAP,
                note=f"{missing}, so it does not fire.",
            )
            local = self._times.at_or_after(local + 1)

    def _plan_local(self, local: int, stretch: Stretch) -> Planned:
        second = local - stretch.offset
        again = local < stretch.start + stretch.offset_before
        to_come = local >= stretch.end + stretch.offset_after
        reason, note = None, ""
        if not self._elapsed and (again or to_come):
            if (again and self._first) or (to_come and self._last):
                reason, which = SkipReason.DST_FOLD, "only the other one fires"
            elif self._first or self._last:
                which = "the only one that fires"
            else:
                which = "and both fire"
            note = f"{_wall(local)} comes twice: this is the {'last' if again else 'first'} pass"
            note = f"{note}, {which}."
        return Planned(
            at=second * SECOND,
            local_time=_format_local(second, stretch.offset),
            skip_reason=reason,
            note=note,
        )


def _wall(local: int) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=local)).strftime(
        "%Y-%m-%dT%H:%M:%S"
    )


def _format_local(second: int, offset: int) -> str:
    # RFC 3339 has no seconds in offsets; zones had them before clocks were standardised.
    if offset % 60:
        return f"{_wall(second)}Z"
    sign, minutes = "-" if offset < 0 else "+", abs(offset) // 60
    return f"{_wall(second + offset)}{sign}{minutes // 60:02d}:{minutes % 60:02d}"
