"""Reads and writes of operations, except for the steps they take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fencepost_server.clock import Instant
from fencepost_server.domain.operation import OperationAction, OperationState, StopCause
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.statements import load

_SQL = load("operations")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProblem:
    """Why one of the runs could not be changed; `code` is a google.rpc.Code."""

    code: int
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """An operation as stored, and what has become of its runs; `rate` is per second."""

    operation_id: str
    action: OperationAction
    state: OperationState
    stop_cause: StopCause | None
    filter: str
    reason: str
    creator: str
    rate: float
    stop_when_failing: float
    matched: int
    changed: int
    unchanged: int
    failed: int
    changed_ended: int
    changed_dead: int
    problems: Sequence[StepProblem]
    created_at: Instant
    ended_at: Instant | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBackfill:
    """A backfill to store: fires of a version of a job in [since, until)."""

    operation_id: str
    tenant_id: int
    job_id: str
    version: int
    since: Instant
    until: Instant
    rate: float
    allows_overlap: bool
    matched: int
    filter: str
    reason: str
    now: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBulk:
    """A change of every run that matches to store; `query` as `store.matches` keeps it.

    `job_id` None: all jobs; `rate` in runs per second; `max_runs` 0 and `stop_when_failing` 0:
    no bound.
    """

    operation_id: str
    tenant_id: int
    action: OperationAction
    job_id: str | None
    query: Mapping[str, Any]
    filter: str
    rate: float
    max_runs: int
    stop_when_failing: float
    use_newest_version: bool
    matched: int
    reason: str
    now: Instant


async def insert(connection: Connection, made: NewBackfill) -> None:
    """Stores it; its first step may be taken at once."""
    await connection.execute(
        _SQL["insert_operation"],
        operation_id=made.operation_id,
        tenant_id=made.tenant_id,
        action=OperationAction.BACKFILL.name.lower(),
        filter=made.filter,
        reason=made.reason,
        creator="",
        rate=made.rate,
        now=made.now,
        matched=made.matched,
        job_id=made.job_id,
        version=made.version,
        since_at=made.since,
        until_at=made.until,
        allows_overlap=made.allows_overlap,
        query=None,
        max_runs=0,
        stop_when_failing=0.0,
        use_newest_version=False,
    )


async def insert_bulk(connection: Connection, made: NewBulk) -> None:
    """As `insert`."""
    await connection.execute(
        _SQL["insert_operation"],
        operation_id=made.operation_id,
        tenant_id=made.tenant_id,
        action=made.action.name.lower(),
        filter=made.filter,
        reason=made.reason,
        creator="",
        rate=made.rate,
        now=made.now,
        matched=made.matched,
        job_id=made.job_id,
        version=None,
        since_at=None,
        until_at=None,
        allows_overlap=False,
        query=dict(made.query),
        max_runs=made.max_runs,
        stop_when_failing=made.stop_when_failing,
        use_newest_version=made.use_newest_version,
    )


async def read(connection: Connection, tenant_id: int, operation_id: str) -> OperationRecord | None:
    """One of a tenant's operations."""
    row = await connection.fetch_one(
        _SQL["read_operation"], tenant_id=tenant_id, operation_id=operation_id
    )
    return None if row is None else _record(row)


async def page(
    connection: Connection,
    tenant_id: int,
    *,
    states: Sequence[OperationState] | None,
    actions: Sequence[OperationAction] | None,
    before: str | None,
    limit: int,
) -> list[str]:
    """Ids of at most `limit` operations, newest first; None: all states, all actions."""
    rows = await connection.fetch(
        _SQL["list_operations"],
        tenant_id=tenant_id,
        before=before,
        states=None if states is None else [each.name.lower() for each in states],
        actions=None if actions is None else [each.name.lower() for each in actions],
        page_max=limit,
    )
    return [str(row["operation_id"]) for row in rows]


async def stop(connection: Connection, tenant_id: int, operation_id: str, *, now: Instant) -> None:
    """Ends it if it still goes on, before its next step."""
    await connection.execute(
        _SQL["stop_operation"], tenant_id=tenant_id, operation_id=operation_id, now=now
    )


def problems_of(value: Sequence[Mapping[str, Any]]) -> list[StepProblem]:
    """The problems that a row holds."""
    return [StepProblem(**each) for each in value]


def _record(row: Row) -> OperationRecord:
    cause = row["stop_cause"]
    return OperationRecord(
        operation_id=str(row["operation_id"]),
        action=OperationAction[row["action"].upper()],
        state=OperationState[row["state"].upper()],
        stop_cause=None if cause is None else StopCause[cause.upper()],
        filter=row["filter"],
        reason=row["reason"],
        creator=row["creator"],
        rate=row["rate"],
        stop_when_failing=row["stop_when_failing"],
        matched=row["matched"],
        changed=row["changed"],
        unchanged=row["unchanged"],
        failed=row["failed"],
        changed_ended=row["changed_ended"],
        changed_dead=row["changed_dead"],
        problems=problems_of(row["problems"]),
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )
