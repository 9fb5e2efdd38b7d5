"""The fires to come of a schedule of any kind, with those that clock changes suppress."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fencepost_server.clock import SECOND, Instant, ceil_second, format_instant
from fencepost_server.domain.calendar import NamedCalendar
from fencepost_server.domain.schedule import CronSpec, Schedule, SkipReason
from fencepost_server.policy.calendar import excludes, zone_of
from fencepost_server.policy.cron import Planned
from fencepost_server.policy.due import counts_from_ends
from fencepost_server.policy.schedule import bounded_rule, cron_rule


def preview(
    schedule: Schedule,
    *,
    after: Instant,
    count: int,
    anchor: Instant,
    seed: str = "",
    fires_left: int | None = None,
    calendars: Sequence[NamedCalendar] = (),
) -> list[Planned]:
    """At most `count` fires and suppressed fires later than `after`; fewer: it ends.

    `anchor` is any fire of an interval without its own, or when it would begin;
    `fires_left` is what the limit of fires leaves (None: no limit). Raises InvalidSchedule
    for a bad cron expression.
    """
    found: list[Planned] = []
    for one in _plan(schedule, after, count, ceil_second(anchor), seed):
        if len(found) == count or fires_left == 0:
            break
        if one.skip_reason is None and calendars:
            name = excludes(calendars, one.at, zone_of(schedule))
            if name is not None:
                note = f"The calendar {name} excludes it."
                one = replace(one, skip_reason=SkipReason.EXCLUDED, note=note)
        found.append(one)
        if fires_left is not None and one.skip_reason is None:
            fires_left -= 1
    return found


def _plan(
    schedule: Schedule, after: Instant, count: int, anchor: Instant, seed: str
) -> Iterator[Planned]:
    if isinstance(schedule.spec, CronSpec):
        if schedule.start_at is not None:
            after = max(after, ceil_second(schedule.start_at) - 1)
        end_at = None if schedule.end_at is None else ceil_second(schedule.end_at)
        for one in cron_rule(schedule.spec, seed=seed).planned(after, count):
            if end_at is not None and one.at >= end_at:
                return
            yield one
        return
    if counts_from_ends(schedule):
        # The anchor is the next fire; only the end of its run decides those that follow.
        if anchor > after and (schedule.end_at is None or anchor < schedule.end_at):
            yield Planned(
                at=anchor,
                local_time=format_instant(anchor).replace("Z", "+00:00"),
                note="Those that follow count from the end of its run.",
            )
        return
    rule = bounded_rule(schedule, anchor=anchor, seed=seed)
    at = rule.next_after(after)
    while at is not None:
        assert at % SECOND == 0, "nominal fires are whole seconds"
        yield Planned(at=at, local_time=format_instant(at).replace("Z", "+00:00"))
        at = rule.next_after(at)
