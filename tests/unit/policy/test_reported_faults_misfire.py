"""Faults of catching up that users of other schedulers reported in public, a test for each
and for its family. What was reported stands in the comment above.
"""

import time
from datetime import datetime

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Duration, Instant, from_datetime
from fencepost_server.domain.schedule import (
    CronSpec,
    IntervalSpec,
    MisfireAction,
    MisfirePolicy,
    SkipReason,
    Spec,
)
from fencepost_server.policy.misfire import Judgement, judge
from fencepost_server.policy.schedule import Rule, compile_rule

NOON = from_datetime(datetime.fromisoformat("2026-06-01T12:00:00Z"))
MINUTELY = CronSpec(expressions=("* * * * *",))
RUN_ONCE, SKIP, CATCH_UP = MisfireAction.RUN_ONCE, MisfireAction.SKIP, MisfireAction.CATCH_UP


def compiled(spec: Spec) -> Rule:
    return compile_rule(spec, anchor=NOON)


def judged(
    policy: MisfirePolicy,
    *,
    first: Instant,
    now: Instant,
    spec: Spec = MINUTELY,
    reason: SkipReason = SkipReason.MISFIRE,
) -> Judgement:
    return judge(compiled(spec), policy, next_run_at=first, now=now, reason=reason)


def split(found: Judgement) -> tuple[list[Instant], list[Instant]]:
    """Caught-up fires and regular ones."""
    caught_up = [fire.at for fire in found.fires if fire.caught_up]
    return caught_up, [fire.at for fire in found.fires if not fire.caught_up]


def skipped(found: Judgement, spec: Spec = MINUTELY) -> int:
    """How many fires the stretches hold."""
    rule, count = compiled(spec), 0
    for stretch in found.skips:
        at: Instant | None = stretch.first
        while at is not None and at <= stretch.last:
            count += 1
            at = rule.next_after(at)
    return count


# sidekiq#4893, jobrunr#940, camunda#9680: after a sleep every missed tick was enqueued.
@pytest.mark.parametrize(
    ("policy", "late", "dropped"),
    [
        (MisfirePolicy(action=SKIP), [], 3),
        (MisfirePolicy(action=RUN_ONCE), [3], 2),
        (MisfirePolicy(action=CATCH_UP, max_catch_up=2), [2, 3], 1),
        (MisfirePolicy(action=CATCH_UP, max_catch_up=3), [1, 2, 3], 0),
    ],
    ids=["skip", "run once", "catch up two", "catch up three"],
)
def test_a_scheduler_that_slept_for_four_minutes(
    policy: MisfirePolicy, late: list[int], dropped: int
) -> None:
    # Stopped at 12:00:30, back at 12:04:30: 12:04 is late by less than the threshold.
    found = judged(policy, first=NOON + MINUTE, now=NOON + 4 * MINUTE + 30 * SECOND)
    caught_up, regular = split(found)
    assert caught_up == [NOON + minute * MINUTE for minute in late]
    assert regular == [NOON + 4 * MINUTE]
    assert skipped(found) == dropped
    assert found.next_run_at == NOON + 5 * MINUTE


OUTAGES = {
    "30 s": 30 * SECOND,
    "59 s": 59 * SECOND,
    "61 s": 61 * SECOND,
    "26 h": 26 * HOUR,
    "40 d": 40 * DAY,
}
SPECS: dict[str, Spec] = {
    "minutely": MINUTELY,
    "every second": CronSpec(expressions=("* * * * * *",)),
    "daily in Berlin": CronSpec(expressions=("30 2 * * *",), time_zone="Europe/Berlin"),
    "every 7 min": IntervalSpec(every=7 * MINUTE),
}


