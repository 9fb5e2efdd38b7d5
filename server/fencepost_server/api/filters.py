"""The filter grammar of lists, parsed to a flat list of typed conditions.

`field op value` joined by blanks or AND; several values of one field as `a,b` or
`(a OR b)`; text with blanks in double quotes; a trailing `*` is a prefix where the field
allows it; `labels:KEY` asks for a key, `labels.KEY:value` for its value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import TypeAlias

from fencepost_server.clock import Instant, from_datetime
from fencepost_server.errors import FilterNotSupported, cut_text

FILTER_BYTES_MAX = 2048
CONDITIONS_MAX = 32
VALUES_MAX = 100
LABELS_FIELD = "labels"

_NO_FIELDS = frozenset(("AND", "OR", "NOT"))
_BLANK = re.compile(r"\s*")
_FIELD = re.compile(r'[A-Za-z_][A-Za-z0-9_]*(?:\.(?:"(?:[^"\\]|\\.)+"|[A-Za-z0-9_./-]+))?')
_OPERATOR = re.compile(r"!=|<=|>=|=|<|>|:")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_BARE = re.compile(r'[^\s,()"]+')
_AND = re.compile(r"AND(?=\s)")
_OR = re.compile(r"\s+OR\s+")
_INSTANT = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", re.IGNORECASE | re.ASCII
)


class Op(Enum):
    """What a condition asks; `:` reads as EQ, except on labels as a whole (HAS_KEY)."""

    EQ = "="
    NE = "!="
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="
    HAS_KEY = ":"


class Shape(Enum):
    """The type of a field's values."""

    TEXT = "text"
    ENUM = "a name"
    INSTANT = "an RFC 3339 instant such as 2026-12-01T09:00:00Z"
    INTEGER = "a whole number"
    LABELS = "a label"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldKind:
    """What a list allows of one field: value type, prefixes, and the names of an enum."""

    shape: Shape
    prefix: bool = False
    names: Mapping[str, int] = field(default_factory=dict)


TEXT = FieldKind(shape=Shape.TEXT)
PREFIX_TEXT = FieldKind(shape=Shape.TEXT, prefix=True)
INSTANT = FieldKind(shape=Shape.INSTANT)
INTEGER = FieldKind(shape=Shape.INTEGER)
LABELS = FieldKind(shape=Shape.LABELS)

Value: TypeAlias = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """True when one of `values` or `prefixes` fits; with NE when none does.

    Enum values and integers are numbers, instants microseconds. For labels `key` is set,
    and with HAS_KEY there are no values.
    """

    field: str
    op: Op
    values: tuple[Value, ...] = ()
    prefixes: tuple[str, ...] = ()
    key: str = ""


def enum_names(names: Mapping[str, int]) -> FieldKind:
    """An enum field: names without prefix, as they are written in a filter."""
    return FieldKind(shape=Shape.ENUM, names=names)


def parse(text: str, fields: Mapping[str, FieldKind]) -> list[Condition]:
    """All conditions of `text`, each of which must hold. Raises FilterNotSupported."""
    if len(text.encode("utf-8", "replace")) > FILTER_BYTES_MAX:
        raise _refused(f"is longer than {FILTER_BYTES_MAX} bytes", "filter")
    if "\x00" in text:
        raise _refused("has a NUL character", "filter")
    return _Parser(text, fields).conditions()


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    quoted: bool


