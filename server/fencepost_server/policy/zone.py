"""Time zones as stretches of constant UTC offset, from the pinned `tzdata` package.

The host's own zone files are never read: two servers with the same lock file agree.
"""

from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from zoneinfo import ZoneInfo

from fencepost_server.errors import InvalidSchedule
from fencepost_server.policy.zone_source import ZoneSource, pinned

DAY_SECONDS = 86_400

# Offsets are looked up between these UTC seconds only; datetime ends with year 9999.
FIRST_YEAR, LAST_YEAR = 1900, 9998
FIRST_SECOND = int(datetime(FIRST_YEAR, 1, 1, tzinfo=UTC).timestamp())
LAST_SECOND = int(datetime(LAST_YEAR + 1, 1, 1, tzinfo=UTC).timestamp()) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """UTC seconds [start, end) with one offset, and the offsets on both sides of it.

    An end that no transition makes (the search is bounded to about a year around) has the
    same offset on its far side.
    """

    start: int
    end: int
    offset: int
    offset_before: int
    offset_after: int


_NOTHING = Stretch(start=0, end=0, offset=0, offset_before=0, offset_after=0)


class Zone:
    """One zone, from `load_zone` or from zone data of one's own."""

    __slots__ = ("_info", "_recent", "name")

    def __init__(self, name: str, info: ZoneInfo) -> None:
        self.name = name
        self._info = info
        # Nearly all questions are about now, so the last answer serves the next one.
        self._recent = _NOTHING

    def stretch(self, second: int) -> Stretch:
        """The stretch that holds a UTC second from FIRST_SECOND to LAST_SECOND."""
        recent = self._recent
        if recent.start <= second < recent.end:
            return recent
        self._recent = found = self._find(second)
        return found

    def changes(self, first: int, last: int) -> list[Stretch]:
        """The stretches that a change of offset within UTC seconds [first, last] begins."""
        found: list[Stretch] = []
        stretch = self.stretch(first)
        last = min(last, LAST_SECOND)
        while stretch.end <= last:
            stretch = self.stretch(stretch.end)
            if stretch.offset != stretch.offset_before:
                found.append(stretch)
        return found

    def _find(self, second: int) -> Stretch:
        year = datetime.fromtimestamp(second, UTC).year
        first, last = max(year - 1, FIRST_YEAR), min(year + 1, LAST_YEAR)
        around = [
            transition for y in range(first, last + 1) for transition in _transitions(self._info, y)
        ]
        index = bisect_right(around, second, key=lambda transition: transition[0])
        offset = _offset(self._info, second)
        start, end, before, after = _year_start(first), _year_start(last + 1), offset, offset
        if index > 0:
            start, before, _ = around[index - 1]
        if index < len(around):
            end, _, after = around[index]
        return Stretch(
            start=start, end=end, offset=offset, offset_before=before, offset_after=after
        )


def load_zone(
    name: str, *, field: str = "schedule.cron.time_zone", source: ZoneSource | None = None
) -> Zone:
    """The zone of that IANA name, of the pinned zone data unless `source` is another.

    Raises InvalidSchedule for an unknown name or an offset.
    """
    data = pinned() if source is None else source
    if name in data.names:
        return _load(data, name)
    shown = name if len(name) <= 64 else f"{name[:64]}…"
    near = _names_by_lower_case(data).get(name.lower()) if len(name) <= 64 else None
    if near is not None:
        hint = f"did you mean {near!r}?"
    elif any(character in "+-0123456789" for character in name[:64]):
        hint = 'UTC offsets are not accepted; use an IANA name such as "Europe/Paris"'
    else:
        hint = 'use an IANA name such as "Europe/Paris"'
    raise InvalidSchedule(
        f"time_zone: {shown!r} is not a known time zone (tzdata {data.version}); {hint}",
        field=field,
        time_zone=name,
        tzdata_version=data.version,
    )


def tzdata_version() -> str:
    """Version of the zone data in use, such as "2026b"."""
    return pinned().version


@lru_cache(maxsize=4)
def _names_by_lower_case(source: ZoneSource) -> dict[str, str]:
    return {name.lower(): name for name in source.names}


@lru_cache(maxsize=2048)
def _load(source: ZoneSource, name: str) -> Zone:
    return Zone(name, source.read(name))


@lru_cache(maxsize=8192)
def _transitions(info: ZoneInfo, year: int) -> tuple[tuple[int, int, int], ...]:
    """The year's changes of offset: (first UTC second with the new one, old, new)."""
    found: list[tuple[int, int, int]] = []
    low = _year_start(year) - 1
    last = _year_start(year + 1) - 1
    old = _offset(info, low)
    while low < last:
        high = min(low + DAY_SECONDS, last)
        new = _offset(info, high)
        if new != old:
            _bisect(info, low, old, high, new, found)
        low, old = high, new
    return tuple(found)


def _bisect(
    info: ZoneInfo, low: int, old: int, high: int, new: int, found: list[tuple[int, int, int]]
) -> None:
    if old == new:
        return
    if high - low == 1:
        found.append((high, old, new))
        return
    middle = (low + high) // 2
    offset = _offset(info, middle)
    _bisect(info, low, old, middle, offset, found)
    _bisect(info, middle, offset, high, new, found)


def _offset(info: ZoneInfo, second: int) -> int:
    offset = datetime.fromtimestamp(second, info).utcoffset()
    assert offset is not None, "a ZoneInfo always knows its offset"
    return offset.days * DAY_SECONDS + offset.seconds


def _year_start(year: int) -> int:
    return int(datetime(year, 1, 1, tzinfo=UTC).timestamp())
