"""Zone data beside the pinned one: read from folders and wheels, and compared."""

import os
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fencepost_server.clock import DAY, HOUR, SECOND, Instant, format_instant, from_datetime
from fencepost_server.domain.schedule import CronSpec
from fencepost_server.errors import InvalidSchedule
from fencepost_server.policy.cron import compile_cron
from fencepost_server.policy.zone import load_zone, tzdata_version
from fencepost_server.policy.zone_diff import ZoneState, differing_zones, moved_fires
from fencepost_server.policy.zone_source import NoZoneData, open_source, pinned

from tests.unit.policy.zone_files import compiled, write_zones

NOW = from_datetime(datetime(2026, 12, 1, 12, tzinfo=UTC))
# From 2027-01-10T00:00Z on, the zone is at +01:00 instead of UTC.
CHANGE = from_datetime(datetime(2027, 1, 10, tzinfo=UTC))
STILL = compiled([], first_offset=0, rule="UTC0")
MOVED = compiled([(CHANGE // SECOND, 3600)], first_offset=0, rule="<+01>-1")


def three_years(first: Instant = NOW) -> dict[str, Instant]:
    return {"first": first, "last": first + 3 * 366 * DAY}


def test_a_wheel_an_unpacked_package_and_a_bare_folder_are_read_alike(tmp_path: Path) -> None:
    folder = write_zones(tmp_path / "unpacked", {"Test/A": STILL, "B": MOVED})
    wheel = tmp_path / "tzdata-2031.3-py2.py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for path in folder.rglob("*"):
            file.write(path, path.relative_to(folder))
    bare = folder / "tzdata" / "zoneinfo"
    (bare / "zone.tab").write_text("not a zone")
    (bare / "leapseconds").write_text("nor this")

    found = [open_source(path) for path in (wheel, folder, folder / "tzdata", bare)]

    assert [one.version for one in found] == ["2031c", "2031c", "2031c", "unknown"]
    assert {one.names for one in found} == {frozenset({"Test/A", "B"})}
    assert {one.content("B") for one in found} == {MOVED}


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [("+VERSION", "2030e\n", "2030e"), ("tzdata.zi", "# version 2029b\nR a 1 2\n", "2029b")],
)
def test_a_systems_folder_tells_its_version(
    tmp_path: Path, name: str, text: str, version: str
) -> None:
    bare = write_zones(tmp_path, {"Test/A": STILL}) / "tzdata" / "zoneinfo"
    (bare / name).write_text(text)
    assert open_source(bare).version == version


def test_a_path_without_zones_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no zip")
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path, "no compiled zones"),
        (text, "not a wheel"),
        (tmp_path / "none", "does not exist"),
    ):
        with pytest.raises(NoZoneData, match=words):
            open_source(path)


def test_the_pinned_data_is_left_alone_by_other_data(tmp_path: Path) -> None:
    before = load_zone("UTC"), tzdata_version(), pinned().names
    source = open_source(write_zones(tmp_path, {"UTC": MOVED, "Test/New": STILL}))

    other = load_zone("UTC", source=source)

    assert other.stretch(CHANGE // SECOND + 1).offset == 3600
    assert load_zone("UTC").stretch(CHANGE // SECOND + 1).offset == 0
    assert (load_zone("UTC"), tzdata_version(), pinned().names) == before
    with pytest.raises(InvalidSchedule, match=f"tzdata {tzdata_version()}"):
        load_zone("Test/New")
    with pytest.raises(InvalidSchedule, match=r"did you mean 'Test/New'\?") as caught:
        load_zone("test/new", source=source)
    assert caught.value.metadata["tzdata_version"] == "2031c"


def test_a_rule_is_compiled_on_other_data_if_it_is_named(tmp_path: Path) -> None:
    source = open_source(write_zones(tmp_path, {"UTC": MOVED}))
    spec = CronSpec(expressions=("0 9 * * *",))
    here, there = compile_cron(spec), compile_cron(spec, zones=source)
    assert here.next_after(CHANGE) == CHANGE + 9 * HOUR
    assert there.next_after(CHANGE) == CHANGE + 8 * HOUR


def test_equal_data_differs_in_nothing() -> None:
    assert differing_zones(pinned(), pinned(), **three_years()) == []


def test_zones_that_differ_come_with_when_and_how(tmp_path: Path) -> None:
    old = open_source(write_zones(tmp_path / "old", {"A": STILL, "B": STILL, "Gone": STILL}))
    new = open_source(write_zones(tmp_path / "new", {"A": STILL, "B": MOVED, "New": MOVED}))

    found = differing_zones(old, new, **three_years())

    assert [(one.name, one.state) for one in found] == [
        ("B", ZoneState.CHANGED),
        ("Gone", ZoneState.REMOVED),
        ("New", ZoneState.ADDED),
    ]
    (span,) = found[0].spans
    assert (span.start, span.offset_before, span.offset_after) == (CHANGE, 0, 3600)
    assert span.until >= NOW + 3 * 366 * DAY
    assert differing_zones(old, new, first=NOW, last=CHANGE - SECOND)[0].name == "Gone"


def test_moved_fires_are_paired_by_their_local_time(tmp_path: Path) -> None:
    old = open_source(write_zones(tmp_path / "old", {"Test/A": STILL}))
    new = open_source(write_zones(tmp_path / "new", {"Test/A": MOVED}))

    def moved(expression: str, last: Instant) -> list[tuple[str | None, str | None]]:
        spec = CronSpec(expressions=(expression,), time_zone="Test/A")
        found = moved_fires(spec, seed="", old=old, new=new, first=NOW, last=last)
        return [
            (
                None if one.before is None else format_instant(one.before),
                None if one.after is None else format_instant(one.after),
            )
            for one in found
        ]

    assert moved("0 9 * * 1", CHANGE + 9 * DAY) == [
        ("2027-01-11T09:00:00Z", "2027-01-11T08:00:00Z"),
        ("2027-01-18T09:00:00Z", "2027-01-18T08:00:00Z"),
    ]
    # 00:30 on the night of the change is jumped over and fires at the first instant after.
    assert moved("30 0 10 1 *", CHANGE + DAY) == [
        (None, "2027-01-10T00:00:00Z"),
        ("2027-01-10T00:30:00Z", None),
    ]
    assert moved("*/20 * * * *", CHANGE + 90 * DAY) == []
    assert moved("0 9 * * 1", CHANGE - DAY) == []
