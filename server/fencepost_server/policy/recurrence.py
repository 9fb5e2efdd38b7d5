"""Events that recur: which RRULEs are accepted, and when they begin within a window.

A library expands months and years. Days and weeks are walked here: it would walk a rule that
never matches to the year 9999.
"""

from calendar import monthrange
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from dateutil.rrule import rrulestr

from fencepost_server.errors import InvalidField, cut_text
from fencepost_server.policy.zone import Zone

TIMES_PER_DAY_MAX = 48
OCCURRENCES_MAX = 20_000
# Days, weeks, months and years that all rules of a calendar walk through for one year of it.
STEPS_MAX = 4_000
FIRST_YEAR, LAST_YEAR = 1970, 2200
# Bare rules without DTSTART count from here, a Thursday.
EPOCH = datetime(FIRST_YEAR, 1, 1)  # noqa: DTZ001 - wall clock of any zone
_DAYS = {"YEARLY": 365, "MONTHLY": 28, "WEEKLY": 7, "DAILY": 1}
_FREQUENCIES = tuple(_DAYS)
_RANGES = (
    ("BYMONTH", 1, 12),
    ("BYMONTHDAY", -31, 31),
    ("BYHOUR", 0, 23),
    ("BYMINUTE", 0, 59),
    ("BYSECOND", 0, 59),
)
_PARTS = frozenset(
    (
        *("FREQ", "UNTIL", "COUNT", "INTERVAL", "WKST", "BYSECOND", "BYMINUTE", "BYHOUR"),
        *("BYDAY", "BYMONTHDAY", "BYYEARDAY", "BYWEEKNO", "BYMONTH", "BYSETPOS"),
    )
)
# Parts that RFC 5545 does not allow with every frequency, or that would have no meaning.
_NOT_WITH = {
    "DAILY": ("BYYEARDAY", "BYWEEKNO", "BYSETPOS"),
    "WEEKLY": ("BYYEARDAY", "BYWEEKNO", "BYSETPOS", "BYMONTHDAY"),
    "MONTHLY": ("BYYEARDAY", "BYWEEKNO"),
    "YEARLY": (),
}
_WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
_UNTIL_FORM = "%Y%m%dT%H%M%S"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event in wall clock time; no `zone`: of whoever reads the calendar.

    `rules` are texts of RRULEs whose UNTIL is wall clock too.
    """

    start: datetime
    duration: timedelta
    zone: Zone | None = None
    rules: tuple[str, ...] = ()
    more: tuple[datetime, ...] = ()
    without: frozenset[datetime] = frozenset()


def starts_within(event: Event, first: datetime, last: datetime) -> list[datetime]:
    """When the event begins within [first, last] by its wall clock, at most OCCURRENCES_MAX."""
    if not event.rules:
        found = {event.start, *event.more}
    else:
        found = set(event.more)
        for text in event.rules:
            found.update(_expand(event.start, text, first, last))
    return sorted(at for at in found - event.without if first <= at <= last)[:OCCURRENCES_MAX]


def _expand(start: datetime, text: str, first: datetime, last: datetime) -> Iterator[datetime]:
    parts = dict(part.split("=", 1) for part in text.split(";"))
    begin = _forwarded(start, parts, first)
    left = int(parts.pop("COUNT", OCCURRENCES_MAX))
    until = parts.pop("UNTIL", None)
    if until is not None:
        last = min(last, datetime.strptime(until, _UNTIL_FORM))  # noqa: DTZ007 - wall clock
    for at in _occurrences(begin, parts, last):
        if left == 0 or at > last:
            return
        left -= 1
        if at >= first:
            yield at


def _occurrences(begin: datetime, parts: dict[str, str], last: datetime) -> Iterator[datetime]:
    if parts["FREQ"] in ("MONTHLY", "YEARLY"):
        yield from rrulestr(_joined(parts), dtstart=begin)
        return
    # Days are walked here: the library would walk a rule that never matches to the year 9999.
    weekly = parts["FREQ"] == "WEEKLY"
    months = set(_numbers(parts.get("BYMONTH", "")))
    days = set(_numbers(parts.get("BYMONTHDAY", "")))
    weekdays = {_WEEKDAYS.index(name) for name in parts.get("BYDAY", "").split(",") if name}
    if weekly and not weekdays:
        weekdays = {begin.weekday()}
    times = _times(begin, parts)
    step = int(parts.get("INTERVAL", "1"))
    first_weekday = _WEEKDAYS.index(parts.get("WKST", "MO"))
    day = begin.replace(hour=0, minute=0, second=0)
    if weekly:
        day -= timedelta(days=(day.weekday() - first_weekday) % 7)
    while day <= last:
        for one in [day + timedelta(days=n) for n in range(7)] if weekly else [day]:
            length = monthrange(one.year, one.month)[1]
            if (
                (not months or one.month in months)
                and (not days or one.day in days or one.day - length - 1 in days)
                and (not weekdays or one.weekday() in weekdays)
            ):
                for time in times:
                    if (at := one + time) >= begin:
                        yield at
        day += timedelta(days=step * (7 if weekly else 1))


def _times(begin: datetime, parts: dict[str, str]) -> list[timedelta]:
    hours = _numbers(parts.get("BYHOUR", "")) or [begin.hour]
    minutes = _numbers(parts.get("BYMINUTE", "")) or [begin.minute]
    seconds = _numbers(parts.get("BYSECOND", "")) or [begin.second]
    return sorted(
        {timedelta(hours=h, minutes=m, seconds=s) for h in hours for m in minutes for s in seconds}
    )


def _forwarded(start: datetime, parts: dict[str, str], first: datetime) -> datetime:
    """A later start with the same phase, so that decades need not be walked."""
    if "COUNT" in parts or first <= start:
        return start
    step = int(parts.get("INTERVAL", "1"))
    if parts["FREQ"] in ("DAILY", "WEEKLY"):
        days = step * _DAYS[parts["FREQ"]]
        return start + timedelta(days=((first - start).days // days) * days)
    if start.day > 28:
        return start
    months = step * (12 if parts["FREQ"] == "YEARLY" else 1)
    passed = (first.year - start.year) * 12 + first.month - start.month - 1
    total = start.month - 1 + max(passed // months, 0) * months
    return start.replace(year=start.year + total // 12, month=total % 12 + 1)


def steps(event: Event, first: datetime, last: datetime) -> int:
    """How many days, weeks, months or years the event's rules walk through within a window."""
    total = 0
    for text in event.rules:
        parts = dict(part.split("=", 1) for part in text.split(";"))
        begin = _forwarded(event.start, parts, first)
        days = _DAYS[parts["FREQ"]] * int(parts.get("INTERVAL", "1"))
        total += max((last - begin).days, 0) // days + 1
    return total


