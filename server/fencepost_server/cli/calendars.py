"""`fencepost calendars`: days on which schedules that name a calendar do not fire."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.calendar_view import show_calendar, show_calendars
from fencepost_server.cli.confirm import confirm
from fencepost_server.cli.failure import note, usage
from fencepost_server.cli.options import LimitOption, YesOption, option
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.values import calendar_path, last_part, read_text

if TYPE_CHECKING:
    from fencepost.v1.schedule_pb2 import Calendar

app = typer.Typer(
    help="Calendars: list, read, create, update, delete, import from iCalendar files.",
    no_args_is_help=True,
)

CalendarName = Annotated[str, typer.Argument(metavar="CALENDAR", help="Name of the calendar.")]
DateOption = Annotated[
    list[str] | None,
    option("--date", metavar="DAY", help="A whole day, 2026-12-25; may be repeated."),
]
RangeOption = Annotated[
    list[str] | None,
    option("--range", metavar="FIRST..LAST", help="Days in a row, both included; may be repeated."),
]
IcsOption = Annotated[
    str | None, option("--ics", metavar="FILE", help="iCalendar text or RRULE lines; -: stdin.")
]
ZoneOption = Annotated[
    str | None,
    option("--tz", metavar="ZONE", help="Zone its days begin in; default: each schedule's."),
]
DescriptionOption = Annotated[str | None, option("--description", help="For people.")]


@app.command("list")
@calls_server
def list_calendars(settings: Settings, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List calendars by name.

    Examples:

      fencepost calendars list

      fencepost calendars list -o json

      fencepost --tenant acme calendars list
    """
    from fencepost.v1.admin_service_pb2 import ListCalendarsRequest

    from fencepost_server.cli.connection import connected

    with connected(settings) as server:

        def fetch(size: int, token: str) -> tuple[Any, str]:
            request = ListCalendarsRequest(parent=settings.parent, page_size=size, page_token=token)
            page = server.call(server.admin.ListCalendars, request, what="list calendars")
            return page.calendars, page.next_page_token

        calendars = collect(fetch, limit=limit)
    show_calendars(settings, calendars)


@app.command("get")
@calls_server
def get(settings: Settings, name: CalendarName) -> None:
    """Show one calendar with all its days.

    Examples:

      fencepost calendars get holidays

      fencepost calendars get holidays -o json

      fencepost --tenant acme calendars get holidays
    """
    from fencepost.v1.admin_service_pb2 import GetCalendarRequest

    from fencepost_server.cli.connection import connected

    request = GetCalendarRequest(name=calendar_path(settings.tenant, name))
    with connected(settings) as server:
        answer = server.call(server.admin.GetCalendar, request, what=f"get calendar {name!r}")
    show_calendar(settings, answer.calendar)


@app.command("create")
@calls_server
def create(
    settings: Settings,
    name: CalendarName,
    date: DateOption = None,
    days: RangeOption = None,
    ics: IcsOption = None,
    tz: ZoneOption = None,
    description: DescriptionOption = None,
) -> None:
    """Add a calendar; jobs name it in their schedule and do not fire on its days.

    Examples:

      fencepost calendars create holidays --date 2026-12-25 --date 2026-12-26 --tz Europe/Berlin

      fencepost calendars create shutdown --range 2026-12-24..2027-01-01

      fencepost calendars create weekends --ics weekends.ics --description "no work"
    """
    _create(settings, name, _calendar(date, days, ics, tz, description)[0])


@app.command("import-ics")
@calls_server
def import_ics(
    settings: Settings,
    file: Annotated[str, typer.Argument(metavar="FILE", help="iCalendar file; -: stdin.")],
    name: Annotated[
        str | None, option("--name", help="Name of the calendar; default: the file's.")
    ] = None,
    tz: ZoneOption = None,
) -> None:
    """Make a calendar of an iCalendar file, or replace the days of the one that has its name.

    Examples:

      fencepost calendars import-ics holidays.ics

      fencepost calendars import-ics feiertage.ics --name holidays --tz Europe/Berlin

      curl -s https://example.org/holidays.ics | fencepost calendars import-ics - --name holidays
    """
    from pathlib import Path

    if name is None and file == "-":
        raise usage("what is the calendar's name?", why="stdin has none", hint="--name NAME")
    called = name if name is not None else Path(file).stem.lower()
    calendar, paths = _calendar(None, None, file, tz, None)
    from fencepost_server.cli.failure import CliError

    try:
        _update(settings, called, calendar, ["dates", "ranges", *paths])
    except CliError as error:
        if error.reason != "CALENDAR_NOT_FOUND":
            raise
        _create(settings, called, calendar)


