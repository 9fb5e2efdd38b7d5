"""What becomes of a run when an attempt ends in any way but success.

Pure: the engine reads the locked row, asks here, and writes the decision. The classes say
what happened; the decision says which state follows, when, and with which counts.
"""

from dataclasses import dataclass
from typing import TypeAlias

from fencepost_server.clock import SECOND, Duration, Instant
from fencepost_server.domain.job import BackoffJitter, RetryPolicy
from fencepost_server.domain.run import (
    LOST_LEASE_WAIT_MAX,
    AttemptOutcome,
    CancelCause,
    DeadReason,
    RunKey,
    RunState,
    stable_fraction,
)

# base · 2^n is over every cap long before this; the exponent never grows beyond it.
_EXPONENT_MAX = 40
UNSUPPORTED_KIND_WAIT: Duration = 5 * SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The handler, the SDK or a timeout failed the attempt.

    `retry_after` is a delay the failure named; `final` says that it asked for no retry.
    `reported`: the worker says so; a timeout that nobody reported was kept by the server.
    """

    code: str
    final: bool = False
    retry_after: Duration | None = None
    timed_out: bool = False
    reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snoozed:
    """Neither an error nor done: call again after `delay`."""

    delay: Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The handler obeyed a cancel, or its grace is over (`forced`)."""

    forced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Given back without a verdict on the work; `undelivered` if it never reached a worker."""

    delay: Duration = 0
    undelivered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost:
    """Nobody renewed the lease."""


Ending: TypeAlias = Failed | Snoozed | Cancelled | Released | LeaseLost


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAttempt:
    """The locked row of a run whose newest attempt is open."""

    key: RunKey
    attempt: int
    state: RunState
    failure_count: int
    lost_lease_count: int
    snooze_count: int
    cancel_requested: bool
    cancel_cause: CancelCause | None
    cancel_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The state that follows, with everything its row needs.

    `available_at` is set for QUEUED and RETRYING. `keeps_open`: the attempt may still
    report. `outcome` None: the attempt is not recorded yet, because it is still open.
    """

    state: RunState
    outcome: AttemptOutcome | None
    available_at: Instant | None = None
    keeps_open: bool = False
    failure_count: int
    lost_lease_count: int
    snooze_count: int
    dead_reason: DeadReason | None = None
    cancel_cause: CancelCause | None = None
    forced: bool = False
    late: bool = False


def decide(run: OpenAttempt, ending: Ending, policy: RetryPolicy, *, now: Instant) -> Decision:
    """The decision for one ended attempt (protocol T8 to T12, T16, T17)."""
    late = run.state is RunState.RETRYING
    # A report that comes after the lease ran out takes that loss back.
    lost = run.lost_lease_count - (1 if late else 0)
    if isinstance(ending, LeaseLost):
        return _lose_lease(run, policy, now)
    outcome = _outcome(ending)
    failures = run.failure_count + (1 if isinstance(ending, Failed) else 0)
    snoozes = run.snooze_count + (1 if isinstance(ending, Snoozed) else 0)
    if run.cancel_requested or isinstance(ending, Cancelled):
        return Decision(
            state=RunState.CANCELLED,
            outcome=outcome,
            failure_count=failures,
            lost_lease_count=lost,
            snooze_count=snoozes,
            cancel_cause=run.cancel_cause or CancelCause.REQUESTED,
            forced=isinstance(ending, Cancelled) and ending.forced,
            late=late,
        )
    if isinstance(ending, Failed):
        dead = _dead_reason(ending, failures, policy)
        if dead is not None:
            return Decision(
                state=RunState.DEAD,
                outcome=outcome,
                failure_count=failures,
                lost_lease_count=lost,
                snooze_count=snoozes,
                dead_reason=dead,
                forced=ending.timed_out and not ending.reported,
                late=late,
            )
    return Decision(
        state=RunState.QUEUED if isinstance(ending, Released) else RunState.RETRYING,
        outcome=outcome,
        available_at=now + _wait(run, ending, policy, failures),
        failure_count=failures,
        lost_lease_count=lost,
        snooze_count=snoozes,
        late=late,
    )


def backoff(policy: RetryPolicy, *, failures: int, fraction: float) -> Duration:
    """The wait after failure number `failures` (from 1); `fraction` in [0, 1) places it."""
    exponent = min(max(failures, 0), _EXPONENT_MAX)
    longest = min(policy.cap, policy.base << exponent)
    match policy.jitter:
        case BackoffJitter.NONE:
            return longest
        case BackoffJitter.PROPORTIONAL:
            return int(longest * (0.8 + 0.2 * fraction))
        case BackoffJitter.FULL:
            return int(longest * fraction)


def _lose_lease(run: OpenAttempt, policy: RetryPolicy, now: Instant) -> Decision:
    lost = run.lost_lease_count + 1
    if run.cancel_requested:
        state, dead = RunState.CANCELLED, None
    elif lost >= policy.max_lost_leases:
        state, dead = RunState.DEAD, DeadReason.MAX_LOST_LEASES
    else:
        wait = int(LOST_LEASE_WAIT_MAX * _fraction(run, "lost"))
        return Decision(
            state=RunState.RETRYING,
            outcome=None,
            available_at=now + wait,
            keeps_open=True,
            failure_count=run.failure_count,
            lost_lease_count=lost,
            snooze_count=run.snooze_count,
        )
    return Decision(
        state=state,
        outcome=AttemptOutcome.LEASE_EXPIRED,
        failure_count=run.failure_count,
        lost_lease_count=lost,
        snooze_count=run.snooze_count,
        dead_reason=dead,
        cancel_cause=(run.cancel_cause or CancelCause.REQUESTED) if dead is None else None,
        forced=True,
    )


def _outcome(ending: Failed | Snoozed | Cancelled | Released) -> AttemptOutcome:
    match ending:
        case Failed():
            return AttemptOutcome.TIMED_OUT if ending.timed_out else AttemptOutcome.FAILED
        case Snoozed():
            return AttemptOutcome.SNOOZED
        case Cancelled():
            return AttemptOutcome.CANCELLED
        case Released():
            return AttemptOutcome.UNDELIVERED if ending.undelivered else AttemptOutcome.RELEASED


def _dead_reason(ending: Failed, failures: int, policy: RetryPolicy) -> DeadReason | None:
    if ending.final or ending.code in policy.non_retryable_codes:
        return DeadReason.NOT_RETRYABLE
    return DeadReason.MAX_FAILURES if failures >= policy.max_failures else None


def _wait(
    run: OpenAttempt,
    ending: Failed | Snoozed | Cancelled | Released,
    policy: RetryPolicy,
    failures: int,
) -> Duration:
    match ending:
        case Failed():
            if ending.retry_after is not None:
                return ending.retry_after
            return backoff(policy, failures=failures, fraction=_fraction(run, "backoff"))
        case Snoozed() | Released():
            return ending.delay
        case Cancelled():
            return 0


def _fraction(run: OpenAttempt, purpose: str) -> float:
    return stable_fraction(str(run.key), str(run.attempt), purpose)
