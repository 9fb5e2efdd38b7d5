"""What the cron grammar admits, what it refuses and how it says so."""

from datetime import datetime

import pytest
from fencepost_server.clock import Instant, format_instant, from_datetime
from fencepost_server.domain.schedule import CronSpec
from fencepost_server.errors import InvalidSchedule
from fencepost_server.policy.cron import CronRule, compile_cron


def instant(text: str) -> Instant:
    return from_datetime(datetime.fromisoformat(text))


def rule(*expressions: str, time_zone: str = "UTC", seed: str = "") -> CronRule:
    return compile_cron(CronSpec(expressions=expressions, time_zone=time_zone), seed=seed)


def fires(expression: str, after: str, count: int) -> list[str]:
    found = rule(expression).between(instant(after), instant("9990-01-01T00:00:00Z"), count)
    return [format_instant(at).replace("T00:00:00Z", "") for at in found]


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        pytest.param(
            "0 0 * * SAT-SUN",
            "2025-03-14T00:00Z",
            ["2025-03-15", "2025-03-16", "2025-03-22", "2025-03-23"],
            id="a range that ends on Sunday",
        ),
        pytest.param(
            "0 0 * * 6-7",
            "2025-03-14T00:00Z",
            ["2025-03-15", "2025-03-16", "2025-03-22", "2025-03-23"],
            id="Sunday as 7",
        ),
        pytest.param(
            "0 0 * * 0,7",
            "2025-03-14T00:00Z",
            ["2025-03-16", "2025-03-23"],
            id="Sunday named twice fires once",
        ),
        pytest.param(
            "0 0 * * 7/2",
            "2026-06-06T00:00Z",
            ["2026-06-07", "2026-06-09", "2026-06-11", "2026-06-13", "2026-06-14"],
            id="a step from Sunday as 7",
        ),
        pytest.param(
            "0 0 1,15 * 5",
            "2026-05-31T00:00Z",
            [f"2026-06-{day:02d}" for day in (1, 5, 12, 15, 19, 26)],
            id="both day fields restricted: either matches",
        ),
        pytest.param(
            "0 0 */2 * FRI",
            "2026-05-31T00:00Z",
            ["2026-06-05", "2026-06-19", "2026-07-03", "2026-07-17"],
            id="a field that begins with a star does not restrict: both match",
        ),
        pytest.param(
            "0 0 1-31 * 4",
            "2026-05-31T00:00Z",
            ["2026-06-01", "2026-06-02", "2026-06-03"],
            id="1-31 restricts, so every day matches",
        ),
        pytest.param(
            "0 0 * * 6#4",
            "2024-08-02T00:00Z",
            ["2024-08-24", "2024-09-28", "2024-10-26", "2024-11-23", "2024-12-28"],
            id="the fourth Saturday is not the fifth",
        ),
        pytest.param(
            "0 0 * * SAT#5",
            "2024-08-02T00:00Z",
            ["2024-08-31", "2024-11-30"],
            id="the fifth Saturday skips months without one",
        ),
        pytest.param(
            "0 0 * * 5L",
            "2026-12-01T00:00Z",
            ["2026-12-25", "2027-01-29", "2027-02-26"],
            id="the last Friday, six days before the month's end",
        ),
        pytest.param(
            "0 0 31W * *",
            "2026-04-01T00:00Z",
            ["2026-05-29", "2026-07-31", "2026-08-31"],
            id="31W leaves out months without a 31st and stays in its month",
        ),
        pytest.param(
            "0 0 1W 8 *", "2026-01-01T00:00Z", ["2026-08-03"], id="1W never goes back a month"
        ),
        pytest.param(
            "0 0 L-30 * *",
            "2026-01-02T00:00Z",
            ["2026-03-01", "2026-05-01"],
            id="L-30 only in months of 31 days",
        ),
        pytest.param(
            "0 0 LW * *", "2026-01-15T00:00Z", ["2026-01-30", "2026-02-27"], id="last weekday"
        ),
        pytest.param("0 0 29 2 *", "2096-03-01T00:00Z", ["2104-02-29"], id="2100 has no leap day"),
        pytest.param(
            "0 0 */28 2 1#5",
            "2072-03-01T00:00Z",
            ["2112-02-29", "2140-02-29"],
            id="a fifth Monday in February, 40 years apart around 2100",
        ),
        pytest.param(
            "0 0 1 1 *", "2099-12-31T00:00Z", ["2100-01-01", "2101-01-01"], id="beyond 2099"
        ),
        pytest.param(
            "0 0 28-2 2 *",
            "2026-01-01T00:00Z",
            ["2026-02-01", "2026-02-02", "2026-02-28", "2027-02-01"],
            id="days of the month wrap",
        ),
        pytest.param(
            "0 0 1 NOV-JAN *",
            "2026-01-02T00:00Z",
            ["2026-11-01", "2026-12-01", "2027-01-01"],
            id="months wrap",
        ),
    ],
)
def test_dates(expression: str, after: str, expected: list[str]) -> None:
    assert expected == fires(expression, after, len(expected))