@app.command("update")
@calls_server
def update(
    settings: Settings,
    name: CalendarName,
    date: DateOption = None,
    days: RangeOption = None,
    ics: IcsOption = None,
    tz: ZoneOption = None,
    description: DescriptionOption = None,
) -> None:
    """Replace parts of a calendar: all dates, all ranges, the iCalendar text, the zone.

    What no flag names stays. It holds for fires from now on, in all jobs that name it.

    Examples:

      fencepost calendars update holidays --date 2027-12-25 --date 2027-12-26

      fencepost calendars update shutdown --range 2027-12-24..2028-01-01

      fencepost calendars update holidays --tz Europe/Berlin
    """
    calendar, paths = _calendar(date, days, ics, tz, description)
    if not paths:
        raise usage(
            "nothing to change",
            why="no flag says what",
            hint="--date, --range, --ics, --tz or --description",
        )
    _update(settings, name, calendar, paths)


@app.command("delete")
@calls_server
def delete(settings: Settings, name: CalendarName, yes: YesOption = False) -> None:
    """Delete a calendar that no job names.

    Examples:

      fencepost calendars delete shutdown

      fencepost calendars delete shutdown --yes

      fencepost --tenant acme calendars delete shutdown --yes
    """
    from fencepost.v1.admin_service_pb2 import DeleteCalendarRequest

    from fencepost_server.cli.connection import connected

    confirm(f"delete calendar {name!r} of tenant {settings.tenant}", yes=yes)
    request = DeleteCalendarRequest(name=calendar_path(settings.tenant, name))
    with connected(settings) as server:
        server.call(server.admin.DeleteCalendar, request, what=f"delete calendar {name!r}")
    note(f"deleted {last_part(name)}")


def _calendar(
    date: list[str] | None,
    days: list[str] | None,
    ics: str | None,
    tz: str | None,
    description: str | None,
) -> "tuple[Calendar, list[str]]":
    """The content that flags say, and which fields that are."""
    from fencepost.v1.schedule_pb2 import Calendar

    calendar = Calendar(dates=date or (), time_zone=tz or "", description=description or "")
    for text in days or ():
        first, dots, last = text.partition("..")
        if not dots:
            raise usage(
                f"--range {text!r} is not a range of days", why="it is 2026-12-24..2027-01-01"
            )
        calendar.ranges.add(first_date=first, last_date=last)
    if ics is not None:
        calendar.ics = read_text(ics, what="the calendar")
    given = {"dates": date, "ranges": days, "ics": ics, "time_zone": tz, "description": description}
    return calendar, [field for field, value in given.items() if value is not None]


def _create(settings: Settings, name: str, calendar: "Calendar") -> None:
    from fencepost.v1.admin_service_pb2 import CreateCalendarRequest

    from fencepost_server.cli.connection import connected, new_request_id

    request = CreateCalendarRequest(
        parent=settings.parent, calendar_name=name, calendar=calendar, request_id=new_request_id()
    )
    with connected(settings) as server:
        answer = server.call(server.admin.CreateCalendar, request, what=f"create calendar {name!r}")
    show_calendar(settings, answer.calendar)


def _update(settings: Settings, name: str, calendar: "Calendar", paths: list[str]) -> None:
    from fencepost.v1.admin_service_pb2 import UpdateCalendarRequest

    from fencepost_server.cli.connection import connected

    calendar.name = calendar_path(settings.tenant, name)
    request = UpdateCalendarRequest(calendar=calendar)
    request.update_mask.paths.extend(paths)
    with connected(settings) as server:
        answer = server.call(server.admin.UpdateCalendar, request, what=f"change calendar {name!r}")
    show_calendar(settings, answer.calendar)
