"""Which local wall-clock seconds one cron expression admits, found by jumps over bit sets.

Knows no time zone: seconds count from 1970-01-01T00:00:00 local time. `cron` maps them to
instants.
"""

from dataclasses import dataclass
from datetime import date

DAY_SECONDS = 86_400
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
# The longest wait between two dates that a possible expression admits is 40 years: a given
# weekday on 29 February around a century without a leap day.
_YEARS_MAX = 41


@dataclass(frozen=True, slots=True, kw_only=True)
class CronFields:
    """A parsed expression. Bit n of a set admits value n; Sunday is 0."""

    seconds: int
    minutes: int
    hours: int
    months: int
    days: int
    # Days before the last of the month: 0 is L, 3 is L-3.
    days_from_end: frozenset[int]
    # Days whose nearest weekday is meant (15W), and whether LW is.
    near_weekdays: frozenset[int]
    last_weekday: bool
    weekdays: int
    # Weekdays whose last in the month is meant (5L), and (weekday, n) of MON#1.
    last_of_month: frozenset[int]
    nth_of_month: frozenset[tuple[int, int]]
    # Whether the field restricts: both do, then a day needs to match only one of them.
    days_restrict: bool
    weekdays_restrict: bool
    # The expression in normal form: upper case, single blanks, numbers, H resolved.
    text: str

    @property
    def every_hour(self) -> bool:
        """Whether the hour field admits every hour, so that it runs on elapsed time."""
        return self.hours == (1 << 24) - 1

    def can_fire(self) -> bool:
        """Whether any date matches. Each length of month meets each first weekday."""
        return any(
            day_bits(self, length, first)
            for month in range(1, 13)
            if self.months >> month & 1
            for length in ((28, 29) if month == 2 else (_month_length(2025, month),))
            for first in range(7)
        )


class LocalTimes:
    """Finds the local seconds that an expression admits."""

    __slots__ = ("_bits", "_fields", "_first", "_hours", "_last", "_minutes", "_month", "_seconds")

    def __init__(self, fields: CronFields) -> None:
        self._fields = fields
        self._hours, self._minutes, self._seconds = fields.hours, fields.minutes, fields.seconds
        self._first = _low(self._hours), _low(self._minutes), _low(self._seconds)
        self._last = _high(self._hours), _high(self._minutes), _high(self._seconds)
        # Day sets by length and first weekday of a month: at most 28 of them.
        self._bits: dict[tuple[int, int], int] = {}
        # The month last looked at: its first day, the day after it, its day set.
        self._month = (0, 0, 0)

    def at_or_after(self, local: int) -> int | None:
        """The first admitted second not before `local`; None when the calendar ends."""
        day, second = divmod(local, DAY_SECONDS)
        start, end, bits = self._month
        if not start <= day < end:
            start, end, bits = self._load(day)
        if bits >> (day - start) & 1:
            found = self._time_at_or_after(second)
            if found >= 0:
                return day * DAY_SECONDS + found
        day += 1
        for _ in range(_YEARS_MAX * 12):
            if not start <= day < end:
                if not _in_calendar(day):
                    return None
                start, end, bits = self._load(day)
            rest = bits >> (day - start)
            if rest:
                hour, minute, second = self._first
                day += _low(rest)
                return day * DAY_SECONDS + hour * 3600 + minute * 60 + second
            day = end
        return None

    def at_or_before(self, local: int) -> int | None:
        """The last admitted second not after `local`; None when the calendar begins."""
        day, second = divmod(local, DAY_SECONDS)
        start, end, bits = self._month
        if not start <= day < end:
            start, end, bits = self._load(day)
        if bits >> (day - start) & 1:
            found = self._time_at_or_before(second)
            if found >= 0:
                return day * DAY_SECONDS + found
        day -= 1
        for _ in range(_YEARS_MAX * 12):
            if not start <= day < end:
                if not _in_calendar(day):
                    return None
                start, end, bits = self._load(day)
            rest = _up_to(bits, day - start)
            if rest:
                hour, minute, second = self._last
                return (start + _high(rest)) * DAY_SECONDS + hour * 3600 + minute * 60 + second
            day = start - 1
        return None

    def _time_at_or_after(self, second_of_day: int) -> int:
        """The first admitted second of a day not before this one; -1 if there is none."""
        hour, rest = divmod(second_of_day, 3600)
        minute, second = divmod(rest, 60)
        _, first_minute, first_second = self._first
        if self._hours >> hour & 1:
            if self._minutes >> minute & 1:
                rest = self._seconds >> second
                if rest:
                    return second_of_day + _low(rest)
            rest = self._minutes >> (minute + 1)
            if rest:
                return hour * 3600 + (minute + 1 + _low(rest)) * 60 + first_second
        rest = self._hours >> (hour + 1)
        if rest:
            return (hour + 1 + _low(rest)) * 3600 + first_minute * 60 + first_second
        return -1

    def _time_at_or_before(self, second_of_day: int) -> int:
        """The last admitted second of a day not after this one; -1 if there is none."""
        hour, rest = divmod(second_of_day, 3600)
        minute, second = divmod(rest, 60)
        _, last_minute, last_second = self._last
        if self._hours >> hour & 1:
            if self._minutes >> minute & 1:
                rest = _up_to(self._seconds, second)
                if rest:
                    return hour * 3600 + minute * 60 + _high(rest)
            rest = _up_to(self._minutes, minute - 1)
            if rest:
                return hour * 3600 + _high(rest) * 60 + last_second
        rest = _up_to(self._hours, hour - 1)
        if rest:
            return _high(rest) * 3600 + last_minute * 60 + last_second
        return -1

    def _load(self, day: int) -> tuple[int, int, int]:
        """Remember and return the month of a day, with bit 0 for its first day."""
        first_date = date.fromordinal(day + _EPOCH_ORDINAL).replace(day=1)
        start = first_date.toordinal() - _EPOCH_ORDINAL
        length = _month_length(first_date.year, first_date.month)
        bits = 0
        if self._fields.months >> first_date.month & 1:
            key = length, first_date.isoweekday() % 7
            cached = self._bits.get(key)
            bits = cached if cached is not None else day_bits(self._fields, *key) >> 1
            self._bits[key] = bits
        self._month = found = (start, start + length, bits)
        return found


