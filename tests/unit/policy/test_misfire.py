"""Outages of every length under every policy, with exact counts."""

from dataclasses import dataclass
from datetime import datetime

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Duration, Instant, from_datetime
from fencepost_server.domain.schedule import (
    CronSpec,
    IntervalSpec,
    MisfireAction,
    MisfirePolicy,
    OnceSpec,
    Schedule,
    SkipReason,
)
from fencepost_server.policy.misfire import DueFire, Judgement, SkipStretch, judge
from fencepost_server.policy.schedule import Rule, bounded_rule
from hypothesis import given, settings
from hypothesis import strategies as st

DOWN_AT = from_datetime(datetime.fromisoformat("2026-10-20T00:00:00Z"))
RUN_ONCE, SKIP, CATCH_UP = MisfireAction.RUN_ONCE, MisfireAction.SKIP, MisfireAction.CATCH_UP

MINUTELY = bounded_rule(Schedule(spec=CronSpec(expressions=("* * * * *",))), anchor=0)
SECONDLY = bounded_rule(Schedule(spec=CronSpec(expressions=("* * * * * *",))), anchor=0)
DAILY = bounded_rule(
    Schedule(spec=CronSpec(expressions=("30 2 * * *",), time_zone="Europe/Berlin")), anchor=0
)


@dataclass
class CountingRule:
    """Counts the questions put to a rule."""

    rule: Rule
    asked: int = 0

    def next_after(self, at: Instant) -> Instant | None:
        self.asked += 1
        return self.rule.next_after(at)

    def prev_before(self, at: Instant) -> Instant | None:
        self.asked += 1
        return self.rule.prev_before(at)


def count(rule: Rule, first: Instant, last: Instant) -> int:
    """Fires in [first, last], one by one."""
    number, at = 0, rule.next_after(first - 1)
    while at is not None and at <= last:
        number, at = number + 1, rule.next_after(at)
    return number


def judged(
    rule: Rule, action: MisfireAction, outage: Duration, *, cap: int = 100
) -> tuple[int, int, int, Judgement]:
    """Caught-up, regular and skipped fires after an outage that began just before a fire."""
    first = rule.next_after(DOWN_AT - 1)
    assert first is not None
    now = first + outage
    policy = MisfirePolicy(action=action, max_catch_up=cap)
    decision = judge(rule, policy, next_run_at=first, now=now)
    assert decision.next_run_at is not None
    assert decision.next_run_at > now
    assert decision.next_run_at == rule.next_after(now)
    caught_up = [fire.at for fire in decision.fires if fire.caught_up]
    regular = [fire.at for fire in decision.fires if not fire.caught_up]
    assert [fire.at for fire in decision.fires] == sorted({*caught_up, *regular})
    assert all(now - at > MINUTE for at in caught_up)
    assert all(0 <= now - at <= MINUTE for at in regular)
    skipped = sum(count(rule, skip.first, skip.last) for skip in decision.skips)
    return len(caught_up), len(regular), skipped, decision


# (outage, policy) -> caught up, regular, skipped, for a fire every minute. The fire that was
# due as the outage began is the first one missed.
MINUTELY_CASES = [
    (30 * SECOND, RUN_ONCE, 0, 1, 0),
    (30 * SECOND, SKIP, 0, 1, 0),
    (30 * SECOND, CATCH_UP, 0, 1, 0),
    (59 * SECOND, RUN_ONCE, 0, 1, 0),
    (59 * SECOND, SKIP, 0, 1, 0),
    (59 * SECOND, CATCH_UP, 0, 1, 0),
    (60 * SECOND, RUN_ONCE, 0, 2, 0),
    (60 * SECOND, SKIP, 0, 2, 0),
    (60 * SECOND, CATCH_UP, 0, 2, 0),
    (61 * SECOND, RUN_ONCE, 1, 1, 0),
    (61 * SECOND, SKIP, 0, 1, 1),
    (61 * SECOND, CATCH_UP, 1, 1, 0),
    (26 * HOUR, RUN_ONCE, 1, 2, 1558),
    (26 * HOUR, SKIP, 0, 2, 1559),
    (26 * HOUR, CATCH_UP, 100, 2, 1459),
    (40 * DAY, RUN_ONCE, 1, 2, 57_598),
    (40 * DAY, SKIP, 0, 2, 57_599),
    (40 * DAY, CATCH_UP, 100, 2, 57_499),
]


@pytest.mark.parametrize(("outage", "action", "caught_up", "regular", "skipped"), MINUTELY_CASES)
def test_an_outage_of_a_minutely_job(
    outage: Duration, action: MisfireAction, caught_up: int, regular: int, skipped: int
) -> None:
    assert (caught_up, regular, skipped) == judged(MINUTELY, action, outage)[:3]


