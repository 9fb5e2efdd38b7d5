"""Single fields: bounds, spelling, and refusals that name field, value and what is allowed."""

from collections.abc import Callable

import pytest
from fencepost_server.api import validate
from fencepost_server.clock import DAY, MINUTE, SECOND
from fencepost_server.domain.job import BackoffJitter
from fencepost_server.errors import InvalidField, PayloadTooLarge
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


@pytest.mark.parametrize(
    ("check", "allowed"),
    [
        (lambda: validate.text("a\x00b", field="f"), "without NUL"),
        (lambda: validate.text("a\ud800", field="f"), "lone surrogates"),
        (lambda: validate.text("ab", field="f", chars_max=1), "at most 1 characters, not 2"),
        (lambda: validate.text("ä", field="f", bytes_max=1), "at most 1 bytes, not 2"),
        (lambda: validate.ascii_text("ä", field="f", chars_max=3), "printable ASCII"),
        (lambda: validate.ascii_text("a\n", field="f", chars_max=3), "printable ASCII"),
        (lambda: validate.request_id("x" * 37, field="f"), "at most 36"),
        (lambda: validate.integer(11, field="f", minimum=1, maximum=10), "1 to 10"),
        (lambda: validate.optional_integer(-1, field="f", minimum=1, maximum=10), "1 to 10"),
        (lambda: validate.priority(10, field="f"), "0 to 9"),
        (lambda: validate.priority(-1, field="f"), "0 to 9"),
        (lambda: validate.choice(9, BackoffJitter, field="f"), "one of FULL (1)"),
        (lambda: validate.kind("", field="f"), "1 to 128 of"),
        (lambda: validate.kind("a b", field="f"), "1 to 128 of"),
        (lambda: validate.kind("a" * 129, field="f"), "1 to 128 of"),
        (lambda: validate.failure_code("Bad", field="f"), "UPPER_SNAKE_CASE"),
        (lambda: validate.labels({"": "x"}, field="f"), "1 to 63 characters"),
        (lambda: validate.labels({"a" * 64: "x"}, field="f"), "at most 63 characters"),
        (lambda: validate.labels({"a": "x" * 64}, field="f"), "at most 63 characters"),
        (lambda: validate.labels({str(i): "" for i in range(33)}, field="f"), "at most 32 labels"),
        (lambda: validate.page_size(-1, field="f"), "1 to 1000"),
        (lambda: validate.instant(Timestamp(nanos=1), field="f"), "whole microseconds"),
        (lambda: validate.instant(Timestamp(nanos=-1000), field="f"), "0 to 999999999 ns"),
        (lambda: validate.instant(Timestamp(seconds=2**40), field="f"), "0001 to 9999"),
        (lambda: validate.instant(Timestamp(seconds=-(2**40)), field="f"), "0001 to 9999"),
        (
            lambda: validate.duration(Duration(seconds=-1), field="f", minimum=0),
            "no negative duration",
        ),
        (
            lambda: validate.duration(Duration(seconds=1, nanos=10**9), field="f", minimum=0),
            "in its own range",
        ),
        (
            lambda: validate.duration(Duration(seconds=2**40), field="f", minimum=0),
            "in its own range",
        ),
        (
            lambda: validate.duration(Duration(nanos=1), field="f", minimum=0),
            "whole microseconds",
        ),
        (
            lambda: validate.duration(
                Duration(seconds=601), field="f", minimum=15 * SECOND, maximum=10 * MINUTE
            ),
            "15 s to 10 min",
        ),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(
    check: Callable[[], object], allowed: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        check()
    assert caught.value.field.startswith("f")
    assert caught.value.message.startswith("f")
    assert allowed in caught.value.message
    caught.value.message.encode()


def test_what_is_in_bounds_comes_back_in_our_terms() -> None:
    assert validate.instant(Timestamp(seconds=-5, nanos=1000), field="f") == -5 * SECOND + 1
    assert validate.instant(Timestamp(nanos=1), field="f", round_up=True) == 1
    assert validate.whole_second(Timestamp(seconds=5, nanos=1), field="f") == 6 * SECOND
    assert validate.whole_second(Timestamp(seconds=5), field="f") == 5 * SECOND
    assert validate.duration(Duration(seconds=1, nanos=5000), field="f", minimum=0) == SECOND + 5
    assert validate.optional_duration(Duration(), field="f", minimum=SECOND) is None
    assert validate.optional_integer(0, field="f", minimum=1, maximum=2) is None
    assert validate.choice(0, BackoffJitter, field="f") is None
    assert validate.choice(3, BackoffJitter, field="f") is BackoffJitter.NONE
    assert validate.labels({"a": "x" * 63}, field="f") == {"a": "x" * 63}
    assert validate.text("ä" * 128, field="f", chars_max=128) == "ä" * 128


@pytest.mark.parametrize(("sent", "used"), [(0, 50), (1, 1), (1000, 1000), (5000, 1000)])
def test_page_sizes(sent: int, used: int) -> None:
    assert validate.page_size(sent) == used


def test_a_payload_over_the_limit_says_both_sizes() -> None:
    assert validate.payload_size(262_144, field="payload") == 262_144
    with pytest.raises(PayloadTooLarge) as caught:
        validate.payload_size(262_145, field="payload")
    assert caught.value.metadata == {"limitBytes": "262144", "actualBytes": "262145"}


@pytest.mark.parametrize(
    ("length", "text"),
    [(0, "0 s"), (DAY, "1 d"), (90 * SECOND, "90 s"), (1500, "1500 us"), (1000, "1 ms")],
)
def test_durations_as_text(length: int, text: str) -> None:
    assert validate.duration_text(length) == text