@pytest.mark.parametrize(
    "written",
    ["0 0 12 9 * ", "\t0 0 12 9 *", "0  0   12 9 *", "0 0 12 9 *\r\n", "00 0 12 sep ?"],
)
def test_blanks_case_and_names_do_not_matter(written: str) -> None:
    assert rule("0 0 12 9 *").canonical == rule(written).canonical


@pytest.mark.parametrize(
    ("macro", "fields"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@Weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
    ],
)
def test_macros_are_abbreviations(macro: str, fields: str) -> None:
    assert rule(fields).canonical == rule(macro).canonical


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("*/60 */24 * * *", "*/60 */24 * * *"),
        ("5/20 * * * *", "5-59/20 * * * *"),
        ("0 0 ? * fri-mon", "0 0 * * 5-1"),
        ("0 0 15w,l-3,LW * *", "0 0 15W,L-3,LW * *"),
        ("0 0 * * FRIL,mon#1,7L", "0 0 * * 5L,1#1,0L"),
        ("07 3-3 * * *", "7 3 * * *"),
        ("*/10 1 2 3 4 5", "*/10 1 2 3 4 5"),
    ],
)
def test_the_canonical_form_reads_as_itself(written: str, canonical: str) -> None:
    assert (canonical,) == rule(written).canonical.expressions
    assert rule(written).canonical == rule(canonical).canonical


def test_seconds_come_first_when_there_are_six_fields() -> None:
    found = rule("*/20 30 9 * * *").between(
        instant("2026-01-01T00:00Z"), instant("2026-01-02T00:00Z"), 10
    )
    expected = ["2026-01-01T09:30:00Z", "2026-01-01T09:30:20Z", "2026-01-01T09:30:40Z"]
    assert expected == [format_instant(at) for at in found]


def test_several_expressions_are_a_union() -> None:
    found = rule("0 9 * * *", "0 */3 * * *", "30 9 * * *").between(
        instant("2026-01-01T06:00Z"), instant("2026-01-01T12:00Z"), 10
    )
    expected = ["2026-01-01T09:00:00Z", "2026-01-01T09:30:00Z", "2026-01-01T12:00:00Z"]
    assert expected == [format_instant(at) for at in found]


def test_h_is_the_documented_hash() -> None:
    # SHA-256 of "acme/report minute" begins with 97ce7c6d91e557d2, of "acme/report hour"
    # with e9d2b365b14a0a14, both read as big-endian integers.
    minute = 0x97CE7C6D91E557D2 % 60
    hour = 0xE9D2B365B14A0A14 % 24
    assert (f"{minute} {hour} * * *",) == rule(
        "H H * * *", seed="acme/report"
    ).canonical.expressions


def test_h_spreads_jobs_and_stays_in_its_range() -> None:
    minutes = set()
    for number in range(200):
        expression = rule("H H(1-3) H * H/2", seed=f"acme/job-{number}").canonical.expressions[0]
        minute, hour, day, _, weekday = expression.split(" ")
        minutes.add(int(minute))
        assert 1 <= int(hour) <= 3
        assert 1 <= int(day) <= 28
        assert weekday in ("0-6/2", "1-6/2")
    assert len(minutes) > 45


def test_h_with_a_range_and_a_step_begins_within_the_first_step() -> None:
    for number in range(50):
        expression = rule("H(0-29)/10 * * * *", seed=f"acme/{number}").canonical.expressions[0]
        start, _, rest = expression.split(" ")[0].partition("-")
        assert 0 <= int(start) <= 9
        assert rest == "29/10"


