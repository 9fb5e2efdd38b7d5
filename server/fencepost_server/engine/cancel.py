"""Cancels live runs: those that wait end at once, those that run are asked to stop.

A running attempt is told at once where its worker has a session, else with its next heartbeat,
and is ended by the reaper when its grace is over; without a grace it ends here. First commit
wins: a completion that was stored before the cancel stands. What a cancel returns is for the
hints after its commit.
"""

from collections.abc import Sequence

from fencepost_server.clock import SECOND, Duration, Instant
from fencepost_server.domain.run import AttemptOutcome, RunKey, RunState
from fencepost_server.engine.attempts import Effects
from fencepost_server.engine.ending import EndedAttempt, EndedRun, end_runs, record_attempts
from fencepost_server.engine.wake import Affected
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.statements import load

_SQL = load("settle")
_FOREVER: Instant = 253_402_300_799 * SECOND


async def cancel_run(
    connection: Connection,
    *,
    key: RunKey,
    reason: str,
    grace: Duration | None,
    now: Instant,
) -> Effects | None:
    """Cancel one live run; None if it is not live (any more). `grace` None: the run's own."""
    row = await connection.fetch_one(
        _SQL["run_to_cancel"], job_id=key.job_id, scheduled_at=key.scheduled_at
    )
    if row is None:
        return None
    return await _cancel(connection, [row], cause="requested", reason=reason, grace=grace, now=now)


async def cancel_locked(
    connection: Connection, rows: Sequence[Row], *, reason: str, now: Instant
) -> Effects:
    """Cancel live runs that the caller has locked in key order, each with its own grace."""
    return await _cancel(connection, rows, cause="requested", reason=reason, grace=None, now=now)


async def cancel_job_runs(
    connection: Connection, *, job_id: str, cause: str, now: Instant, reason: str = ""
) -> Effects:
    """Cancel every live run of a job, ad-hoc and future ones included."""
    rows = await connection.fetch(
        _SQL["runs_to_cancel"], job_ids=[job_id], until=_FOREVER, with_enqueued=True
    )
    return await _cancel(connection, rows, cause=cause, reason=reason, grace=None, now=now)


async def cancel_overlapped(
    connection: Connection, *, until: Sequence[tuple[str, Instant]], now: Instant
) -> Effects:
    """Cancel earlier runs that fires made, for a newer fire under CANCEL_PREVIOUS."""
    limits = dict(until)
    rows = await connection.fetch(
        _SQL["runs_to_cancel"],
        job_ids=list(limits),
        until=max(limits.values()),
        with_enqueued=False,
    )
    earlier = [row for row in rows if row["scheduled_at"] <= limits[str(row["job_id"])]]
    return await _cancel(connection, earlier, cause="overlap", reason="", grace=None, now=now)


async def _cancel(
    connection: Connection,
    rows: Sequence[Row],
    *,
    cause: str,
    reason: str,
    grace: Duration | None,
    now: Instant,
) -> Effects:
    asked = [row for row in rows if _is_running(row) and _grace(row, grace) > 0]
    over = [row for row in rows if not (_is_running(row) and _grace(row, grace) > 0)]
    if asked:
        await connection.execute(
            _SQL["request_cancel"],
            job_ids=[row["job_id"] for row in asked],
            scheduled_ats=[row["scheduled_at"] for row in asked],
            cause=cause,
            reason=reason or None,
            grace=grace,
            now=now,
        )
    await end_runs(connection, [_ended(row, cause, reason) for row in over], now=now)
    closed = [_closed(row) for row in over if row["attempt_open"]]
    await record_attempts(connection, closed, now=now)
    return Effects(
        serial_jobs={str(row["job_id"]) for row in over},
        affected={
            Affected(str(row["worker_id"]), _key(row), row["attempt"])
            for row in rows
            if row["attempt_open"] and row["worker_id"] is not None
        },
    )


def _ended(row: Row, cause: str, reason: str) -> EndedRun:
    return EndedRun(
        key=_key(row),
        attempt=row["attempt"],
        state=RunState.CANCELLED,
        failure_count=row["failure_count"],
        lost_lease_count=row["lost_lease_count"],
        # Asked before and ended now: the first cause stands.
        cancel_cause=row["cancel_cause"] or cause,
        cancel_reason=row["cancel_reason"] or reason or None,
        # A closed attempt had its word; only an open one is ended over its worker's head.
        forced=row["attempt_open"],
    )


def _closed(row: Row) -> EndedAttempt:
    running = _is_running(row)
    return EndedAttempt(
        key=_key(row),
        attempt=row["attempt"],
        outcome=AttemptOutcome.CANCELLED if running else AttemptOutcome.LEASE_EXPIRED,
        late=False,
        worker_id=None if row["worker_id"] is None else str(row["worker_id"]),
        claimed_at=row["claimed_at"],
    )


def _is_running(row: Row) -> bool:
    return bool(row["state"] == RunState.RUNNING.name.lower())


def _grace(row: Row, grace: Duration | None) -> Duration:
    own: Duration = row["cancel_grace_s"] * SECOND
    return own if grace is None else grace


def _key(row: Row) -> RunKey:
    return RunKey(str(row["job_id"]), row["scheduled_at"])
