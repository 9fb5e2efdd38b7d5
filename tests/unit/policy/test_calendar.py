"""What exclusion calendars exclude, and which content is refused."""

import time
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from fencepost_server.clock import SECOND, Instant, from_datetime
from fencepost_server.domain.calendar import CalendarContent, DateRange, NamedCalendar
from fencepost_server.errors import FencepostError
from fencepost_server.policy.calendar import check_content, excludes, exclusions


def at(text: str) -> Instant:
    return from_datetime(datetime.fromisoformat(text).replace(tzinfo=UTC))


def _excluded(content: CalendarContent, text: str, zone: str = "UTC") -> bool:
    return excludes([NamedCalendar(name="c", content=content)], at(text), zone) == "c"


def _ics(*lines: str) -> CalendarContent:
    body = ("BEGIN:VCALENDAR", "VERSION:2.0", "BEGIN:VEVENT", *lines, "END:VEVENT", "END:VCALENDAR")
    return CalendarContent(ics="\r\n".join(body))


CHRISTMAS = CalendarContent(
    dates=("2026-12-25",),
    ranges=(DateRange(first_date="2026-12-29", last_date="2027-01-02"),),
)


@pytest.mark.parametrize(
    ("text", "zone", "excluded"),
    [
        ("2026-12-24T23:59:59", "UTC", False),
        ("2026-12-25T00:00:00", "UTC", True),
        ("2026-12-25T23:59:59", "UTC", True),
        ("2026-12-26T00:00:00", "UTC", False),
        ("2026-12-31T12:00:00", "UTC", True),
        ("2027-01-02T23:59:59", "UTC", True),
        ("2027-01-03T00:00:00", "UTC", False),
        ("2026-12-24T23:00:00", "Europe/Paris", True),
        ("2026-12-25T23:00:00", "Europe/Paris", False),
        ("2026-12-25T05:00:00", "America/New_York", True),
        ("2026-12-25T04:59:59", "America/New_York", False),
    ],
)
def test_days_begin_in_the_zone_of_the_schedule(text: str, zone: str, excluded: bool) -> None:
    assert _excluded(CHRISTMAS, text, zone) is excluded


def test_a_calendar_with_a_zone_of_its_own_ignores_that_of_the_schedule() -> None:
    content = CalendarContent(dates=("2026-12-25",), time_zone="Asia/Tokyo")
    assert _excluded(content, "2026-12-24T15:00:00", "America/New_York")
    assert not _excluded(content, "2026-12-25T15:00:00", "America/New_York")


def test_a_day_of_a_clock_change_is_as_long_as_it_is() -> None:
    content = CalendarContent(dates=("2027-03-28",))
    one = NamedCalendar(name="c", content=content)
    noon = at("2027-03-28T12:00:00")
    span = exclusions([one], "Europe/Paris", first=noon, last=noon).span_at(noon)
    assert span is not None
    assert (span.until - span.start) // SECOND == 23 * 3600


@pytest.mark.parametrize(
    ("ics", "inside", "outside"),
    [
        ("RRULE:FREQ=WEEKLY;BYDAY=SA,SU", "2026-12-05T10:00:00", "2026-12-04T10:00:00"),
        ("FREQ=YEARLY;BYMONTH=12;BYMONTHDAY=25", "2031-12-25T10:00:00", "2031-12-24T10:00:00"),
        ("FREQ=MONTHLY;BYDAY=-1FR", "2026-11-27T10:00:00", "2026-11-20T10:00:00"),
        ("FREQ=DAILY;BYMONTH=8", "2026-08-31T23:00:00", "2026-09-01T00:00:00"),
        ("FREQ=MONTHLY;BYMONTHDAY=-1", "2028-02-29T10:00:00", "2027-02-27T10:00:00"),
        (
            "DTSTART;TZID=Europe/Paris:20260101T120000\nDURATION:PT1H\nRRULE:FREQ=DAILY",
            "2026-07-01T10:30:00",
            "2026-07-01T11:00:00",
        ),
        (
            "DTSTART:20260105T000000Z\nDURATION:PT6H\nRRULE:FREQ=WEEKLY;INTERVAL=2;BYDAY=MO",
            "2026-01-19T05:59:59",
            "2026-01-12T05:59:59",
        ),
        (
            "DTSTART;VALUE=DATE:20260101\nRRULE:FREQ=DAILY;COUNT=3",
            "2026-01-03T10:00:00",
            "2026-01-04T10:00:00",
        ),
        (
            "DTSTART;VALUE=DATE:20260101\nEXDATE;VALUE=DATE:20260102\nRRULE:FREQ=DAILY",
            "2026-01-03T10:00:00",
            "2026-01-02T10:00:00",
        ),
    ],
)
def test_bare_rules(ics: str, inside: str, outside: str) -> None:
    content = CalendarContent(ics=ics)
    check_content(content, now=at("2026-01-01T00:00:00"))
    assert _excluded(content, inside)
    assert not _excluded(content, outside)