def checked_rule(
    value: Any, *, start: datetime, is_day: bool, zone: Zone | None, place: str, field: str
) -> str:
    """The text of an RRULE with UNTIL on the event's wall clock. Raises InvalidField."""
    text = value.to_ical().decode("ascii", "replace").upper()
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    unknown = sorted(parts.keys() - _PARTS)
    if unknown:
        raise _refused(field, f"{place}: RRULE part {unknown[0]}", "parts of RFC 5545")
    if parts.get("FREQ") not in _FREQUENCIES:
        raise _refused(
            field,
            f"{place}: FREQ {parts.get('FREQ')}",
            f"{', '.join(_FREQUENCIES)}; for hours, BYHOUR and a DURATION",
        )
    for name in _NOT_WITH[parts["FREQ"]]:
        if name in parts:
            raise _refused(field, f"{place}: {name}", f"no {name} with FREQ={parts['FREQ']}")
    if parts["FREQ"] in ("DAILY", "WEEKLY"):
        for name in parts.get("BYDAY", "").split(",") if "BYDAY" in parts else ():
            if name not in _WEEKDAYS:
                raise _refused(field, f"{place}: BYDAY {name[:20]}", ", ".join(_WEEKDAYS))
    for name, low, high in (("INTERVAL", 1, 10_000), ("COUNT", 1, OCCURRENCES_MAX)):
        if name in parts and not (parts[name].isdigit() and low <= int(parts[name]) <= high):
            raise _refused(field, f"{place}: {name} {parts[name][:20]}", f"{low} to {high}")
    times = 1
    for name in ("BYHOUR", "BYMINUTE", "BYSECOND"):
        if name in parts:
            if is_day:
                raise _refused(field, f"{place}: {name} of whole days", "a DTSTART with a time")
            times *= len(set(parts[name].split(",")))
    if times > TIMES_PER_DAY_MAX:
        raise _refused(field, f"{place}: {times} times a day", f"at most {TIMES_PER_DAY_MAX}")
    for name, low, high in _RANGES:
        if not all(low <= number <= high for number in _numbers(parts.get(name, ""))):
            raise _refused(field, f"{place}: {name} {parts[name][:20]}", f"{low} to {high}")
    if "UNTIL" in parts:
        parts["UNTIL"] = _until(value["UNTIL"], zone, place, field)
    cleaned = _joined(parts)
    endless = {name: part for name, part in parts.items() if name not in ("UNTIL", "COUNT")}
    try:
        rule = rrulestr(_joined(endless), dtstart=start)
        # Found out once, at most thousands of steps; those that happen are found soon.
        never = parts["FREQ"] in ("MONTHLY", "YEARLY") and next(iter(rule), None) is None
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise _refused(
            field, f"{place}: {cut_text(str(error), 100)}", "a rule of RFC 5545"
        ) from error
    if never:
        raise _refused(field, f"{place}: an RRULE that never happens", "rules that happen")
    return cleaned


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.lstrip("+-").isdigit()]


