"""Which reports are plain, and in which order they are stored."""

from fencepost_server.domain.run import RunKey
from fencepost_server.engine.plain_reports import split
from fencepost_server.engine.verdicts import PlainSuccess, Report
from fencepost_server.policy.outcome import Cancelled

from tests.factories import JOB_ID, NOON

OTHER_JOB = JOB_ID[:-1] + ("0" if JOB_ID[-1] != "0" else "1")


def success(at: int, result: bytes | None = None) -> PlainSuccess:
    return JOB_ID, NOON + at, result, None


def test_plain_successes_come_in_key_order_with_their_places() -> None:
    reports = [success(3), success(1, b"x"), success(2)]
    plain, others = split(reports)
    assert plain == [
        (JOB_ID, NOON + 1, 1, b"x", None),
        (JOB_ID, NOON + 2, 2, None, None),
        (JOB_ID, NOON + 3, 0, None, None),
    ]
    assert others == []


def test_the_first_of_equal_keys_comes_first_whatever_its_result() -> None:
    plain, _ = split([success(1, b"x"), success(1), success(1, b"a")])
    assert [row[2] for row in plain] == [0, 1, 2]


def test_reports_of_unary_calls_are_plain_too() -> None:
    plain, others = split(
        [
            Report(key=RunKey(JOB_ID, NOON + 1), attempt=1, ending=None, result=b"1"),
            Report(key=RunKey(JOB_ID, NOON + 2), attempt=2, ending=None),
            Report(key=RunKey(JOB_ID, NOON + 3), attempt=1, ending=None, progress=b"p"),
            Report(key=RunKey(JOB_ID, NOON + 4), attempt=1, ending=Cancelled()),
        ]
    )
    assert plain == [(JOB_ID, NOON + 1, 0, b"1", None)]
    assert others == [1, 2, 3]


def test_a_run_that_something_else_is_said_of_is_left_to_the_general_path() -> None:
    plain, others = split(
        [
            success(1),
            success(2),
            Report(key=RunKey(JOB_ID, NOON + 1), attempt=1, ending=Cancelled()),
            Report(key=RunKey(OTHER_JOB, NOON + 2), attempt=1, ending=Cancelled()),
        ]
    )
    assert [row[2] for row in plain] == [1]
    assert others == [0, 2, 3]
