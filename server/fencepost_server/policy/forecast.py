"""In which minutes jobs that fire alike will fire. The engine groups the jobs and adds up."""

from collections.abc import Iterator
from dataclasses import dataclass

from fencepost_server.clock import MINUTE, SECOND, Duration, Instant, format_instant
from fencepost_server.policy.cron import CronRule

RULE_CHARS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FireGroup:
    """Jobs with one rule and one first fire: a cron rule, every `every`, or else only once.

    Fires end before `end_at` and after `fires_left` of them (None: no such bound).
    """

    jobs: int
    first_at: Instant
    rule: CronRule | None = None
    every: Duration | None = None
    end_at: Instant | None = None
    fires_left: int | None = None

    @property
    def text(self) -> str:
        """The rule for people, such as "0 0 * * * UTC"; equal rules have equal text."""
        if self.rule is not None:
            spec = self.rule.canonical
            text = f"{'; '.join(spec.expressions)} {spec.time_zone}"
            return text if len(text) <= RULE_CHARS_MAX else f"{text[: RULE_CHARS_MAX - 1]}…"
        return "once" if self.every is None else f"every {_duration_text(self.every)}"


def fires_by_minute(group: FireGroup, start: Instant, until: Instant) -> Iterator[tuple[int, int]]:
    """Pairs (minute counted from `start`, fires of one job of the group), minutes rising.

    `start` and `until` are whole minutes. A minute may come more than once, and with no
    fires: each pair is a step of work, and steps of a group that has no bound of its own
    are at most one for each fire in [start, until).
    """
    assert start % MINUTE == 0 == until % MINUTE, format_instant(start)
    if group.end_at is not None:
        until = min(until, group.end_at)
    if group.rule is not None:
        yield from _of_rule(group, group.rule, start, until)
    elif group.every is not None:
        yield from _of_interval(group, group.every, start, until)
    elif start <= group.first_at < until and group.fires_left != 0:
        yield (group.first_at - start) // MINUTE, 1


def _of_rule(
    group: FireGroup, rule: CronRule, start: Instant, until: Instant
) -> Iterator[tuple[int, int]]:
    left = group.fires_left
    # Whoever counts fires has to count also those before `start`.
    after = group.first_at if left is not None else max(group.first_at, start)
    at = rule.next_after(after - 1)
    while at is not None and at < until and left != 0:
        if at >= start:
            yield (at - start) // MINUTE, 1
        else:
            yield 0, 0
        left = None if left is None else left - 1
        at = rule.next_after(at)


def _of_interval(
    group: FireGroup, every: Duration, start: Instant, until: Instant
) -> Iterator[tuple[int, int]]:
    first = group.first_at
    if group.fires_left is not None:
        until = min(until, first + (group.fires_left - 1) * every + 1)
    # The number of the first fire not before an instant.
    number = max(0, -((first - max(start, first)) // every))
    if every >= MINUTE:
        for at in range(first + number * every, until, every):
            yield (at - start) // MINUTE, 1
        return
    minute = max(start, first) // MINUTE * MINUTE
    while minute < until:
        following = max(0, -((first - min(minute + MINUTE, until)) // every))
        yield (minute - start) // MINUTE, following - number
        number = following
        minute += MINUTE


def _duration_text(duration: Duration) -> str:
    seconds = duration // SECOND
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
