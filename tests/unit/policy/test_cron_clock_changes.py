"""Known traps of clock changes and of the calendar's ends, each with exact instants."""

from datetime import datetime

import pytest
from fencepost_server.clock import Instant, format_instant, from_datetime
from fencepost_server.domain.schedule import CronSpec, DstFoldPolicy, DstGapPolicy, SkipReason
from fencepost_server.policy.cron import CronRule, compile_cron
from fencepost_server.policy.cron_parse import parse_cron

from tests.unit.policy.posix_zone import zone_of_posix_rule

AFTER, SKIP = DstGapPolicy.RUN_AFTER_GAP, DstGapPolicy.SKIP
FIRST, LAST, BOTH = DstFoldPolicy.FIRST, DstFoldPolicy.LAST, DstFoldPolicy.BOTH


def instant(text: str) -> Instant:
    return from_datetime(datetime.fromisoformat(text))


def rule(
    *expressions: str, tz: str, gap: DstGapPolicy = AFTER, fold: DstFoldPolicy = FIRST
) -> CronRule:
    return compile_cron(CronSpec(expressions=expressions, time_zone=tz, dst_gap=gap, dst_fold=fold))


@pytest.mark.parametrize(
    ("compiled", "after", "expected"),
    [
        pytest.param(
            rule("0 2 * * *", tz="America/Los_Angeles", gap=SKIP),
            "2026-03-08T00:00Z",
            ["2026-03-09T09:00:00Z"],
            id="a skipped gap time comes next on the following day",
        ),
        pytest.param(
            rule("*/20 2 * * *", tz="America/Los_Angeles"),
            "2026-03-08T00:00Z",
            ["2026-03-08T10:00:00Z", "2026-03-09T09:00:00Z"],
            id="three times in a gap are one fire after it",
        ),
        pytest.param(
            rule("0 1 30 3 *", tz="Europe/Lisbon", gap=SKIP),
            "2024-11-15T00:00Z",
            ["2026-03-30T00:00:00Z"],
            id="a yearly time that meets the gap in one year",
        ),
        pytest.param(
            rule("0 1 30 3 *", tz="Europe/Lisbon"),
            "2024-11-15T00:00Z",
            ["2025-03-30T01:00:00Z"],
            id="the same after the gap",
        ),
        pytest.param(
            rule("0 0 1 * *", tz="Europe/Berlin"),
            "2024-02-29T23:00Z",
            ["2024-03-31T22:00:00Z", "2024-04-30T22:00:00Z"],
            id="the first of the month after a change",
        ),
        pytest.param(
            rule("0 * * * *", tz="Australia/Lord_Howe"),
            "2019-10-05T13:59Z",
            ["2019-10-05T14:30:00Z", "2019-10-05T16:00:00Z", "2019-10-05T17:00:00Z"],
            id="every hour on the hour, over a gap of half an hour",
        ),
        pytest.param(
            rule("0 * * * *", tz="Australia/Lord_Howe"),
            "2026-04-04T12:59Z",
            [
                "2026-04-04T13:00:00Z",
                "2026-04-04T14:00:00Z",
                "2026-04-04T15:30:00Z",
                "2026-04-04T16:30:00Z",
            ],
            id="and over a fold of half an hour",
        ),
        pytest.param(
            rule("45 1 * * *", tz="Australia/Lord_Howe", fold=FIRST),
            "2026-04-04T12:00Z",
            ["2026-04-04T14:45:00Z", "2026-04-05T15:15:00Z"],
            id="the first pass, half an hour before the last",
        ),
        pytest.param(
            rule("45 1 * * *", tz="Australia/Lord_Howe", fold=LAST),
            "2026-04-04T12:00Z",
            ["2026-04-04T15:15:00Z", "2026-04-05T15:15:00Z"],
            id="the last pass, half an hour after the first",
        ),
        pytest.param(
            rule("30 1 * * *", tz="Antarctica/Troll"),
            "2026-03-28T00:00Z",
            ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-29T23:30:00Z"],
            id="a gap of two hours",
        ),
        pytest.param(
            rule("30 1 * * *", tz="Antarctica/Troll", fold=LAST),
            "2026-10-24T12:00Z",
            ["2026-10-25T01:30:00Z", "2026-10-26T01:30:00Z"],
            id="the last pass, two hours later",
        ),
        pytest.param(
            rule("30 1 * * *", tz="Antarctica/Troll", fold=BOTH),
            "2026-10-24T12:00Z",
            ["2026-10-24T23:30:00Z", "2026-10-25T01:30:00Z", "2026-10-26T01:30:00Z"],
            id="both passes",
        ),
        pytest.param(
            rule("0 12 * * *", tz="Pacific/Apia"),
            "2011-12-28T12:00Z",
            [
                "2011-12-28T22:00:00Z",
                "2011-12-29T22:00:00Z",
                "2011-12-30T10:00:00Z",
                "2011-12-30T22:00:00Z",
            ],
            id="a whole day that was left out",
        ),
        pytest.param(
            rule("0 0 * * *", "0 2 * * *", tz="Pacific/Apia"),
            "2011-12-29T13:00Z",
            ["2011-12-30T10:00:00Z", "2011-12-30T12:00:00Z"],
            id="equal instants are one fire",
        ),
        pytest.param(
            rule("* * * * *", tz="UTC"),
            "2038-01-19T03:14:07Z",
            ["2038-01-19T03:15:00Z"],
            id="beyond 32 bits",
        ),
    ],
)
def test_fires(compiled: CronRule, after: str, expected: list[str]) -> None:
    found = compiled.between(instant(after), instant("2050-01-01T00:00Z"), len(expected))
    assert expected == [format_instant(at) for at in found]
    assert found[-2::-1] == [compiled.prev_before(at) for at in found[:0:-1]]


