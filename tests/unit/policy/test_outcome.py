"""What becomes of a run when an attempt ends: states, waits and counts."""

from typing import Any

import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND
from fencepost_server.domain.job import BackoffJitter, RetryPolicy
from fencepost_server.domain.run import (
    LOST_LEASE_WAIT_MAX,
    TRANSITIONS,
    AttemptOutcome,
    CancelCause,
    DeadReason,
    RunKey,
    RunState,
    allowed,
)
from fencepost_server.policy.outcome import (
    Cancelled,
    Decision,
    Ending,
    Failed,
    LeaseLost,
    Released,
    Snoozed,
    backoff,
    decide,
)

from tests.factories import JOB_ID, NOON, open_attempt, plain_retry

ENDINGS: list[Ending] = [
    Failed(code="X", reported=True),
    Failed(code="X", final=True, reported=True),
    Failed(code="TIMEOUT", timed_out=True),
    Snoozed(delay=SECOND),
    Cancelled(),
    Cancelled(forced=True),
    Released(),
    Released(delay=5 * SECOND, undelivered=True),
    LeaseLost(),
]


def _decide(ending: Ending, policy: RetryPolicy | None = None, **run: Any) -> Decision:
    return decide(open_attempt(**run), ending, policy or plain_retry(), now=NOON)


@pytest.mark.parametrize("failures", range(4))
def test_a_failure_with_budget_left_waits_twice_as_long_each_time(failures: int) -> None:
    decision = _decide(Failed(code="X"), failure_count=failures)
    assert decision.state is RunState.RETRYING
    assert decision.outcome is AttemptOutcome.FAILED
    assert decision.failure_count == failures + 1
    assert decision.available_at == NOON + 20 * SECOND * 2**failures


def test_the_fifth_failure_is_final_by_default() -> None:
    decision = _decide(Failed(code="X"), RetryPolicy(), failure_count=4)
    assert (decision.state, decision.dead_reason) == (RunState.DEAD, DeadReason.MAX_FAILURES)
    assert _decide(Failed(code="X"), RetryPolicy(), failure_count=3).state is RunState.RETRYING


def test_the_attempt_number_is_no_budget() -> None:
    assert _decide(Failed(code="X"), attempt=1000).state is RunState.RETRYING


def test_the_wait_never_grows_over_its_cap() -> None:
    policy = plain_retry(max_failures=10**6, cap=HOUR)
    for failures in (9, 100, 10**5):
        decision = _decide(Failed(code="X"), policy, failure_count=failures)
        assert decision.available_at == NOON + HOUR


@pytest.mark.parametrize("jitter", list(BackoffJitter))
def test_jitter_keeps_the_wait_in_its_range(jitter: BackoffJitter) -> None:
    policy = RetryPolicy.of(jitter=jitter)
    low = {BackoffJitter.FULL: 0.0, BackoffJitter.PROPORTIONAL: 0.8, BackoffJitter.NONE: 1.0}
    waits = [backoff(policy, failures=1, fraction=n / 100) for n in range(100)]
    assert min(waits) == int(20 * SECOND * low[jitter])
    assert max(waits) <= 20 * SECOND
    assert waits == sorted(waits)


def test_full_jitter_spreads_runs_evenly_and_is_stable() -> None:
    def wait(n: int) -> int:
        run = open_attempt(key=RunKey(JOB_ID, NOON + n))
        decision = decide(run, Failed(code="X"), RetryPolicy(), now=NOON)
        assert decision.available_at is not None
        return decision.available_at - NOON

    waits = [wait(n) for n in range(2000)]
    assert waits == [wait(n) for n in range(2000)]
    assert 0 <= min(waits) <= max(waits) < 20 * SECOND
    assert sum(waits) / len(waits) == pytest.approx(10 * SECOND, rel=0.03)


def test_a_named_delay_replaces_the_backoff() -> None:
    decision = _decide(Failed(code="X", retry_after=7 * MINUTE), failure_count=3)
    assert decision.available_at == NOON + 7 * MINUTE


def test_a_named_delay_buys_no_budget() -> None:
    decision = _decide(Failed(code="X", retry_after=SECOND), failure_count=4)
    assert decision.state is RunState.DEAD


def test_a_failure_that_asks_for_no_retry_or_has_such_a_code_is_dead() -> None:
    policy = plain_retry(non_retryable_codes=("BAD",))
    for failed in (Failed(code="X", final=True), Failed(code="BAD")):
        decision = _decide(failed, policy)
        assert (decision.state, decision.dead_reason) == (
            RunState.DEAD,
            DeadReason.NOT_RETRYABLE,
        )


