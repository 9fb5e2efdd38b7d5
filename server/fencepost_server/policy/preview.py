"""The fires to come of a schedule of any kind, with those that clock changes suppress."""

from collections.abc import Iterator

from fencepost_server.clock import SECOND, Instant, ceil_second, format_instant
from fencepost_server.domain.schedule import CronSpec, Schedule
from fencepost_server.policy.cron import Planned
from fencepost_server.policy.schedule import bounded_rule, cron_rule


def preview(
    schedule: Schedule,
    *,
    after: Instant,
    count: int,
    anchor: Instant,
    seed: str = "",
    fires_left: int | None = None,
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
    rule = bounded_rule(schedule, anchor=anchor, seed=seed)
    at = rule.next_after(after)
    while at is not None:
        assert at % SECOND == 0, "nominal fires are whole seconds"
        yield Planned(at=at, local_time=format_instant(at).replace("Z", "+00:00"))
        at = rule.next_after(at)
