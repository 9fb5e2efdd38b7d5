"""Faults of cron expressions that users of other schedulers reported in public, a test for
each and for its family. What was reported stands in the comment above.
"""

import time
from datetime import datetime

import pytest
from fencepost_server.clock import DAY, Instant, format_instant, from_datetime
from fencepost_server.domain.schedule import CronSpec, OnceSpec, Schedule
from fencepost_server.errors import InvalidSchedule
from fencepost_server.policy.cron import CronRule, compile_cron
from fencepost_server.policy.describe import describe
from fencepost_server.policy.schedule import ONCE_AHEAD_MAX, validate


def instant(text: str) -> Instant:
    return from_datetime(datetime.fromisoformat(text))


def rule(expression: str, zone: str = "UTC") -> CronRule:
    return compile_cron(CronSpec(expressions=(expression,), time_zone=zone))


def days(expression: str, after: str, count: int) -> list[str]:
    """The next dates, of a rule that fires at midnight UTC."""
    found = rule(expression).between(instant(f"{after}T00:00Z") - 1, 10**18, count)
    assert all(at % DAY == 0 for at in found)
    return [format_instant(at)[:10] for at in found]


# croner#215: a trailing blank turned five fields into six with another meaning.
@pytest.mark.parametrize(
    "written",
    ["0 0 12 9 * ", "\t0 0 12 9 *", "0  0   12 9 *", "0 0 12 9 *\r\n", "\n0\t0\t12\t9\t*"],
)
def test_blanks_around_and_between_fields_mean_nothing(written: str) -> None:
    plain = rule("0 0 12 9 *")
    assert rule(written).canonical == plain.canonical
    assert days(written, "2026-01-01", 5) == days("0 0 12 9 *", "2026-01-01", 5)


@pytest.mark.parametrize("blank", ["\u00a0", "\u2003", "\u3000", "\u200b", "\v", "\f", "\0"])
def test_blanks_that_are_none_are_named(blank: str) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        rule(f"0 0{blank}12 9 *")
    assert f"U+{ord(blank):04X} at column 4" in caught.value.message


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8])
def test_other_numbers_of_fields_are_refused(count: int) -> None:
    with pytest.raises(InvalidSchedule, match=f"has {count} fields; allowed: 5 fields"):
        rule(" ".join(["*"] * count))


# cronie#200, agent-os#1501: Sunday as 7 vanished at the end of a range.
@pytest.mark.parametrize("weekend", ["SAT-SUN", "6-7", "6-0", "6,7", "0,6", "sat,sun"])
def test_a_weekend_ends_with_sunday(weekend: str) -> None:
    found = days(f"0 0 * * {weekend}", "2025-03-10", 4)
    assert found == ["2025-03-15", "2025-03-16", "2025-03-22", "2025-03-23"]


@pytest.mark.parametrize(
    ("equal", "weekdays"),
    [
        (("0", "7", "SUN", "0,7", "7-7", "0-0"), {0}),
        (("5-7", "FRI-SUN", "5-0", "5,6,7"), {5, 6, 0}),
        (("0/2", "7/2", "SUN/2", "0-6/2"), {0, 2, 4, 6}),
        (("0-7", "*", "0-6", "1-7", "MON-SUN"), {0, 1, 2, 3, 4, 5, 6}),
        (("7-2", "0-2", "SUN-TUE"), {0, 1, 2}),
    ],
)
def test_sunday_is_both_0_and_7(equal: tuple[str, ...], weekdays: set[int]) -> None:
    expected = None
    for text in equal:
        compiled = rule(f"0 0 * * {text}")
        found = compiled.between(instant("2026-06-01T00:00Z"), instant("2026-07-01T00:00Z"), 99)
        assert {(at // DAY + 4) % 7 for at in found} == weekdays, text
        expected = found if expected is None else expected
        assert found == expected, text


# croner#267: with both day fields the dates matched neither reading.
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 0 1,15 * 5", ["06-01", "06-05", "06-12", "06-15", "06-19", "06-26", "07-01"]),
        # 1-31 restricts, as it does not begin with *: every day matches it.
        ("0 0 1-31 * 4", ["06-01", "06-02", "06-03", "06-04"]),
        # */2 begins with *: both have to match.
        ("0 0 */2 * FRI", ["06-05", "06-19", "07-03", "07-17"]),
        ("0 0 13 * */2", ["06-13", "08-13", "09-13", "10-13"]),
        ("0 0 * * 4", ["06-04", "06-11", "06-18"]),
        ("0 0 ? * 4", ["06-04", "06-11", "06-18"]),
        ("0 0 15 * ?", ["06-15", "07-15"]),
        ("0 0 L * MON", ["06-01", "06-08", "06-15", "06-22", "06-29", "06-30"]),
    ],
)
def test_two_day_fields_match_either_unless_one_begins_with_a_star(
    expression: str, expected: list[str]
) -> None:
    found = days(expression, "2026-06-01", len(expected))
    assert found == [f"2026-{day}" for day in expected]


