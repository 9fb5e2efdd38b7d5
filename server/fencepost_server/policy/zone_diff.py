"""What other zone data would change: offsets of zones, and fires of cron rules.

Two sources are arguments here; nothing of it reaches the zones that schedules run on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fencepost_server.clock import DAY, SECOND, Instant
from fencepost_server.domain.schedule import CronSpec
from fencepost_server.policy.cron import CronRule, compile_cron
from fencepost_server.policy.zone import FIRST_SECOND, LAST_SECOND, Zone, load_zone
from fencepost_server.policy.zone_source import ZoneSource

# A fire can move by no more than this when an offset changes.
_REACH = 2 * DAY
# Fires compared around each stretch of time in which the sources differ.
_FIRES_MAX = 200_000


class ZoneState(StrEnum):
    """How a zone differs."""

    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Instants [start, until) at which the offsets, in seconds, differ."""

    start: Instant
    until: Instant
    offset_before: int
    offset_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneDifference:
    """A zone that differs; spans only if it is in both sources."""

    name: str
    state: ZoneState
    spans: Sequence[Span] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedFire:
    """A fire before and after; None: there it does not exist."""

    before: Instant | None
    after: Instant | None


def differing_zones(
    old: ZoneSource, new: ZoneSource, *, first: Instant, last: Instant
) -> list[ZoneDifference]:
    """The zones whose offsets differ within [first, last], by name."""
    found = []
    for name in sorted(old.names | new.names):
        if name not in new.names:
            found.append(ZoneDifference(name=name, state=ZoneState.REMOVED))
        elif name not in old.names:
            found.append(ZoneDifference(name=name, state=ZoneState.ADDED))
        elif old.content(name) != new.content(name):
            before, after = load_zone(name, source=old), load_zone(name, source=new)
            spans = tuple(_spans(before, after, first // SECOND, last // SECOND))
            if spans:
                found.append(ZoneDifference(name=name, state=ZoneState.CHANGED, spans=spans))
    return found


def moved_fires(
    spec: CronSpec,
    *,
    seed: str,
    old: ZoneSource,
    new: ZoneSource,
    first: Instant,
    last: Instant,
) -> list[MovedFire]:
    """The fires within [first, last] that are elsewhere under `new`, oldest first.

    The zone must be in both sources. Raises InvalidSchedule.
    """
    before = compile_cron(spec, seed=seed, zones=old)
    after = compile_cron(spec, seed=seed, zones=new)
    gone: set[Instant] = set()
    come: set[Instant] = set()
    for span in _spans(before.zone, after.zone, first // SECOND, last // SECOND):
        low, high = max(span.start - _REACH, first), min(span.until + _REACH, last)
        olds = set(before.between(low - 1, high, _FIRES_MAX))
        news = set(after.between(low - 1, high, _FIRES_MAX))
        gone |= olds - news
        come |= news - olds
    return _paired(before, after, sorted(gone), sorted(come))


def _paired(
    before: CronRule, after: CronRule, gone: list[Instant], come: list[Instant]
) -> list[MovedFire]:
    """A fire that went belongs to the one that came at the same time on the wall."""
    by_wall = {after.local_time(at)[:19]: at for at in come}
    pairs = [
        MovedFire(before=at, after=by_wall.pop(before.local_time(at)[:19], None)) for at in gone
    ]
    pairs += [MovedFire(before=None, after=at) for at in by_wall.values()]
    return sorted(pairs, key=lambda pair: (pair.before or pair.after or 0, pair.after or 0))


def _spans(before: Zone, after: Zone, first: int, last: int) -> Iterator[Span]:
    """The parts of UTC seconds [first, last] in which offsets differ; neighbours are merged."""
    second = max(first, FIRST_SECOND)
    last = min(last, LAST_SECOND)
    open_span: Span | None = None
    while second <= last:
        old, new = before.stretch(second), after.stretch(second)
        end = min(old.end, new.end, last + 1)
        offsets = (old.offset, new.offset)
        if open_span is not None and offsets != (open_span.offset_before, open_span.offset_after):
            yield open_span
            open_span = None
        if old.offset != new.offset:
            open_span = Span(
                start=second * SECOND if open_span is None else open_span.start,
                until=end * SECOND,
                offset_before=old.offset,
                offset_after=new.offset,
            )
        second = end
    if open_span is not None:
        yield open_span
