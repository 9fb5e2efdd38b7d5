"""Makes hostile variants of a request: for each of its fields, set or not, what no caller
should send."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

Change: TypeAlias = Callable[[Any], None]

_DEPTH_MAX = 5
# Valid text of three bytes, to be replaced by a lone surrogate on the wire.
SURROGATE = "@@@"
_SURROGATE_BYTES = b"\xed\xa0\x80"
_HUGE = 2**62
_TEXTS = {
    "NUL": "a\x00b",
    "a lone surrogate": SURROGATE,
    "263,000 characters": "x" * 263_000,
    "no name": "../../etc/passwd' OR 1=1 --",
}
_DURATIONS = {
    "-1 s": Duration(seconds=-1),
    "-1 ns": Duration(nanos=-1),
    "two signs": Duration(seconds=1, nanos=-1),
    "2^62 s": Duration(seconds=_HUGE),
    "2e9 ns": Duration(nanos=2_000_000_000),
    "300 years": Duration(seconds=9_467_280_000),
}
_INSTANTS = {
    "half a microsecond": Timestamp(seconds=1_800_000_000, nanos=500),
    "2^62 s": Timestamp(seconds=_HUGE),
    "-2^62 s": Timestamp(seconds=-_HUGE),
    "-1 ns": Timestamp(nanos=-1),
    "2e9 ns": Timestamp(nanos=2_000_000_000),
    "the year 9999": Timestamp(seconds=253_402_300_799),
    "the year 1": Timestamp(seconds=-62_135_596_800),
}
_MAPS = {
    "10,000 entries": {f"k{n}": "v" for n in range(10_000)},
    "an empty key": {"": "v"},
    "NUL in a key": {"a\x00": "v"},
    "NUL in a value": {"a": "\x00"},
    "a lone surrogate": {"a": SURROGATE},
    "64 characters": {"k" * 64: "v"},
}
_NUMBERS: dict[int, tuple[float, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: (-1, -(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-1, -(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (2**32 - 1,),
    FieldDescriptor.CPPTYPE_UINT64: (2**64 - 1,),
    FieldDescriptor.CPPTYPE_DOUBLE: (float("nan"), float("inf"), -1.0),
    FieldDescriptor.CPPTYPE_FLOAT: (float("nan"), float("inf"), -1.0),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 999),
}


def variants(base: Message) -> Iterator[tuple[str, str, bytes]]:
    """Path of the field, what is wrong with it, and the request as it goes over the wire."""
    for path, what, change in _changes(base.DESCRIPTOR, 0):
        request = type(base)()
        request.CopyFrom(base)
        change(request)
        yield path, what, request.SerializeToString().replace(SURROGATE.encode(), _SURROGATE_BYTES)


def _changes(descriptor: Any, depth: int) -> Iterator[tuple[str, str, Change]]:
    for field in descriptor.fields:
        for inner, what, change in _of_field(field, depth):
            yield f"{field.name}{inner}", what, change


def _of_field(field: Any, depth: int) -> Iterator[tuple[str, str, Change]]:
    name = field.name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for what, entries in _MAPS.items():
            yield "", what, _bound(_update, name, entries)
    elif field.is_repeated:
        yield "", "10,000 entries", _bound(_many, field)
        if field.message_type is not None and depth < _DEPTH_MAX:
            for inner, what, change in _changes(field.message_type, depth + 1):
                yield f"[].{inner}", what, _bound(_in_first, name, change)
        elif field.message_type is None:
            for what, value in _scalars(field):
                yield "[]", what, _bound(_append, name, value)
    elif field.message_type is not None:
        kind = field.message_type.name
        if kind in ("Duration", "Timestamp"):
            for what, at in (_DURATIONS if kind == "Duration" else _INSTANTS).items():
                yield "", what, _bound(_copy, name, at)
        else:
            yield "", "nothing in it", _bound(_emptied, name)
            yield "", "missing", _bound(_cleared, name)
            if depth < _DEPTH_MAX:
                for inner, what, change in _changes(field.message_type, depth + 1):
                    yield f".{inner}", what, _bound(_inside, name, change)
    else:
        for what, value in _scalars(field):
            yield "", what, _bound(setattr, name, value)
        yield "", "missing", _bound(_cleared, name)


def _scalars(field: Any) -> Iterator[tuple[str, Any]]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            yield "263,000 bytes", b"\x00" * 263_000
        else:
            yield from _TEXTS.items()
    for number in _NUMBERS.get(field.cpp_type, ()):
        yield str(number), number


def _bound(act: Callable[..., None], *values: Any) -> Change:
    def change(message: Any) -> None:
        act(message, *values)

    return change


def _update(message: Any, name: str, entries: dict[str, str]) -> None:
    getattr(message, name).update(entries)


def _many(message: Any, field: Any) -> None:
    values = getattr(message, field.name)
    if field.message_type is not None:
        for _ in range(10_000):
            values.add()
    elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        values.extend(["x"] * 10_000)
    else:
        values.extend([1] * 10_000)


def _append(message: Any, name: str, value: Any) -> None:
    getattr(message, name).append(value)


def _copy(message: Any, name: str, value: Message) -> None:
    getattr(message, name).CopyFrom(value)


def _in_first(message: Any, name: str, change: Change) -> None:
    values = getattr(message, name)
    change(values[0] if values else values.add())


def _inside(message: Any, name: str, change: Change) -> None:
    inner = getattr(message, name)
    inner.SetInParent()
    change(inner)


def _emptied(message: Any, name: str) -> None:
    message.ClearField(name)
    getattr(message, name).SetInParent()


def _cleared(message: Any, name: str) -> None:
    message.ClearField(name)
