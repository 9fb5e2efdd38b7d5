"""Whole months of fires in every IANA zone, 2011 to 2040, against a scan of the same minutes.

The scan shares no code with the evaluator: it spells out for each minute of a local day
whether the fields admit it, and lays those days over the UTC minutes of the month.
FENCEPOST_CRON_COMPARISONS asks for more fires than the 100,000 of every run.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from fencepost_server.clock import MINUTE
from fencepost_server.domain.schedule import CronSpec, DstFoldPolicy, DstGapPolicy
from fencepost_server.policy.cron import compile_cron
from fencepost_server.policy.zone_source import pinned

COMPARISONS = int(os.environ.get("FENCEPOST_CRON_COMPARISONS", "100000"))
YEARS = range(2011, 2041)
YEARS_TRIED = 3
DAY_MINUTES = 1440
SEED = 20111030
# A rule of every minute would be most of the comparisons by itself.
FIRES_OF_CASE_MAX = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Fields as sets of values, with the text that means them."""

    text: str
    day_minutes: bytes  # one byte for each minute of a day: whether hour and minute admit it
    days: frozenset[int]
    weekdays: frozenset[int]
    either: bool
    every_hour: bool

    def admits_day(self, day: date) -> bool:
        by_date, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_date or by_weekday if self.either else by_date and by_weekday


def draw_case(drawn: random.Random, near: frozenset[int]) -> Case:
    """A case whose hours are often those of `near`, in which clocks change."""

    def values(low: int, high: int, most: int) -> frozenset[int]:
        return frozenset(drawn.sample(range(low, high + 1), drawn.randint(1, most)))

    def text(chosen: frozenset[int]) -> str:
        return ",".join(str(value) for value in drawn.sample(sorted(chosen), len(chosen)))

    every_hour = drawn.random() < 0.2
    minutes = values(0, 59, 3)
    hours = frozenset(range(24)) if every_hour else values(0, 23, 3)
    if near and drawn.random() < 0.7:
        hours |= frozenset(drawn.sample(sorted(near), drawn.randint(1, len(near))))
    any_date, any_weekday = drawn.random() < 0.6, drawn.random() < 0.6
    days = frozenset(range(1, 32)) if any_date else values(1, 31, 8)
    weekdays = frozenset(range(7)) if any_weekday else values(0, 6, 4)
    return Case(
        text=f"{text(minutes)} {'*' if every_hour else text(hours)} "
        f"{'*' if any_date else text(days)} * {'*' if any_weekday else text(weekdays)}",
        day_minutes=bytes(
            hour in hours and minute in minutes for hour in range(24) for minute in range(60)
        ),
        days=days,
        weekdays=weekdays,
        either=not any_date and not any_weekday,
        every_hour=every_hour,
    )


@lru_cache(maxsize=1024)
def zone_info(name: str) -> ZoneInfo:
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def offset_of(zone: ZoneInfo, minute: int) -> int:
    offset = datetime.fromtimestamp(minute * 60, zone).utcoffset()
    assert offset is not None
    whole, rest = divmod(offset, timedelta(minutes=1))
    assert not rest, "since 2011 every offset is whole minutes"
    return whole


