"""Previews of every kind of schedule, with bounds and limits."""

from datetime import datetime

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, format_instant, from_datetime
from fencepost_server.domain.schedule import (
    CronSpec,
    DstGapPolicy,
    IntervalSpec,
    OnceSpec,
    Schedule,
    SkipReason,
)
from fencepost_server.policy.preview import preview

NOW = from_datetime(datetime.fromisoformat("2027-03-27T12:00:00Z"))
NIGHTLY = CronSpec(
    expressions=("30 2 * * *",), time_zone="Europe/Berlin", dst_gap=DstGapPolicy.SKIP
)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        pytest.param(
            Schedule(spec=CronSpec(expressions=("0 13 * * *",)), end_at=NOW + 2 * DAY),
            [NOW + HOUR, NOW + DAY + HOUR],
            id="cron until end_at",
        ),
        pytest.param(
            Schedule(
                spec=CronSpec(expressions=("@hourly",)),
                start_at=NOW + 3 * HOUR,
                end_at=NOW + 5 * HOUR,
            ),
            [NOW + 3 * HOUR, NOW + 4 * HOUR],
            id="cron from start_at",
        ),
        pytest.param(
            Schedule(spec=IntervalSpec(every=MINUTE), end_at=NOW + 3 * MINUTE),
            [NOW + MINUTE, NOW + 2 * MINUTE],
            id="interval",
        ),
        pytest.param(Schedule(spec=OnceSpec(at=NOW + DAY)), [NOW + DAY], id="once"),
        pytest.param(Schedule(spec=OnceSpec(at=NOW)), [], id="once: passed"),
    ],
)
def test_a_preview_ends_with_its_schedule(schedule: Schedule, expected: list[int]) -> None:
    found = preview(schedule, after=NOW, count=100, anchor=NOW)
    assert expected == [one.at for one in found]


def test_a_preview_shows_the_local_time_in_utc_where_there_is_no_zone() -> None:
    found = preview(Schedule(spec=IntervalSpec(every=SECOND)), after=NOW, count=1, anchor=NOW)
    assert found[0].local_time == "2027-03-27T12:00:01+00:00"


def test_skipped_fires_count_for_the_length_of_a_preview_but_not_for_the_limit() -> None:
    schedule = Schedule(spec=NIGHTLY)
    found = preview(schedule, after=NOW, count=2, anchor=NOW)
    assert [one.skip_reason for one in found] == [SkipReason.DST_GAP, None]
    found = preview(schedule, after=NOW, count=100, anchor=NOW, fires_left=2)
    expected = ["2027-03-28T01:00:00Z", "2027-03-29T00:30:00Z", "2027-03-30T00:30:00Z"]
    assert expected == [format_instant(one.at) for one in found]