def _joined(parts: dict[str, str]) -> str:
    return ";".join(f"{name}={part}" for name, part in parts.items())


def _until(value: Any, zone: Zone | None, place: str, field: str) -> str:
    at = value if not isinstance(value, list) else value[0]
    if isinstance(at, datetime):
        if at.tzinfo is not None:
            at = at.astimezone(UTC).replace(tzinfo=None)
            if zone is not None:
                at = from_wall_second(wall_of(wall_second(at), zone))
    else:
        at = datetime(at.year, at.month, at.day, 23, 59, 59)  # noqa: DTZ001 - wall clock
    return in_range(at.replace(microsecond=0), place, field).strftime(_UNTIL_FORM)


def wall_second(at: datetime) -> int:
    """Seconds from 1970-01-01T00:00:00 to `at`, both on one wall clock."""
    return int((at - EPOCH).total_seconds())


def from_wall_second(second: int) -> datetime:
    """The reverse of `wall_second`."""
    return EPOCH + timedelta(seconds=second)


def wall_of(second: int, zone: Zone) -> int:
    """The wall clock, as `wall_second` counts, of a UTC second."""
    return second + zone.stretch(second).offset


def to_second(zone: Zone, wall: int) -> int:
    """The first UTC second at which a zone's clock shows `wall`; in a gap, the first after it."""
    offsets = sorted(
        {zone.stretch(wall + days * 86_400).offset for days in (-1, 0, 1)}, reverse=True
    )
    for offset in offsets:
        if zone.stretch(wall - offset).offset == offset:
            return wall - offset
    # No clock shows it: clocks jump from the smaller offset over it.
    return zone.stretch(wall - offsets[-1]).start


def in_range(at: datetime, place: str, field: str) -> datetime:
    """`at`, if its year is one that calendars know. Raises InvalidField."""
    if not FIRST_YEAR <= at.year <= LAST_YEAR:
        allowed = f"years {FIRST_YEAR} to {LAST_YEAR}"
        raise _refused(field, f"{place}: year {at.year}", allowed)
    return at


def _refused(field: str, value: str, allowed: str) -> InvalidField:
    name = field.rpartition(".")[2]
    return InvalidField(
        f"{name}: got {value}, want {allowed}", field=field, value=value, allowed=allowed
    )