def day_bits(fields: CronFields, length: int, first_weekday: int) -> int:
    """The days a month admits, as bits 1 to 31, by its length and its first weekday."""
    by_date = _by_date(fields, length, first_weekday)
    by_weekday = _by_weekday(fields, length, first_weekday)
    if fields.days_restrict and fields.weekdays_restrict:
        return by_date | by_weekday
    return by_date & by_weekday


def _by_date(fields: CronFields, length: int, first_weekday: int) -> int:
    bits = _up_to(fields.days, length)
    for back in fields.days_from_end:
        if back < length:
            bits |= 1 << (length - back)
    for day in fields.near_weekdays:
        if day <= length:
            bits |= 1 << _nearest_weekday(day, length, first_weekday)
    if fields.last_weekday:
        bits |= 1 << _nearest_weekday(length, length, first_weekday)
    return bits


def _nearest_weekday(day: int, length: int, first_weekday: int) -> int:
    """The Monday-to-Friday day nearest to `day` that lies in the same month."""
    weekday = (first_weekday + day - 1) % 7
    if weekday == 6:
        return day - 1 if day > 1 else day + 2
    if weekday == 0:
        return day + 1 if day < length else day - 2
    return day


def _by_weekday(fields: CronFields, length: int, first_weekday: int) -> int:
    bits = 0
    for day in range(1, length + 1):
        weekday = (first_weekday + day - 1) % 7
        if (
            fields.weekdays >> weekday & 1
            or (weekday, (day - 1) // 7 + 1) in fields.nth_of_month
            or (day > length - 7 and weekday in fields.last_of_month)
        ):
            bits |= 1 << day
    return bits


def _month_length(year: int, month: int) -> int:
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def _in_calendar(day: int) -> bool:
    return 1 <= day + _EPOCH_ORDINAL <= date.max.toordinal()


def _low(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _high(bits: int) -> int:
    return bits.bit_length() - 1


def _up_to(bits: int, last: int) -> int:
    """The bits 0 to `last`; none when `last` is -1."""
    return bits & ((1 << (last + 1)) - 1)