def test_events_with_times_rules_and_exceptions() -> None:
    content = _ics(
        "UID:1",
        "DTSTART;TZID=Europe/Paris:20261224T180000",
        "DTEND;TZID=Europe/Paris:20261226T060000",
        "RRULE:FREQ=YEARLY;UNTIL=20301231T000000Z",
        "EXDATE;TZID=Europe/Paris:20271224T180000",
    )
    assert _excluded(content, "2026-12-24T17:00:00")
    assert _excluded(content, "2026-12-26T04:59:59")
    assert not _excluded(content, "2026-12-26T05:00:00")
    assert not _excluded(content, "2027-12-25T00:00:00")
    assert _excluded(content, "2030-12-25T00:00:00")
    assert not _excluded(content, "2031-12-25T00:00:00")


def test_an_occurrence_that_was_moved_excludes_its_new_time_only() -> None:
    content = CalendarContent(
        ics="\n".join(
            [
                "BEGIN:VCALENDAR",
                *("BEGIN:VEVENT", "UID:1", "DTSTART;VALUE=DATE:20260101"),
                *("RRULE:FREQ=WEEKLY;BYDAY=TH", "END:VEVENT"),
                *("BEGIN:VEVENT", "UID:1", "RECURRENCE-ID;VALUE=DATE:20260108"),
                *("DTSTART;VALUE=DATE:20260109", "END:VEVENT"),
                *("BEGIN:VEVENT", "UID:1", "RECURRENCE-ID;VALUE=DATE:20260115"),
                *("STATUS:CANCELLED", "DTSTART;VALUE=DATE:20260115", "END:VEVENT"),
                "END:VCALENDAR",
            ]
        )
    )
    found = [day for day in range(1, 23) if _excluded(content, f"2026-01-{day:02}T12:00:00")]
    assert found == [1, 9, 22]


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        (CalendarContent(dates=("2026-02-30",)), "calendar.dates[0]", "2026-02-30"),
        (CalendarContent(dates=("20260228",)), "calendar.dates[0]", "want a date as"),
        (CalendarContent(dates=("2026-01-01",) * 4097), "calendar.dates", "at most 4096"),
        (
            CalendarContent(ranges=(DateRange(first_date="2026-01-02", last_date="2026-01-01"),)),
            "calendar.ranges[0].last_date",
            "366",
        ),
        (
            CalendarContent(ranges=(DateRange(first_date="2026-01-01", last_date="2027-01-03"),)),
            "calendar.ranges[0].last_date",
            "366",
        ),
        (
            CalendarContent(dates=("2026-01-01",), time_zone="Mars/Base"),
            "calendar.time_zone",
            "Mars/Base",
        ),
        (CalendarContent(ics="hello"), "calendar.ics", "iCalendar"),
        (CalendarContent(ics="x" * 65_537), "calendar.ics", "65536 bytes"),
        (CalendarContent(ics="FREQ=HOURLY"), "calendar.ics", "FREQ HOURLY"),
        (CalendarContent(ics="FREQ=SECONDLY"), "calendar.ics", "FREQ SECONDLY"),
        (CalendarContent(ics="FREQ=DAILY;BYHOUR=3"), "calendar.ics", "BYHOUR of whole days"),
        (CalendarContent(ics="FREQ=DAILY;BYSETPOS=1"), "calendar.ics", "BYSETPOS"),
        (CalendarContent(ics="FREQ=WEEKLY;BYDAY=2MO"), "calendar.ics", "BYDAY 2MO"),
        (CalendarContent(ics="FREQ=DAILY;INTERVAL=0"), "calendar.ics", "INTERVAL 0"),
        (CalendarContent(ics="FREQ=YEARLY;BYMONTH=13"), "calendar.ics", "BYMONTH 13"),
        (CalendarContent(ics="FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"), "calendar.ics", "never"),
        (CalendarContent(ics="FREQ=DAILY;COUNT=5"), "calendar.ics", "steps"),
        (CalendarContent(ics="\n".join(["FREQ=WEEKLY"] * 33)), "calendar.ics", "33 RRULEs"),
        (_ics("DTSTART:2026xx"), "calendar.ics", "DTSTART"),
        (_ics("DTSTART:19000101T000000Z"), "calendar.ics", "year 1900"),
        (_ics("DTSTART;TZID=Mars/Base:20260101T000000"), "calendar.ics", "Mars/Base"),
        (_ics("DTSTART:20260101T000000Z", "DURATION:P400D"), "calendar.ics", "366 d"),
        (_ics("SUMMARY:no start"), "calendar.ics", "DTSTART"),
    ],
)
def test_what_is_refused_names_field_value_and_what_is_allowed(
    content: CalendarContent, field: str, words: str
) -> None:
    with pytest.raises(FencepostError) as caught:
        check_content(content, now=at("2026-01-01T00:00:00"))
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "ics",
    [
        "\n".join(["FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30"] * 10),
        "\n".join(["FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30;COUNT=5"] * 32),
        "\n".join(["FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"] * 32),
        "BEGIN:VCALENDAR\n" + "BEGIN:VEVENT\n" * 5000,
        "RRULE:FREQ=DAILY;BYMONTHDAY=" + ",".join(["1"] * 30_000),
        "RRULE:FREQ=DAILY;INTERVAL=" + "9" * 5000,
        "RRULE:FREQ=YEARLY;UNTIL=" + "9" * 5000,
    ],
)
def test_hostile_text_costs_little(ics: str) -> None:
    begun = time.process_time()
    with suppress(FencepostError):
        check_content(CalendarContent(ics=ics), now=at("2026-01-01T00:00:00"))
    assert time.process_time() - begun < 3
