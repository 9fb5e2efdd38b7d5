"""First and next fires of every kind of schedule, and what validation refuses."""

from dataclasses import replace
from datetime import datetime

import pytest
from fencepost_server.clock import DAY, HOUR, MILLISECOND, MINUTE, SECOND, Instant, from_datetime
from fencepost_server.domain.schedule import (
    CronSpec,
    DstGapPolicy,
    IntervalSpec,
    MisfirePolicy,
    OnceSpec,
    Schedule,
    Spec,
)
from fencepost_server.errors import FencepostError, InvalidField, InvalidSchedule
from fencepost_server.policy.schedule import (
    BoundedRule,
    IntervalRule,
    bounded_rule,
    compile_rule,
    cron_rule,
    first_fire,
    interned_spec,
    next_fire,
    validate,
)
from hypothesis import given, settings
from hypothesis import strategies as st

NOW = from_datetime(datetime.fromisoformat("2026-11-30T12:00:00Z"))
SOON = NOW + 300 * MILLISECOND

HOURLY = CronSpec(expressions=("0 * * * *",))


@pytest.mark.parametrize(
    ("schedule", "now", "expected"),
    [
        pytest.param(Schedule(spec=HOURLY), SOON, NOW + HOUR, id="cron"),
        pytest.param(Schedule(spec=HOURLY), NOW, NOW + HOUR, id="cron: strictly later than now"),
        pytest.param(
            Schedule(spec=HOURLY, start_at=NOW + 5 * HOUR),
            NOW,
            NOW + 5 * HOUR,
            id="cron: start_at is a fire if it matches",
        ),
        pytest.param(
            Schedule(spec=HOURLY, start_at=NOW + 5 * HOUR + 1),
            NOW,
            NOW + 6 * HOUR,
            id="cron: start_at is rounded up to a second",
        ),
        pytest.param(
            Schedule(spec=HOURLY, start_at=NOW - DAY), NOW, NOW + HOUR, id="cron: start_at passed"
        ),
        pytest.param(
            Schedule(spec=HOURLY, end_at=NOW + HOUR), NOW, None, id="cron: no fire at end_at"
        ),
        pytest.param(
            Schedule(spec=HOURLY, end_at=NOW + HOUR + 1),
            NOW,
            NOW + HOUR,
            id="cron: end_at is rounded up too",
        ),
        pytest.param(
            Schedule(spec=IntervalSpec(every=90 * SECOND)),
            SOON,
            NOW + SECOND,
            id="interval: begins with the creation, rounded up",
        ),
        pytest.param(
            Schedule(spec=IntervalSpec(every=90 * SECOND)),
            NOW,
            NOW,
            id="interval: begins at once on a whole second",
        ),
        pytest.param(
            Schedule(spec=IntervalSpec(every=90 * SECOND, anchor=NOW - 100 * SECOND - 1)),
            NOW,
            NOW + 80 * SECOND,
            id="interval: a passed anchor, rounded up",
        ),
        pytest.param(
            Schedule(spec=IntervalSpec(every=90 * SECOND, anchor=NOW + DAY)),
            NOW,
            NOW + DAY,
            id="interval: no fire before the anchor",
        ),
        pytest.param(
            Schedule(spec=IntervalSpec(every=HOUR, anchor=NOW), start_at=NOW + 90 * MINUTE),
            NOW,
            NOW + 2 * HOUR,
            id="interval: start_at does not move the anchor",
        ),
        pytest.param(Schedule(spec=OnceSpec(at=SOON)), NOW, NOW + SECOND, id="once: rounded up"),
        pytest.param(Schedule(spec=OnceSpec(at=NOW)), NOW, NOW, id="once: now is due now"),
        pytest.param(
            Schedule(spec=OnceSpec(at=NOW - DAY)), NOW, NOW - DAY, id="once: the past is due now"
        ),
        pytest.param(
            Schedule(spec=OnceSpec(at=NOW), end_at=NOW), NOW, None, id="once: outside its bounds"
        ),
        pytest.param(Schedule(spec=OnceSpec(at=0)), NOW, 0, id="once: at the epoch"),
    ],
)
def test_first_fire(schedule: Schedule, now: Instant, expected: Instant | None) -> None:
    assert expected == first_fire(schedule, now=now)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        pytest.param(Schedule(spec=HOURLY), NOW + HOUR, id="cron"),
        pytest.param(Schedule(spec=HOURLY, end_at=NOW + HOUR), None, id="cron: ended"),
        pytest.param(Schedule(spec=IntervalSpec(every=7 * SECOND)), NOW + 7 * SECOND, id="every"),
        pytest.param(
            Schedule(spec=IntervalSpec(every=HOUR, anchor=NOW - 61 * MINUTE)),
            NOW + 59 * MINUTE,
            id="anchored",
        ),
        pytest.param(Schedule(spec=OnceSpec(at=NOW)), None, id="once"),
        pytest.param(Schedule(spec=OnceSpec(at=NOW + DAY)), NOW + DAY, id="once: moved ahead"),
    ],
)
def test_next_fire(schedule: Schedule, expected: Instant | None) -> None:
    assert expected == next_fire(schedule, after=NOW)


