"""iCalendar text and bare RRULE lines as events.

A library reads the text; size, number of events and rules, durations and years are bounded.
"""

import re
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

from icalendar import Calendar as IcsCalendar

from fencepost_server.errors import InvalidField, cut_text
from fencepost_server.policy.recurrence import (
    Event,
    checked_rule,
    from_wall_second,
    in_range,
    to_second,
    wall_of,
    wall_second,
)
from fencepost_server.policy.zone import Zone, load_zone

ICS_BYTES_MAX = 64 * 1024
EVENTS_MAX = 2000
RULES_MAX = 32
DURATION_MAX = timedelta(days=366)
_BARE = re.compile(r"\s*(RRULE|DTSTART|DURATION|EXDATE|RDATE|FREQ)\b", re.IGNORECASE)


def read_events(text: str, *, field: str) -> tuple[Event, ...]:
    """The events of iCalendar text, or of bare RRULE lines. Raises InvalidField."""
    size = len(text.encode())
    if size > ICS_BYTES_MAX:
        raise _refused(field, f"{size} bytes", f"at most {ICS_BYTES_MAX} bytes")
    if not text.strip():
        return ()
    bare = _BARE.match(text) is not None
    try:
        parsed = IcsCalendar.from_ical(_wrapped(text) if bare else text)
        components = list(parsed.walk("VEVENT"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _refused(
            field, cut_text(str(error), 200), "iCalendar text (VCALENDAR), or bare RRULE lines"
        ) from error
    if not components:
        raise _refused(field, "no VEVENT", "iCalendar text with events, or bare RRULE lines")
    if len(components) > EVENTS_MAX:
        raise _refused(field, f"{len(components)} events", f"at most {EVENTS_MAX} events")
    events = _without_overridden(
        [_read_event(each, f"event {n}", field) for n, each in enumerate(components, 1)]
    )
    rules = sum(len(event.rules) for event in events)
    if rules > RULES_MAX:
        raise _refused(field, f"{rules} RRULEs", f"at most {RULES_MAX} RRULEs")
    return tuple(events)


def _wrapped(text: str) -> str:
    """Bare lines as one event for each rule."""
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    rules = [line for line in lines if re.match(r"(RRULE|FREQ)\b", line, re.IGNORECASE)]
    others = [line for line in lines if line not in rules]
    if not any(line.upper().startswith("DTSTART") for line in others):
        others.append("DTSTART;VALUE=DATE:19700101")
    body = []
    for number, rule in enumerate(rules[: EVENTS_MAX + 1]):
        whole = rule if rule.upper().startswith("RRULE") else f"RRULE:{rule}"
        body += ["BEGIN:VEVENT", f"UID:{number}", *others, whole, "END:VEVENT"]
    return "\r\n".join(["BEGIN:VCALENDAR", "VERSION:2.0", *body, "END:VCALENDAR", ""])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    event: Event
    uid: str
    # The occurrence of the event with this uid that this one replaces.
    replaces: datetime | None
    cancelled: bool


def _without_overridden(read: list[_Read]) -> list[Event]:
    replaced: dict[str, set[datetime]] = {}
    for one in read:
        if one.replaces is not None:
            replaced.setdefault(one.uid, set()).add(one.replaces)
    events = []
    for one in read:
        if one.cancelled:
            continue
        event = one.event
        if one.replaces is None and one.uid in replaced:
            event = replace(event, without=event.without | replaced[one.uid])
        events.append(event)
    return events


def _read_event(component: Any, place: str, field: str) -> _Read:
    errors = [f"{name}: {cut_text(str(why), 100)}" for name, why in component.errors]
    if errors:
        raise _refused(field, f"{place}: {errors[0]}", "valid properties")
    if "DTSTART" not in component:
        raise _refused(field, f"{place} without DTSTART", "a DTSTART in each event")
    starts = _one(component["DTSTART"], place, field)
    start, is_day, zone = _wall(starts, place, field)
    duration = _duration(component, start, is_day, zone, place, field)
    rules = tuple(
        checked_rule(each, start=start, is_day=is_day, zone=zone, place=place, field=field)
        for each in _many(component.get("RRULE"))
    )
    more = [
        at for each in _many(component.get("RDATE")) for at in _listed(each, zone, place, field)
    ]
    gone = [
        at for each in _many(component.get("EXDATE")) for at in _listed(each, zone, place, field)
    ]
    replaces = component.get("RECURRENCE-ID")
    return _Read(
        event=Event(
            start=start,
            duration=duration,
            zone=zone,
            rules=rules,
            more=tuple(more),
            without=frozenset(gone),
        ),
        uid=str(component.get("UID", place)),
        replaces=None if replaces is None else _wall(replaces, place, field)[0],
        cancelled=str(component.get("STATUS", "")).upper() == "CANCELLED",
    )


def _duration(
    component: Any, start: datetime, is_day: bool, zone: Zone | None, place: str, field: str
) -> timedelta:
    duration = timedelta(days=1) if is_day else timedelta(seconds=1)
    if "DTEND" in component:
        end, _, end_zone = _wall(_one(component["DTEND"], place, field), place, field)
        if end_zone is not zone:
            raise _refused(field, f"{place}: DTEND in another zone", "the zone of DTSTART")
        duration = max(end - start, duration)
    elif "DURATION" in component:
        given = getattr(_one(component["DURATION"], place, field), "dt", None)
        if isinstance(given, timedelta):
            duration = max(given, duration)
    if duration > DURATION_MAX:
        raise _refused(field, f"{place}: longer than 366 d", "events of at most 366 d")
    return duration


def _wall(value: Any, place: str, field: str) -> tuple[datetime, bool, Zone | None]:
    """Wall clock of a value, whether it is a whole day, and its zone (None: floating)."""
    at = value.dt
    name = str(value.params.get("TZID", "")) if hasattr(value, "params") else ""
    if not isinstance(at, date):
        raise _refused(field, f"{place}: {cut_text(str(at), 100)}", "a date or a date with time")
    if not isinstance(at, datetime):
        return in_range(datetime(at.year, at.month, at.day), place, field), True, None  # noqa: DTZ001
    zone = None
    if name:
        zone = load_zone(name, field=field)
    elif at.tzinfo is not None:
        zone = load_zone("UTC", field=field)
        at = at.astimezone(UTC)
    return in_range(at.replace(tzinfo=None, microsecond=0), place, field), False, zone


def _listed(value: Any, zone: Zone | None, place: str, field: str) -> list[datetime]:
    found = []
    for each in value.dts:
        if not isinstance(each.dt, date):
            raise _refused(field, f"{place}: a period in RDATE", "dates, or dates with time")
        at, _, own = _wall(each, place, field)
        if own is not None and zone is not None and own is not zone:
            at = _moved(at, own, zone)
        found.append(at)
    return found


def _moved(at: datetime, source: Zone, target: Zone) -> datetime:
    """The same instant on the wall clock of another zone."""
    return from_wall_second(wall_of(to_second(source, wall_second(at)), target))


def _many(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _one(value: Any, place: str, field: str) -> Any:
    if isinstance(value, list):
        raise _refused(field, f"{place}: a property twice", "each property once")
    return value


def _refused(field: str, value: str, allowed: str) -> InvalidField:
    name = field.rpartition(".")[2]
    return InvalidField(
        f"{name}: got {value}, want {allowed}", field=field, value=value, allowed=allowed
    )
