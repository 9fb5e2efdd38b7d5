"""Reads one cron expression into bit sets, or says which field, column and value is wrong.

`H` stands for a value drawn from a hash, so that jobs spread out instead of all firing at
minute 0: the first 8 bytes, big-endian, of SHA-256 over the UTF-8 text
`{seed} {field}`, where the seed is `{tenant}/{job_name}` and the field is one of `second`,
`minute`, `hour`, `day of month`, `month`, `day of week`. `H` is `low + hash % size` of the
field's range (days of the month: 1-28, so that no month is left out), `H(a-b)` of that
range, and `H/n` is every n-th value of the range from `low + hash % n`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NoReturn

from fencepost_server.errors import InvalidSchedule
from fencepost_server.policy.cron_calendar import CronFields
from fencepost_server.policy.cron_fields import DAY, FIELDS, MACROS, SECOND, WEEKDAY, FieldKind

EXPRESSION_LENGTH_MAX = 256


@dataclass(slots=True, kw_only=True)
class _Parsed:
    """One field's values so far, and its parts in normal form."""

    bits: int = 0
    days_from_end: set[int] = field(default_factory=set)
    near_weekdays: set[int] = field(default_factory=set)
    last_weekday: bool = False
    last_of_month: set[int] = field(default_factory=set)
    nth_of_month: set[tuple[int, int]] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)

    @property
    def restricts(self) -> bool:
        return not self.texts[0].startswith("*")


def parse_cron(expression: str, *, seed: str = "", path: str = "expression") -> CronFields:
    """The expression's fields, with H resolved for `seed`.

    Raises InvalidSchedule with `path` as its field; its metadata name the expression, the
    cron field, the 1-based position, the value and what is allowed.
    """
    return _Parser(expression, seed=seed, path=path).parse()


