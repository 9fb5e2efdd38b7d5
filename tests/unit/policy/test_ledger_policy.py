"""Entries of a ledger: cut out of stretches, in order, each fire in exactly one."""

import random
from collections import Counter
from datetime import UTC, datetime

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Instant, from_datetime
from fencepost_server.domain.fire import Fire, FireDisposition
from fencepost_server.domain.schedule import (
    CronSpec,
    DstFoldPolicy,
    DstGapPolicy,
    Schedule,
    SkipReason,
)
from fencepost_server.policy.clock_changes import clock_change_fires
from fencepost_server.policy.cron import Planned
from fencepost_server.policy.ledger import (
    CAPPED_DETAIL,
    COUNT_MAX,
    Stretch,
    Suppressed,
    count_between,
    counted,
    lay_out,
    local_time,
)
from fencepost_server.policy.schedule import IntervalRule, bounded_rule, cron_rule

from tests.factories import NOON, cron, every

RULE = IntervalRule(every=MINUTE, anchor=NOON)


def _stretch(first: int, last: int, reason: SkipReason = SkipReason.MISFIRE) -> Stretch:
    """Minutes after noon."""
    return Stretch(
        first=NOON + first * MINUTE,
        last=NOON + last * MINUTE,
        disposition=FireDisposition.SKIPPED,
        reason=reason,
        version=1,
    )


def _run(minute: int) -> Fire:
    at = NOON + minute * MINUTE
    return Fire(first=at, last=at, disposition=FireDisposition.BACKFILLED, version=1, run_at=at)


def _gap(minute: int, local: str = "02:30") -> Suppressed:
    planned = Planned(
        at=NOON + minute * MINUTE, local_time=local, skip_reason=SkipReason.DST_GAP, note="gone"
    )
    return Suppressed(planned=planned, version=1)


def _shown(
    runs: list[Fire],
    stretches: list[Stretch],
    suppressed: list[Suppressed],
    first: int = -1000,
    until: int = 1000,
) -> list[tuple[int, int, str, int]]:
    """First and last minute, reason or disposition, and count of each entry."""
    entries = lay_out(
        runs,
        stretches,
        suppressed,
        lambda version, at: RULE,
        first=NOON + first * MINUTE,
        until=NOON + until * MINUTE,
    )
    return [
        (
            (fire.first - NOON) // MINUTE,
            (fire.last - NOON) // MINUTE,
            fire.disposition.name if fire.reason is None else fire.reason.name,
            counted(fire, RULE).count,
        )
        for fire in entries
    ]


def test_runs_are_cut_out_of_a_stretch() -> None:
    assert _shown([_run(0), _run(3), _run(4), _run(9)], [_stretch(0, 9)], []) == [
        (9, 9, "BACKFILLED", 1),
        (5, 8, "MISFIRE", 4),
        (4, 4, "BACKFILLED", 1),
        (3, 3, "BACKFILLED", 1),
        (1, 2, "MISFIRE", 2),
        (0, 0, "BACKFILLED", 1),
    ]


def test_what_was_suppressed_splits_a_stretch_and_comes_after_a_fire_of_its_instant() -> None:
    assert _shown([], [_stretch(0, 9)], [_gap(5)]) == [
        (5, 9, "MISFIRE", 5),
        (5, 5, "DST_GAP", 1),
        (0, 4, "MISFIRE", 5),
    ]


def test_neighbours_that_were_suppressed_are_one_entry() -> None:
    suppressed = [_gap(5, "02:00"), _gap(5, "02:10"), _gap(6, "02:20"), _gap(9, "02:30")]
    assert _shown([_run(8)], [], suppressed) == [
        (9, 9, "DST_GAP", 1),
        (8, 8, "BACKFILLED", 1),
        (5, 6, "DST_GAP", 3),
    ]


def test_bounds_cut_stretches() -> None:
    assert _shown([], [_stretch(0, 9)], [], first=2, until=6) == [(2, 5, "MISFIRE", 4)]


