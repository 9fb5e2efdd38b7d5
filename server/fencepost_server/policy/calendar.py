"""What exclusion calendars exclude, as spans of instants in a zone.

Expanded per calendar, zone and year, and cached: most questions are about this year.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache

from fencepost_server.clock import SECOND, Instant, to_datetime
from fencepost_server.domain.calendar import CalendarContent, NamedCalendar
from fencepost_server.domain.schedule import CronSpec, Schedule
from fencepost_server.errors import FencepostError, InvalidField
from fencepost_server.policy.exclusion import Exclusions, Span, merge
from fencepost_server.policy.ics import read_events
from fencepost_server.policy.recurrence import (
    FIRST_YEAR,
    LAST_YEAR,
    STEPS_MAX,
    Event,
    from_wall_second,
    starts_within,
    steps,
    to_second,
    wall_second,
)
from fencepost_server.policy.zone import load_zone

DATES_MAX = 4096
RANGES_MAX = 512
RANGE_DAYS_MAX = 366
YEARS_CACHED = 512
# A decision about older fires than this many years does not ask calendars any more.
YEARS_BACK_MAX = 10
_DAY = timedelta(days=1)
# Wall clocks and UTC are never further apart than this.
_MARGIN = 2 * _DAY
_MARGIN_S = 2 * 86_400


def zone_of(schedule: Schedule) -> str:
    """The zone in which days of a calendar without its own begin."""
    return schedule.spec.time_zone if isinstance(schedule.spec, CronSpec) else "UTC"


def exclusions(
    calendars: Sequence[NamedCalendar], zone: str, *, first: Instant, last: Instant
) -> Exclusions:
    """All that the calendars exclude, known for [first, last]."""
    years = range(_year(first), _year(last) + 1)[-YEARS_BACK_MAX:]
    return Exclusions(
        span
        for calendar in calendars
        for year in years
        for span in _spans(calendar.content, calendar.content.time_zone or zone, year)
    )


def excludes(calendars: Sequence[NamedCalendar], at: Instant, zone: str) -> str | None:
    """The name of the first calendar that excludes `at`; None if none does."""
    for calendar in calendars:
        if exclusions([calendar], zone, first=at, last=at).span_at(at) is not None:
            return calendar.name
    return None


def check_content(content: CalendarContent, *, now: Instant, path: str = "calendar") -> None:
    """Raises InvalidField or InvalidSchedule, with a field path under `path`, unless the
    content can be read; this and the next year are expanded.
    """
    if len(content.dates) > DATES_MAX:
        raise _refused(f"{path}.dates", f"{len(content.dates)} dates", f"at most {DATES_MAX}")
    for index, text in enumerate(content.dates):
        _read_date(text, f"{path}.dates[{index}]")
    if len(content.ranges) > RANGES_MAX:
        raise _refused(f"{path}.ranges", f"{len(content.ranges)} ranges", f"at most {RANGES_MAX}")
    for index, one in enumerate(content.ranges):
        first = _read_date(one.first_date, f"{path}.ranges[{index}].first_date")
        field = f"{path}.ranges[{index}].last_date"
        last = _read_date(one.last_date, field)
        if not first <= last <= first + RANGE_DAYS_MAX * _DAY:
            raise _refused(field, one.last_date, f"first_date to {RANGE_DAYS_MAX} days later")
    if content.time_zone:
        load_zone(content.time_zone, field=f"{path}.time_zone")
    events = read_events(content.ics, field=f"{path}.ics")
    first = from_wall_second(now // SECOND)
    walked = sum(steps(event, first - event.duration, first + 370 * _DAY) for event in events)
    if walked > STEPS_MAX:
        raise _refused(
            f"{path}.ics",
            f"rules that take {walked} steps to expand one year",
            f"at most {STEPS_MAX} steps: fewer rules, or a later DTSTART for those with COUNT",
        )
    for year in (_year(now), _year(now) + 1):
        _spans(content, content.time_zone or "UTC", year)


@lru_cache(maxsize=YEARS_CACHED)
def _spans(content: CalendarContent, zone_name: str, year: int) -> tuple[Span, ...]:
    """What touches a year of UTC, as spans that may reach beyond it."""
    zone = load_zone(zone_name)
    begin = int(datetime(year, 1, 1, tzinfo=UTC).timestamp())
    end = int(datetime(year + 1, 1, 1, tzinfo=UTC).timestamp())
    walls: list[tuple[int, int, str]] = []
    for first, last in _days(content):
        walls.append((_midnight(first), _midnight(last + _DAY), zone_name))
    for event in _events(content.ics):
        own = zone_name if event.zone is None else event.zone.name
        low = from_wall_second(begin) - event.duration - _MARGIN
        walls += [
            (wall_second(at), wall_second(at + event.duration), own)
            for at in starts_within(event, low, from_wall_second(end) + _MARGIN)
        ]
    found = []
    for wall_start, wall_end, own in walls:
        if wall_end < begin - _MARGIN_S or wall_start > end + _MARGIN_S:
            continue
        place = zone if own == zone_name else load_zone(own)
        first_second, end_second = to_second(place, wall_start), to_second(place, wall_end)
        if first_second < end_second and end_second > begin and first_second < end:
            found.append(Span(start=first_second * SECOND, until=end_second * SECOND))
    return merge(found)


@lru_cache(maxsize=64)
def _events(text: str) -> tuple[Event, ...]:
    return read_events(text, field="calendar.ics")


def _days(content: CalendarContent) -> Iterator[tuple[date, date]]:
    for text in content.dates:
        day = date.fromisoformat(text)
        yield day, day
    for one in content.ranges:
        yield date.fromisoformat(one.first_date), date.fromisoformat(one.last_date)


def _midnight(day: date) -> int:
    return wall_second(datetime(day.year, day.month, day.day))  # noqa: DTZ001 - wall clock


def _read_date(text: str, field: str) -> date:
    allowed = f"a date as 2026-12-25, of the years {FIRST_YEAR} to {LAST_YEAR}"
    try:
        day = date.fromisoformat(text)
    except ValueError as error:
        raise _refused(field, repr(text[:40]), allowed) from error
    # Python reads more spellings than this one.
    if day.isoformat() != text or not FIRST_YEAR <= day.year <= LAST_YEAR:
        raise _refused(field, repr(text[:40]), allowed)
    return day


def _year(at: Instant) -> int:
    return to_datetime(at).year


def _refused(field: str, value: str, allowed: str) -> FencepostError:
    name = field.rpartition(".")[2]
    return InvalidField(
        f"{name}: got {value}, want {allowed}", field=field, value=value, allowed=allowed
    )
