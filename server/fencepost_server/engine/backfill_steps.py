"""Carries backfills out, step by step, under the operation's and then the job's lock."""

from dataclasses import asdict
from itertools import islice

from fencepost_server.clock import SECOND, Clock, Duration, Instant, format_instant
from fencepost_server.domain.job import JobSpec
from fencepost_server.domain.run import Lane
from fencepost_server.engine.backfill import existing_runs, past_rule
from fencepost_server.engine.operation_steps import PROBLEMS_MAX, Hints, OperationSteps
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import InvalidField
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
_WAIT: Duration = SECOND


class BackfillSteps(OperationSteps):
    """Run `run` until it is cancelled."""

    def __init__(self, *, database: Database, clock: Clock, wake: Wake) -> None:
        super().__init__(database=database, clock=clock, wake=wake, lease=_SQL["lease_operation"])

    async def _take(self, connection: Connection, row: Row, *, now: Instant) -> Hints:
        return Hints(lanes=await _take(connection, row, now=now))


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
            now=now,
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
        problems=[asdict(each) for each in problems[:PROBLEMS_MAX]],
        state=state,
        stop_cause="refused" if refused else None,
    )


def _too_old(at: Instant) -> StepProblem:
    return StepProblem(
        code=int(InvalidField.code),
        reason=InvalidField.reason,
        message=f"{format_instant(at)}: its history is no longer kept, so it may have had a run",
    )