class _Parser:
    """Holds what every error message needs while one expression is read."""

    def __init__(self, expression: str, *, seed: str, path: str) -> None:
        self._expression = expression
        self._seed = seed
        self._path = path
        self._field = SECOND

    def parse(self) -> CronFields:
        self._check_characters()
        words = [
            (found.group().upper(), found.start() + 1)
            for found in re.finditer(r"[^ \t\r\n]+", self._expression)
        ]
        words = self._expand_macro(words)
        if len(words) not in (5, 6):
            self._refuse_count(words)
        kinds = FIELDS if len(words) == 5 else (SECOND, *FIELDS)
        parsed = [self._parse_field(kind, *word) for kind, word in zip(kinds, words, strict=True)]
        minute, hour, day, month, weekday = parsed[-5:]
        fields = CronFields(
            seconds=parsed[0].bits if len(parsed) == 6 else 1,
            minutes=minute.bits,
            hours=hour.bits,
            months=month.bits,
            days=day.bits,
            days_from_end=frozenset(day.days_from_end),
            near_weekdays=frozenset(day.near_weekdays),
            last_weekday=day.last_weekday,
            weekdays=weekday.bits,
            last_of_month=frozenset(weekday.last_of_month),
            nth_of_month=frozenset(weekday.nth_of_month),
            days_restrict=day.restricts,
            weekdays_restrict=weekday.restricts,
            text=" ".join(",".join(one.texts) for one in parsed),
        )
        if not fields.can_fire():
            self._field = DAY
            self._refuse(*words[-3], "never comes in the given months, so it would never fire")
        return fields

    def _check_characters(self) -> None:
        length = len(self._expression)
        if length > EXPRESSION_LENGTH_MAX:
            raise InvalidSchedule(
                f"expression: {length} characters are too many; "
                f"allowed: at most {EXPRESSION_LENGTH_MAX} ASCII characters",
                field=self._path,
                length=str(length),
                allowed=f"at most {EXPRESSION_LENGTH_MAX} ASCII characters",
            )
        for position, character in enumerate(self._expression, start=1):
            if not (" " <= character <= "~" or character in "\t\r\n"):
                raise InvalidSchedule(
                    f"expression: character U+{ord(character):04X} at column {position} is not "
                    "allowed; allowed: printable ASCII, blanks and tabs",
                    field=self._path,
                    position=str(position),
                    value=f"U+{ord(character):04X}",
                    allowed="printable ASCII, blanks and tabs",
                )

    def _expand_macro(self, words: list[tuple[str, int]]) -> list[tuple[str, int]]:
        if not words or not words[0][0].startswith("@"):
            return words
        macro, column = words[0]
        if len(words) == 1 and macro in MACROS:
            return [(word, column) for word in MACROS[macro].split()]
        hint = {
            "@REBOOT": "nothing boots here; a schedule fires at instants",
            "@EVERY": "use an interval schedule",
        }.get(macro, "a macro stands alone")
        allowed = ", ".join(name.lower() for name in MACROS)
        raise InvalidSchedule(
            f"expression: {macro.lower()!r} at column {column} is not allowed ({hint}); "
            f"allowed: five or six fields, or one of {allowed}",
            field=self._path,
            expression=self._expression,
            position=str(column),
            value=macro.lower(),
            allowed=allowed,
        )

    def _refuse_count(self, words: list[tuple[str, int]]) -> NoReturn:
        allowed = (
            "5 fields (minute hour day-of-month month day-of-week), or 6 with seconds first; "
            "there is no year field"
        )
        raise InvalidSchedule(
            f"expression: {self._expression!r} has {len(words)} fields; allowed: {allowed}",
            field=self._path,
            expression=self._expression,
            position=str(words[6][1] if len(words) > 6 else len(self._expression) + 1),
            value=str(len(words)),
            allowed=allowed,
        )

    def _parse_field(self, kind: FieldKind, text: str, column: int) -> _Parsed:
        self._field = kind
        parsed = _Parsed()
        if text == "?":
            if kind not in (DAY, WEEKDAY):
                self._refuse(text, column, "is only for the two day fields")
            text = "*"
        for part, at in _split(text, column):
            if not self._parse_special(parsed, part, at):
                self._parse_values(parsed, part, at)
        return parsed

    def _parse_special(self, parsed: _Parsed, part: str, column: int) -> bool:
        """Reads the forms that only a day field has; False if `part` is none of them."""
        if self._field is DAY:
            if part == "L":
                parsed.days_from_end.add(0)
            elif part == "LW":
                parsed.last_weekday = True
            elif found := re.fullmatch(r"L-(\d+)", part):
                back = self._number(found[1], column + 2, 1, 30)
                parsed.days_from_end.add(back)
                part = f"L-{back}"
            elif found := re.fullmatch(r"(\d+)W", part):
                day = self._number(found[1], column, 1, 31)
                parsed.near_weekdays.add(day)
                part = f"{day}W"
            else:
                return False
        elif self._field is WEEKDAY:
            if part == "L":
                self._refuse(part, column, "needs a weekday, as in 5L")
            if found := re.fullmatch(r"(\w+)L", part):
                weekday = self._value(found[1], column) % 7
                parsed.last_of_month.add(weekday)
                part = f"{weekday}L"
            elif found := re.fullmatch(r"(\w+)#(\w+)", part):
                weekday = self._value(found[1], column) % 7
                nth = self._number(found[2], column + found.start(2), 1, 5)
                parsed.nth_of_month.add((weekday, nth))
                part = f"{weekday}#{nth}"
            else:
                return False
        else:
            return False
        parsed.texts.append(part)
        return True

    def _parse_values(self, parsed: _Parsed, part: str, column: int) -> None:
        """Reads `*`, a value, a range or H, each with or without a step."""
        base, slash, step_text = part.partition("/")
        size = self._field.size
        step = 1
        if slash:
            step = self._number(step_text, column + len(base) + 1, 1, size)
        low, high = self._bounds(base, column, step if slash else None)
        if high is None:
            # A single value: with a step it runs to the field's end.
            high = self._field.low + size - 1 if slash else low
        values = range(low, (high if high >= low else high + size) + 1, step)
        for value in values:
            parsed.bits |= 1 << ((value - self._field.low) % size + self._field.low)
        parsed.texts.append(_normal(base, low, high, step, len(values)))

    def _bounds(self, base: str, column: int, step: int | None) -> tuple[int, int | None]:
        """First and last value of a part without its step; None: a single value."""
        if base == "*":
            return self._field.low, self._field.low + self._field.size - 1
        if found := re.fullmatch(r"H(?:\((\w+)-(\w+)\))?", base):
            return self._hashed(found, column, step)
        first, dash, last = base.partition("-")
        low = self._value(first, column)
        if not dash:
            return low % 7 if self._field is WEEKDAY else low, None
        high = self._value(last, column + len(first) + 1)
        if self._field is WEEKDAY:
            # 7 is Sunday at either end: 5-7 is 5,6,0, and 0-7 is the whole week.
            high = (6 if low == 0 else 0) if high == 7 else high
            low %= 7
        return low, high

    def _hashed(
        self, found: re.Match[str], column: int, step: int | None
    ) -> tuple[int, int | None]:
        low, high = self._field.low, self._field.hash_high
        if found[1] is not None:
            low = self._value(found[1], column + found.start(1))
            high = self._value(found[2], column + found.start(2))
            if self._field is WEEKDAY:
                high = min(high, 6)
            if high < low:
                self._refuse(found[0], column, "is backwards; write H(low-high)")
        digest = sha256(f"{self._seed} {self._field.name}".encode()).digest()
        drawn = int.from_bytes(digest[:8], "big")
        if step is None:
            return low + drawn % (high - low + 1), None
        if step > high - low + 1:
            self._refuse(str(step), column, f"is a step over the {high - low + 1} values of H")
        return low + drawn % step, high

    def _value(self, text: str, column: int) -> int:
        if text in self._field.names:
            return self._field.names[text]
        return self._number(text, column, self._field.low, self._field.high)

    def _number(self, text: str, column: int, low: int, high: int) -> int:
        # Longer digits could not be in range, and reading thousands of them costs time.
        if re.fullmatch(r"[0-9]{1,4}", text) and low <= int(text) <= high:
            return int(text)
        outer = (low, high) == (self._field.low, self._field.high)
        return self._refuse(text, column, "is not allowed" if outer else f"is not {low}-{high}")

    def _refuse(self, value: str, column: int, why: str) -> NoReturn:
        shown = value if len(value) <= 32 else f"{value[:32]}…"
        raise InvalidSchedule(
            f'{self._field.name}: "{shown}" at column {column} of "{self._expression}" '
            f"{why}; allowed: {self._field.allowed}",
            field=self._path,
            expression=self._expression,
            cron_field=self._field.name,
            position=str(column),
            value=value,
            allowed=self._field.allowed,
        )


def _split(text: str, column: int) -> Iterator[tuple[str, int]]:
    """The comma-separated parts, each with the column it begins at."""
    for part in text.split(","):
        yield part, column
        column += len(part) + 1


def _normal(base: str, low: int, high: int, step: int, count: int) -> str:
    """A part in normal form, which reads as the same values again."""
    if base == "*":
        return f"*/{step}" if step > 1 else "*"
    if count == 1:
        return str(low)
    return f"{low}-{high}/{step}" if step > 1 else f"{low}-{high}"
