"""An explanation tells fires, gaps and clock changes as the evaluator has them."""

from datetime import UTC, datetime

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Instant, format_instant, from_datetime
from fencepost_server.domain.schedule import CronSpec, DstFoldPolicy, DstGapPolicy
from fencepost_server.policy.explain import NOTES_MAX, Explanation, explain

NOW = from_datetime(datetime(2026, 11, 30, 9, 8, tzinfo=UTC))


def explained(
    *expressions: str,
    tz: str = "Europe/Berlin",
    gap: DstGapPolicy = DstGapPolicy.RUN_AFTER_GAP,
    fold: DstFoldPolicy = DstFoldPolicy.FIRST,
    now: Instant = NOW,
    seed: str = "",
) -> Explanation:
    spec = CronSpec(expressions=expressions, time_zone=tz, dst_gap=gap, dst_fold=fold)
    return explain(spec, now=now, count=3, seed=seed)


def changed_gaps(found: Explanation) -> list[int]:
    return [gap.length for gap in found.gaps.changed]


def test_a_weekday_rule_has_gaps_of_a_day_and_of_a_weekend() -> None:
    found = explained("0 9 * * 1-5")
    assert [format_instant(one.at) for one in found.fires] == [
        "2026-12-01T08:00:00Z",
        "2026-12-02T08:00:00Z",
        "2026-12-03T08:00:00Z",
    ]
    assert found.gaps.smallest is not None
    assert found.gaps.largest is not None
    assert (found.gaps.smallest.length, found.gaps.largest.length) == (DAY, 3 * DAY)
    assert changed_gaps(found) == [71 * HOUR, 73 * HOUR] * 2
    assert [change.notes for change in found.changes] == [[], [], [], []]


def test_the_utc_time_of_the_same_wall_time_is_told_for_each_change() -> None:
    found = explained("0 9 * * 1-5")
    assert [
        (
            format_instant(change.first_fire or 0),
            change.utc_before // 3600,
            change.utc_after // 3600,
        )
        for change in found.changes[:2]
    ] == [("2027-03-29T07:00:00Z", 8, 7), ("2027-11-01T08:00:00Z", 7, 8)]


@pytest.mark.parametrize(
    ("gap", "fold", "gaps"),
    [
        (DstGapPolicy.RUN_AFTER_GAP, DstFoldPolicy.FIRST, [23 * 60 + 30, 23 * 60 + 30, 25 * 60]),
        (DstGapPolicy.RUN_AFTER_GAP, DstFoldPolicy.LAST, [23 * 60 + 30, 23 * 60 + 30, 25 * 60]),
        (DstGapPolicy.SKIP, DstFoldPolicy.FIRST, [47 * 60, 25 * 60]),
        (DstGapPolicy.SKIP, DstFoldPolicy.BOTH, [47 * 60, 60]),
    ],
)
def test_a_time_in_the_skipped_hour_changes_the_gaps_by_policy(
    gap: DstGapPolicy, fold: DstFoldPolicy, gaps: list[int]
) -> None:
    found = explained("30 2 * * *", gap=gap, fold=fold)
    assert [length // MINUTE for length in changed_gaps(found)] == gaps * 2
    assert found.gaps.smallest == found.gaps.largest or found.gaps.smallest is not None
    assert {found.gaps.smallest and found.gaps.smallest.length} == {DAY}


def test_every_change_says_what_the_policies_make_of_it() -> None:
    found = explained("30 2 * * *", gap=DstGapPolicy.SKIP, fold=DstFoldPolicy.LAST)
    forward, back = found.changes[:2]
    assert [note.note for note in forward.notes] == [
        "2027-03-28T02:30:00 does not exist here: clocks jump over it, so it does not fire."
    ]
    assert [note.note.partition(": ")[2] for note in back.notes] == [
        "this is the first pass, only the other one fires.",
        "this is the last pass, the only one that fires.",
    ]


def test_times_beyond_a_few_are_counted() -> None:
    found = explained("* 2 * * *", fold=DstFoldPolicy.BOTH)
    back = found.changes[1]
    assert (len(back.notes), back.more) == (NOTES_MAX, 120 - NOTES_MAX)


def test_a_rule_on_elapsed_time_keeps_its_gaps() -> None:
    found = explained("*/20 * * * *")
    assert found.elapsed
    assert changed_gaps(found) == []
    assert all(not change.notes for change in found.changes)
    # But not where clocks change by half an hour.
    lord_howe = explained("0 * * * *", tz="Australia/Lord_Howe")
    assert changed_gaps(lord_howe) == [90 * MINUTE] * 4


def test_a_zone_that_stays_has_nothing_to_tell() -> None:
    found = explained("30 2 * * *", tz="Asia/Kolkata")
    assert (found.changes, found.gaps.changed) == ([], [])


def test_a_rare_rule_is_walked_for_years() -> None:
    found = explained("0 0 29 2 *")
    assert found.gaps.smallest is not None
    assert found.gaps.smallest.length == 1461 * DAY
    # Only the second of the four changes begins a half-year with a fire in it.
    assert [change.first_fire is None for change in found.changes] == [True, False, True, True]


def test_warnings_leave_out_what_the_changes_tell() -> None:
    found = explained("*/7 2 13 * 0")
    assert ["either" in text or "evenly" in text for text in found.warnings] == [True, True]
    assert any(change.notes for change in found.changes)


def test_a_rule_without_fires_says_why() -> None:
    # 2:30 on the last Sunday of March is jumped over in every year from 1996 on.
    found = explained("30 2 * 3 0L", gap=DstGapPolicy.SKIP)
    assert found.gaps.smallest is None
    assert found.warnings[0].startswith("It never fires: every time falls into an hour")
    ended = explained("0 0 * * *", now=from_datetime(datetime(9998, 12, 31, 23, 30, tzinfo=UTC)))
    assert ended.warnings[0].startswith("It does not fire again")


def test_hashed_fields_are_those_of_the_job() -> None:
    one, other = (explained("H H * * *", seed=seed) for seed in ("acme/a", "acme/b"))
    assert one.rule.fields[0].text != other.rule.fields[0].text
    assert one.fires[0].at % (60 * SECOND) == 0
