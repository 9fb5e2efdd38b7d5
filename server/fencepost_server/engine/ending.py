"""Writes ends of runs and of attempts that are not plain successes, in the caller's transaction.

The rows are locked by the caller; every write repeats the fence (key and attempt).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fencepost_server.clock import Instant
from fencepost_server.domain.run import AttemptOutcome, RunKey, RunState
from fencepost_server.store.database import Connection
from fencepost_server.store.statements import load

_SQL = load("outcomes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """A run's final state, with everything history keeps that its row does not say yet.

    Reasons and causes are spelled as in Postgres; `forced`: no worker reported it.
    """

    key: RunKey
    attempt: int
    state: RunState
    failure_count: int
    lost_lease_count: int
    dead_reason: str | None = None
    cancel_cause: str | None = None
    cancel_reason: str | None = None
    skip_reason: str | None = None
    forced: bool = False
    failure: bytes | None = None
    failure_code: str | None = None
    progress: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """An attempt that did not simply succeed, for its own record."""

    key: RunKey
    attempt: int
    outcome: AttemptOutcome
    late: bool
    worker_id: str | None
    claimed_at: Instant | None
    failure: bytes | None = None
    timings: bytes | None = None


async def end_runs(
    connection: Connection, ended: Sequence[EndedRun], *, now: Instant
) -> list[RunKey]:
    """Moves locked live runs to history or to the dead letters; returns those it moved."""
    if not ended:
        return []
    ended = sorted(ended, key=lambda each: each.key)
    rows = await connection.fetch(
        _SQL["end_runs"],
        job_ids=[each.key.job_id for each in ended],
        scheduled_ats=[each.key.scheduled_at for each in ended],
        attempts=[each.attempt for each in ended],
        states=[each.state.name.lower() for each in ended],
        failure_counts=[each.failure_count for each in ended],
        lost_lease_counts=[each.lost_lease_count for each in ended],
        dead_reasons=[each.dead_reason for each in ended],
        cancel_causes=[each.cancel_cause for each in ended],
        cancel_reasons=[each.cancel_reason for each in ended],
        skip_reasons=[each.skip_reason for each in ended],
        forced=[each.forced for each in ended],
        failures=[each.failure for each in ended],
        failure_codes=[each.failure_code for each in ended],
        progresses=[each.progress for each in ended],
        now=now,
    )
    return [RunKey(str(row["job_id"]), row["scheduled_at"]) for row in rows]


async def record_attempts(
    connection: Connection, ended: Sequence[EndedAttempt], *, now: Instant
) -> None:
    """Keeps the attempts; a run's last success at its first try needs no record."""
    if not ended:
        return
    ended = sorted(ended, key=lambda each: (each.key, each.attempt))

    def column(name: str) -> list[Any]:
        return [getattr(each, name) for each in ended]

    await connection.execute(
        _SQL["record_attempts"],
        job_ids=[each.key.job_id for each in ended],
        scheduled_ats=[each.key.scheduled_at for each in ended],
        attempts=column("attempt"),
        outcomes=[each.outcome.name.lower() for each in ended],
        lates=column("late"),
        worker_ids=column("worker_id"),
        claimed_ats=column("claimed_at"),
        failures=column("failure"),
        timings=column("timings"),
        now=now,
    )