@settings(max_examples=100, deadline=None, database=None)
@given(every=st.integers(1, 10**6), anchor=st.integers(-(10**9), 10**9), at=st.integers())
def test_an_interval_is_free_of_drift(every: int, anchor: int, at: int) -> None:
    rule = IntervalRule(every=every * SECOND, anchor=anchor * SECOND)
    later, earlier = rule.next_after(at), rule.prev_before(at)
    assert later is not None
    assert later > at
    assert later == rule.anchor or later - rule.every <= at
    assert later >= rule.anchor
    assert (later - rule.anchor) % rule.every == 0
    if earlier is None:
        assert at <= rule.anchor
    else:
        assert earlier < at <= earlier + rule.every
        assert earlier >= rule.anchor
        assert (earlier - rule.anchor) % rule.every == 0


def test_bounds_hold_in_both_directions() -> None:
    schedule = Schedule(spec=HOURLY, start_at=NOW + HOUR, end_at=NOW + 3 * HOUR)
    rule = bounded_rule(schedule, anchor=NOW)
    assert isinstance(rule, BoundedRule)
    assert rule.next_after(NOW - DAY) == NOW + HOUR
    assert rule.next_after(NOW + 2 * HOUR) is None
    assert rule.prev_before(NOW + DAY) == NOW + 2 * HOUR
    assert rule.prev_before(NOW + HOUR) is None


def test_rules_without_h_are_shared_by_all_jobs_and_rules_with_h_are_not() -> None:
    plain = CronSpec(expressions=("*/5 * * MAR THU",))
    hashed = CronSpec(expressions=("h * * * *",))
    assert cron_rule(plain, seed="acme/a") is cron_rule(plain, seed="acme/b")
    assert cron_rule(hashed, seed="acme/a") is not cron_rule(hashed, seed="acme/b")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            CronSpec(expressions=(" 5  4 * * sun",), time_zone="Asia/Tokyo"),
            CronSpec(expressions=("5 4 * * 0",), time_zone="Asia/Tokyo"),
        ),
        (IntervalSpec(every=HOUR, anchor=NOW), IntervalSpec(every=HOUR)),
        (OnceSpec(at=NOW), None),
    ],
)
def test_what_is_interned_leaves_out_all_that_is_the_jobs_own(
    spec: Spec, expected: Spec | None
) -> None:
    assert expected == interned_spec(spec)


@pytest.mark.parametrize(
    "spec",
    [
        CronSpec(expressions=("H H(2-5) * * *", "*/7 * * * *"), time_zone="Europe/Berlin"),
        IntervalSpec(every=97 * SECOND, anchor=NOW - 12345 * SECOND),
    ],
)
def test_an_interned_rule_follows_a_fire_as_the_schedule_does(spec: Spec) -> None:
    schedule, seed = Schedule(spec=spec), "acme/report"
    fire = first_fire(schedule, now=NOW, seed=seed)
    interned = interned_spec(spec, seed=seed)
    assert interned is not None
    for _ in range(50):
        assert fire is not None
        following = next_fire(schedule, after=fire, seed=seed)
        assert following == compile_rule(interned, anchor=fire).next_after(fire)
        fire = following


GOOD = Schedule(spec=HOURLY)