def test_a_fold_across_the_turn_of_the_year_in_utc_is_one_fold() -> None:
    # Clocks go back from 23:30 to 22:30 on 31 December, at 23:30 UTC.
    zone = zone_of_posix_rule("Test/Year_End", "STD1DST,J60/0,J365/23:30")
    spec = CronSpec(expressions=("0 23 31 12 *",), time_zone=zone.name)
    compiled = CronRule(spec, zone, (parse_cron("0 23 31 12 *"),))
    assert compiled.next_after(instant("2026-12-31T12:00Z")) == instant("2026-12-31T23:00Z")
    assert compiled.next_after(instant("2026-12-31T23:45Z")) == instant("2027-12-31T23:00Z")
    assert compiled.prev_before(instant("2027-01-01T00:15Z")) == instant("2026-12-31T23:00Z")


def test_a_time_made_by_a_gap_is_not_on_the_hour() -> None:
    assert not rule("0 * * * *", tz="Australia/Lord_Howe").matches(instant("2019-10-05T15:30Z"))


def test_a_fraction_of_a_second_never_matches() -> None:
    assert rule("* * * * *", tz="UTC").matches(instant("2026-01-01T00:00Z"))
    assert not rule("* * * * *", tz="UTC").matches(instant("2026-01-01T00:00Z") + 1)


@pytest.mark.parametrize("text", ["9998-12-31T23:59:00Z", "9999-12-31T23:59:00Z"])
def test_the_calendar_ends_without_an_exception(text: str) -> None:
    every_minute = rule("* * * * *", tz="Europe/Berlin")
    assert every_minute.next_after(instant(text)) is None
    assert every_minute.prev_before(instant(text)) is not None
    assert every_minute.local_time(instant(text)).startswith("999")


def test_the_calendar_begins_without_an_exception() -> None:
    every_minute = rule("* * * * *", tz="Europe/Berlin")
    assert every_minute.prev_before(instant("1899-06-01T00:00Z")) is None
    first = every_minute.next_after(instant("0001-01-01T00:00Z"))
    assert first == instant("1900-01-01T00:00Z")


def test_between_leaves_out_its_start_and_holds_its_end() -> None:
    hourly = rule("@hourly", tz="UTC")
    start, end = instant("2026-01-01T00:00Z"), instant("2026-01-01T02:00Z")
    assert [instant("2026-01-01T01:00Z"), end] == hourly.between(start, end, 10)
    assert [instant("2026-01-01T01:00Z")] == hourly.between(start, end, 1)
    assert hourly.between(start, end, 0) == []


