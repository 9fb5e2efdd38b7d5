"""Why a run has not started: which holds apply, given what is known of the run, its queue, the
limits over it and the workers that listen. Pure: everything is an argument.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from fencepost_server.clock import MINUTE, SECOND, Duration, Instant
from fencepost_server.domain.run import AttemptOutcome, RunState
from fencepost_server.errors import cut_text

MESSAGE_BYTES_MAX = 256
RUNS_AHEAD_MAX = 10_000


class HoldCode(IntEnum):
    """What can keep a run from starting; numbers as in the contract."""

    NOT_DUE = 1
    BACKOFF = 2
    SNOOZED = 3
    RELEASED = 4
    EARLIER_RUN = 5
    QUEUE_PAUSED = 6
    TENANT_LIMIT = 7
    QUEUE_LIMIT = 8
    JOB_LIMIT = 9
    KEY_LIMIT = 10
    RATE_LIMIT = 11
    NO_WORKER = 12
    NO_HANDLER = 13
    WORKERS_FULL = 14
    BEHIND_OTHERS = 15
    NEXT_CLAIM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """One thing that keeps a run from starting. `clears_in` None: not known."""

    code: HoldCode
    message: str
    clears_in: Duration | None = None
    subject: str = ""
    used: int = 0
    limit: int = 0
    runs_ahead: int = 0
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """A limit over runs in flight, what is in use of it and who has it, as resource names."""

    code: HoldCode
    subject: str
    used: int
    limit: int
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A queue's rate limit that lets nothing through for `clears_in`."""

    per_second: float
    clears_in: Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A worker that listens on the queue. `polls`: by single calls, with no slots told."""

    takes_kind: bool
    polls: bool = False
    slots: int = 0
    held_runs: int = 0
    free_credits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRun:
    """A run that waits, and all that may be in its way. Names are resource names, except
    `kind`.

    `last_outcome`: how its newest attempt ended, None if it is open or there is none.
    `runs_ahead`: claimable runs before it, counted up to RUNS_AHEAD_MAX. `parked_ahead`: if it
    waits for its place after an outage, the runs that get theirs before it, counted as far.
    """

    state: RunState
    available_at: Instant
    queue: str
    kind: str
    parked_ahead: int | None = None
    attempt: int = 0
    attempt_open: bool = False
    last_outcome: AttemptOutcome | None = None
    blocked_by: str = ""
    queue_paused: bool = False
    pause_reason: str = ""
    caps: Sequence[Cap] = ()
    rate: Rate | None = None
    listeners: Sequence[Listener] = ()
    runs_ahead: int = 0


def holds_of(run: WaitingRun, *, now: Instant) -> list[Hold]:
    """All that apply, the one that clears last first; NEXT_CLAIM when nothing else does.

    What comes and goes with the traffic (limits, full workers, runs ahead) is told of a run
    that could be claimed otherwise, because it says nothing of one that has to wait anyway.
    """
    found = [*_time(run, now), *_blocked(run), *_paused(run), *_workers_missing(run)]
    if run.state is not RunState.BLOCKED and run.available_at <= now:
        found += _limits(run)
        found += _contended(run)
    if not found:
        found = [
            Hold(
                code=HoldCode.NEXT_CLAIM,
                message="nothing is in the way: the next claim takes it",
                subject=run.queue,
            )
        ]
    # Nobody knows how long the unknown ones last, so they come first.
    found.sort(key=lambda hold: (hold.clears_in is not None, -(hold.clears_in or 0)))
    return [_cut(hold) for hold in found]


def _time(run: WaitingRun, now: Instant) -> Iterator[Hold]:
    left = run.available_at - now
    if run.state is RunState.BLOCKED or left <= 0:
        return
    if run.parked_ahead is not None and run.attempt == 0:
        # How soon depends on the rate and on what else is parked; available_at is a bound only.
        yield Hold(code=HoldCode.NOT_DUE, message=_parked_text(run.parked_ahead))
        return
    in_time = f"in {duration_text(left)}"
    match _why(run):
        case HoldCode.BACKOFF if run.attempt_open:
            text = f"the lease of attempt {run.attempt} ran out; it may be claimed again {in_time}"
        case HoldCode.BACKOFF:
            text = f"attempt {run.attempt} failed; it may be claimed again {in_time}"
        case HoldCode.SNOOZED:
            text = f"attempt {run.attempt} asked to be called again {in_time}"
        case HoldCode.RELEASED:
            text = f"attempt {run.attempt} was given back; it may be claimed again {in_time}"
        case _:
            text = f"it is due {in_time}"
    yield Hold(code=_why(run), message=text, clears_in=left)


def _parked_text(ahead: int) -> str:
    match ahead:
        case 0:
            runs = "it is the next one"
        case 1:
            runs = "1 newer one comes first"
        case _:
            more = "at least " if ahead >= RUNS_AHEAD_MAX else ""
            runs = f"{more}{ahead} newer ones come first"
    return f"it fell due in an outage; late runs of its tenant are released at a rate, and {runs}"


def _why(run: WaitingRun) -> HoldCode:
    """Why its available_at is to come."""
    if run.attempt == 0:
        return HoldCode.NOT_DUE
    if run.attempt_open:
        return HoldCode.BACKOFF
    match run.last_outcome:
        case AttemptOutcome.SNOOZED:
            return HoldCode.SNOOZED
        case AttemptOutcome.RELEASED | AttemptOutcome.UNDELIVERED:
            return HoldCode.RELEASED
        case None if run.state is RunState.QUEUED:
            # Replayed; the records of its attempts are gone.
            return HoldCode.NOT_DUE
        case _:
            return HoldCode.BACKOFF if run.state is RunState.RETRYING else HoldCode.NOT_DUE


def _blocked(run: WaitingRun) -> Iterator[Hold]:
    if run.state is RunState.BLOCKED:
        yield Hold(
            code=HoldCode.EARLIER_RUN,
            message="it waits for an earlier run of its job to end",
            subject=run.blocked_by,
        )


def _paused(run: WaitingRun) -> Iterator[Hold]:
    if run.queue_paused:
        reason = f": {run.pause_reason}" if run.pause_reason else ""
        yield Hold(
            code=HoldCode.QUEUE_PAUSED,
            message=f"its queue is paused{reason}",
            subject=run.queue,
        )


def _workers_missing(run: WaitingRun) -> Iterator[Hold]:
    if not run.listeners:
        yield Hold(
            code=HoldCode.NO_WORKER, message="no worker listens on its queue", subject=run.queue
        )
    elif not any(each.takes_kind for each in run.listeners):
        number = len(run.listeners)
        workers = "1 worker listens" if number == 1 else f"{number} workers listen"
        yield Hold(
            code=HoldCode.NO_HANDLER,
            message=f"{workers} on its queue, none for kind {run.kind}",
            subject=run.queue,
        )


def _limits(run: WaitingRun) -> Iterator[Hold]:
    # An open attempt keeps its place, so no limit holds back its next claim.
    if not run.attempt_open:
        for cap in run.caps:
            if cap.used >= cap.limit:
                yield Hold(
                    code=cap.code,
                    message=f"{cap.used} of {cap.limit} places of {_scope(cap)} are taken",
                    subject=cap.subject,
                    used=cap.used,
                    limit=cap.limit,
                    holders=cap.holders,
                )
    if run.rate is not None and run.rate.clears_in > 0:
        yield Hold(
            code=HoldCode.RATE_LIMIT,
            message=f"its queue starts {run.rate.per_second:g} runs a second at most",
            clears_in=run.rate.clears_in,
            subject=run.queue,
        )


def _scope(cap: Cap) -> str:
    match cap.code:
        case HoldCode.TENANT_LIMIT:
            return "its tenant"
        case HoldCode.QUEUE_LIMIT:
            return "its queue"
        case HoldCode.JOB_LIMIT:
            return "its job"
        case _:
            return "its concurrency key"


def _contended(run: WaitingRun) -> Iterator[Hold]:
    takers = [each for each in run.listeners if each.takes_kind]
    if not takers:
        return
    sessions = [each for each in takers if not each.polls]
    free = sum(each.free_credits for each in sessions)
    # Who polls takes what there is whenever it asks, so it is never full as far as we know.
    if free <= 0 and len(sessions) == len(takers):
        held, slots = (sum(each.held_runs for each in sessions), sum(e.slots for e in sessions))
        yield Hold(
            code=HoldCode.WORKERS_FULL,
            message=f"{held} of {slots} slots of the workers for its queue and kind are taken",
            subject=run.queue,
            used=held,
            limit=max(1, slots),
        )
    if run.runs_ahead > 0 and run.runs_ahead >= free:
        more = "at least " if run.runs_ahead >= RUNS_AHEAD_MAX else ""
        runs = (
            "1 run of its queue comes"
            if run.runs_ahead == 1
            else (f"{more}{run.runs_ahead} runs of its queue come")
        )
        yield Hold(
            code=HoldCode.BEHIND_OTHERS,
            message=f"{runs} first by priority and age",
            subject=run.queue,
            runs_ahead=run.runs_ahead,
        )


def duration_text(duration: Duration) -> str:
    """Two units at most, such as "1h 5m", "42s" or "0.3s"."""
    if duration < 10 * SECOND:
        return f"{max(duration, SECOND // 10) / SECOND:.1f}s"
    seconds = duration // SECOND
    if duration < MINUTE:
        return f"{seconds}s"
    for size, name, below, lower in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "m")):
        if seconds >= size:
            rest = seconds % size // below
            return f"{seconds // size}{name} {rest}{lower}" if rest else f"{seconds // size}{name}"
    rest = seconds % 60
    return f"{seconds // 60}m {rest}s" if rest else f"{seconds // 60}m"


def _cut(hold: Hold) -> Hold:
    if len(hold.message.encode()) <= MESSAGE_BYTES_MAX:
        return hold
    return Hold(
        code=hold.code,
        message=cut_text(hold.message, MESSAGE_BYTES_MAX),
        clears_in=hold.clears_in,
        subject=hold.subject,
        used=hold.used,
        limit=hold.limit,
        runs_ahead=hold.runs_ahead,
        holders=hold.holders,
    )
