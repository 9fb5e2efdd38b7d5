"""How `fencepost calendars` shows calendars: as a table, as pairs, or as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencepost_server.cli.failure import note
from fencepost_server.cli.settings import Settings
from fencepost_server.cli.tables import (
    instant,
    one_line,
    print_json,
    print_json_list,
    print_pairs,
    print_rows,
)
from fencepost_server.cli.values import last_part

if TYPE_CHECKING:
    from fencepost.v1.schedule_pb2 import Calendar

_EVENT = "BEGIN:VEVENT"


def show_calendars(settings: Settings, calendars: "Sequence[Calendar]") -> None:
    """Many, a line for each; lists carry no iCalendar text."""
    if settings.json:
        print_json_list("calendars", calendars)
        return
    if not calendars:
        note("no calendars; add one: fencepost calendars create NAME --date 2026-12-25")
        return
    print_rows(
        ("CALENDAR", "ZONE", "DATES", "RANGES", "CHANGED", "DESCRIPTION"),
        [
            (
                last_part(each.name),
                each.time_zone or "each schedule's",
                str(len(each.dates)),
                str(len(each.ranges)),
                instant(each, "updated_at"),
                one_line(each.description),
            )
            for each in calendars
        ],
    )


def show_calendar(settings: Settings, calendar: "Calendar") -> None:
    """One, whole."""
    if settings.json:
        print_json(calendar)
        return
    events = calendar.ics.count(_EVENT)
    print_pairs(
        [
            ("calendar", last_part(calendar.name)),
            ("description", one_line(calendar.description, 500)),
            ("zone", calendar.time_zone or "each schedule's"),
            *(("date", each) for each in calendar.dates),
            *(("range", f"{each.first_date}..{each.last_date}") for each in calendar.ranges),
            ("ics", _ics(calendar.ics, events)),
            ("changed", instant(calendar, "updated_at")),
        ]
    )


def _ics(text: str, events: int) -> str:
    if not text:
        return ""
    return f"{events} events" if events else one_line(text, 200)
