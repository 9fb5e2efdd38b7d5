"""What workers are told: verdicts on their reports, and notices about the runs they hold."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from fencepost_server.clock import Duration, Instant
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.policy.outcome import Ending
from fencepost_server.store.database import Row

TIMEOUT_CODE = "TIMEOUT"


class Verdict(IntEnum):
    """What was done with one report; numbers as in the contract."""

    APPLIED = 1
    ALREADY_APPLIED = 2
    STALE_ATTEMPT = 3
    RUN_TERMINAL = 4
    NOT_FOUND = 5
    INVALID = 6
    RETRY = 7


class LeaseLostReason(IntEnum):
    """Why an attempt is over for its worker; numbers as in the contract."""

    SUPERSEDED = 1
    RUN_TERMINAL = 2
    ATTEMPT_TIMEOUT = 3
    ATTEMPT_CLOSED = 4
    UNKNOWN_RUN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The end of one attempt as a worker tells it. `ending` None: the handler returned.

    Bytes are serialized messages that are kept as they came.
    """

    key: RunKey
    attempt: int
    ending: Ending | None
    result: bytes | None = None
    failure: bytes | None = None
    failure_code: str | None = None
    timings: bytes | None = None
    progress: bytes | None = None


# What most reports say, that a first attempt succeeded: job_id, scheduled_at, result, timings.
PlainSuccess: TypeAlias = tuple[str, Instant, bytes | None, bytes | None]


def attempt_of(report: Report | PlainSuccess) -> tuple[RunKey, int]:
    """Whose end it is."""
    if isinstance(report, tuple):
        return RunKey(report[0], report[1]), 1
    return report.key, report.attempt


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict with what the worker is told besides."""

    verdict: Verdict
    current_attempt: int = 0
    run_state: RunState | None = None


SUCCESS_APPLIED = Judged(Verdict.APPLIED, run_state=RunState.SUCCEEDED)


class Held(NamedTuple):
    """One run a worker says it holds, with its progress if that changed."""

    key: RunKey
    attempt: int
    progress: bytes | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """What a worker must know about a run it holds: lost, or asked to stop.

    `grace` is what is left before the server ends the run itself.
    """

    key: RunKey
    attempt: int
    lost: LeaseLostReason | None = None
    current_attempt: int = 0
    cancel_reason: str = ""
    grace: Duration = 0


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer for one held run: renewed unless `not_renewed`, with a notice if any."""

    notice: Notice | None = None
    not_renewed: bool = False


RENEWED = Renewal()


def judge(row: Row | None, attempt: int) -> Judged | None:
    """The verdict on a report that changed nothing; None: the attempt is open, try again."""
    if row is None:
        return Judged(Verdict.NOT_FOUND)
    state = RunState.of(row["state"])
    current: int = row["attempt"]
    if attempt < current:
        return Judged(Verdict.STALE_ATTEMPT, current_attempt=current, run_state=state)
    if attempt > current:
        return Judged(Verdict.INVALID, current_attempt=current, run_state=state)
    if row["attempt_open"]:
        return None
    return Judged(
        Verdict.RUN_TERMINAL if row["forced"] else Verdict.ALREADY_APPLIED, run_state=state
    )


def cancel_notice(held: Held, row: Row, now: Instant) -> Notice | None:
    if not row["cancel_requested"]:
        return None
    return Notice(
        held.key,
        held.attempt,
        cancel_reason=row["cancel_reason"] or "",
        grace=max(0, (row["cancel_by"] or now) - now),
    )


def lost_notice(held: Held, row: Row | None) -> Notice | None:
    """Why a held run was not renewed; None: its row was only locked just now."""
    if row is None:
        return Notice(held.key, held.attempt, lost=LeaseLostReason.UNKNOWN_RUN)
    current: int = row["attempt"]
    if current != held.attempt:
        reason = (
            LeaseLostReason.SUPERSEDED if current > held.attempt else LeaseLostReason.UNKNOWN_RUN
        )
        return Notice(held.key, held.attempt, lost=reason, current_attempt=current)
    if row["attempt_open"]:
        return None
    if row["forced"]:
        reason = LeaseLostReason.RUN_TERMINAL
    elif row["failure_code"] == TIMEOUT_CODE and RunState.of(row["state"]).is_live:
        reason = LeaseLostReason.ATTEMPT_TIMEOUT
    else:
        reason = LeaseLostReason.ATTEMPT_CLOSED
    return Notice(held.key, held.attempt, lost=reason)