@pytest.mark.parametrize(
    "schedule",
    [
        GOOD,
        Schedule(spec=IntervalSpec(every=SECOND)),
        Schedule(spec=IntervalSpec(every=366 * DAY)),
        Schedule(spec=OnceSpec(at=NOW + 366 * DAY)),
        Schedule(spec=OnceSpec(at=NOW - 10_000 * DAY)),
        replace(GOOD, start_at=NOW + HOUR, end_at=NOW + HOUR + SECOND),
        replace(GOOD, max_fires=2**63 - 1),
        replace(GOOD, misfire=MisfirePolicy(threshold=SECOND, window=SECOND, max_catch_up=1)),
        replace(GOOD, misfire=MisfirePolicy(threshold=DAY, max_catch_up=1000)),
        Schedule(spec=CronSpec(expressions=("* * * * *",) * 16)),
    ],
)
def test_all_that_is_within_limits_is_accepted(schedule: Schedule) -> None:
    validate(schedule, NOW)
    first = first_fire(schedule, now=NOW)
    assert first is not None


@pytest.mark.parametrize(
    ("schedule", "error", "field"),
    [
        (Schedule(spec=IntervalSpec(every=0)), InvalidSchedule, "interval.every"),
        (Schedule(spec=IntervalSpec(every=-SECOND)), InvalidSchedule, "interval.every"),
        (Schedule(spec=IntervalSpec(every=1500 * MILLISECOND)), InvalidSchedule, "interval.every"),
        (Schedule(spec=IntervalSpec(every=366 * DAY + SECOND)), InvalidSchedule, "interval.every"),
        (Schedule(spec=OnceSpec(at=NOW + 366 * DAY + 1)), InvalidSchedule, "once.at"),
        (Schedule(spec=CronSpec(expressions=())), InvalidSchedule, "cron.expressions"),
        (
            Schedule(spec=CronSpec(expressions=("* * * * *", "99 * * * *"))),
            InvalidSchedule,
            "cron.expressions[1]",
        ),
        (
            Schedule(spec=CronSpec(expressions=("* * * * *",), time_zone="Mars/Base")),
            InvalidSchedule,
            "cron.time_zone",
        ),
        (replace(GOOD, start_at=NOW, end_at=NOW), InvalidField, "end_at"),
        (replace(GOOD, start_at=NOW - 5, end_at=NOW), InvalidField, "end_at"),
        (replace(GOOD, max_fires=-1), InvalidField, "max_fires"),
        (replace(GOOD, max_fires=2**63), InvalidField, "max_fires"),
        (
            replace(GOOD, misfire=MisfirePolicy(threshold=SECOND - 1)),
            InvalidField,
            "misfire_policy.threshold",
        ),
        (
            replace(GOOD, misfire=MisfirePolicy(threshold=DAY + 1)),
            InvalidField,
            "misfire_policy.threshold",
        ),
        (replace(GOOD, misfire=MisfirePolicy(window=0)), InvalidField, "misfire_policy.window"),
        (
            replace(GOOD, misfire=MisfirePolicy(max_catch_up=0)),
            InvalidField,
            "misfire_policy.max_catch_up",
        ),
        (
            replace(GOOD, misfire=MisfirePolicy(max_catch_up=1001)),
            InvalidField,
            "misfire_policy.max_catch_up",
        ),
    ],
)
def test_what_is_outside_its_limits_is_refused_by_name(
    schedule: Schedule, error: type[FencepostError], field: str
) -> None:
    with pytest.raises(error, match=r"allowed:|not a known time zone") as caught:
        validate(schedule, NOW)
    assert type(caught.value) is error
    assert caught.value.field == f"job.schedule.{field}"


def test_a_rule_whose_every_time_falls_into_a_skipped_gap_is_refused() -> None:
    # Clocks in Berlin jump over 02:30 on exactly the last Sunday of March.
    spec = CronSpec(expressions=("30 2 * 3 SUNL",), time_zone="Europe/Berlin")
    validate(Schedule(spec=spec), NOW)
    with pytest.raises(InvalidSchedule, match="would never fire") as caught:
        validate(Schedule(spec=replace(spec, dst_gap=DstGapPolicy.SKIP)), NOW)
    assert caught.value.field == "job.schedule.cron.expressions"


def test_the_value_of_a_refused_duration_is_told_in_seconds() -> None:
    with pytest.raises(InvalidSchedule, match=r"every: -1\.5 s is not allowed; allowed: whole"):
        validate(Schedule(spec=IntervalSpec(every=-1500 * MILLISECOND)), NOW)
