"""Backoffs that cannot overflow, and what becomes of runs whose time is over."""

from dataclasses import replace
from typing import Any

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Duration
from fencepost_server.domain.job import BackoffJitter, RetryPolicy
from fencepost_server.domain.run import (
    AttemptOutcome,
    CancelCause,
    DeadReason,
    RunKey,
    RunState,
    allowed,
)
from fencepost_server.domain.schedule import SkipReason
from fencepost_server.policy.outcome import (
    Decision,
    Ending,
    Failed,
    LeaseLost,
    OutOfTime,
    Released,
    Snoozed,
    backoff,
    decide,
    expire,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import JOB_ID, NOON, failed, open_attempt, plain_retry

ATTEMPTS = (1, 2, 31, 63, 64, 1023, 1024, 2000, 10**6)
POLICIES = st.builds(
    lambda base, more, jitter: RetryPolicy.of(base=base, cap=base + more, jitter=jitter),
    base=st.integers(100_000, DAY),
    more=st.integers(0, 30 * DAY),
    jitter=st.sampled_from(BackoffJitter),
)
FRACTIONS = st.floats(0, 1, exclude_max=True)


def _decide(ending: Ending, policy: RetryPolicy | None = None, **run: Any) -> Decision:
    return decide(open_attempt(**run), ending, policy or plain_retry(), now=NOON)


# Backoffs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitter", list(BackoffJitter))
@pytest.mark.parametrize("base", [SECOND, 100_000, HOUR])
def test_no_attempt_number_overflows_a_backoff(base: Duration, jitter: BackoffJitter) -> None:
    policy = RetryPolicy.of(base=base, cap=HOUR, jitter=jitter)
    for number in ATTEMPTS:
        for fraction in (0.0, 0.5, 1 - 2**-53):
            assert 0 <= backoff(policy, failures=number, fraction=fraction) <= HOUR
    without = replace(policy, jitter=BackoffJitter.NONE)
    assert backoff(without, failures=1, fraction=0) == min(HOUR, 2 * base)
    assert {backoff(without, failures=number, fraction=0) for number in ATTEMPTS[2:]} == {HOUR}


def test_a_million_failures_decide_as_quickly_as_one() -> None:
    policy = plain_retry(max_failures=10**7)
    decision = _decide(failed(), policy, failure_count=10**6)
    assert decision.available_at == NOON + HOUR


def test_full_jitter_is_half_the_cap_on_average() -> None:
    policy = RetryPolicy.of(base=SECOND, cap=HOUR, max_failures=1000)
    waits = []
    for number in range(10_000):
        run = open_attempt(key=RunKey(JOB_ID, NOON + number), failure_count=30)
        at = decide(run, failed(), policy, now=NOON).available_at
        assert at is not None
        waits.append(at - NOON)
    assert 0 <= min(waits) <= max(waits) <= HOUR
    assert sum(waits) / len(waits) == pytest.approx(HOUR / 2, rel=0.03)


@given(policy=POLICIES, failures=st.integers(1, 10**9), fraction=FRACTIONS)
def test_any_backoff_is_between_nothing_and_its_cap(
    policy: RetryPolicy, failures: int, fraction: float
) -> None:
    assert 0 <= backoff(policy, failures=failures, fraction=fraction) <= policy.cap


@given(policy=POLICIES, failures=st.integers(1, 1000), fraction=FRACTIONS)
def test_a_later_failure_never_waits_less_at_the_same_place(
    policy: RetryPolicy, failures: int, fraction: float
) -> None:
    sooner = backoff(policy, failures=failures, fraction=fraction)
    assert sooner <= backoff(policy, failures=failures + 1, fraction=fraction)


# total_timeout ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        (failed(retry_after=MINUTE), AttemptOutcome.FAILED),
        (Snoozed(delay=MINUTE), AttemptOutcome.SNOOZED),
        (Released(delay=MINUTE), AttemptOutcome.RELEASED),
    ],
)
def test_a_wait_that_ends_when_the_run_is_over_ends_it_at_once(
    ending: Ending, outcome: AttemptOutcome
) -> None:
    over = _decide(ending, total_until=NOON + MINUTE)
    assert (over.state, over.dead_reason) == (RunState.DEAD, DeadReason.TOTAL_TIMEOUT)
    # The worker has said this itself, and may say it again.
    assert (over.outcome, over.forced) == (outcome, False)
    in_time = _decide(ending, total_until=NOON + MINUTE + 1)
    assert in_time.available_at == NOON + MINUTE
    assert in_time.state.is_live


