"""Checks of single request fields: each returns the value in the server's own terms.

Every refusal names the path of the field, the value (cut) and what is allowed.
"""

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration as DurationMessage
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost_server.clock import DAY, HOUR, MILLISECOND, MINUTE, SECOND, Duration, Instant
from fencepost_server.domain.job import PRIORITY_MAX
from fencepost_server.errors import InvalidField, PayloadTooLarge, cut_text

PAYLOAD_BYTES_MAX = 256 * 1024
LABELS_MAX = 32
LABEL_CHARS_MAX = 63
PAGE_SIZE_DEFAULT = 50
PAGE_SIZE_MAX = 1000
REQUEST_ID_CHARS_MAX = 36
BATCH_ENTRIES_MAX = 1000

_KIND = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CODE = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
_SECONDS_MIN = -62_135_596_800  # 0001-01-01T00:00:00Z
_SECONDS_MAX = 253_402_300_799  # 9999-12-31T23:59:59Z
_DURATION_SECONDS_MAX = 315_576_000_000
_NANOS_PER_SECOND = 1_000_000_000
_UNITS = (
    (DAY, "d"),
    (HOUR, "h"),
    (MINUTE, "min"),
    (SECOND, "s"),
    (MILLISECOND, "ms"),
    (1, "us"),
)

Choice = TypeVar("Choice", bound=IntEnum)


def refused(field: str, value: object, allowed: str) -> InvalidField:
    """The error for a field whose value is not allowed."""
    shown = cut_text(str(value), 100)
    return InvalidField(
        f"{field}: got {shown!r}, want {allowed}", field=field, value=shown, allowed=allowed
    )


def missing(field: str, allowed: str) -> InvalidField:
    """The error for a required field that is not set."""
    return InvalidField(f"{field}: required, {allowed}", field=field, allowed=allowed)


def text(
    value: str, *, field: str, chars_max: int | None = None, bytes_max: int | None = None
) -> str:
    """Free text for people: UTF-8 without NUL, within its bound."""
    if "\x00" in value:
        raise refused(field, value, "text without NUL characters")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        shown = value.encode("utf-8", "replace").decode()
        raise refused(field, shown, "valid UTF-8 without lone surrogates") from error
    if chars_max is not None and len(value) > chars_max:
        raise refused(field, value, f"at most {chars_max} characters, not {len(value)}")
    if bytes_max is not None and size > bytes_max:
        raise refused(field, value, f"at most {bytes_max} bytes, not {size}")
    return value


def ascii_text(value: str, *, field: str, chars_max: int) -> str:
    """Printable ASCII of bounded length."""
    if len(value) > chars_max or not value.isascii() or not (value.isprintable()):
        raise refused(field, value, f"at most {chars_max} printable ASCII characters")
    return value


def request_id(value: str, *, field: str = "request_id") -> str:
    """A request id, "" if none was sent."""
    return ascii_text(value, field=field, chars_max=REQUEST_ID_CHARS_MAX)


def integer(value: int, *, field: str, minimum: int, maximum: int) -> int:
    """A whole number within both bounds."""
    if not minimum <= value <= maximum:
        raise refused(field, value, f"{minimum} to {maximum}")
    return value


def optional_integer(value: int, *, field: str, minimum: int, maximum: int) -> int | None:
    """The same, or None for 0, which stands for the default."""
    return integer(value, field=field, minimum=minimum, maximum=maximum) if value else None


def priority(value: int, *, field: str) -> int:
    """0 to 9."""
    return integer(value, field=field, minimum=0, maximum=PRIORITY_MAX)


def choice(value: int, of: type[Choice], *, field: str) -> Choice | None:
    """A value of an enum, or None for 0, which stands for the default."""
    if value == 0:
        return None
    try:
        return of(value)
    except ValueError:
        known = ", ".join(f"{each.name} ({int(each)})" for each in of)
        raise refused(field, value, f"one of {known}") from None


def kind(value: str, *, field: str) -> str:
    """A handler name."""
    allowed = "1 to 128 of [A-Za-z0-9._-]"
    if not value:
        raise missing(field, allowed)
    if _KIND.fullmatch(value) is None:
        raise refused(field, value, allowed)
    return value


def failure_code(value: str, *, field: str) -> str:
    """A machine-readable cause of a failure."""
    if _CODE.fullmatch(value) is None:
        raise refused(field, value, "UPPER_SNAKE_CASE, at most 63 characters")
    return value


