"""Fires against a brute-force scan of minutes that shares no code with the evaluator."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from zoneinfo import ZoneInfo

from fencepost_server.clock import DAY, SECOND, from_datetime
from fencepost_server.domain.schedule import CronSpec, DstFoldPolicy, DstGapPolicy, SkipReason
from fencepost_server.policy.cron import CronRule, compile_cron
from hypothesis import given, settings
from hypothesis import strategies as st

MINUTE = timedelta(minutes=1)
WINDOW = timedelta(days=2)

# Where clocks changed by an hour, two, half of one, a quarter, a whole day, at midnight, at
# 00:01, and not at all.
PLACES = [
    ("Europe/Berlin", "2026-03-28T12:00"),
    ("Europe/Berlin", "2026-10-24T12:00"),
    ("America/New_York", "2026-03-07T12:00"),
    ("America/New_York", "2026-10-31T12:00"),
    ("Antarctica/Troll", "2026-03-28T12:00"),
    ("Antarctica/Troll", "2026-10-24T12:00"),
    ("Australia/Lord_Howe", "2026-04-04T00:00"),
    ("Australia/Lord_Howe", "2026-10-03T00:00"),
    ("Asia/Kathmandu", "1985-12-31T00:00"),
    ("Pacific/Apia", "2011-12-29T12:00"),
    ("America/Santiago", "2026-09-05T12:00"),
    ("America/Santiago", "2026-04-04T12:00"),
    ("America/Sao_Paulo", "2018-11-03T12:00"),
    ("America/St_Johns", "2011-03-12T12:00"),
    ("America/St_Johns", "2010-11-06T12:00"),
    ("Africa/Casablanca", "2026-02-14T12:00"),
    ("Europe/Dublin", "2026-10-24T12:00"),
    ("America/Havana", "2027-11-06T12:00"),
    ("UTC", "2026-02-27T12:00"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The text of a field and the values it means, made together."""

    text: str
    values: frozenset[int]


def field_of(low: int, high: int) -> st.SearchStrategy[Field]:
    value = st.integers(low, high)
    everything = frozenset(range(low, high + 1))
    star = st.just(Field(text="*", values=everything))
    single = value.map(lambda v: Field(text=str(v), values=frozenset({v})))
    listed = st.lists(value, min_size=1, max_size=4).map(
        lambda vs: Field(text=",".join(map(str, vs)), values=frozenset(vs))
    )
    stepped = st.integers(1, (high - low + 1) // 2).map(
        lambda n: Field(text=f"*/{n}", values=frozenset(range(low, high + 1, n)))
    )

    def ranged(ends: tuple[int, int]) -> Field:
        first, last = ends
        if first <= last:
            values = frozenset(range(first, last + 1))
        else:
            values = everything - frozenset(range(last + 1, first))
        return Field(text=f"{first}-{last}", values=values)

    return st.one_of(star, single, listed, stepped, st.tuples(value, value).map(ranged))


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Field, ...]:
    minute = draw(field_of(0, 59))
    # Near midnight and the usual hours of change, or nothing would be compared.
    early = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(
        lambda values: Field(text=",".join(map(str, values)), values=frozenset(values))
    )
    hour = draw(st.one_of(field_of(0, 23), early))
    day = draw(st.one_of(st.just(Field(text="*", values=frozenset(range(1, 32)))), field_of(1, 31)))
    weekday = draw(st.one_of(st.just(Field(text="*", values=frozenset(range(7)))), field_of(0, 6)))
    return minute, hour, day, Field(text="*", values=frozenset(range(1, 13))), weekday


@lru_cache(maxsize=32)
def zone_info(name: str) -> ZoneInfo:
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