def test_a_backoff_that_ends_in_time_is_waited_for() -> None:
    in_time = _decide(failed(), total_until=NOON + 20 * SECOND + 1)
    assert in_time.state is RunState.RETRYING
    over = _decide(failed(), total_until=NOON + 20 * SECOND)
    assert (over.state, over.failure_count) == (RunState.DEAD, 1)


def test_the_failures_own_reason_goes_before_the_time() -> None:
    for ending, policy, reason in (
        (failed(final=True), plain_retry(), DeadReason.NOT_RETRYABLE),
        (failed(), plain_retry(max_failures=1), DeadReason.MAX_FAILURES),
    ):
        assert _decide(ending, policy, total_until=NOON).dead_reason is reason


def test_a_lost_lease_may_still_be_reported_until_the_time_is_over() -> None:
    decision = _decide(LeaseLost(), total_until=NOON + 1)
    assert (decision.state, decision.keeps_open) == (RunState.RETRYING, True)


def test_a_running_attempt_out_of_time_ends_the_run_by_force_and_costs_no_failure() -> None:
    decision = _decide(OutOfTime(), failure_count=1, lost_lease_count=2, total_until=NOON)
    assert (decision.state, decision.dead_reason) == (RunState.DEAD, DeadReason.TOTAL_TIMEOUT)
    assert (decision.outcome, decision.forced) == (AttemptOutcome.TIMED_OUT, True)
    assert (decision.failure_count, decision.lost_lease_count) == (1, 2)


def test_a_run_asked_to_stop_that_runs_out_of_time_is_cancelled() -> None:
    decision = _decide(
        OutOfTime(), cancel_requested=True, cancel_cause=CancelCause.OVERLAP, total_until=NOON
    )
    assert (decision.state, decision.cancel_cause) == (RunState.CANCELLED, CancelCause.OVERLAP)
    assert decision.forced


def test_what_never_reached_a_worker_and_is_out_of_time_ends_by_force() -> None:
    decision = _decide(Released(undelivered=True), total_until=NOON)
    assert (decision.state, decision.outcome) == (RunState.DEAD, AttemptOutcome.UNDELIVERED)
    assert decision.forced


def test_a_timeout_that_the_server_kept_is_forced_and_a_reported_one_is_not() -> None:
    for reported in (True, False):
        ending = Failed(code="TIMEOUT", timed_out=True, reported=reported)
        assert _decide(ending, total_until=NOON).forced is not reported


# Waiting runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("waited_out", [True, False])
def test_a_run_that_nobody_claimed_is_skipped_not_dead(waited_out: bool) -> None:
    expiry = expire(attempt=0, waited_out=waited_out)
    assert (expiry.state, expiry.skip_reason) == (RunState.SKIPPED, SkipReason.EXPIRED)
    assert expiry.dead_reason is None
    assert allowed(RunState.QUEUED, expiry.state)
    assert allowed(RunState.BLOCKED, expiry.state)


@pytest.mark.parametrize(
    ("waited_out", "reason"),
    [(True, DeadReason.QUEUE_TIMEOUT), (False, DeadReason.TOTAL_TIMEOUT)],
)
def test_a_run_that_was_claimed_before_is_dead_for_the_time_that_was_over_first(
    waited_out: bool, reason: DeadReason
) -> None:
    expiry = expire(attempt=3, waited_out=waited_out)
    assert (expiry.state, expiry.dead_reason, expiry.skip_reason) == (RunState.DEAD, reason, None)
    assert allowed(RunState.QUEUED, expiry.state)
    assert allowed(RunState.RETRYING, expiry.state)
