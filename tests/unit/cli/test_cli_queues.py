"""`fencepost queues` and `calendars`: only what is said is changed, and files are read."""

import json
from pathlib import Path

import grpc
import pytest
from fencepost.v1 import admin_pb2, admin_service_pb2, schedule_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.unit.cli.scripted import Refusal, Run, ScriptedServer

QUEUE = admin_pb2.Queue(
    name="tenants/default/queues/billing",
    paused=True,
    pause_reason="the provider is down",
    max_in_flight=10,
    rate_limit=2.5,
    stats=admin_pb2.QueueStats(
        ready_runs=412,
        running_runs=10,
        oldest_ready_age=Duration(seconds=720),
        measured_at=Timestamp(seconds=1),
    ),
)
CALENDAR = schedule_pb2.Calendar(
    name="tenants/default/calendars/holidays",
    dates=["2026-12-25"],
    ranges=[schedule_pb2.DateRange(first_date="2026-12-28", last_date="2026-12-31")],
    ics="BEGIN:VCALENDAR\nBEGIN:VEVENT\nEND:VEVENT\nEND:VCALENDAR",
    time_zone="Europe/Berlin",
)


def test_queues_are_shown(server: ScriptedServer, run: Run) -> None:
    server.on("ListQueues", admin_service_pb2.ListQueuesResponse(queues=[QUEUE]))
    server.on("GetQueue", admin_service_pb2.GetQueueResponse(queue=QUEUE))
    line = run("queues", "list").out.splitlines()[1]
    assert line.split()[:6] == ["billing", "paused", "412", "12m", "00s", "10"]
    assert line.endswith("10 at once, 2.5 a second")
    shown = run("queues", "get", "billing").out
    assert "state     paused (the provider is down)" in shown
    assert "ready     412" in shown
    assert json.loads(run("queues", "list", "-o", "json").out)["queues"][0]["maxInFlight"] == 10


@pytest.mark.parametrize(
    ("command", "paths"),
    [
        (("pause", "billing", "--reason", "why"), ["paused", "pause_reason"]),
        (("resume", "billing"), ["paused", "pause_reason"]),
        (("set", "billing", "--max-in-flight", "0"), ["max_in_flight"]),
        (
            ("set", "billing", "--rate-limit", "0.5", "--max-in-flight-per-key", "1"),
            ["max_in_flight_per_key", "rate_limit"],
        ),
    ],
)
def test_only_what_is_said_is_changed(
    server: ScriptedServer, run: Run, command: tuple[str, ...], paths: list[str]
) -> None:
    server.on("UpdateQueue", admin_service_pb2.UpdateQueueResponse(queue=QUEUE))
    assert run("queues", *command).code == 0
    [request] = server.requests["UpdateQueue"]
    assert list(request.update_mask.paths) == paths
    assert request.queue.name == "tenants/default/queues/billing"
    assert request.queue.paused == (command[0] == "pause")
    assert request.queue.rate_limit == (0.5 if "--rate-limit" in command else 0)


@pytest.mark.parametrize("flags", [(), ("--max-in-flight", "99999999999999999999")])
def test_nothing_and_too_much_are_refused(
    server: ScriptedServer, run: Run, flags: tuple[str, ...]
) -> None:
    result = run("queues", "set", "billing", *flags)
    assert (result.code, dict(server.requests)) == (2, {})


def test_a_queue_is_made(server: ScriptedServer, run: Run) -> None:
    server.on("CreateQueue", admin_service_pb2.CreateQueueResponse(queue=QUEUE))
    assert run("queues", "create", "billing", "--max-in-flight", "10").code == 0
    [request] = server.requests["CreateQueue"]
    assert (request.queue_name, request.queue.max_in_flight) == ("billing", 10)
    assert len(request.request_id) == 36


