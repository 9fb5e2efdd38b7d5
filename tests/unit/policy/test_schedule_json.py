"""Schedules survive their JSON form, and their numbers are the contract's."""

import json
from enum import IntEnum

import pytest
from fencepost.v1 import schedule_pb2
from fencepost_server.clock import HOUR, SECOND
from fencepost_server.domain.schedule import (
    CronSpec,
    DstFoldPolicy,
    DstGapPolicy,
    IntervalSpec,
    MisfireAction,
    MisfirePolicy,
    OnceSpec,
    OverlapPolicy,
    Schedule,
    SkipReason,
    spec_from_json,
    spec_to_json,
)

SCHEDULES = [
    Schedule(spec=OnceSpec(at=5)),
    Schedule(spec=IntervalSpec(every=SECOND), start_at=0, end_at=HOUR, max_fires=2**62),
    Schedule(spec=IntervalSpec(every=SECOND, anchor=7), overlap=OverlapPolicy.ALLOW),
    Schedule(
        spec=CronSpec(
            expressions=("H * * * *", "0 9 * * MON#1"),
            time_zone="Europe/Berlin",
            dst_gap=DstGapPolicy.SKIP,
            dst_fold=DstFoldPolicy.BOTH,
        ),
        misfire=MisfirePolicy(
            action=MisfireAction.CATCH_UP, threshold=HOUR, window=2 * HOUR, max_catch_up=7
        ),
    ),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule.spec).__name__)
def test_a_schedule_survives_its_json_form(schedule: Schedule) -> None:
    text = json.dumps(schedule.to_json())
    assert schedule == Schedule.from_json(json.loads(text))
    assert text == json.dumps(Schedule.from_json(json.loads(text)).to_json())
    assert schedule.spec == spec_from_json(spec_to_json(schedule.spec))


def test_an_unknown_time_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="not a time rule"):
        spec_from_json({"lunar": {}})


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (DstGapPolicy, schedule_pb2.DstGapPolicy, "DST_GAP_POLICY_"),
        (DstFoldPolicy, schedule_pb2.DstFoldPolicy, "DST_FOLD_POLICY_"),
        (MisfireAction, schedule_pb2.MisfireAction, "MISFIRE_ACTION_"),
        (OverlapPolicy, schedule_pb2.OverlapPolicy, "OVERLAP_POLICY_"),
        (SkipReason, schedule_pb2.SkipReason, "SKIP_REASON_"),
    ],
)
def test_numbers_and_names_are_those_of_the_contract(
    ours: type[IntEnum], theirs: object, prefix: str
) -> None:
    descriptor = theirs.DESCRIPTOR  # type: ignore[attr-defined]
    expected = {value.name.removeprefix(prefix): value.number for value in descriptor.values}
    expected.pop("UNSPECIFIED")
    assert expected == {one.name: int(one) for one in ours}
