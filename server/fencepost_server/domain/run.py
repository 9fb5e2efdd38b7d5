"""What a run is: its states, and the only table of who may become what.

SQL statements that change a state name their rows of this table, and a test holds the two
together; the numbers are those of protocol.md §2.2.
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from fencepost_server.clock import Duration, Instant
from fencepost_server.domain.names import format_run_key


class RunState(IntEnum):
    """Life of a run; numbers as in the contract, names in lower case as in Postgres."""

    QUEUED = 1
    BLOCKED = 2
    RUNNING = 3
    RETRYING = 4
    SUCCEEDED = 5
    DEAD = 6
    CANCELLED = 7
    SKIPPED = 8

    @property
    def is_live(self) -> bool:
        """Whether the run has not ended."""
        return self <= RunState.RETRYING

    @classmethod
    def of(cls, spelling: str) -> "RunState":
        """The state that Postgres spells so."""
        return _STATES[spelling]


_STATES = {state.name.lower(): state for state in RunState}


class RunOrigin(IntEnum):
    """How a run came to be."""

    SCHEDULE = 1
    CATCH_UP = 2
    BACKFILL = 3
    ENQUEUE = 4


class DeadReason(IntEnum):
    """Why a run is DEAD."""

    MAX_FAILURES = 1
    MAX_LOST_LEASES = 2
    NOT_RETRYABLE = 3
    QUEUE_TIMEOUT = 4
    TOTAL_TIMEOUT = 5


class CancelCause(IntEnum):
    """Why a run is CANCELLED, or being cancelled."""

    REQUESTED = 1
    OVERLAP = 2
    REPLACED = 3
    JOB_DELETED = 4


class AttemptOutcome(IntEnum):
    """How an attempt ended."""

    SUCCEEDED = 1
    FAILED = 2
    SNOOZED = 3
    CANCELLED = 4
    LEASE_EXPIRED = 5
    RELEASED = 6
    UNDELIVERED = 7
    TIMED_OUT = 8


class RunKey(NamedTuple):
    """The identity of a run. Nothing ever makes two runs of one key; keys sort for locking."""

    job_id: str
    scheduled_at: Instant

    def __str__(self) -> str:
        return format_run_key(self.job_id, self.scheduled_at)


class Lane(NamedTuple):
    """Runs that one index range holds in the order they are claimed."""

    queue_id: int
    kind_id: int
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One event of a run, from which states it may come and to which it leads."""

    rows: str
    event: str
    sources: frozenset[RunState]
    targets: frozenset[RunState]


def _moves(rows: str, event: str, sources: str, targets: str) -> Transition:
    return Transition(
        rows=rows,
        event=event,
        sources=frozenset(_STATES[name] for name in sources.split()),
        targets=frozenset(_STATES[name] for name in targets.split()),
    )


TRANSITIONS: tuple[Transition, ...] = (
    _moves("T1 T2", "make", "", "queued blocked"),
    _moves("T4", "promote", "blocked", "queued"),
    _moves("T5", "claim", "queued retrying", "running"),
    _moves("T6 T10", "heartbeat", "running retrying", "running"),
    _moves("T7 T17", "succeed", "running retrying", "succeeded"),
    _moves("T8 T11 T17", "put_back", "running retrying", "retrying queued"),
    _moves("T9", "lose_lease", "running", "retrying"),
    _moves("T12 T13 T17", "bury", "queued running retrying", "dead"),
    _moves("T14", "expire", "queued blocked", "skipped"),
    _moves("T15 T16 T17", "cancel", "queued blocked running retrying", "cancelled"),
    _moves("T18", "replay", "dead", "queued"),
    _moves("T20", "backfill", "skipped", "queued blocked"),
)


def allowed(source: RunState, target: RunState) -> bool:
    """Whether some event leads from `source` to `target`."""
    return any(source in t.sources and target in t.targets for t in TRANSITIONS)


def span_id(key: RunKey, attempt: int) -> str:
    """Span id of an attempt, 16 hex digits (protocol N6); attempt 0 is the run's root span."""
    return hashlib.sha256(f"{key}/{attempt}".encode()).hexdigest()[:16]


def trace_id(key: RunKey) -> str:
    """Trace id of a run, 32 hex digits, derived from its key so that it needs no column."""
    return hashlib.sha256(f"{key}/trace".encode()).hexdigest()[:32]


def traceparent(key: RunKey, attempt: int) -> str:
    """The W3C header that stands for an attempt, or with attempt 0 for the run."""
    text = str(key)
    trace = hashlib.sha256(f"{text}/trace".encode()).hexdigest()[:32]
    span = hashlib.sha256(f"{text}/{attempt}".encode()).hexdigest()[:16]
    return f"00-{trace}-{span}-01"


def stable_fraction(*parts: str) -> float:
    """A number in [0, 1) that depends on `parts` alone: all that may look random here."""
    digest = hashlib.sha256("/".join(parts).encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def key_in_second(at: Instant) -> Instant:
    """`at`, moved off a whole second, which belongs to fires (protocol N4)."""
    return at + 1 if at % 1_000_000 == 0 else at


LOST_LEASE_WAIT_MAX: Duration = 2_000_000
