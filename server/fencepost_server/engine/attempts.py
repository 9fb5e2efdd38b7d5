"""Ends open attempts in any way but success: reads locked rows, asks the policy, writes.

Completions, releases and the reaper come here, each inside a transaction of its own that
has locked the rows in key order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fencepost_server.clock import Instant
from fencepost_server.domain.job import RetryPolicy
from fencepost_server.domain.run import CancelCause, Lane, RunKey, RunState
from fencepost_server.engine.ending import EndedAttempt, EndedRun, end_runs, record_attempts
from fencepost_server.engine.specs import SpecKey
from fencepost_server.engine.wake import Affected
from fencepost_server.policy.outcome import Decision, Ending, OpenAttempt, decide
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.statements import load

_SQL = load("outcomes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One ended attempt: its locked row, what ended it, and what was reported with it."""

    row: Row
    ending: Ending
    failure: bytes | None = None
    failure_code: str | None = None
    timings: bytes | None = None
    progress: bytes | None = None


@dataclass(slots=True, kw_only=True)
class Effects:
    """What others should hear of after the commit."""

    states: dict[RunKey, RunState] = field(default_factory=dict)
    ready: dict[Lane, Instant] = field(default_factory=dict)
    serial_jobs: set[str] = field(default_factory=set)
    # Where attempts were closed: under caps, places are free.
    queue_ids: set[int] = field(default_factory=set)
    affected: set[Affected] = field(default_factory=set)


async def end_attempts(
    connection: Connection,
    ended: Sequence[Ended],
    policies: Mapping[SpecKey, RetryPolicy],
    *,
    now: Instant,
) -> Effects:
    """Writes the decision of the retry policy for each; the rows are locked by the caller."""
    effects = Effects()
    back: list[tuple[Ended, OpenAttempt, Decision]] = []
    runs: list[EndedRun] = []
    attempts: list[EndedAttempt] = []
    for each in ended:
        row = each.row
        run = open_attempt(row)
        # A version is kept while a live run names it; without it the defaults decide.
        policy = policies.get(SpecKey(run.key.job_id, row["version"]), RetryPolicy())
        decision = decide(run, each.ending, policy, now=now)
        effects.states[run.key] = decision.state
        if not decision.keeps_open:
            effects.queue_ids.add(row["queue_id"])
        if decision.state.is_live:
            back.append((each, run, decision))
            lane = Lane(row["queue_id"], row["kind_id"], row["priority"])
            at = decision.available_at or now
            effects.ready[lane] = min(at, effects.ready.get(lane, at))
        else:
            runs.append(_ended_run(each, run, decision))
            if row["serial"]:
                effects.serial_jobs.add(run.key.job_id)
        if decision.outcome is not None:
            attempts.append(_ended_attempt(each, run, decision))
    await _put_back(connection, back, now=now)
    await end_runs(connection, runs, now=now)
    await record_attempts(connection, attempts, now=now)
    return effects


def open_attempt(row: Row) -> OpenAttempt:
    """The locked row as the policy wants it."""
    cause = row["cancel_cause"]
    return OpenAttempt(
        key=RunKey(str(row["job_id"]), row["scheduled_at"]),
        attempt=row["attempt"],
        state=RunState.of(row["state"]),
        failure_count=row["failure_count"],
        lost_lease_count=row["lost_lease_count"],
        snooze_count=row["snooze_count"],
        cancel_requested=row["cancel_requested"],
        cancel_cause=None if cause is None else CancelCause[cause.upper()],
        cancel_reason=row["cancel_reason"],
        total_until=row["total_until"],
    )


def _ended_run(each: Ended, run: OpenAttempt, decision: Decision) -> EndedRun:
    dead, cause = decision.dead_reason, decision.cancel_cause
    return EndedRun(
        key=run.key,
        attempt=run.attempt,
        state=decision.state,
        failure_count=decision.failure_count,
        lost_lease_count=decision.lost_lease_count,
        dead_reason=None if dead is None else dead.name.lower(),
        cancel_cause=None if cause is None else cause.name.lower(),
        cancel_reason=run.cancel_reason,
        forced=decision.forced,
        failure=each.failure,
        failure_code=each.failure_code,
        progress=each.progress,
    )


def _ended_attempt(each: Ended, run: OpenAttempt, decision: Decision) -> EndedAttempt:
    assert decision.outcome is not None
    worker_id = each.row["worker_id"]
    return EndedAttempt(
        key=run.key,
        attempt=run.attempt,
        outcome=decision.outcome,
        late=decision.late,
        worker_id=None if worker_id is None else str(worker_id),
        claimed_at=each.row["claimed_at"],
        failure=each.failure,
        timings=each.timings,
    )


async def _put_back(
    connection: Connection, back: Sequence[tuple[Ended, OpenAttempt, Decision]], *, now: Instant
) -> None:
    if not back:
        return
    await connection.execute(
        _SQL["put_back_runs"],
        job_ids=[run.key.job_id for _, run, _ in back],
        scheduled_ats=[run.key.scheduled_at for _, run, _ in back],
        attempts=[run.attempt for _, run, _ in back],
        states=[decision.state.name.lower() for _, _, decision in back],
        available_ats=[decision.available_at for _, _, decision in back],
        opens=[decision.keeps_open for _, _, decision in back],
        failure_counts=[decision.failure_count for _, _, decision in back],
        lost_lease_counts=[decision.lost_lease_count for _, _, decision in back],
        snooze_counts=[decision.snooze_count for _, _, decision in back],
        failures=[each.failure for each, _, _ in back],
        failure_codes=[each.failure_code for each, _, _ in back],
        progresses=[each.progress for each, _, _ in back],
        now=now,
    )
