"""What becomes of a run when an attempt ends in any way but success, or when its time is over.

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
from fencepost_server.domain.schedule import SkipReason

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfTime:
    """The run is over its total_timeout while the attempt runs."""


Ending: TypeAlias = Failed | Snoozed | Cancelled | Released | LeaseLost | OutOfTime


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAttempt:
    """The locked row of a run whose newest attempt is open.

    `total_until`: no run goes on beyond it; None without a total_timeout.
    """

    key: RunKey
    attempt: int
    state: RunState
    failure_count: int
    lost_lease_count: int
    snooze_count: int
    cancel_requested: bool
    cancel_cause: CancelCause | None
    cancel_reason: str | None
    total_until: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """How a waiting run ends whose time is over; one of the reasons is set."""

    state: RunState
    dead_reason: DeadReason | None = None
    skip_reason: SkipReason | None = None


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
            forced=not _is_reported(ending),
            late=late,
        )
    wait = 0 if isinstance(ending, OutOfTime) else _wait(run, ending, policy, failures)
    dead = _dead_reason(run, ending, policy, failures, available_at=now + wait)
    if dead is not None:
        return Decision(
            state=RunState.DEAD,
            outcome=outcome,
            failure_count=failures,
            lost_lease_count=lost,
            snooze_count=snoozes,
            dead_reason=dead,
            forced=not _is_reported(ending),
            late=late,
        )
    return Decision(
        state=RunState.QUEUED if isinstance(ending, Released) else RunState.RETRYING,
        outcome=outcome,
        available_at=now + wait,
        failure_count=failures,
        lost_lease_count=lost,
        snooze_count=snoozes,
        late=late,
    )


def expire(*, attempt: int, waited_out: bool) -> Expiry:
    """How a waiting run ends that is over its queue_timeout (`waited_out`) or total_timeout
    (protocol T13, T14): a run that nobody ever claimed did not fail, it was skipped.
    """
    if attempt == 0:
        return Expiry(state=RunState.SKIPPED, skip_reason=SkipReason.EXPIRED)
    reason = DeadReason.QUEUE_TIMEOUT if waited_out else DeadReason.TOTAL_TIMEOUT
    return Expiry(state=RunState.DEAD, dead_reason=reason)


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


def _outcome(ending: Failed | Snoozed | Cancelled | Released | OutOfTime) -> AttemptOutcome:
    match ending:
        case OutOfTime():
            return AttemptOutcome.TIMED_OUT
        case Failed():
            return AttemptOutcome.TIMED_OUT if ending.timed_out else AttemptOutcome.FAILED
        case Snoozed():
            return AttemptOutcome.SNOOZED
        case Cancelled():
            return AttemptOutcome.CANCELLED
        case Released():
            return AttemptOutcome.UNDELIVERED if ending.undelivered else AttemptOutcome.RELEASED


def _is_reported(ending: Failed | Snoozed | Cancelled | Released | OutOfTime) -> bool:
    """Whether the worker has said this itself, and may say it again."""
    match ending:
        case Failed():
            return ending.reported or not ending.timed_out
        case Released():
            return not ending.undelivered
        case Cancelled():
            return not ending.forced
        case Snoozed():
            return True
        case OutOfTime():
            return False


def _dead_reason(
    run: OpenAttempt,
    ending: Failed | Snoozed | Cancelled | Released | OutOfTime,
    policy: RetryPolicy,
    failures: int,
    *,
    available_at: Instant,
) -> DeadReason | None:
    if isinstance(ending, Failed):
        if ending.final or ending.code in policy.non_retryable_codes:
            return DeadReason.NOT_RETRYABLE
        if failures >= policy.max_failures:
            return DeadReason.MAX_FAILURES
    # A run that becomes claimable only when its time is over will never be claimed.
    is_over = run.total_until is not None and available_at >= run.total_until
    return DeadReason.TOTAL_TIMEOUT if is_over or isinstance(ending, OutOfTime) else None


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