def labels(value: Mapping[str, str], *, field: str) -> dict[str, str]:
    """At most 32 labels of 63 + 63 characters; keys not empty."""
    if len(value) > LABELS_MAX:
        raise refused(field, f"{len(value)} labels", f"at most {LABELS_MAX} labels")
    for key, content in value.items():
        if not key:
            raise refused(f"{field} (key)", key, f"1 to {LABEL_CHARS_MAX} characters")
        text(key, field=f"{field} (key)", chars_max=LABEL_CHARS_MAX)
        text(content, field=f"{field}[{cut_text(key, 63)}]", chars_max=LABEL_CHARS_MAX)
    return dict(value)


def page_size(value: int, *, field: str = "page_size") -> int:
    """Default 50; more than 1,000 is read as 1,000; negative is refused."""
    if value < 0:
        raise refused(field, value, f"1 to {PAGE_SIZE_MAX}, or 0 for {PAGE_SIZE_DEFAULT}")
    return min(value, PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT


def payload_size(size: int, *, field: str, limit: int = PAYLOAD_BYTES_MAX) -> int:
    """A body's length in bytes. Raises PayloadTooLarge over `limit`."""
    if size > limit:
        raise PayloadTooLarge(
            f"{field}: has {size} bytes, at most {limit} are allowed",
            field=field,
            limitBytes=str(limit),
            actualBytes=str(size),
        )
    return size


def instant(value: Timestamp, *, field: str, round_up: bool = False) -> Instant:
    """An instant of the years 1 to 9999, in whole microseconds.

    Finer ones are refused, or with `round_up` moved on to the next microsecond.
    """
    if not _SECONDS_MIN <= value.seconds <= _SECONDS_MAX:
        raise refused(field, f"{value.seconds} s", "an instant of the years 0001 to 9999")
    if not 0 <= value.nanos < _NANOS_PER_SECOND:
        raise refused(field, f"{value.nanos} ns", "0 to 999999999 ns")
    return value.seconds * SECOND + _whole_micros(value.nanos, field, round_up=round_up)


def whole_second(value: Timestamp, *, field: str) -> Instant:
    """An instant rounded up to a whole second, as bounds and nominal fires are."""
    at = -(-instant(value, field=field, round_up=True) // SECOND) * SECOND
    if at > _SECONDS_MAX * SECOND:
        raise refused(field, f"{value.seconds} s", "an instant of the years 0001 to 9999")
    return at


def duration(
    value: DurationMessage,
    *,
    field: str,
    minimum: Duration,
    maximum: Duration | None = None,
    round_up: bool = False,
) -> Duration:
    """A normalised duration within its bounds, in whole microseconds."""
    if abs(value.seconds) > _DURATION_SECONDS_MAX or abs(value.nanos) >= _NANOS_PER_SECOND:
        raise refused(field, f"{value.seconds} s {value.nanos} ns", "a duration in its own range")
    if value.seconds < 0 or value.nanos < 0:
        raise refused(field, f"{value.seconds} s {value.nanos} ns", "no negative duration")
    length = value.seconds * SECOND + _whole_micros(value.nanos, field, round_up=round_up)
    if length < minimum or (maximum is not None and length > maximum):
        allowed = (
            f"{duration_text(minimum)} or more"
            if maximum is None
            else f"{duration_text(minimum)} to {duration_text(maximum)}"
        )
        raise refused(field, duration_text(length), allowed)
    return length


def optional_duration(
    value: DurationMessage, *, field: str, minimum: Duration, maximum: Duration | None = None
) -> Duration | None:
    """The same, or None for a zero one, which stands for the default."""
    if value.seconds == 0 and value.nanos == 0:
        return None
    return duration(value, field=field, minimum=minimum, maximum=maximum)


def duration_text(length: Duration) -> str:
    """A duration in its largest whole unit, such as "90 s" or "1 d"."""
    for size, unit in _UNITS:
        if length and length % size == 0:
            return f"{length // size} {unit}"
    return "0 s"


def _whole_micros(nanos: int, field: str, *, round_up: bool) -> int:
    if nanos % 1000 and not round_up:
        raise refused(field, f"{nanos} ns", "whole microseconds")
    return -(-nanos // 1000)
