"""croniter, the Python library most people know, gives the same fires, but where we decided
otherwise. Each difference is a row here with its reason, and a row of docs/time-details.md.
"""

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from croniter import CroniterError, croniter
from fencepost_server.clock import SECOND, format_instant, from_datetime
from fencepost_server.domain.schedule import CronSpec
from fencepost_server.errors import InvalidSchedule
from fencepost_server.policy.cron import compile_cron

REFUSED = "refused"
BERLIN = "Europe/Berlin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The fires after `after`, ours and croniter's, and why ours are so."""

    expression: str
    after: str
    ours: list[str] | str
    theirs: list[str] | str
    decision: str
    time_zone: str = "UTC"


DIFFERENCES = [
    Difference(
        expression="30 2 * * *",
        time_zone=BERLIN,
        after="2026-10-24T12:00Z",
        ours=["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"],
        theirs=["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"],
        decision="a daily job runs once in the night that clocks go back; dst_fold says which",
    ),
    Difference(
        expression="*/30 2 * * *",
        time_zone=BERLIN,
        after="2026-10-24T12:00Z",
        ours=["2026-10-25T00:00:00Z", "2026-10-25T00:30:00Z", "2026-10-26T01:00:00Z"],
        theirs=["2026-10-25T00:00:00Z", "2026-10-25T00:30:00Z", "2026-10-25T01:00:00Z"],
        decision="so does a job that runs several times in a named hour",
    ),
    Difference(
        expression="0 0 */2 * FRI",
        after="2026-06-01T00:00Z",
        ours=["2026-06-05T00:00:00Z", "2026-06-19T00:00:00Z"],
        theirs=["2026-06-03T00:00:00Z", "2026-06-05T00:00:00Z"],
        decision="a field that begins with * does not restrict (cronie): both have to match",
    ),
    Difference(
        expression="0 0 L-3 * *",
        after="2026-02-01T00:00Z",
        ours=["2026-02-25T00:00:00Z", "2026-03-28T00:00:00Z"],
        theirs=REFUSED,
        decision="days before the last of the month can be written",
    ),
    Difference(
        expression="0 0 LW * *",
        after="2026-02-01T00:00Z",
        ours=["2026-02-27T00:00:00Z", "2026-03-31T00:00:00Z"],
        theirs=REFUSED,
        decision="and the last weekday of the month",
    ),
    Difference(
        expression="0 0 * * 5L",
        after="2026-02-01T00:00Z",
        ours=["2026-02-27T00:00:00Z", "2026-03-27T00:00:00Z"],
        theirs=REFUSED,
        decision="the last Friday is 5L, as in Quartz",
    ),
    Difference(
        expression="0 0 * * L5",
        after="2026-02-01T00:00Z",
        ours=REFUSED,
        theirs=["2026-02-27T00:00:00Z", "2026-03-27T00:00:00Z"],
        decision="one way to write the last Friday is enough",
    ),
    Difference(
        expression="30 0 0 1 1 *",
        after="2026-01-02T00:00Z",
        ours=["2027-01-01T00:00:30Z"],
        theirs=REFUSED,
        decision="of six fields the first is seconds; croniter puts them last",
    ),
    Difference(
        expression="0 0 1 1 * 30",
        after="2026-01-02T00:00Z",
        ours=REFUSED,
        theirs=["2027-01-01T00:00:30Z"],
        decision="and an expression that means something else there is refused here",
    ),
    Difference(
        expression="0 0 1 1 * 0 2030",
        after="2026-01-02T00:00Z",
        ours=REFUSED,
        theirs=["2030-01-01T00:00:00Z"],
        decision="there is no year field; start_at and end_at bound a schedule",
    ),
    Difference(
        expression="*/90 * * * *",
        after="2026-01-02T00:00Z",
        ours=REFUSED,
        theirs=["2026-01-02T01:00:00Z", "2026-01-02T02:00:00Z"],
        decision="a step larger than the field promises what it does not do; use an interval",
    ),
    Difference(
        expression="H * * * *",
        after="2026-01-02T00:00Z",
        ours=["2026-01-02T00:13:00Z", "2026-01-02T01:13:00Z"],
        theirs=REFUSED,
        decision="H needs no parameter: it is drawn from the names of tenant and job",
    ),
    Difference(
        expression="* * * * *",
        after="9999-12-31T23:59Z",
        ours=[],
        theirs=REFUSED,
        decision="the calendar ends without an error: there is no further fire",
    ),
]


