"""Zones come from the pinned data, and unknown ones are refused in words."""

import re
from datetime import UTC, datetime

import pytest
from fencepost_server.errors import InvalidSchedule
from fencepost_server.policy.zone import LAST_SECOND, load_zone, tzdata_version


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Europe/Nowhere", "use an IANA name"),
        ("europe/berlin", "did you mean 'Europe/Berlin'?"),
        ("+02:00", "offsets are not accepted"),
        ("UTC+2", "offsets are not accepted"),
        ("", "use an IANA name"),
        ("../../etc/passwd", "use an IANA name"),
        ("/etc/localtime", "use an IANA name"),
        ("Europe/Berlin\x00", "use an IANA name"),
        ("Europe", "use an IANA name"),
        ("x" * 40_000, "use an IANA name"),
    ],
)
def test_an_unknown_zone_is_refused(name: str, hint: str) -> None:
    with pytest.raises(InvalidSchedule, match="is not a known time zone") as caught:
        load_zone(name)
    assert hint in caught.value.message
    assert caught.value.field == "schedule.cron.time_zone"
    assert len(caught.value.message) < 300


def test_the_version_is_that_of_the_zone_data() -> None:
    assert re.fullmatch(r"20\d\d[a-z]", tzdata_version())


def test_a_stretch_knows_the_offsets_around_it() -> None:
    second = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp())
    stretch = load_zone("Europe/Berlin").stretch(second)
    assert (
        stretch.offset_before,
        stretch.offset,
        stretch.offset_after,
    ) == (3600, 7200, 3600)
    assert datetime(2026, 3, 29, 1, tzinfo=UTC).timestamp() == stretch.start
    assert datetime(2026, 10, 25, 1, tzinfo=UTC).timestamp() == stretch.end


def test_a_zone_without_changes_has_the_same_offset_everywhere() -> None:
    zone = load_zone("Asia/Kolkata")
    second = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())
    assert zone.changes(second, second + 3 * 366 * 86_400) == []
    assert zone.stretch(second).offset == 19_800


def test_changes_are_those_of_the_range() -> None:
    first = int(datetime(2025, 1, 1, tzinfo=UTC).timestamp())
    last = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())
    starts = [one.start for one in load_zone("Africa/Casablanca").changes(first, last)]
    expected = [datetime(2025, 2, 23, 2, tzinfo=UTC), datetime(2025, 4, 6, 2, tzinfo=UTC)]
    assert expected == [datetime.fromtimestamp(start, UTC) for start in starts]


def test_changes_end_with_the_calendar() -> None:
    zone = load_zone("Europe/Berlin")
    starts = [one.start for one in zone.changes(LAST_SECOND - 366 * 86_400, LAST_SECOND * 2)]
    assert [datetime.fromtimestamp(start, UTC).year for start in starts] == [9998, 9998]
