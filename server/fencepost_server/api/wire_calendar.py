"""Exclusion calendars between messages and the store."""

from fencepost.v1 import schedule_pb2

from fencepost_server.api import validate
from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.clock import Instant
from fencepost_server.domain.calendar import CalendarContent, DateRange
from fencepost_server.domain.names import format_calendar
from fencepost_server.policy.calendar import DATES_MAX, RANGES_MAX, check_content
from fencepost_server.policy.ics import ICS_BYTES_MAX
from fencepost_server.store.calendars import CalendarRecord, CalendarSettings

CALENDAR_FIELDS = frozenset(("description", "dates", "ranges", "ics", "time_zone"))
DESCRIPTION_BYTES_MAX = 1024


def read_calendar(
    message: schedule_pb2.Calendar, *, now: Instant, field: str = "calendar"
) -> CalendarSettings:
    """Raises InvalidField or InvalidSchedule."""
    for name, count, most in (
        ("dates", len(message.dates), DATES_MAX),
        ("ranges", len(message.ranges), RANGES_MAX),
    ):
        if count > most:
            raise validate.refused(f"{field}.{name}", f"{count} {name}", f"at most {most}")
    content = CalendarContent(
        dates=tuple(
            validate.text(text, field=f"{field}.dates[{index}]")
            for index, text in enumerate(message.dates)
        ),
        ranges=tuple(
            DateRange(first_date=each.first_date, last_date=each.last_date)
            for each in message.ranges
        ),
        ics=validate.text(message.ics, field=f"{field}.ics", bytes_max=ICS_BYTES_MAX),
        time_zone=validate.text(message.time_zone, field=f"{field}.time_zone"),
    )
    if content == CalendarContent(time_zone=content.time_zone):
        raise validate.missing(f"{field}.dates", "at least one of dates, ranges, ics")
    check_content(content, now=now, path=field)
    return CalendarSettings(
        description=validate.text(
            message.description, field=f"{field}.description", bytes_max=DESCRIPTION_BYTES_MAX
        ),
        content=content,
    )


def write_calendar(record: CalendarRecord, *, tenant: str) -> schedule_pb2.Calendar:
    """The calendar as stored."""
    content = record.settings.content
    return schedule_pb2.Calendar(
        name=format_calendar(tenant, record.name),
        description=record.settings.description,
        dates=content.dates,
        ranges=[
            schedule_pb2.DateRange(first_date=each.first_date, last_date=each.last_date)
            for each in content.ranges
        ],
        ics=content.ics,
        time_zone=content.time_zone,
        created_at=to_timestamp(record.created_at),
        updated_at=to_timestamp(record.updated_at),
        etag=record.etag,
    )
