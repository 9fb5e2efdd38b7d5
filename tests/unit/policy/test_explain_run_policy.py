"""Which holds apply to a waiting run, given the facts: a case per code, and their order."""

from typing import Any

import pytest
from fencepost.v1 import run_pb2
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND
from fencepost_server.domain.run import AttemptOutcome, RunState
from fencepost_server.policy.explain_run import (
    MESSAGE_BYTES_MAX,
    RUNS_AHEAD_MAX,
    Cap,
    Hold,
    HoldCode,
    Listener,
    Rate,
    WaitingRun,
    duration_text,
    holds_of,
)

from tests.factories import NOON

QUEUE = "tenants/acme/queues/mail"
FREE = Listener(takes_kind=True, slots=10, held_runs=4, free_credits=6)
FULL = Listener(takes_kind=True, slots=10, held_runs=10, free_credits=0)


def waiting(**values: Any) -> WaitingRun:
    """A run that the next claim takes, unless `values` say otherwise."""
    known: dict[str, Any] = {
        "state": RunState.QUEUED,
        "available_at": NOON,
        "queue": QUEUE,
        "kind": "mail.send",
        "listeners": (FREE,),
    }
    return WaitingRun(**(known | values))


def holds(**values: Any) -> list[Hold]:
    return holds_of(waiting(**values), now=NOON)


def codes(**values: Any) -> list[str]:
    return [hold.code.name for hold in holds(**values)]


def test_codes_are_those_of_the_contract() -> None:
    told = {code.name: int(code) for code in HoldCode}
    contract = {
        name.removeprefix("HOLD_CODE_"): number for name, number in run_pb2.HoldCode.items()
    }
    assert {"UNSPECIFIED": 0, **told} == contract


def test_nothing_in_the_way_is_a_code_too() -> None:
    assert codes() == ["NEXT_CLAIM"]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({}, "NOT_DUE"),
        ({"attempt": 1, "last_outcome": AttemptOutcome.RELEASED}, "RELEASED"),
        ({"attempt": 1, "last_outcome": AttemptOutcome.UNDELIVERED}, "RELEASED"),
        ({"attempt": 2, "last_outcome": None}, "NOT_DUE"),
        ({"attempt": 2, "last_outcome": AttemptOutcome.FAILED}, "NOT_DUE"),
        (
            {
                "state": RunState.RETRYING,
                "attempt": 1,
                "last_outcome": AttemptOutcome.SNOOZED,
            },
            "SNOOZED",
        ),
        ({"state": RunState.RETRYING, "attempt": 1, "attempt_open": True}, "BACKOFF"),
        *[
            ({"state": RunState.RETRYING, "attempt": 3, "last_outcome": outcome}, "BACKOFF")
            for outcome in (
                AttemptOutcome.FAILED,
                AttemptOutcome.TIMED_OUT,
                AttemptOutcome.LEASE_EXPIRED,
                None,
            )
        ],
    ],
)
def test_a_run_whose_time_is_to_come(values: dict[str, Any], code: str) -> None:
    [hold] = holds(available_at=NOON + 90 * SECOND, **values)
    assert (hold.code.name, hold.clears_in) == (code, 90 * SECOND)
    assert "in 1m 30s" in hold.message
    assert codes(available_at=NOON, **values) == ["NEXT_CLAIM"], "its time has come"


def test_a_lost_lease_is_told_from_a_failure() -> None:
    [lost] = holds(
        state=RunState.RETRYING, attempt=2, attempt_open=True, available_at=NOON + SECOND
    )
    assert lost.message.startswith("the lease of attempt 2 ran out")


def test_a_blocked_run_names_the_one_it_waits_for() -> None:
    earlier = "tenants/acme/jobs/mail/runs/2026-12-01T11:00:00Z"
    [hold] = holds(state=RunState.BLOCKED, blocked_by=earlier, available_at=NOON + HOUR)
    assert (hold.code, hold.subject, hold.clears_in) == (HoldCode.EARLIER_RUN, earlier, None)


def test_a_paused_queue_says_why() -> None:
    [hold] = holds(queue_paused=True, pause_reason="until the provider is back")
    assert (hold.code, hold.subject) == (HoldCode.QUEUE_PAUSED, QUEUE)
    assert hold.message == "its queue is paused: until the provider is back"
    [long] = holds(queue_paused=True, pause_reason="é" * 400)
    assert len(long.message.encode()) <= MESSAGE_BYTES_MAX


@pytest.mark.parametrize(
    "code",
    [HoldCode.TENANT_LIMIT, HoldCode.QUEUE_LIMIT, HoldCode.JOB_LIMIT, HoldCode.KEY_LIMIT],
)
def test_a_cap_that_is_reached_names_its_holders(code: HoldCode) -> None:
    cap = Cap(code=code, subject="tenants/acme", used=5, limit=5, holders=("a", "b"))
    [hold] = holds(caps=[cap])
    assert (hold.code, hold.subject, hold.used, hold.limit) == (code, "tenants/acme", 5, 5)
    assert hold.holders == ("a", "b")
    assert hold.message.startswith("5 of 5 places")
    room = Cap(code=code, subject="tenants/acme", used=4, limit=5)
    assert codes(caps=[room]) == ["NEXT_CLAIM"]
    # A lost attempt that is still open has its place already.
    assert codes(caps=[cap], attempt=1, attempt_open=True) == ["NEXT_CLAIM"]