@pytest.mark.parametrize("outage", OUTAGES)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("action", MisfireAction)
def test_exact_counts_after_outages(outage: str, name: str, action: MisfireAction) -> None:
    spec, length = SPECS[name], OUTAGES[outage]
    policy = MisfirePolicy(action=action, max_catch_up=100)
    rule = compiled(spec)
    first = rule.next_after(NOON)
    assert first is not None
    now = NOON + length
    if first > now:
        assert judged(policy, first=first, now=now, spec=spec).fires == ()
        return
    # By arithmetic: every fire up to now, those later than the threshold are missed.
    missed, due = _counts(name, first, now)
    late = {RUN_ONCE: min(missed, 1), SKIP: 0, CATCH_UP: min(missed, 100)}[action]

    found = judged(policy, first=first, now=now, spec=spec)

    caught_up, regular = split(found)
    assert (len(caught_up), len(regular)) == (late, due - missed)
    assert caught_up + regular == sorted(set(caught_up + regular))
    if missed - late <= 100_000:
        assert skipped(found, spec) == missed - late
    else:
        # One stretch up to the fire before the oldest kept one, or all that was missed.
        (stretch,) = found.skips
        assert stretch.first == first
        assert stretch.last == first + (missed - late - 1) * SECOND
    assert found.next_run_at is not None
    assert found.next_run_at > now


def _counts(name: str, first: Instant, now: Instant) -> tuple[int, int]:
    """Fires before `now` minus the threshold, and fires up to `now`."""
    every = {
        "minutely": MINUTE,
        "every second": SECOND,
        "every 7 min": 7 * MINUTE,
        "daily in Berlin": DAY,
    }[name]
    # In June and July Berlin's clocks stay.
    missed = max(0, -((first - (now - MINUTE)) // every))
    return missed, (now - first) // every + 1


def test_misfires_of_a_night_with_a_clock_change_are_counted_by_the_rule() -> None:
    spec = CronSpec(expressions=("*/20 * * * *",), time_zone="Europe/Paris")
    start = from_datetime(datetime.fromisoformat("2026-10-24T22:00:00Z"))
    found = judged(MisfirePolicy(action=SKIP), first=start, now=start + 25 * HOUR, spec=spec)
    _, regular = split(found)
    # 75 of a day of 25 hours are missed; the one at its end is due now.
    assert (skipped(found, spec), regular) == (75, [start + 25 * HOUR])


# kubernetes#45825, #42649: after more than 100 missed slots the job never ran again.
@pytest.mark.parametrize("action", MisfireAction)
@pytest.mark.parametrize("minutes", [99, 100, 101, 4320, 60 * 24 * 365])
def test_too_many_missed_never_stop_a_job(action: MisfireAction, minutes: int) -> None:
    policy = MisfirePolicy(action=action)
    now = NOON + minutes * MINUTE + SECOND
    began = time.process_time()
    found = judged(policy, first=NOON, now=now, reason=SkipReason.PAUSED)
    assert time.process_time() - began < 0.1
    assert found.next_run_at == NOON + (minutes + 1) * MINUTE
    assert found.next_run_at - now < MINUTE
    assert len(found.fires) <= policy.max_catch_up + 2
    assert len(found.skips) <= 1
    assert all(stretch.reason is SkipReason.PAUSED for stretch in found.skips)


# temporal#4332: a short default window dropped work in silence.
@pytest.mark.parametrize("outage", [2 * MINUTE, 10 * MINUTE, DAY, 400 * DAY])
def test_without_a_policy_one_late_run_stands_for_all(outage: Duration) -> None:
    now = NOON + outage + SECOND
    found = judged(MisfirePolicy(), first=NOON, now=now)
    caught_up, regular = split(found)
    # The newest that is late; the one a second ago is regular.
    assert caught_up == [NOON + outage - MINUTE]
    assert regular == [NOON + outage]
    (stretch,) = found.skips
    assert (stretch.first, stretch.last) == (NOON, NOON + outage - 2 * MINUTE)
    assert stretch.stand_in == NOON + outage - MINUTE


@pytest.mark.parametrize("limit", [1, 2, 100, 1000])
def test_catching_up_is_bounded_whatever_was_missed(limit: int) -> None:
    policy = MisfirePolicy(action=CATCH_UP, max_catch_up=limit)
    found = judged(policy, first=NOON, now=NOON + 400 * DAY + SECOND)
    caught_up, _ = split(found)
    newest = NOON + 400 * DAY - MINUTE
    assert caught_up == [newest - back * MINUTE for back in reversed(range(limit))]


def test_a_window_drops_only_what_is_older_and_says_so() -> None:
    policy = MisfirePolicy(action=CATCH_UP, max_catch_up=1000, window=10 * MINUTE)
    found = judged(policy, first=NOON, now=NOON + HOUR)
    caught_up, _ = split(found)
    assert caught_up == [NOON + minute * MINUTE for minute in range(50, 59)]
    assert skipped(found) == 50
