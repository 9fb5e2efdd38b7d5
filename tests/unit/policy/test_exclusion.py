"""Excluded fires among those that are late, regular, or count from an end."""

from fencepost_server.clock import HOUR, MINUTE, SECOND
from fencepost_server.domain.schedule import (
    IntervalSpec,
    MisfireAction,
    Schedule,
    SkipReason,
)
from fencepost_server.policy.due import Due, judge_due, pending_skipped
from fencepost_server.policy.exclusion import Exclusions, Span, excluded_stretches
from fencepost_server.policy.misfire import Judgement
from fencepost_server.policy.schedule import BoundedRule, bounded_rule

from tests.factories import NOON, every, schedule

# Minutes 10 to 19, and 25, after noon.
EXCLUDED = Exclusions(
    [
        Span(start=NOON + 10 * MINUTE, until=NOON + 15 * MINUTE),
        Span(start=NOON + 15 * MINUTE, until=NOON + 20 * MINUTE),
        Span(start=NOON + 25 * MINUTE, until=NOON + 26 * MINUTE),
    ]
)


def _rule(wanted: Schedule) -> BoundedRule:
    return bounded_rule(wanted, anchor=NOON)


def _judge(wanted: Schedule, minutes: int) -> Judgement:
    at = Due(next_run_at=NOON, now=NOON + minutes * MINUTE)
    return judge_due(_rule(wanted), wanted, at, EXCLUDED)


def _told(judgement: Judgement) -> tuple[list[int], list[tuple[int, int, str]], int | None]:
    following = judgement.next_run_at
    return (
        [(fire.at - NOON) // MINUTE for fire in judgement.fires],
        [
            ((each.first - NOON) // MINUTE, (each.last - NOON) // MINUTE, each.reason.name)
            for each in judgement.skips
        ],
        None if following is None else (following - NOON) // MINUTE,
    )


def test_touching_spans_are_one() -> None:
    assert len(EXCLUDED.spans) == 2
    found = excluded_stretches(_rule(every()), EXCLUDED, first=NOON, last=NOON + HOUR)
    assert [(each.first - NOON, each.last - NOON) for each in found] == [
        (10 * MINUTE, 19 * MINUTE),
        (25 * MINUTE, 25 * MINUTE),
    ]


def test_the_newest_that_is_left_stands_in_and_each_fire_has_one_reason() -> None:
    judged = _judge(every(threshold=30 * SECOND), 25)
    assert _told(judged) == (
        [24],
        [(0, 9, "MISFIRE"), (10, 19, "EXCLUDED"), (20, 23, "MISFIRE"), (25, 25, "EXCLUDED")],
        26,
    )
    assert judged.skips[0].stand_in == judged.fires[0].at


def test_catch_up_counts_only_what_is_left() -> None:
    wanted = every(misfire=MisfireAction.CATCH_UP, threshold=30 * SECOND, max_catch_up=6)
    # Six that are late, and minute 22, which is not.
    assert _told(_judge(wanted, 22)) == (
        [6, 7, 8, 9, 20, 21, 22],
        [(0, 5, "MISFIRE"), (10, 19, "EXCLUDED")],
        23,
    )


def test_an_excluded_fire_alone_leaves_the_next_one_to_be_judged_when_due() -> None:
    at = Due(next_run_at=NOON + 10 * MINUTE, now=NOON + 10 * MINUTE)
    judged = judge_due(_rule(every()), every(), at, EXCLUDED)
    # Minute 11 is excluded too, but until it is due the calendar may change.
    assert _told(judged) == ([], [(10, 10, "EXCLUDED")], 11)


def test_what_follows_the_last_fire_of_a_schedule_is_not_judged() -> None:
    at = Due(next_run_at=NOON + 9 * MINUTE, now=NOON + 30 * MINUTE, fires_left=1)
    wanted = every(threshold=HOUR)
    assert _told(judge_due(_rule(wanted), wanted, at, EXCLUDED)) == ([9], [], 10)


def test_paused_fires_that_are_dropped_keep_the_stronger_reason() -> None:
    at = Due(next_run_at=NOON, now=NOON + 21 * MINUTE, reason=SkipReason.PAUSED)
    assert _told(pending_skipped(_rule(every()), at, EXCLUDED)) == (
        [],
        [(0, 9, "PAUSED"), (10, 19, "EXCLUDED"), (20, 21, "PAUSED")],
        22,
    )


def test_an_interval_after_completion_counts_from_the_excluded_fire() -> None:
    wanted = schedule(IntervalSpec(every=MINUTE, after_completion=True))
    at = Due(next_run_at=NOON + 12 * MINUTE, now=NOON + 13 * MINUTE)
    rule = bounded_rule(wanted, anchor=at.next_run_at)
    assert _told(judge_due(rule, wanted, at, EXCLUDED)) == ([], [(12, 13, "EXCLUDED")], 14)
    late = Due(next_run_at=NOON + 12 * MINUTE, now=NOON + 22 * MINUTE)
    assert _told(judge_due(rule, wanted, late, EXCLUDED)) == ([20], [(12, 19, "EXCLUDED")], None)