@pytest.mark.parametrize(
    ("outage", "action", "caught_up", "regular", "skipped"),
    [
        (30 * SECOND, RUN_ONCE, 0, 1, 0),
        (61 * SECOND, RUN_ONCE, 1, 0, 0),
        (61 * SECOND, SKIP, 0, 0, 1),
        (61 * SECOND, CATCH_UP, 1, 0, 0),
        # 02:30 in Berlin: clocks go back on 25 October, so 40 days hold 40 fires.
        (26 * HOUR, RUN_ONCE, 1, 0, 1),
        (26 * HOUR, CATCH_UP, 2, 0, 0),
        (40 * DAY + HOUR, RUN_ONCE, 1, 1, 39),
        (40 * DAY + HOUR, SKIP, 0, 1, 40),
        (40 * DAY + HOUR, CATCH_UP, 40, 1, 0),
    ],
)
def test_an_outage_of_a_daily_job_across_a_clock_change(
    outage: Duration, action: MisfireAction, caught_up: int, regular: int, skipped: int
) -> None:
    assert (caught_up, regular, skipped) == judged(DAILY, action, outage)[:3]


def test_run_once_runs_the_newest_and_says_whom_it_stands_in_for() -> None:
    decision = judged(MINUTELY, RUN_ONCE, 5 * MINUTE + SECOND)[3]
    newest = DOWN_AT + 4 * MINUTE
    expected = Judgement(
        fires=(
            DueFire(at=newest, caught_up=True),
            DueFire(at=DOWN_AT + 5 * MINUTE, caught_up=False),
        ),
        skips=(
            SkipStretch(
                first=DOWN_AT,
                last=DOWN_AT + 3 * MINUTE,
                reason=SkipReason.MISFIRE,
                stand_in=newest,
            ),
        ),
        next_run_at=DOWN_AT + 6 * MINUTE,
    )
    assert expected == decision


def test_catch_up_keeps_the_newest_and_runs_them_oldest_first() -> None:
    decision = judged(MINUTELY, CATCH_UP, 5 * MINUTE + SECOND, cap=3)[3]
    kept = [fire.at for fire in decision.fires if fire.caught_up]
    assert kept == [DOWN_AT + n * MINUTE for n in (2, 3, 4)]
    expected = SkipStretch(first=DOWN_AT, last=DOWN_AT + MINUTE, reason=SkipReason.MISFIRE)
    assert decision.skips == (expected,)


def test_nothing_is_judged_before_it_is_due() -> None:
    policy = MisfirePolicy()
    decision = judge(MINUTELY, policy, next_run_at=DOWN_AT + 1, now=DOWN_AT)
    assert decision == Judgement(fires=(), skips=(), next_run_at=DOWN_AT + 1)


@pytest.mark.parametrize("action", list(MisfireAction))
@pytest.mark.parametrize("cap", [1, 100, 1000])
def test_forty_days_of_every_second_cost_no_more_than_the_caps(
    action: MisfireAction, cap: int
) -> None:
    rule = CountingRule(SECONDLY)
    policy = MisfirePolicy(action=action, max_catch_up=cap)
    decision = judge(rule, policy, next_run_at=DOWN_AT, now=DOWN_AT + 40 * DAY)
    # 61 regular ones: every second of the last minute, both ends included.
    assert rule.asked <= cap + 61 + 5
    caught_up = sum(fire.caught_up for fire in decision.fires)
    assert {RUN_ONCE: 1, SKIP: 0, CATCH_UP: cap}[action] == caught_up
    assert len(decision.fires) == caught_up + 61
    skip = decision.skips[0]
    missed = (skip.last - skip.first) // SECOND + 1
    assert missed + caught_up == 40 * 86_400 - 60


def test_regular_fires_over_the_limit_stay_pending_for_the_next_decision() -> None:
    policy = MisfirePolicy(threshold=DAY)
    now = DOWN_AT + 2500 * SECOND
    at: Instant | None = DOWN_AT
    sizes = []
    while at is not None and at <= now:
        decision = judge(SECONDLY, policy, next_run_at=at, now=now)
        assert decision.skips == ()
        assert decision.fires[0].at == at
        sizes.append(len(decision.fires))
        at = decision.next_run_at
    assert sizes == [1000, 1000, 501]


@pytest.mark.parametrize(
    ("action", "window", "caught_up", "skipped"),
    [
        (RUN_ONCE, 30 * MINUTE, 1, 118),
        (RUN_ONCE, SECOND, 0, 119),
        (CATCH_UP, 10 * MINUTE, 9, 110),
        (CATCH_UP, SECOND, 0, 119),
        (SKIP, 10 * MINUTE, 0, 119),
    ],
)
def test_misfires_older_than_the_window_are_dropped(
    action: MisfireAction, window: Duration, caught_up: int, skipped: int
) -> None:
    policy = MisfirePolicy(action=action, window=window)
    decision = judge(MINUTELY, policy, next_run_at=DOWN_AT, now=DOWN_AT + 2 * HOUR)
    assert caught_up == sum(fire.caught_up for fire in decision.fires)
    assert skipped == sum(count(MINUTELY, one.first, one.last) for one in decision.skips)
    assert sum(not fire.caught_up for fire in decision.fires) == 2