@pytest.mark.parametrize("seed", range(30))
def test_every_fire_is_in_one_entry(seed: int) -> None:
    chance = random.Random(seed)
    stretches, at = [], 0
    for _ in range(chance.randint(1, 6)):
        first = at + chance.randint(0, 5)
        at = first + chance.randint(0, 30)
        stretches.append(
            _stretch(first, at, chance.choice([SkipReason.MISFIRE, SkipReason.OVERLAP]))
        )
        at += 1
    runs = [_run(minute) for minute in sorted(chance.sample(range(at + 5), chance.randint(0, 8)))]
    suppressed = [_gap(minute) for minute in chance.sample(range(at + 5), chance.randint(0, 4))]
    shown = _shown(runs, stretches, suppressed)
    seen: Counter[int] = Counter()
    for first, last, word, count in shown:
        if word != "DST_GAP":
            assert count == last - first + 1
            seen.update(range(first, last + 1))
    in_stretches = {
        minute
        for stretch in stretches
        for minute in range((stretch.first - NOON) // MINUTE, (stretch.last - NOON) // MINUTE + 1)
    }
    assert seen == Counter(in_stretches | {(run.first - NOON) // MINUTE for run in runs})
    assert sum(count for *_, word, count in shown if word == "DST_GAP") == len(suppressed)
    order = [(last, word != "DST_GAP") for _, last, word, _ in shown]
    assert order == sorted(order, reverse=True)


def test_counting_stops_at_its_cap() -> None:
    rule = cron_rule(CronSpec(expressions=("* * * * *",)))
    last = NOON + (COUNT_MAX - 1) * MINUTE
    assert count_between(rule, NOON, last) == COUNT_MAX
    assert count_between(rule, NOON, last - MINUTE) == COUNT_MAX - 1
    assert count_between(rule, NOON, NOON + 400 * DAY) == COUNT_MAX
    fire = Fire(first=NOON, last=NOON + 400 * DAY, disposition=FireDisposition.SKIPPED, version=1)
    assert (counted(fire, rule).count, counted(fire, rule).detail) == (COUNT_MAX, CAPPED_DETAIL)


def test_ends_that_the_rule_does_not_know_count() -> None:
    rule = cron_rule(CronSpec(expressions=("0 * * * *",)))
    assert count_between(rule, NOON + 1 * SECOND, NOON + 2 * HOUR + SECOND) == 4
    fire = Fire(first=NOON, last=NOON + HOUR, disposition=FireDisposition.SKIPPED, version=1)
    assert counted(fire, None).count == 2
    assert "no longer kept" in counted(fire, None).detail


def test_local_times_are_those_of_the_zone() -> None:
    berlin = bounded_rule(cron("0 9 * * *", "Europe/Berlin"), anchor=NOON)
    assert local_time(NOON, berlin) == "2026-12-01T13:00:00+01:00"
    assert local_time(NOON, None) == "2026-12-01T12:00:00+00:00"


def _at(*parts: int) -> Instant:
    return from_datetime(datetime(*parts, tzinfo=UTC))  # type: ignore[misc,arg-type]


@pytest.mark.parametrize("zone", ["Europe/Paris", "Australia/Lord_Howe", "America/St_Johns", "UTC"])
@pytest.mark.parametrize("gap", list(DstGapPolicy))
@pytest.mark.parametrize("fold", list(DstFoldPolicy))
def test_clock_changes_are_found_without_looking_at_every_fire(
    zone: str, gap: DstGapPolicy, fold: DstFoldPolicy
) -> None:
    spec = CronSpec(
        expressions=("*/15 0-3 * * *", "7 2 * * *"), time_zone=zone, dst_gap=gap, dst_fold=fold
    )
    first, until = _at(2027, 1, 1), _at(2028, 1, 1)
    every_fire = [
        one
        for one in cron_rule(spec).planned_between(first, until)
        if one.note or one.skip_reason is not None
    ]
    assert clock_change_fires(Schedule(spec=spec), first=first, until=until) == every_fire


def test_schedules_on_elapsed_time_have_no_clock_changes() -> None:
    first, until = _at(2027, 1, 1), _at(2028, 1, 1)
    hourly = cron("30 * * * *", "Europe/Paris")
    assert clock_change_fires(every(HOUR), first=first, until=until) == []
    assert clock_change_fires(hourly, first=first, until=until) == []