def test_a_rate_limit_clears_with_its_next_token() -> None:
    [hold] = holds(rate=Rate(per_second=2.5, clears_in=400_000))
    assert (hold.code, hold.clears_in, hold.subject) == (HoldCode.RATE_LIMIT, 400_000, QUEUE)
    assert "2.5 runs a second" in hold.message
    assert codes(rate=Rate(per_second=2.5, clears_in=0)) == ["NEXT_CLAIM"]


def test_no_worker_and_none_for_the_kind_are_two_codes() -> None:
    assert codes(listeners=()) == ["NO_WORKER"]
    other = Listener(takes_kind=False, slots=5, free_credits=5)
    [hold] = holds(listeners=(other, other))
    assert hold.code is HoldCode.NO_HANDLER
    assert hold.message == "2 workers listen on its queue, none for kind mail.send"


def test_workers_without_a_free_slot() -> None:
    other = Listener(takes_kind=False, slots=5, free_credits=5)
    [hold] = holds(listeners=(FULL, FULL, other))
    assert (hold.code, hold.used, hold.limit) == (HoldCode.WORKERS_FULL, 20, 20)
    assert codes(listeners=(FULL, FREE)) == ["NEXT_CLAIM"]
    polling = Listener(takes_kind=True, polls=True)
    assert codes(listeners=(FULL, polling)) == ["NEXT_CLAIM"], "who polls is not known to be full"


def test_runs_that_come_first() -> None:
    [hold] = holds(runs_ahead=6)
    assert (hold.code, hold.runs_ahead) == (HoldCode.BEHIND_OTHERS, 6)
    assert codes(runs_ahead=5) == ["NEXT_CLAIM"], "six slots are free"
    [many] = holds(runs_ahead=RUNS_AHEAD_MAX)
    assert many.message.startswith("at least 10000 runs")
    assert codes(listeners=(FULL,), runs_ahead=1) == ["WORKERS_FULL", "BEHIND_OTHERS"]


def test_all_that_apply_are_told_and_the_one_that_clears_last_first() -> None:
    found = holds(
        queue_paused=True,
        available_at=NOON + MINUTE,
        listeners=(),
        caps=[Cap(code=HoldCode.QUEUE_LIMIT, subject=QUEUE, used=1, limit=1)],
        runs_ahead=3,
    )
    # What comes and goes says nothing of a run that is not due.
    assert {hold.code.name for hold in found} == {"QUEUE_PAUSED", "NO_WORKER", "NOT_DUE"}
    assert [hold.clears_in for hold in found] == [None, None, MINUTE]
    rated = holds(
        caps=[Cap(code=HoldCode.JOB_LIMIT, subject=QUEUE, used=2, limit=1)],
        rate=Rate(per_second=1, clears_in=SECOND),
    )
    assert [hold.code.name for hold in rated] == ["JOB_LIMIT", "RATE_LIMIT"]


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (1, "0.1s"),
        (2_500_000, "2.5s"),
        (59 * SECOND, "59s"),
        (MINUTE, "1m"),
        (90 * SECOND, "1m 30s"),
        (HOUR, "1h"),
        (HOUR + 5 * MINUTE, "1h 5m"),
        (DAY + HOUR, "1d 1h"),
        (366 * DAY, "366d"),
    ],
)
def test_durations_read_well(duration: int, text: str) -> None:
    assert duration_text(duration) == text


@pytest.mark.parametrize(
    ("ahead", "told"),
    [
        (0, "and it is the next one"),
        (1, "and 1 newer one comes first"),
        (1234, "and 1234 newer ones come first"),
        (RUNS_AHEAD_MAX, "and at least 10000 newer ones come first"),
    ],
)
def test_a_parked_run_says_who_comes_first_and_not_when_its_bound_is_over(
    ahead: int, told: str
) -> None:
    [hold] = holds(available_at=NOON + 7 * DAY, parked_ahead=ahead)
    assert (hold.code, hold.clears_in) == (HoldCode.NOT_DUE, None)
    assert hold.message.startswith("it fell due in an outage")
    assert hold.message.endswith(told)
    # Over its bound it may be claimed, and waits for nothing.
    assert codes(available_at=NOON, parked_ahead=ahead) == ["NEXT_CLAIM"]


def test_a_backoff_is_told_as_such_whatever_its_run_waited_for_before() -> None:
    [hold] = holds(
        state=RunState.RETRYING,
        attempt=1,
        last_outcome=AttemptOutcome.FAILED,
        available_at=NOON + HOUR,
        parked_ahead=0,
    )
    assert (hold.code, hold.clears_in) == (HoldCode.BACKOFF, HOUR)
