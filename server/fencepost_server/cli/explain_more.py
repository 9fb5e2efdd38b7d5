"""What `fencepost explain` shows on request: another rule beside the one that is explained, and
its fires as a calendar.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fencepost_server.policy.cron import CronRule, Planned

# Fires of each rule that a comparison looks at.
COMPARED_MAX = 1000
# Fires that it names one by one, of each rule.
NAMED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Instants before `until` at which both rules fire, or one of them alone."""

    other: "CronRule"
    until: int
    both: Sequence[int]
    only_here: Sequence[int]
    only_there: Sequence[int]


def compare(rule: "CronRule", other: "CronRule", *, now: int, until: int | None) -> Comparison:
    """Sets two rules side by side, from `now` to `until`, or as far as both were looked at."""
    here, there = _instants(rule, now), _instants(other, now)
    ends = [found[-1] + 1 for found in (here, there) if len(found) == COMPARED_MAX]
    if until is not None:
        ends.append(until)
    end = min(ends, default=max([*here, *there], default=now) + 1)
    one, two = ({at for at in found if at < end} for found in (here, there))
    return Comparison(
        other=other,
        until=end,
        both=sorted(one & two),
        only_here=sorted(one - two),
        only_there=sorted(two - one),
    )


def calendar(fires: "Sequence[Planned]", *, summary: str, seed: str) -> str:
    """The fires as iCalendar text, one event each, without length."""
    from icalendar import Calendar, Event

    text = Calendar()
    text.add("prodid", "-//Fencepost//explain//EN")
    text.add("version", "2.0")
    for fire in fires:
        if fire.skip_reason is not None:
            continue
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=fire.at)
        event = Event()
        event.add("uid", f"{at:%Y%m%dT%H%M%SZ}-{seed or 'explain'}@fencepost".replace("/", "-"))
        event.add("dtstamp", at)
        event.add("dtstart", at)
        event.add("summary", summary)
        if fire.note:
            event.add("description", fire.note)
        text.add_component(event)
    return bytes(text.to_ical()).decode()


def _instants(rule: "CronRule", now: int) -> list[int]:
    return [one.at for one in rule.planned(now, COMPARED_MAX) if one.skip_reason is None]