def test_calendars_are_shown(server: ScriptedServer, run: Run) -> None:
    server.on("ListCalendars", admin_service_pb2.ListCalendarsResponse(calendars=[CALENDAR]))
    server.on("GetCalendar", admin_service_pb2.GetCalendarResponse(calendar=CALENDAR))
    listed = run("calendars", "list").out.splitlines()[1]
    assert listed.split()[:4] == ["holidays", "Europe/Berlin", "1", "1"]
    shown = [
        line.split(maxsplit=1) for line in run("calendars", "get", "holidays").out.splitlines()
    ]
    assert shown == [
        ["calendar", "holidays"],
        ["zone", "Europe/Berlin"],
        ["date", "2026-12-25"],
        ["range", "2026-12-28..2026-12-31"],
        ["ics", "1 events"],
    ]


def test_a_calendar_is_made(server: ScriptedServer, run: Run) -> None:
    server.on("CreateCalendar", admin_service_pb2.CreateCalendarResponse(calendar=CALENDAR))
    flags = "--date 2026-12-25 --date 2026-12-26 --range 2026-12-28..2026-12-31 --tz Europe/Berlin"
    assert run("calendars", "create", "holidays", *flags.split()).code == 0
    [request] = server.requests["CreateCalendar"]
    assert request.calendar_name == "holidays"
    assert list(request.calendar.dates) == ["2026-12-25", "2026-12-26"]
    assert request.calendar.ranges[0].last_date == "2026-12-31"
    wrong = run("calendars", "create", "holidays", "--range", "2026-12-28")
    assert (wrong.code, "2026-12-24..2027-01-01" in wrong.err) == (2, True)


def test_an_update_changes_only_what_is_said(server: ScriptedServer, run: Run) -> None:
    server.on("UpdateCalendar", admin_service_pb2.UpdateCalendarResponse(calendar=CALENDAR))
    assert run("calendars", "update", "holidays", "--tz", "UTC").code == 0
    [request] = server.requests["UpdateCalendar"]
    assert list(request.update_mask.paths) == ["time_zone"]
    nothing = run("calendars", "update", "holidays")
    assert (nothing.code, len(server.requests["UpdateCalendar"])) == (2, 1)


def test_a_file_becomes_a_calendar_or_replaces_one(
    server: ScriptedServer, run: Run, tmp_path: Path
) -> None:
    missing = Refusal(grpc.StatusCode.NOT_FOUND, "no such calendar", reason="CALENDAR_NOT_FOUND")
    server.on(
        "UpdateCalendar",
        lambda _: missing,
        admin_service_pb2.UpdateCalendarResponse(calendar=CALENDAR),
    )
    server.on("CreateCalendar", admin_service_pb2.CreateCalendarResponse(calendar=CALENDAR))
    file = tmp_path / "Holidays.ics"
    file.write_text("BEGIN:VCALENDAR\nEND:VCALENDAR\n")
    assert run("calendars", "import-ics", str(file)).code == 0
    [made] = server.requests["CreateCalendar"]
    assert (made.calendar_name, made.calendar.ics) == ("holidays", file.read_text())
    assert run("calendars", "import-ics", str(file), "--name", "days", "--tz", "UTC").code == 0
    replaced = server.requests["UpdateCalendar"][1]
    assert replaced.calendar.name == "tenants/default/calendars/days"
    assert list(replaced.update_mask.paths) == ["dates", "ranges", "ics", "time_zone"]
    assert len(server.requests["CreateCalendar"]) == 1


@pytest.mark.parametrize("file", ["-", "/no/such/file.ics"])
def test_a_file_that_cannot_be_read_is_told(server: ScriptedServer, run: Run, file: str) -> None:
    result = run("calendars", "import-ics", file)
    assert (result.code, dict(server.requests)) == (2, {})


def test_a_delete_is_asked_for(server: ScriptedServer, run: Run) -> None:
    server.on("DeleteCalendar", admin_service_pb2.DeleteCalendarResponse())
    assert run("calendars", "delete", "holidays").code == 2
    assert run("calendars", "delete", "holidays", "--yes").code == 0
    assert [each.name for each in server.requests["DeleteCalendar"]] == [
        "tenants/default/calendars/holidays"
    ]
