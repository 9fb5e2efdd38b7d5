"""Schedules in words, and the warnings of a careful reader."""

from datetime import datetime

import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND, from_datetime
from fencepost_server.domain.schedule import (
    CronSpec,
    DstFoldPolicy,
    DstGapPolicy,
    IntervalSpec,
    OnceSpec,
    Schedule,
)
from fencepost_server.policy.describe import describe, warnings
from hypothesis import given, settings
from hypothesis import strategies as st

NOW = from_datetime(datetime.fromisoformat("2026-06-01T00:00:00Z"))


def cron(*expressions: str, time_zone: str = "UTC") -> Schedule:
    return Schedule(spec=CronSpec(expressions=expressions, time_zone=time_zone))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("* * * * *", "Every minute"),
        ("*/15 * * * *", "Every 15 minutes"),
        ("*/7 * * * *", "Every 7 minutes from minute 0"),
        ("*/5 * * * * *", "Every 5 seconds"),
        ("0 * * * *", "At minute 0 of every hour"),
        ("5,35 * * * *", "At minutes 5 and 35 of every hour"),
        ("0 */2 * * *", "At minute 0 of every 2 hours"),
        ("* 9-17 * * *", "Every minute of hours 9 to 17"),
        ("0 9 * * 1-5", "At 09:00, on Monday to Friday"),
        ("30 2,14 * * *", "At 02:30 and 14:30"),
        ("15 30 9 * * *", "At 09:30:15"),
        ("@monthly", "At 00:00, on day 1 of the month"),
        ("0 0 1,15 * *", "At 00:00, on days 1 and 15 of the month"),
        ("0 9 LW * ?", "At 09:00, on the last weekday of the month"),
        ("0 9 15W * *", "At 09:00, on the weekday nearest day 15"),
        ("0 9 L,L-3 * *", "At 09:00, on the last day of the month and 3 days before {0}"),
        ("0 9 * * MON#1,5L", "At 09:00, on the first Monday {1} and the last Friday {1}"),
        ("0 9 1 * 1", "At 09:00, on day 1 of the month or on Monday"),
        ("0 9 * JAN-MAR,DEC *", "At 09:00, in January to March and December"),
        ("5/20 * * * *", "At minutes 5 to 59 in steps of 20 of every hour"),
    ],
)
def test_a_cron_expression_in_words(expression: str, expected: str) -> None:
    words = expected.format("the last day of the month", "of the month")
    assert f"{words}, in the time zone UTC." == describe(cron(expression))


def test_several_expressions_are_joined() -> None:
    expected = "At 09:00; and at 18:00, in the time zone Asia/Tokyo."
    assert expected == describe(cron("0 9 * * *", "0 18 * * *", time_zone="Asia/Tokyo"))


def test_h_is_told_as_what_it_became() -> None:
    words = describe(cron("H 3 * * *"), seed="acme/report")
    assert words == "At 03:46, in the time zone UTC."


def test_an_interval_in_words() -> None:
    schedule = Schedule(spec=IntervalSpec(every=HOUR + 30 * MINUTE + SECOND, anchor=NOW))
    expected = "Every 1 hour 30 minutes 1 second, counted from 2026-06-01T00:00:00Z."
    assert expected == describe(schedule)


def test_a_single_fire_and_bounds_in_words() -> None:
    schedule = Schedule(spec=OnceSpec(at=NOW), start_at=NOW, end_at=NOW + HOUR, max_fires=1)
    expected = (
        "Once, at 2026-06-01T00:00:00Z, not before 2026-06-01T00:00:00Z, "
        "ending before 2026-06-01T01:00:00Z, at most 1 time."
    )
    assert expected == describe(schedule)


def test_the_longest_words_fit_in_a_kibibyte() -> None:
    long = ",".join(str(minute) for minute in range(60))
    words = describe(cron(*(f"{long} {hour} * * *" for hour in range(16))))
    assert 1000 < len(words.encode()) <= 1024
    assert words.endswith("…")


def test_warnings_name_both_day_fields() -> None:
    assert warnings(cron("0 9 1 * 1"), now=NOW) == [
        '"0 9 1 * 1": both day fields are restricted, so it fires on a day that matches either: '
        "on day 1 of the month, or on Monday."
    ]