def test_a_timeout_is_a_failure_and_forced_only_if_nobody_reported_it() -> None:
    policy = plain_retry(max_failures=1)
    kept = _decide(Failed(code="TIMEOUT", timed_out=True), policy)
    reported = _decide(Failed(code="TIMEOUT", timed_out=True, reported=True), policy)
    assert kept.outcome is reported.outcome is AttemptOutcome.TIMED_OUT
    assert (kept.forced, reported.forced) == (True, False)


def test_snoozes_and_releases_cost_nothing() -> None:
    snoozed = _decide(Snoozed(delay=MINUTE), failure_count=4, lost_lease_count=4)
    released = _decide(Released(), failure_count=4, lost_lease_count=4)
    undelivered = _decide(Released(undelivered=True), failure_count=4, lost_lease_count=4)
    for decision in (snoozed, released, undelivered):
        assert (decision.failure_count, decision.lost_lease_count) == (4, 4)
    assert (snoozed.state, snoozed.snooze_count) == (RunState.RETRYING, 1)
    assert snoozed.available_at == NOON + MINUTE
    assert (released.state, released.available_at) == (RunState.QUEUED, NOON)
    assert undelivered.outcome is AttemptOutcome.UNDELIVERED


def test_a_lost_lease_leaves_the_attempt_open_and_waits_up_to_two_seconds() -> None:
    waits = set()
    for attempt in range(1, 200):
        decision = _decide(LeaseLost(), attempt=attempt)
        assert decision.state is RunState.RETRYING
        assert decision.keeps_open
        assert decision.outcome is None
        assert (decision.failure_count, decision.lost_lease_count) == (0, 1)
        assert decision.available_at is not None
        waits.add(decision.available_at - NOON)
    assert 0 <= min(waits) < max(waits) < LOST_LEASE_WAIT_MAX
    assert len(waits) > 190


def test_the_last_lost_lease_ends_the_run_by_force() -> None:
    decision = _decide(LeaseLost(), lost_lease_count=4)
    assert (decision.state, decision.dead_reason) == (RunState.DEAD, DeadReason.MAX_LOST_LEASES)
    assert decision.forced
    assert decision.outcome is AttemptOutcome.LEASE_EXPIRED


@pytest.mark.parametrize(
    "ending", [each for each in ENDINGS if not isinstance(each, LeaseLost)], ids=repr
)
def test_a_late_report_takes_the_lost_lease_back(ending: Ending) -> None:
    decision = _decide(ending, state=RunState.RETRYING, lost_lease_count=2)
    assert decision.late
    assert decision.lost_lease_count == 1


@pytest.mark.parametrize("ending", ENDINGS, ids=repr)
def test_a_run_asked_to_stop_ends_cancelled_whatever_its_attempt_says(ending: Ending) -> None:
    decision = _decide(ending, cancel_requested=True, cancel_cause=CancelCause.OVERLAP)
    assert decision.state is RunState.CANCELLED
    assert decision.cancel_cause is CancelCause.OVERLAP
    assert decision.outcome is not None


def test_a_handler_may_cancel_unasked() -> None:
    decision = _decide(Cancelled())
    assert (decision.state, decision.cancel_cause) == (
        RunState.CANCELLED,
        CancelCause.REQUESTED,
    )
    assert not decision.forced


# Only a running attempt has a lease to lose.
@pytest.mark.parametrize(
    ("state", "ending"),
    [(RunState.RUNNING, each) for each in ENDINGS]
    + [(RunState.RETRYING, each) for each in ENDINGS if not isinstance(each, LeaseLost)],
    ids=repr,
)
@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("used", [0, 4])
def test_every_decision_is_a_legal_transition_with_what_its_row_needs(
    ending: Ending, state: RunState, cancel: bool, used: int
) -> None:
    decision = _decide(
        ending,
        state=state,
        cancel_requested=cancel,
        failure_count=used,
        lost_lease_count=max(used, 1),
    )
    assert allowed(state, decision.state)
    assert decision.state.is_live == (decision.available_at is not None)
    assert (decision.state is RunState.DEAD) == (decision.dead_reason is not None)
    assert (decision.state is RunState.CANCELLED) == (decision.cancel_cause is not None)
    assert decision.keeps_open == (decision.outcome is None)


def test_only_dead_and_skipped_runs_ever_leave_a_final_state() -> None:
    leaving = {source for t in TRANSITIONS for source in t.sources if not source.is_live}
    assert leaving == {RunState.DEAD, RunState.SKIPPED}
    assert not allowed(RunState.SUCCEEDED, RunState.QUEUED)
    assert not allowed(RunState.QUEUED, RunState.SUCCEEDED)
    assert not allowed(RunState.BLOCKED, RunState.RUNNING)