class _Parser:
    def __init__(self, text: str, fields: Mapping[str, FieldKind]) -> None:
        self._text = text
        self._fields = fields
        self._at = 0

    def conditions(self) -> list[Condition]:
        found: list[Condition] = []
        self._take(_BLANK)
        while self._at < len(self._text):
            if found:
                self._take(_AND)
                self._take(_BLANK)
            if len(found) == CONDITIONS_MAX:
                raise _refused(f"has more than {CONDITIONS_MAX} conditions", "filter")
            found.append(self._condition())
            end = self._at
            self._take(_BLANK)
            if self._at == end < len(self._text):
                raise self._unexpected("a blank between conditions")
        return found

    def _condition(self) -> Condition:
        written = self._take(_FIELD)
        if written is None:
            raise self._unexpected("a field name")
        if written in _NO_FIELDS:
            raise _refused(
                f"has {written} at character {self._at - len(written) + 1}: conditions are joined "
                "by blanks or AND, values of one field by , or (a OR b), and != is the negation",
                "filter",
            )
        name, _, key = written.partition(".")
        kind = self._fields.get(written if written in self._fields else name)
        if kind is None or (key and kind.shape is not Shape.LABELS and written not in self._fields):
            known = ", ".join(sorted(self._fields))
            raise _refused(f"has no field {cut_text(written, 80)!r}; known: {known}", written)
        self._take(_BLANK)
        operator = self._take(_OPERATOR)
        if operator is None:
            raise self._unexpected("one of = != < <= > >= :")
        self._take(_BLANK)
        words = self._words()
        if kind.shape is Shape.LABELS:
            return _label(written, key, operator, words)
        return _typed(written if written in self._fields else name, kind, operator, words)

    def _words(self) -> list[_Word]:
        if self._text[self._at : self._at + 1] == "(":
            return self._parenthesised()
        words = [self._word()]
        while self._text[self._at : self._at + 1] == ",":
            self._at += 1
            words.append(self._word())
            self._bound(words)
        return words

    def _parenthesised(self) -> list[_Word]:
        self._at += 1
        self._take(_BLANK)
        words = [self._word()]
        while self._take(_OR) is not None:
            words.append(self._word())
            self._bound(words)
        self._take(_BLANK)
        if self._text[self._at : self._at + 1] != ")":
            raise self._unexpected("OR or a closing parenthesis")
        self._at += 1
        return words

    def _word(self) -> _Word:
        quoted = _QUOTED.match(self._text, self._at)
        if quoted is not None:
            self._at = quoted.end()
            return _Word(re.sub(r"\\(.)", r"\1", quoted[1]), quoted=True)
        bare = self._take(_BARE)
        if bare is None:
            raise self._unexpected("a value")
        return _Word(bare, quoted=False)

    def _bound(self, words: list[_Word]) -> None:
        if len(words) > VALUES_MAX:
            raise _refused(f"has more than {VALUES_MAX} values of one field", "filter")

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match[0]

    def _unexpected(self, wanted: str) -> FilterNotSupported:
        rest = cut_text(self._text[self._at :], 40)
        found = repr(rest) if rest else "the end"
        return _refused(f"wants {wanted} at character {self._at + 1}, found {found}", "filter")


def _label(written: str, key: str, operator: str, words: list[_Word]) -> Condition:
    key = re.sub(r"\\(.)", r"\1", key[1:-1]) if key.startswith('"') else key
    if not key:
        if operator != ":" or len(words) != 1:
            raise _refused("takes labels as labels:KEY or labels.KEY:value", written)
        return Condition(field=LABELS_FIELD, op=Op.HAS_KEY, key=words[0].text)
    if operator not in ("=", ":", "!="):
        raise _refused(f"cannot order labels: {written} takes = != :", written)
    if operator == ":" and words == [_Word("*", quoted=False)]:
        return Condition(field=LABELS_FIELD, op=Op.HAS_KEY, key=key)
    op = Op.NE if operator == "!=" else Op.EQ
    return Condition(field=LABELS_FIELD, op=op, key=key, values=tuple(word.text for word in words))


def _typed(name: str, kind: FieldKind, operator: str, words: list[_Word]) -> Condition:
    op = Op.EQ if operator == ":" else Op(operator)
    if op not in (Op.EQ, Op.NE):
        if kind.shape not in (Shape.INSTANT, Shape.INTEGER):
            raise _refused(f"cannot order {name}: it takes = != :", name)
        if len(words) > 1:
            raise _refused(f"takes one value for {name}{operator}", name)
    values: list[Value] = []
    prefixes: list[str] = []
    for word in words:
        if word.text.endswith("*") and not word.quoted and kind.shape is Shape.TEXT:
            if not kind.prefix:
                raise _refused(f"takes no prefix for {name}: put a literal * in quotes", name)
            prefixes.append(word.text[:-1])
        else:
            values.append(_value(name, kind, word.text))
    return Condition(field=name, op=op, values=tuple(values), prefixes=tuple(prefixes))


def _value(name: str, kind: FieldKind, text: str) -> Value:
    match kind.shape:
        case Shape.ENUM:
            number = kind.names.get(text)
            if number is None:
                known = ", ".join(kind.names)
                raise _refused(f"has {cut_text(text, 80)!r} for {name}; known: {known}", name)
            return number
        case Shape.INSTANT:
            return _instant(name, text)
        case Shape.INTEGER:
            if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) is None:
                raise _refused(f"has {cut_text(text, 80)!r} for {name}; want a whole number", name)
            return int(text)
        case _:
            return text


def _instant(name: str, text: str) -> Instant:
    if _INSTANT.fullmatch(text):
        try:
            return from_datetime(datetime.fromisoformat(text.upper()))
        except (ValueError, OverflowError):
            pass  # Such as a 13th month: refused below.
    raise _refused(f"has {cut_text(text, 80)!r} for {name}; want {Shape.INSTANT.value}", name)


def _refused(problem: str, name: str) -> FilterNotSupported:
    return FilterNotSupported(f"filter: {problem}", field="filter", filterField=cut_text(name, 80))