def test_warnings_name_a_day_field_that_a_star_makes_narrower() -> None:
    found = warnings(cron("0 9 */2 * 1"), now=NOW)
    assert "matches both" in found[0]
    assert "the step 2 does not divide the 31 values of the day of month" in found[1]


@pytest.mark.parametrize(
    ("expression", "uneven"),
    [
        ("*/7 * * * *", True),
        ("*/15 * * * *", False),
        ("5/20 * * * *", False),
        ("3/7 * * * *", True),
        ("10-50/10 * * * *", False),
        ("0 */5 * * *", True),
        ("*/7 0 0 * * *", True),
    ],
)
def test_warnings_name_an_uneven_step(expression: str, uneven: bool) -> None:
    assert uneven == any("evenly" in one for one in warnings(cron(expression), now=NOW))


def test_warnings_name_the_clock_changes_of_the_coming_year() -> None:
    found = warnings(cron("30 2 * * *", time_zone="Europe/Berlin"), now=NOW)
    assert len(found) == 2
    assert "2026-10-25T02:30:00 comes twice" in found[0]
    assert "2027-03-28T02:30:00 does not exist" in found[1]


@pytest.mark.parametrize(
    ("gap", "fold", "parts"),
    [
        (DstGapPolicy.RUN_AFTER_GAP, DstFoldPolicy.FIRST, ["the only one", "instant after"]),
        (DstGapPolicy.SKIP, DstFoldPolicy.LAST, ["only the other one", "does not fire"]),
        (DstGapPolicy.SKIP, DstFoldPolicy.BOTH, ["both fire", "does not fire"]),
    ],
)
def test_warnings_say_what_the_policies_do(
    gap: DstGapPolicy, fold: DstFoldPolicy, parts: list[str]
) -> None:
    spec = CronSpec(
        expressions=("30 2 * * *",), time_zone="Europe/Berlin", dst_gap=gap, dst_fold=fold
    )
    found = warnings(Schedule(spec=spec), now=NOW)
    assert [part in one for part, one in zip(parts, found, strict=True)] == [True, True]


@pytest.mark.parametrize(
    "schedule",
    [
        cron("0 9 * * 1-5", time_zone="Europe/Berlin"),
        cron("*/30 * * * *", time_zone="Europe/Berlin"),
        cron("30 2 * * *", time_zone="Asia/Tokyo"),
        Schedule(spec=IntervalSpec(every=HOUR)),
        Schedule(spec=OnceSpec(at=NOW)),
    ],
)
def test_nothing_to_warn_of(schedule: Schedule) -> None:
    assert warnings(schedule, now=NOW) == []


def test_there_are_at_most_16_warnings() -> None:
    schedule = cron(*(f"*/7 {hour} */2 * {hour % 7}" for hour in range(16)))
    assert len(warnings(schedule, now=NOW)) == 16


def part_of(low: int, high: int, *extras: str) -> st.SearchStrategy[str]:
    value = st.integers(low, high).map(str)
    step = st.integers(1, high - low + 1).map(str)
    return st.one_of(
        st.sampled_from(["*", "H", *extras]),
        value,
        st.tuples(value, value).map("-".join),
        st.tuples(st.sampled_from(["*", "H"]), step.filter(lambda n: int(n) <= 6)).map("/".join),
        st.tuples(st.tuples(value, value).map("-".join), step).map("/".join),
    )


def list_of(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(part, min_size=1, max_size=4).map(",".join)


@settings(max_examples=200, deadline=None, database=None)
@given(
    fields=st.tuples(
        list_of(part_of(0, 59)),
        list_of(part_of(0, 23)),
        list_of(part_of(1, 31, "L", "L-3", "LW", "15W")),
        list_of(part_of(1, 12, "JAN")),
        list_of(part_of(0, 6, "MON#2", "5L", "SUN")),
    )
)
def test_every_expression_can_be_told_and_warned_of(fields: tuple[str, ...]) -> None:
    # A month is added that has all days, so that the expression can fire.
    minute, hour, day, month, weekday = fields
    schedule = cron(f"{minute} {hour} {day} {month},1 {weekday}", time_zone="Europe/Berlin")
    words = describe(schedule, seed="acme/job")
    assert words.startswith(("Every", "At"))
    assert "  " not in words
    assert all(one.startswith('"') for one in warnings(schedule, now=NOW, seed="acme/job"))