@pytest.mark.parametrize(
    ("tz", "at", "expected"),
    [
        ("Europe/Berlin", "2027-03-28T07:00:00Z", "2027-03-28T09:00:00+02:00"),
        ("America/St_Johns", "2026-01-01T12:00:00Z", "2026-01-01T08:30:00-03:30"),
        ("UTC", "2026-01-01T12:00:00Z", "2026-01-01T12:00:00+00:00"),
        ("Africa/Monrovia", "1970-01-01T12:00:00Z", "1970-01-01T12:00:00Z"),
    ],
)
def test_local_time_is_rfc_3339(tz: str, at: str, expected: str) -> None:
    assert expected == rule("* * * * *", tz=tz).local_time(instant(at))


def planned(compiled: CronRule, after: str, count: int) -> list[tuple[str, str, str]]:
    return [
        (format_instant(one.at), one.local_time, one.skip_reason.name if one.skip_reason else "")
        for one in compiled.planned(instant(after), count)
    ]


def test_a_skipped_gap_time_is_planned_with_the_local_time_that_did_not_exist() -> None:
    compiled = rule("0,30 2 * * *", tz="Europe/Berlin", gap=SKIP)
    expected = [
        ("2027-03-28T01:00:00Z", "2027-03-28T02:00:00", "DST_GAP"),
        ("2027-03-28T01:00:00Z", "2027-03-28T02:30:00", "DST_GAP"),
        ("2027-03-29T00:00:00Z", "2027-03-29T02:00:00+02:00", ""),
    ]
    assert expected == planned(compiled, "2027-03-28T00:30:00Z", 3)


def test_a_moved_gap_time_is_planned_as_a_fire_with_a_note() -> None:
    compiled = rule("30 2 * * *", tz="Europe/Berlin")
    one = compiled.planned(instant("2027-03-28T00:30:00Z"), 1)[0]
    assert format_instant(one.at) == "2027-03-28T01:00:00Z"
    assert one.local_time == "2027-03-28T03:00:00+02:00"
    assert one.skip_reason is None
    assert "2027-03-28T02:30:00 does not exist" in one.note


@pytest.mark.parametrize(
    ("fold", "first", "last"),
    [(FIRST, "", "DST_FOLD"), (LAST, "DST_FOLD", ""), (BOTH, "", "")],
)
def test_both_passes_of_a_fold_are_planned(fold: DstFoldPolicy, first: str, last: str) -> None:
    compiled = rule("30 2 * * *", tz="Europe/Berlin", fold=fold)
    expected = [
        ("2026-10-25T00:30:00Z", "2026-10-25T02:30:00+02:00", first),
        ("2026-10-25T01:30:00Z", "2026-10-25T02:30:00+01:00", last),
        ("2026-10-26T01:30:00Z", "2026-10-26T02:30:00+01:00", ""),
    ]
    assert expected == planned(compiled, "2026-10-24T12:00:00Z", 3)
    notes = [one.note != "" for one in compiled.planned(instant("2026-10-24T12:00:00Z"), 3)]
    assert notes == [True, True, False]


def test_a_fire_of_one_expression_wins_over_the_fold_of_another() -> None:
    compiled = rule("30 2 * * *", "30 * * * *", tz="Europe/Berlin")
    reasons = {
        one.at: one.skip_reason for one in compiled.planned(instant("2026-10-25T00:00:00Z"), 5)
    }
    assert SkipReason.DST_FOLD not in reasons.values()
    assert len(reasons) == 5


def test_a_gap_of_thousands_of_times_is_planned_no_further_than_asked() -> None:
    compiled = rule("59-0 * 2 * * *", "30 * 2 * * *", tz="Europe/Berlin", gap=SKIP)
    found = compiled.planned(instant("2027-03-28T00:30:00Z"), 4)
    expected = [f"2027-03-28T02:{clock}" for clock in ("00:00", "00:30", "00:59", "01:00")]
    assert expected == [one.local_time for one in found]


def test_an_every_hour_expression_plans_nothing_suppressed() -> None:
    compiled = rule("*/30 * * * *", tz="Europe/Berlin", gap=SKIP)
    found = compiled.planned(instant("2027-03-27T00:00:00Z"), 100)
    assert len(found) == 100
    assert all(one.skip_reason is None and not one.note for one in found)