@pytest.mark.parametrize(
    ("expression", "cron_field", "position", "value"),
    [
        ("60 * * * *", "minute", "1", "60"),
        ("* 24 * * *", "hour", "3", "24"),
        ("0 0 0 * *", "day of month", "5", "0"),
        ("0 0 32 * *", "day of month", "5", "32"),
        ("0 0 * 13 *", "month", "7", "13"),
        ("0 0 * FOO *", "month", "7", "FOO"),
        ("0 0 * * 8", "day of week", "9", "8"),
        ("0 0 * * MONDAY", "day of week", "9", "MONDAY"),
        ("61 0 0 * * *", "second", "1", "61"),
        ("*/0 * * * *", "minute", "3", "0"),
        ("*/61 * * * *", "minute", "3", "61"),
        ("* */25 * * *", "hour", "5", "25"),
        ("5-70 * * * *", "minute", "3", "70"),
        ("1,,2 * * * *", "minute", "3", ""),
        ("1, * * * *", "minute", "3", ""),
        ("1- * * * *", "minute", "3", ""),
        ("-1 * * * *", "minute", "1", ""),
        ("1-2-3 * * * *", "minute", "3", "2-3"),
        ("1/2/3 * * * *", "minute", "3", "2/3"),
        ("*5 * * * *", "minute", "1", "*5"),
        ("? * * * *", "minute", "1", "?"),
        ("0 0 1,? * *", "day of month", "7", "?"),
        ("0 0 L-0 * *", "day of month", "7", "0"),
        ("0 0 L-31 * *", "day of month", "7", "31"),
        ("0 0 32W * *", "day of month", "5", "32"),
        ("0 0 W * *", "day of month", "5", "W"),
        ("0 0 * * L", "day of week", "9", "L"),
        ("0 0 * * MON#6", "day of week", "13", "6"),
        ("0 0 * * MON#0", "day of week", "13", "0"),
        ("L 0 * * *", "minute", "1", "L"),
        ("H(9-3) * * * *", "minute", "1", "H(9-3)"),
        ("H(0-99) * * * *", "minute", "5", "99"),
        ("H(0-3)/10 * * * *", "minute", "1", "10"),
        ("H() * * * *", "minute", "1", "H()"),
        ("+5 * * * *", "minute", "1", "+5"),
        ("1.5 * * * *", "minute", "1", "1.5"),
        ("00005 * * * *", "minute", "1", "00005"),
        ("9" * 200 + " * * * *", "minute", "1", "9" * 200),
    ],
)
def test_an_error_names_field_position_value_and_what_is_allowed(
    expression: str, cron_field: str, position: str, value: str
) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        rule("* * * * *", expression)
    error = caught.value
    assert error.field == "schedule.cron.expressions[1]"
    assert error.metadata["expression"] == expression
    assert error.metadata["cron_field"] == cron_field
    assert error.metadata["position"] == position
    assert error.metadata["value"] == value
    assert error.metadata["allowed"]
    assert error.message.startswith(f"{cron_field}: ")
    assert "; allowed: " in error.message


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        ("", "has 0 fields"),
        ("   ", "has 0 fields"),
        ("* * * *", "has 4 fields"),
        ("* * * * * * *", "there is no year field"),
        ("@reboot", "'@reboot' at column 1"),
        ("@every 5m", "use an interval schedule"),
        ("@daily *", "a macro stands alone"),
        ("0 0\u00a0* * *", "U+00A0 at column 4"),
        ("0 0\u2003* * * *", "U+2003 at column 4"),
        ("٣ * * * *", "U+0663 at column 1"),
        ("0 \x00 * * *", "U+0000 at column 3"),
        ("0 \ud800 * * *", "U+D800 at column 3"),
        ("9" * 5_000, "5000 characters are too many"),
        ("* " * 20_000, "40000 characters are too many"),
    ],
)
def test_what_is_no_expression_is_refused_in_words(expression: str, part: str) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        rule(expression)
    assert part in caught.value.message
    assert "allowed:" in caught.value.message
    assert len(caught.value.message.encode()) <= 1024


@pytest.mark.parametrize(
    "expression",
    ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 0 30W 2 *", "0 0 L-29 2 ?", "0 0 */29 2 1#5"],
)
def test_an_expression_that_can_never_fire_is_refused(expression: str) -> None:
    with pytest.raises(InvalidSchedule, match="would never fire"):
        rule(expression)


@pytest.mark.parametrize("count", [0, 17])
def test_there_are_1_to_16_expressions(count: int) -> None:
    with pytest.raises(InvalidSchedule, match="1 to 16") as caught:
        rule(*["* * * * *"] * count)
    assert caught.value.field == "schedule.cron.expressions"
