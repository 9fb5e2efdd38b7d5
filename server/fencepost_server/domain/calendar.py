"""What an exclusion calendar is: days and hours in which schedules that name it do not fire."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DateRange:
    """Consecutive days, both ends included, as ISO 8601."""

    first_date: str
    last_date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarContent:
    """What a calendar excludes; no `time_zone`: days begin in the zone of each schedule."""

    dates: tuple[str, ...] = ()
    ranges: tuple[DateRange, ...] = ()
    ics: str = ""
    time_zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalendar:
    """A calendar as jobs of its tenant name it."""

    name: str
    content: CalendarContent