# croner#254: the fourth Saturday fired on the fifth as well.
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 0 * * 6#4", ["2024-08-24", "2024-09-28", "2024-10-26", "2024-11-23", "2024-12-28"]),
        ("0 0 * * 6#5", ["2024-08-31", "2024-11-30"]),
        ("0 0 * * 6L", ["2024-08-31", "2024-09-28", "2024-10-26", "2024-11-30"]),
        ("0 0 * * SAT#1,SAT#3", ["2024-08-03", "2024-08-17", "2024-09-07"]),
    ],
)
def test_the_nth_weekday_is_no_other(expression: str, expected: list[str]) -> None:
    assert days(expression, "2024-08-02", len(expected)) == expected


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("weekday", range(7))
def test_the_nth_weekday_lies_in_its_seven_days(weekday: int, nth: int) -> None:
    compiled = rule(f"0 0 * * {weekday}#{nth}")
    found = compiled.between(instant("2023-12-31T12:00Z"), instant("2029-12-31T12:00Z"), 999)
    dates = [datetime.fromisoformat(format_instant(at)) for at in found]
    assert {(one.isoweekday() % 7, (one.day - 1) // 7 + 1) for one in dates} == {(weekday, nth)}
    assert len({(one.year, one.month) for one in dates}) == len(dates)
    assert len(dates) == 72 if nth < 5 else 20 <= len(dates) <= 30


@pytest.mark.parametrize("field", ["6#0", "6#6", "6#", "#2", "8#1", "6#-1", "6#1#2", "6##1", "*#1"])
def test_an_nth_weekday_that_does_not_exist_is_refused(field: str) -> None:
    with pytest.raises(InvalidSchedule, match=r"day of week: .* at column \d+"):
        rule(f"0 0 * * {field}")


# floci#3701: another dialect counts weekdays from Sunday = 1.
def test_two_is_tuesday_in_fires_and_in_words() -> None:
    assert days("0 0 * * 2", "2026-06-01", 2) == ["2026-06-02", "2026-06-09"]
    assert describe(Schedule(spec=CronSpec(expressions=("0 9 * * 2",)))).startswith(
        "At 09:00, on Tuesday"
    )


@pytest.mark.parametrize(
    "expression",
    [
        "0 9 ? * 2 *",
        "0 0 9 ? * 2 *",
        "0 0 9 ? * MON-FRI 2026",
        "cron(0 9 ? * 2 *)",
        "rate(5 minutes)",
    ],
)
def test_the_dialects_of_others_are_refused_and_not_shifted(expression: str) -> None:
    with pytest.raises(InvalidSchedule, match="allowed: "):
        rule(expression)


# cron-parser#122: 29 February with a weekday was an error, or odd dates.
@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("0 0 29 2 *", "2026-03-01", ["2028-02-29", "2032-02-29"]),
        ("0 0 29 2 *", "2096-03-01", ["2104-02-29"]),
        (
            "0 0 29 2 0",
            "2027-12-01",
            ["2028-02-06", "2028-02-13", "2028-02-20", "2028-02-27", "2028-02-29", "2029-02-04"],
        ),
        # A Monday that is 29 February: once in 28 years, and around 2100 once in 40.
        ("0 0 29 2 */7", "2026-01-01", ["2032-02-29", "2060-02-29", "2088-02-29", "2128-02-29"]),
        ("0 0 L 2 *", "2026-01-01", ["2026-02-28", "2027-02-28", "2028-02-29"]),
        ("0 0 29W 2 *", "2026-01-01", ["2028-02-29", "2032-02-27"]),
    ],
)
def test_leap_days_come_when_they_come(expression: str, after: str, expected: list[str]) -> None:
    assert days(expression, after, len(expected)) == expected


@pytest.mark.parametrize("expression", ["0 0 30 2 *", "0 0 31 2,4,6,9,11 *", "0 0 L-30 2 *"])
def test_dates_that_never_come_are_refused_at_once(expression: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidSchedule, match="it would never fire"):
        rule(expression)
    assert time.process_time() - began < 0.05


# cron-utils#538, resque-scheduler#96, OctopusDeploy#9418: limits of years.
def test_years_have_no_limit_but_the_calendars() -> None:
    assert days("0 0 1 1 *", "2099-12-31", 1) == ["2100-01-01"]
    minutely = rule("* * * * *")
    after_32_bits = instant("2038-01-19T03:14:07Z")
    assert minutely.next_after(after_32_bits) == instant("2038-01-19T03:15:00Z")
    assert minutely.next_after(instant("9999-12-31T23:59Z")) is None
    assert rule("0 0 1 1 *", "Europe/Berlin").next_after(instant("9998-12-31T23:00Z")) is None


@pytest.mark.parametrize("year", range(2027, 3000, 97))
def test_each_year_has_its_first_of_january(year: int) -> None:
    assert days("0 0 1 1 *", f"{year - 1}-06-01", 1) == [f"{year}-01-01"]


def test_an_instant_too_far_ahead_is_refused() -> None:
    now = instant("2026-06-01T00:00Z")
    validate(Schedule(spec=OnceSpec(at=now + ONCE_AHEAD_MAX)), now)
    for ahead in (ONCE_AHEAD_MAX + 1, 3653 * DAY, 8_000_000 * DAY):
        with pytest.raises(InvalidSchedule, match="at most 366 d ahead"):
            validate(Schedule(spec=OnceSpec(at=now + ahead)), now)


# Hostile text is refused before it costs anything.
@pytest.mark.parametrize(
    "expression",
    [
        "9" * 5000 + " * * * *",
        "*/" + "9" * 200 + " * * * *",
        "0," * 20_000 + "0 * * * *",
        "٣ * * * *",
        "1²  * * * *",
        "1-" * 100 + "1 * * * *",
        "*" * 256,
        "((((H(0-59)))))/2 * * * *",
    ],
)
def test_hostile_text_costs_little(expression: str) -> None:
    began = time.process_time()
    with pytest.raises(InvalidSchedule) as caught:
        rule(expression)
    assert time.process_time() - began < 0.005
    assert len(caught.value.message) <= 1024