def stretches(zone: ZoneInfo, first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """UTC minutes [start, end) with one offset, found hour by hour and then minute by minute."""
    start, offset = first, offset_of(zone, first)
    for hour in range(first, end, 60):
        if offset_of(zone, min(hour + 60, end - 1)) == offset:
            continue
        for minute in range(hour + 1, min(hour + 61, end)):
            found = offset_of(zone, minute)
            if found != offset:
                yield start, minute, offset
                start, offset = minute, found
    yield start, end, offset


def months(zone: ZoneInfo, drawn: random.Random) -> list[tuple[int, int]]:
    """UTC minutes [first, end) of two months of some years, those of clock changes first."""
    spans: list[tuple[int, int]] = []
    for year in drawn.sample(YEARS, YEARS_TRIED):
        bounds = [
            int(datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp()) // 60
            for month in range(13)
        ]
        spans += pairwise(bounds)
    drawn.shuffle(spans)
    spans.sort(key=lambda span: offset_of(zone, span[0]) == offset_of(zone, span[1]))
    return spans[:2]


def scanned(
    case: Case,
    parts: list[tuple[int, int, int]],
    around: tuple[int, int],
    gap: DstGapPolicy,
    fold: DstFoldPolicy,
) -> list[int]:
    """The UTC minutes of a month at which the case fires.

    `around` are the offsets of the minutes before and after it.
    """
    offsets = [around[0], *(offset for _, _, offset in parts), around[1]]
    fires = []
    for number, (start, end, offset) in enumerate(parts, start=1):
        local = local_minutes(case, start + offset, end + offset)
        if not case.every_hour:
            before, after = offsets[number - 1], offsets[number + 1]
            # The last pass of a time that came before, and the first of one that will.
            if fold is DstFoldPolicy.FIRST and before > offset:
                local = bytes(before - offset) + local[before - offset :]
            if fold is DstFoldPolicy.LAST and after < offset:
                local = local[: after - offset] + bytes(offset - after)
            missing = local_minutes(case, start + before, start + offset)
            if gap is DstGapPolicy.RUN_AFTER_GAP and 1 in missing:
                local = b"\1" + local[1:]
        at = local.find(1)
        while at >= 0:
            fires.append(start + at)
            at = local.find(1, at + 1)
    return fires


def local_minutes(case: Case, first: int, end: int) -> bytes:
    """For each local minute in [first, end), whether the case admits it."""
    if end <= first:
        return b""
    first_day, last_day = first // DAY_MINUTES, (end - 1) // DAY_MINUTES
    laid = b"".join(
        case.day_minutes
        if case.admits_day(date(1970, 1, 1) + timedelta(days=day))
        else bytes(DAY_MINUTES)
        for day in range(first_day, last_day + 1)
    )
    return laid[first - first_day * DAY_MINUTES : end - first_day * DAY_MINUTES]


def compared(name: str, drawn: random.Random) -> Iterator[int]:
    """Compares two months of a zone; yields the number of fires of each."""
    zone = zone_info(name)
    for first, end in months(zone, drawn):
        parts = list(stretches(zone, first, end))
        around = offset_of(zone, first - 1), offset_of(zone, end)
        gap, fold = drawn.choice(list(DstGapPolicy)), drawn.choice(list(DstFoldPolicy))
        # The last hours before a change and the first after it, on either clock.
        near = frozenset(
            (start + offset + hour * 60) // 60 % 24
            for (_, _, before), (start, _, after) in pairwise(parts)
            for offset in (before, after)
            for hour in (-1, 0)
        )
        case = draw_case(drawn, near)
        rule = compile_cron(
            CronSpec(expressions=(case.text,), time_zone=name, dst_gap=gap, dst_fold=fold)
        )
        expected = [minute * MINUTE for minute in scanned(case, parts, around, gap, fold)]
        expected = expected[-FIRES_OF_CASE_MAX:]
        told = (
            f"{case.text!r} in {name} from {datetime.fromtimestamp(first * 60, UTC)}, {gap}, {fold}"
        )
        # Backwards from the end of the month, then forwards again from where that came to.
        at = rule.prev_before(end * MINUTE)
        backwards = []
        while at is not None and at >= (expected[0] if expected else first * MINUTE):
            backwards.append(at)
            at = rule.prev_before(at)
        assert backwards[::-1] == expected, told
        after = expected[0] - 1 if expected else first * MINUTE - 1
        forwards = []
        following = rule.next_after(after)
        while following is not None and following < end * MINUTE:
            forwards.append(following)
            following = rule.next_after(following)
        assert forwards == expected, told
        yield len(expected)


@pytest.mark.timeout(0 if COMPARISONS > 100_000 else 120)
def test_months_of_every_zone_equal_a_scan_of_their_minutes() -> None:
    drawn = random.Random(SEED)
    names = sorted(pinned().names)
    count = 0
    rounds = 0
    while count < COMPARISONS or rounds == 0:
        for name in names:
            count += sum(compared(name, drawn))
        rounds += 1
    assert count >= COMPARISONS