@lru_cache(maxsize=32)
def minutes_of(name: str, start: str) -> list[tuple[datetime, datetime]]:
    """Every UTC minute of the window (and one before it) with its wall clock."""
    zone = zone_info(name)
    first = datetime.fromisoformat(start).replace(tzinfo=UTC) - MINUTE
    utc = [first + n * MINUTE for n in range(WINDOW // MINUTE + 1)]
    return [(at, at.astimezone(zone)) for at in utc]


def admits(fields: tuple[Field, ...], local: datetime) -> bool:
    minute, hour, day, month, weekday = fields
    by_day = local.day in day.values
    by_weekday = date(local.year, local.month, local.day).isoweekday() % 7 in weekday.values
    both = not day.text.startswith("*") and not weekday.text.startswith("*")
    return (
        local.minute in minute.values
        and local.hour in hour.values
        and local.month in month.values
        and (by_day or by_weekday if both else by_day and by_weekday)
    )


def scanned(
    fields: tuple[Field, ...], name: str, start: str, gap: DstGapPolicy, fold: DstFoldPolicy
) -> Iterator[datetime]:
    """The fires of the window, minute by minute."""
    minutes = minutes_of(name, start)
    elapsed = len(fields[1].values) == 24
    for (_, before), (at, local) in pairwise(minutes):
        naive = local.replace(tzinfo=None)
        ambiguous = local.replace(fold=0).utcoffset() != local.replace(fold=1).utcoffset()
        if elapsed or not ambiguous or fold is DstFoldPolicy.BOTH:
            here = admits(fields, naive)
        else:
            here = admits(fields, naive) and (local.fold == 1) == (fold is DstFoldPolicy.LAST)
        if not elapsed and gap is DstGapPolicy.RUN_AFTER_GAP:
            missing = before.replace(tzinfo=None) + MINUTE
            while not here and missing < naive:
                here = admits(fields, missing)
                missing += MINUTE
        if here:
            yield at


@settings(max_examples=60, deadline=None, database=None)
@given(
    fields=expressions(),
    place=st.sampled_from(PLACES),
    gap=st.sampled_from(DstGapPolicy),
    fold=st.sampled_from(DstFoldPolicy),
)
def test_fires_equal_a_scan_of_every_minute(
    fields: tuple[Field, ...], place: tuple[str, str], gap: DstGapPolicy, fold: DstFoldPolicy
) -> None:
    name, start = place
    text = " ".join(field.text for field in fields)
    rule = compile_cron(CronSpec(expressions=(text,), time_zone=name, dst_gap=gap, dst_fold=fold))
    expected = [from_datetime(at) for at in scanned(fields, name, start, gap, fold)]
    after = from_datetime(datetime.fromisoformat(start).replace(tzinfo=UTC)) - 1
    until = after + WINDOW // timedelta(microseconds=1)
    assert expected == rule.between(after, until, 10_000)
    assert expected[::-1] == backwards(rule, until + 1, after)
    assert expected == planned_fires(rule, after, until, len(expected))


def backwards(rule: CronRule, before: int, after: int) -> list[int]:
    found: list[int] = []
    at = rule.prev_before(before)
    while at is not None and at > after:
        found.append(at)
        at = rule.prev_before(at)
    return found


def planned_fires(rule: CronRule, after: int, until: int, count: int) -> list[int]:
    planned = rule.planned(after, 2 * count + 500)
    assert [one.at for one in planned] == sorted(one.at for one in planned)
    return [one.at for one in planned if one.skip_reason is None and one.at <= until]


SECOND_FIELD = field_of(0, 59)


@settings(max_examples=60, deadline=None, database=None)
@given(
    texts=st.lists(st.tuples(SECOND_FIELD, expressions()), min_size=1, max_size=3),
    zone=st.sampled_from(sorted({name for name, _ in PLACES})),
    day=st.integers(0, 25_000),
    micros=st.integers(0, DAY),
)
def test_fires_rise_strictly_and_both_directions_agree(
    texts: list[tuple[Field, tuple[Field, ...]]], zone: str, day: int, micros: int
) -> None:
    spec = CronSpec(
        expressions=tuple(
            " ".join(field.text for field in (second, *rest)) for second, rest in texts
        ),
        time_zone=zone,
    )
    rule = compile_cron(spec)
    start = day * DAY + micros
    fires: list[int] = []
    at = rule.next_after(start)
    assert at is not None
    for _ in range(20):
        assert at is not None
        assert at > (fires[-1] if fires else start)
        assert at % SECOND == 0
        assert rule.matches(at)
        fires.append(at)
        at = rule.next_after(at)
    assert fires[-2::-1] == [rule.prev_before(fire) for fire in fires[:0:-1]]
    earlier = rule.prev_before(fires[0])
    assert earlier is None or earlier <= start
    again = compile_cron(rule.canonical)
    assert again.canonical == rule.canonical
    assert fires == again.between(start, fires[-1], 20)


@settings(max_examples=25, deadline=None, database=None)
@given(fields=expressions(), place=st.sampled_from(PLACES), fold=st.sampled_from(DstFoldPolicy))
def test_every_nominal_time_is_planned_once_fired_or_with_a_reason(
    fields: tuple[Field, ...], place: tuple[str, str], fold: DstFoldPolicy
) -> None:
    name, start = place
    text = " ".join(field.text for field in fields)
    rule = compile_cron(
        CronSpec(expressions=(text,), time_zone=name, dst_gap=DstGapPolicy.SKIP, dst_fold=fold)
    )
    both = scanned(fields, name, start, DstGapPolicy.SKIP, DstFoldPolicy.BOTH)
    expected = [from_datetime(at) for at in both]
    after = from_datetime(datetime.fromisoformat(start).replace(tzinfo=UTC)) - 1
    planned = rule.planned(after, len(expected) + 1500)
    until = after + WINDOW // timedelta(microseconds=1)
    passes = [
        one.at for one in planned if one.skip_reason is not SkipReason.DST_GAP and one.at <= until
    ]
    assert expected == passes
    assert all(one.note for one in planned if one.skip_reason is not None)
