"""The fires of a rule that calendars leave, and the stretches that they exclude.

Whole spans are jumped over, so the cost is bounded by spans, not by fires.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fencepost_server.clock import Instant
from fencepost_server.domain.schedule import SkipReason
from fencepost_server.policy.misfire import SkipStretch
from fencepost_server.policy.schedule import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Instants [start, until) that a calendar excludes."""

    start: Instant
    until: Instant


class Exclusions:
    """Spans in order, none of which touch; empty: nothing is excluded."""

    __slots__ = ("spans",)

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = merge(spans)

    def span_at(self, at: Instant) -> Span | None:
        """The span that holds `at`."""
        index = bisect_right(self.spans, at, key=lambda span: span.start) - 1
        return self.spans[index] if index >= 0 and at < self.spans[index].until else None


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same instants as spans in order that do not touch."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start, each.until)):
        if merged and span.start <= merged[-1].until:
            last = merged.pop()
            span = Span(start=last.start, until=max(last.until, span.until))
        merged.append(span)
    return tuple(merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludingRule:
    """The fires of a rule in [first, last] that are not excluded."""

    rule: Rule
    exclusions: Exclusions
    first: Instant
    last: Instant

    def next_after(self, at: Instant) -> Instant | None:
        """The first such fire strictly later than `at`; None if there is none."""
        found = self.rule.next_after(max(at, self.first - 1))
        while found is not None and found <= self.last:
            span = self.exclusions.span_at(found)
            if span is None:
                return found
            found = self.rule.next_after(span.until - 1)
        return None

    def prev_before(self, at: Instant) -> Instant | None:
        """The last such fire strictly earlier than `at`; None if there is none."""
        found = self.rule.prev_before(min(at, self.last + 1))
        while found is not None and found >= self.first:
            span = self.exclusions.span_at(found)
            if span is None:
                return found
            found = self.rule.prev_before(span.start)
        return None


def excluded_stretches(
    rule: Rule, exclusions: Exclusions, *, first: Instant, last: Instant
) -> list[SkipStretch]:
    """Every excluded fire of `rule` in [first, last], oldest first; neighbours are one stretch."""
    found: list[SkipStretch] = []
    for span in exclusions.spans:
        if span.until <= first or span.start > last:
            continue
        begin = rule.next_after(max(span.start, first) - 1)
        end = rule.prev_before(min(span.until, last + 1))
        if begin is None or end is None or begin > end or end < first:
            continue
        if found and rule.next_after(found[-1].last) == begin:
            begin = found.pop().first
        found.append(SkipStretch(first=begin, last=end, reason=SkipReason.EXCLUDED))
    return found


def without(rule: Rule, stretch: SkipStretch, holes: Sequence[SkipStretch]) -> list[SkipStretch]:
    """The fires of `stretch` that are in none of `holes`, which are in order."""
    parts: list[SkipStretch] = []
    first: Instant | None = stretch.first
    for hole in holes:
        if first is None or hole.first > stretch.last:
            break
        if hole.last < first:
            continue
        last = rule.prev_before(hole.first)
        if last is not None and last >= first:
            parts.append(_part(stretch, first, last))
        first = rule.next_after(hole.last)
    if first is not None and first <= stretch.last:
        parts.append(_part(stretch, first, stretch.last))
    return parts


def _part(stretch: SkipStretch, first: Instant, last: Instant) -> SkipStretch:
    return SkipStretch(first=first, last=last, reason=stretch.reason, stand_in=stretch.stand_in)
