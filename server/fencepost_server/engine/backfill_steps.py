"""Carries backfills out: one short transaction per step, under the operation's and then
the job's lock, that also stores how far it came. Any server takes the next one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice

import structlog

from fencepost_server.clock import MINUTE, SECOND, Clock, Duration, Instant, format_instant
from fencepost_server.domain.job import JobSpec
from fencepost_server.domain.run import Lane
from fencepost_server.engine.backfill import existing_runs, past_rule
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import InvalidField, StorageUnavailable
from fencepost_server.policy.backfill import (
    STEP_FIRES_MAX,
    BackfillBounds,
    StepPlan,
    fires_of,
    made_per_step,
    next_step_at,
    plan_step,
)
from fencepost_server.policy.overlap import WAITING_MAX
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.operations import StepProblem, problems_of
from fencepost_server.store.statements import load

_SQL = load("operations")
_log = structlog.get_logger("backfill")

_STEPS_PER_PASS = 100
_WAIT: Duration = SECOND
_POSTPONED: Duration = MINUTE
_PROBLEMS_MAX = 20


class BackfillSteps:
    """Run `run` until it is cancelled."""

    def __init__(self, *, database: Database, clock: Clock, wake: Wake) -> None:
        self._database = database
        self._clock = clock
        self._wake = wake
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True

    async def run(self, *, interval: Duration) -> None:
        """Takes the steps that are due, every `interval`."""
        while True:
            try:
                for _ in range(_STEPS_PER_PASS):
                    if not self.is_trusted() or not await self.step():
                        break
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            await asyncio.sleep(interval / SECOND)

    async def step(self) -> bool:
        """Takes one step of one backfill; False if none is due."""
        now = self._clock.now()
        operation_id = ""
        lanes: set[Lane] = set()
        try:
            async with self._database.requests.transaction() as connection:
                row = await connection.fetch_one(_SQL["lease_operation"], now=now)
                if row is None:
                    return False
                operation_id = str(row["operation_id"])
                lanes = await _take(connection, row, now=now)
        except StorageUnavailable:
            raise
        except Exception as error:
            if not operation_id:
                raise
            # Other operations must go on.
            _log.exception("operation_step_failed", operation_id=operation_id, error=repr(error))
            await self._database.requests.execute(
                _SQL["postpone_operation"],
                operation_id=operation_id,
                next_step_at=now + _POSTPONED,
            )
        if lanes:
            self._wake.lanes(lanes)
        return True


async def _take(connection: Connection, row: Row, *, now: Instant) -> set[Lane]:
    """One step of a locked operation; the lanes that have new runs."""
    job_id = str(row["job_id"])
    job = await connection.fetch_one(_SQL["lock_job_to_backfill"], job_id=job_id)
    spec = None if row["spec"] is None else JobSpec.from_json(row["spec"])
    # In a new statement: a deletion may have committed while the lock was waited for.
    found = await connection.fetch_one(_SQL["job_is_deleted"], job_id=job_id)
    gone = job is None or found is None or found["is_deleted"]
    if gone or spec is None or spec.schedule is None:
        await _store(connection, row, StepPlan(), now=now, next_at=now, refused=True)
        return set()
    assert job is not None
    live = await connection.fetch_one(_SQL["count_runs_to_backfill"], job_id=job_id, now=now)
    assert live is not None
    make_max = made_per_step(row["rate"])
    if not row["allows_overlap"]:
        make_max = min(make_max, WAITING_MAX - live["blocked"])
    if make_max <= 0:
        await _store(connection, row, StepPlan(), now=now, next_at=now + _WAIT)
        return set()
    rule = await past_rule(
        connection,
        job_id,
        spec.schedule,
        created_at=row["job_created_at"],
        since=row["since_at"],
        until=row["until_at"],
        seed=f"{row['tenant_name']}/{row['job_name']}",
    )
    assert rule is not None, "an interval after completion has no backfill"
    after = row["position_at"]
    since = row["since_at"] if after is None else after + 1
    fires = list(islice(fires_of(rule, since=since, until=row["until_at"]), STEP_FIRES_MAX))
    plan = plan_step(
        fires,
        await existing_runs(connection, job_id, fires),
        BackfillBounds(
            next_run_at=job["next_run_at"],
            floor=job["retention_floor"],
            created_at=row["job_created_at"],
        ),
        asked_at=row["created_at"],
        make_max=make_max,
    )
    lanes: set[Lane] = set()
    if plan.make:
        busy = live["unblocked"] + live["blocked"] > 0
        queued = len(plan.make) if row["allows_overlap"] else 0 if busy else 1
        await _make(connection, job_id, plan, queued_max=queued, now=now)
        if queued:
            lanes.add(Lane(job["queue_id"], job["kind_id"], job["priority"]))
    following = next_step_at(
        due_at=row["next_step_at"], now=now, made=len(plan.make), rate=row["rate"]
    )
    await _store(connection, row, plan, now=now, next_at=following)
    return lanes


async def _make(
    connection: Connection, job_id: str, plan: StepPlan, *, queued_max: int, now: Instant
) -> None:
    if plan.replace:
        await connection.execute(
            _SQL["forget_expired_runs"],
            job_id=job_id,
            first_at=plan.replace[0],
            last_at=plan.replace[-1],
            scheduled_ats=plan.replace,
        )
    await connection.fetch(
        _SQL["insert_backfilled"],
        job_id=job_id,
        scheduled_ats=plan.make,
        queued_max=queued_max,
        now=now,
    )
    await connection.execute(
        _SQL["raise_last_scheduled"], job_id=job_id, scheduled_at=plan.make[-1]
    )


async def _store(
    connection: Connection,
    row: Row,
    plan: StepPlan,
    *,
    now: Instant,
    next_at: Instant,
    refused: bool = False,
) -> None:
    """How far the step came; the end of the range ends the operation."""
    problems = [*problems_of(row["problems"]), *(_too_old(at) for at in plan.too_old)]
    state = "stopped" if refused else "done" if plan.is_end else "running"
    await connection.execute(
        _SQL["advance_operation"],
        operation_id=str(row["operation_id"]),
        position_at=plan.position,
        next_step_at=next_at,
        now=now,
        changed=len(plan.make),
        unchanged=plan.unchanged,
        failed=len(plan.too_old),
        problems=[asdict(each) for each in problems[:_PROBLEMS_MAX]],
        state=state,
        stop_cause="refused" if refused else None,
    )


def _too_old(at: Instant) -> StepProblem:
    return StepProblem(
        code=int(InvalidField.code),
        reason=InvalidField.reason,
        message=f"{format_instant(at)}: its history is no longer kept, so it may have had a run",
    )
