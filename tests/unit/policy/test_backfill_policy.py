"""What a step of a backfill makes, and when the next one is due."""

import pytest
from fencepost_server.clock import HOUR, SECOND
from fencepost_server.domain.schedule import IntervalSpec, Schedule
from fencepost_server.policy.backfill import (
    STEP_FIRES_MAX,
    BackfillBounds,
    ExistingRun,
    backfill_rule,
    fires_of,
    made_per_step,
    next_step_at,
    plan_step,
)

from tests.factories import NOON, every

FIRES = [NOON + number * HOUR for number in range(6)]
BOUNDS = BackfillBounds(next_run_at=None, floor=0, created_at=0)


def test_runs_that_exist_are_left_alone_and_expired_ones_replaced() -> None:
    existing = {
        FIRES[0]: ExistingRun(created_at=NOON - 1, is_expired=False),
        FIRES[1]: ExistingRun(created_at=NOON + 1, is_expired=False),
        FIRES[2]: ExistingRun(created_at=NOON - 1, is_expired=True),
    }
    plan = plan_step(FIRES, existing, BOUNDS, asked_at=NOON, make_max=100)
    assert plan.make == FIRES[2:]
    assert plan.replace == [FIRES[2]]
    # Only what was made after the question had matched.
    assert plan.unchanged == 1
    assert (plan.position, plan.is_end) == (FIRES[-1], True)


def test_a_step_ends_where_it_has_made_enough() -> None:
    plan = plan_step(FIRES, {}, BOUNDS, asked_at=NOON, make_max=2)
    assert plan.make == FIRES[:2]
    assert (plan.position, plan.is_end) == (FIRES[1], False)


def test_a_full_look_is_not_the_end() -> None:
    fires = [NOON + number * SECOND for number in range(STEP_FIRES_MAX)]
    existing = {at: ExistingRun(created_at=0, is_expired=False) for at in fires}
    plan = plan_step(fires, existing, BOUNDS, asked_at=NOON, make_max=5)
    assert (plan.make, plan.unchanged, plan.is_end) == ([], 0, False)
    assert plan.position == fires[-1]


def test_fires_of_the_scheduler_and_of_forgotten_history_are_not_made() -> None:
    bounds = BackfillBounds(next_run_at=FIRES[5], floor=FIRES[2], created_at=FIRES[1])
    plan = plan_step(FIRES, {}, bounds, asked_at=NOON, make_max=100)
    assert plan.too_old == [FIRES[1]]
    assert plan.make == [FIRES[0], *FIRES[2:5]]
    assert plan.unchanged == 1


@pytest.mark.parametrize(("rate", "made"), [(0.1, 1), (1.9, 1), (10, 10), (1000, 1000)])
def test_a_step_makes_a_seconds_worth(rate: float, made: int) -> None:
    assert made_per_step(rate) == made
    assert next_step_at(due_at=NOON, now=NOON, made=made, rate=rate) == NOON + int(
        made / rate * SECOND
    )


def test_a_late_step_makes_up_for_a_second_at_most() -> None:
    late = NOON + 10 * SECOND
    assert next_step_at(due_at=NOON, now=late, made=10, rate=10) == late
    slightly = NOON + SECOND // 2
    assert next_step_at(due_at=NOON, now=slightly, made=10, rate=10) == NOON + SECOND
    assert next_step_at(due_at=NOON, now=NOON, made=0, rate=10) == NOON


def test_intervals_without_anchor_go_on_backwards() -> None:
    rule = backfill_rule(every(HOUR), created_at=NOON, since=NOON - 3 * HOUR + 1, seed="")
    assert rule is not None
    assert list(fires_of(rule, since=NOON - 3 * HOUR + 1, until=NOON + 1)) == [
        NOON - 2 * HOUR,
        NOON - HOUR,
        NOON,
    ]
    anchored = Schedule(spec=IntervalSpec(every=HOUR, anchor=NOON))
    rule = backfill_rule(anchored, created_at=NOON, since=NOON - 3 * HOUR, seed="")
    assert rule is not None
    assert list(fires_of(rule, since=NOON - 3 * HOUR, until=NOON + 1)) == [NOON]


def test_intervals_after_completion_have_no_past() -> None:
    schedule = Schedule(spec=IntervalSpec(every=HOUR, after_completion=True))
    assert backfill_rule(schedule, created_at=NOON, since=NOON - HOUR, seed="") is None