def ours(expression: str, time_zone: str, after: datetime, count: int) -> list[str] | str:
    try:
        rule = compile_cron(CronSpec(expressions=(expression,), time_zone=time_zone))
    except InvalidSchedule:
        return REFUSED
    return [format_instant(at) for at in rule.between(from_datetime(after), 10**18, count)]


def theirs(expression: str, time_zone: str, after: datetime, count: int) -> list[str] | str:
    try:
        fires = croniter(expression, after.astimezone(ZoneInfo(time_zone)))
        return [format_instant(round(fires.get_next(float)) * SECOND) for _ in range(count)]
    except (CroniterError, OverflowError):
        return REFUSED


@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: row.expression)
def test_each_difference_is_as_decided(row: Difference) -> None:
    after = datetime.fromisoformat(row.after)
    count = max(len(said) for said in (row.ours, row.theirs) if said != REFUSED) or 1
    assert row.decision
    assert ours(row.expression, row.time_zone, after, count) == row.ours
    assert theirs(row.expression, row.time_zone, after, count) == row.theirs


@pytest.mark.parametrize(
    ("expression", "time_zone", "after"),
    [
        ("30 2 * * *", BERLIN, "2026-03-28T02:00Z"),
        ("*/20 * * * *", BERLIN, "2026-03-29T00:30Z"),
        ("*/20 * * * *", BERLIN, "2026-10-25T00:30Z"),
        ("0 * * * *", "Australia/Lord_Howe", "2026-04-04T12:59Z"),
        ("0 * * * *", "Australia/Lord_Howe", "2026-10-03T14:59Z"),
        ("0 12 30 12 *", "Pacific/Apia", "2011-12-01T00:00Z"),
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03T12:00Z"),
        ("0 0 1 * *", BERLIN, "2024-02-29T23:00Z"),
        ("0 0 1-31 * 4", "UTC", "2026-06-01T00:00Z"),
        ("0 0 * * FRI-MON", "UTC", "2026-06-01T00:00Z"),
        ("0 22-2 * * *", "UTC", "2026-06-01T12:00Z"),
        ("0 0 * * 7/2", "UTC", "2026-06-01T00:00Z"),
        ("0 0 L * *", "UTC", "2026-02-01T00:00Z"),
        ("0 0 15W * *", "UTC", "2026-02-01T00:00Z"),
        ("0 0 * * 1#1,5#3", "UTC", "2026-02-02T00:00Z"),
        ("0 0 29 2 *", "UTC", "2096-03-02T00:00Z"),
        ("0 0 30 2 *", "UTC", "2026-01-01T00:00Z"),
    ],
)
def test_traps_on_which_both_agree(expression: str, time_zone: str, after: str) -> None:
    at = datetime.fromisoformat(after)
    assert ours(expression, time_zone, at, 4) == theirs(expression, time_zone, at, 4)


def random_expression(drawn: random.Random) -> str:
    def field(low: int, high: int, star: float) -> str:
        if drawn.random() < star:
            return "*"
        values = [str(drawn.randint(low, high)) for _ in range(drawn.randint(1, 3))]
        if drawn.random() < 0.3:
            first, last = sorted(drawn.sample(range(low, high + 1), 2))
            values = [f"{first}-{last}/{drawn.randint(1, 5)}"]
        return ",".join(dict.fromkeys(values))

    minute = drawn.choice((field(0, 59, 0.2), f"*/{drawn.choice((5, 7, 15, 20, 45))}"))
    day, weekday = field(1, 28, 0.5), field(0, 6, 0.5)
    return f"{minute} {field(0, 23, 0.3)} {day} {field(1, 12, 0.7)} {weekday}"


def test_random_expressions_fire_alike_where_clocks_stay() -> None:
    drawn = random.Random(70)
    for _ in range(200):
        expression = random_expression(drawn)
        # Zones without clock changes in these years.
        zone = drawn.choice(("UTC", "Asia/Kolkata", "Asia/Tokyo", "America/Phoenix"))
        after = datetime.fromtimestamp(drawn.randrange(1_770_000_000, 1_900_000_000), UTC)
        assert ours(expression, zone, after, 6) == theirs(expression, zone, after, 6), (
            f"{expression!r} in {zone} after {after}"
        )
