"""Cancels live runs: those that wait end at once, those that run are asked to stop.

A running attempt is told through its worker's next heartbeat (or at once, by notice) and
is ended by the reaper when its grace is over. First commit wins: a completion that was
stored before the cancel stands.
"""

from collections.abc import Sequence

from fencepost_server.clock import SECOND, Duration, Instant
from fencepost_server.domain.run import AttemptOutcome, RunKey, RunState
from fencepost_server.engine.ending import EndedAttempt, EndedRun, end_runs, record_attempts
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
) -> bool:
    """Cancel one live run; False if it is not live (any more). `grace` None: the run's own."""
    row = await connection.fetch_one(
        _SQL["run_to_cancel"], job_id=key.job_id, scheduled_at=key.scheduled_at
    )
    if row is None:
        return False
    await _cancel(connection, [row], cause="requested", reason=reason, grace=grace, now=now)
    return True


async def cancel_job_runs(
    connection: Connection, *, job_id: str, cause: str, now: Instant, reason: str = ""
) -> None:
    """Cancel every live run of a job, ad-hoc and future ones included."""
    rows = await connection.fetch(
        _SQL["runs_to_cancel"], job_ids=[job_id], until=_FOREVER, with_enqueued=True
    )
    await _cancel(connection, rows, cause=cause, reason=reason, grace=None, now=now)


async def cancel_overlapped(
    connection: Connection, *, until: Sequence[tuple[str, Instant]], now: Instant
) -> None:
    """Cancel earlier runs that fires made, for a newer fire under CANCEL_PREVIOUS."""
    limits = dict(until)
    rows = await connection.fetch(
        _SQL["runs_to_cancel"],
        job_ids=list(limits),
        until=max(limits.values()),
        with_enqueued=False,
    )
    earlier = [row for row in rows if row["scheduled_at"] <= limits[str(row["job_id"])]]
    await _cancel(connection, earlier, cause="overlap", reason="", grace=None, now=now)


async def _cancel(
    connection: Connection,
    rows: Sequence[Row],
    *,
    cause: str,
    reason: str,
    grace: Duration | None,
    now: Instant,
) -> None:
    running = [row for row in rows if row["state"] == RunState.RUNNING.name.lower()]
    waiting = [row for row in rows if row["state"] != RunState.RUNNING.name.lower()]
    if running:
        await connection.execute(
            _SQL["request_cancel"],
            job_ids=[row["job_id"] for row in running],
            scheduled_ats=[row["scheduled_at"] for row in running],
            cause=cause,
            reason=reason or None,
            grace_s=None if grace is None else grace // SECOND,
            now=now,
        )
    ended = [
        EndedRun(
            key=RunKey(str(row["job_id"]), row["scheduled_at"]),
            attempt=row["attempt"],
            state=RunState.CANCELLED,
            failure_count=row["failure_count"],
            lost_lease_count=row["lost_lease_count"],
            cancel_cause=cause,
            cancel_reason=reason or None,
            # A closed attempt had its word; only an open one is ended over its worker's head.
            forced=row["attempt_open"],
        )
        for row in waiting
    ]
    await end_runs(connection, ended, now=now)
    lost = [
        EndedAttempt(
            key=RunKey(str(row["job_id"]), row["scheduled_at"]),
            attempt=row["attempt"],
            outcome=AttemptOutcome.LEASE_EXPIRED,
            late=False,
            worker_id=None if row["worker_id"] is None else str(row["worker_id"]),
            claimed_at=row["claimed_at"],
        )
        for row in waiting
        if row["attempt_open"]
    ]
    await record_attempts(connection, lost, now=now)
