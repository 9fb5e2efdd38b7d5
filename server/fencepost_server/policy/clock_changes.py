"""What changes of a zone's offset do to a schedule's past fires: suppressed, moved, doubled.

Only the hours around each change are looked at, so the cost depends on how many changes a
range holds and not on how many fires.
"""

from fencepost_server.clock import SECOND, Instant
from fencepost_server.domain.schedule import CronSpec, Schedule
from fencepost_server.policy.cron import CronRule, Planned
from fencepost_server.policy.schedule import bounded_rule, cron_rule
from fencepost_server.policy.zone import DAY_SECONDS, FIRST_SECOND, LAST_SECOND, Stretch


def clock_change_fires(
    schedule: Schedule, *, first: Instant, until: Instant, seed: str = ""
) -> list[Planned]:
    """The fires and suppressed fires in [first, until) that have a note, in order.

    Other kinds of schedules than cron run on elapsed time and have none.
    """
    if not isinstance(schedule.spec, CronSpec):
        return []
    rule = cron_rule(schedule.spec, seed=seed)
    if all(fields.every_hour for fields in rule.fields):
        return []
    bounds = bounded_rule(schedule, anchor=first, seed=seed)
    if bounds.start_at is not None:
        first = max(first, bounds.start_at)
    if bounds.end_at is not None:
        until = min(until, bounds.end_at)
    found: list[Planned] = []
    # A change up to a day outside may still fold or gap into the range.
    low = max(first // SECOND - DAY_SECONDS, FIRST_SECOND)
    high = min(until // SECOND + DAY_SECONDS, LAST_SECOND)
    if low < high:
        for change in rule.zone.changes(low, high):
            found += [one for one in _around(rule, change) if first <= one.at < until]
    return found


def _around(rule: CronRule, change: Stretch) -> list[Planned]:
    """What has a note at one change: its instant for a gap, both passes of a fold."""
    if change.offset > change.offset_before:
        begin, end = change.start, change.start + 1
    else:
        length = change.offset_before - change.offset
        begin, end = change.start - length, change.start + length
    return [
        one
        for one in rule.planned_between(begin * SECOND, end * SECOND)
        if one.note or one.skip_reason is not None
    ]