def test_a_pause_is_the_reason_of_what_a_resume_skips() -> None:
    policy = MisfirePolicy(action=SKIP)
    decision = judge(
        MINUTELY, policy, next_run_at=DOWN_AT, now=DOWN_AT + HOUR, reason=SkipReason.PAUSED
    )
    assert [skip.reason for skip in decision.skips] == [SkipReason.PAUSED]


@pytest.mark.parametrize(
    ("left", "fires", "pending"),
    [
        (1, [0], 1),
        (3, [0, 1, 2], 3),
        (59, [*range(59)], 59),
        (60, [*range(60)], 60),
        (99, [*range(61)], 61),
    ],
)
def test_no_more_fires_are_taken_than_the_limit_of_fires_leaves(
    left: int, fires: list[int], pending: int
) -> None:
    policy = MisfirePolicy(action=CATCH_UP)
    now = DOWN_AT + HOUR
    decision = judge(MINUTELY, policy, next_run_at=DOWN_AT, now=now, fires_left=left)
    assert [DOWN_AT + n * MINUTE for n in fires] == [fire.at for fire in decision.fires]
    assert DOWN_AT + pending * MINUTE == decision.next_run_at


@pytest.mark.parametrize(
    ("action", "fires", "skips"), [(RUN_ONCE, 1, 0), (CATCH_UP, 1, 0), (SKIP, 0, 1)]
)
def test_a_single_fire_of_the_past_is_judged_and_nothing_follows(
    action: MisfireAction, fires: int, skips: int
) -> None:
    rule = bounded_rule(Schedule(spec=OnceSpec(at=DOWN_AT)), anchor=0)
    policy = MisfirePolicy(action=action)
    decision = judge(rule, policy, next_run_at=DOWN_AT, now=DOWN_AT + 400 * DAY)
    assert (fires, skips) == (len(decision.fires), len(decision.skips))
    assert decision.next_run_at is None


def test_a_schedule_that_ended_during_the_outage_has_no_next_fire() -> None:
    schedule = Schedule(spec=IntervalSpec(every=MINUTE), end_at=DOWN_AT + 10 * MINUTE)
    rule = bounded_rule(schedule, anchor=DOWN_AT)
    policy = MisfirePolicy(action=CATCH_UP)
    decision = judge(rule, policy, next_run_at=DOWN_AT, now=DOWN_AT + DAY)
    assert len(decision.fires) == 10
    assert decision.next_run_at is None


def test_a_pending_fire_that_the_rule_no_longer_has_is_still_a_fire() -> None:
    policy = MisfirePolicy(action=CATCH_UP)
    odd = DOWN_AT + 7 * SECOND
    decision = judge(MINUTELY, policy, next_run_at=odd, now=odd + 2 * MINUTE)
    expected = [odd, DOWN_AT + MINUTE, DOWN_AT + 2 * MINUTE]
    assert expected == [fire.at for fire in decision.fires]


@settings(max_examples=150, deadline=None, database=None)
@given(
    every=st.integers(1, 600),
    outage=st.integers(0, 3000),
    threshold=st.integers(1, 300),
    window=st.none() | st.integers(1, 2000),
    action=st.sampled_from(MisfireAction),
    cap=st.integers(1, 20),
    left=st.none() | st.integers(1, 30),
)
def test_every_fire_gets_exactly_one_answer(
    every: int,
    outage: int,
    threshold: int,
    window: int | None,
    action: MisfireAction,
    cap: int,
    left: int | None,
) -> None:
    rule = bounded_rule(Schedule(spec=IntervalSpec(every=every * SECOND)), anchor=DOWN_AT)
    policy = MisfirePolicy(
        action=action,
        threshold=threshold * SECOND,
        window=None if window is None else window * SECOND,
        max_catch_up=cap,
    )
    now = DOWN_AT + outage * SECOND
    fired: list[Instant] = []
    skipped: list[Instant] = []
    at: Instant | None = DOWN_AT
    while at is not None and at <= now:
        decision = judge(rule, policy, next_run_at=at, now=now, fires_left=left, regular_max=50)
        fired += [fire.at for fire in decision.fires]
        for skip in decision.skips:
            skipped += range(skip.first, skip.last + 1, every * SECOND)
        assert decision.next_run_at is not None
        assert decision.next_run_at > at
        at = decision.next_run_at
    assert [*range(DOWN_AT, now + 1, every * SECOND)] == sorted(fired + skipped)
    assert fired == sorted(fired)
