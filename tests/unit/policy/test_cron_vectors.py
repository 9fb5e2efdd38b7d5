"""The 382 recorded fire-time vectors, each a case of its own."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fencepost_server.clock import format_instant, from_datetime
from fencepost_server.domain.schedule import CronSpec, DstFoldPolicy, DstGapPolicy
from fencepost_server.policy.cron import CronRule, compile_cron
from fencepost_server.policy.cron_parse import parse_cron

from tests.unit.policy.posix_zone import zone_of_posix_rule

VECTORS = [
    json.loads(line)
    for line in Path(__file__).with_name("cron_vectors.jsonl").read_text("utf-8").splitlines()
]
GAPS = {"run_after": DstGapPolicy.RUN_AFTER_GAP, "skip": DstGapPolicy.SKIP}
# In the vectors, `second` is the last pass.
FOLDS = {
    "first": DstFoldPolicy.FIRST,
    "second": DstFoldPolicy.LAST,
    "both": DstFoldPolicy.BOTH,
}
# The vectors were computed from tzdata 2025b. Cuba has since decided to stay on summer time
# in November 2026, so newer data moves those fires; they are checked against the rule of
# their own time, which a POSIX string expresses.
CHANGED_SINCE = {"America/Havana": "CST5CDT,M3.2.0/0,M11.1.0/1"}


def rule_of(vector: dict[str, Any]) -> CronRule:
    spec = CronSpec(
        expressions=(vector["expr"],),
        time_zone=vector["tz"],
        dst_gap=GAPS[vector["gap"]],
        dst_fold=FOLDS[vector["fold"]],
    )
    if spec.time_zone in CHANGED_SINCE:
        zone = zone_of_posix_rule(spec.time_zone, CHANGED_SINCE[spec.time_zone])
        return CronRule(spec, zone, (parse_cron(vector["expr"]),))
    return compile_cron(spec)


def test_all_vectors_are_here() -> None:
    assert len(VECTORS) == 382


@pytest.mark.parametrize(
    "vector",
    VECTORS,
    ids=[f"{v['tz']} {v['expr']} {v['gap']} {v['fold']} {v['after']}" for v in VECTORS],
)
def test_vector(vector: dict[str, Any]) -> None:
    rule = rule_of(vector)
    at = from_datetime(datetime.fromisoformat(vector["after"]))
    fires: list[int] = []
    for _ in vector["fires"]:
        following = rule.next_after(at)
        assert following is not None
        fires.append(at := following)
    assert vector["fires"] == [format_instant(fire) for fire in fires]
    assert fires[-2::-1] == [rule.prev_before(fire) for fire in fires[:0:-1]]
    assert all(rule.matches(fire) for fire in fires)


def test_newer_zone_data_moves_the_fires_that_it_should_move() -> None:
    rule = compile_cron(CronSpec(expressions=("30 2 * * *",), time_zone="America/Havana"))
    after = from_datetime(datetime.fromisoformat("2026-11-01T12:00:00Z"))
    following = rule.next_after(after)
    assert following is not None
    assert format_instant(following) == "2026-11-02T06:30:00Z"
