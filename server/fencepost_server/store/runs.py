"""Runs as rows, read by key from wherever they are; pages of keys are in run_lists.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fencepost_server.clock import SECOND, Instant
from fencepost_server.domain.job import JobSpec, RetryPolicy
from fencepost_server.domain.names import RunName
from fencepost_server.domain.run import (
    AttemptOutcome,
    CancelCause,
    DeadReason,
    RunKey,
    RunOrigin,
    RunState,
)
from fencepost_server.domain.schedule import SkipReason
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.statements import load

_SQL = load("run_reads")

ALL_STATES = frozenset(RunState)
# States that only history has, besides dead letters that were discarded.
_HISTORY_STATES = frozenset((RunState.SUCCEEDED, RunState.CANCELLED, RunState.SKIPPED))
EVER: Instant = -62_135_596_800 * SECOND
FOREVER: Instant = 253_402_300_799 * SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as stored, with the names its ids stand for.

    Bytes are serialized messages. `payload` and `result` are None unless they were asked
    for; `payload` and `labels` are what applies, the job's if the run has none of its own.
    `spec` None: its version is not kept any more.
    """

    key: RunKey
    tenant: str
    job_name: str
    job_is_deleted: bool
    version: int
    spec: JobSpec | None
    state: RunState
    origin: RunOrigin
    queue_name: str
    kind: str
    priority: int
    created_at: Instant
    available_at: Instant
    labels: Mapping[str, str]
    concurrency_key: str = ""
    unique_key: str = ""
    attempt: int = 0
    attempt_open: bool = False
    failure_count: int = 0
    lost_lease_count: int = 0
    snooze_count: int = 0
    replay_count: int = 0
    worker_id: str | None = None
    first_claimed_at: Instant | None = None
    claimed_at: Instant | None = None
    lease_until: Instant | None = None
    ended_at: Instant | None = None
    discarded_at: Instant | None = None
    payload: bytes | None = None
    result: bytes | None = None
    progress: bytes | None = None
    last_failure: bytes | None = None
    timings: bytes | None = None
    skip_reason: SkipReason | None = None
    dead_reason: DeadReason | None = None
    cancel_cause: CancelCause | None = None
    cancel_reason: str = ""
    cancel_requested: bool = False
    trace_context: Mapping[str, str] | None = None
    blocked_by: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One claim of a run; `outcome` None: still open."""

    attempt: int
    worker_id: str | None
    outcome: AttemptOutcome | None
    claimed_at: Instant | None
    ended_at: Instant | None = None
    failure: bytes | None = None
    timings: bytes | None = None
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """What a list asks for. Bounds are half-open; None is no bound.

    `conditions` must all hold; each has the field, what it must (or, negated, must not) be as
    `values` or `prefixes`, and of a label the key.
    """

    states: frozenset[RunState] = ALL_STATES
    job: str | None = None
    scheduled_from: Instant | None = None
    scheduled_before: Instant | None = None
    created_from: Instant | None = None
    created_before: Instant | None = None
    ended_from: Instant | None = None
    ended_before: Instant | None = None
    conditions: tuple[Mapping[str, Any], ...] = ()

    @property
    def bounds_other_times(self) -> bool:
        """Whether it asks for a time that is not the one of the order."""
        times = (self.created_from, self.created_before, self.ended_from, self.ended_before)
        return any(at is not None for at in times)

    def of_jobs_once_named(self, name: str) -> "RunQuery":
        """The same of every job that has or had a name, in place of the job."""
        named: Mapping[str, Any] = {
            "field": "job",
            "key": "",
            "negated": False,
            "has_key": False,
            "values": [name],
            "prefixes": [],
        }
        return replace(self, job=None, conditions=(*self.conditions, named))

    @property
    def is_selective(self) -> bool:
        """Whether some runs between its bounds of scheduled_at do not match."""
        return bool(self.conditions) or self.states != ALL_STATES or self.bounds_other_times

    @property
    def wants_history(self) -> bool:
        """Whether runs that ended, and are no dead letters, may match."""
        return bool(self.states & _HISTORY_STATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """Keys in order, and the key after which the next page begins; None: that was all."""

    keys: Sequence[RunKey]
    after: RunKey | None


async def find_job(connection: Connection, tenant_id: int, name: RunName) -> str | None:
    """The id of the job that a run's name means; by id also after its deletion."""
    if name.is_id:
        row = await connection.fetch_one(
            _SQL["find_job_of_run_by_id"], tenant_id=tenant_id, job_id=name.job
        )
    else:
        row = await connection.fetch_one(
            _SQL["find_job_of_run_by_name"], tenant_id=tenant_id, name=name.job
        )
    return None if row is None else str(row["job_id"])


async def live_state(connection: Connection, key: RunKey) -> RunState | None:
    """The state of a run that has not ended, else None."""
    row = await connection.fetch_one(
        _SQL["live_state"], job_id=key.job_id, scheduled_at=key.scheduled_at
    )
    return None if row is None else RunState.of(row["state"])


async def read(
    connection: Connection, keys: Sequence[RunKey], *, full: bool
) -> dict[RunKey, RunRecord]:
    """Those runs that exist; `full`: with payload and result."""
    if not keys:
        return {}
    rows = await connection.fetch(
        _SQL["read_runs"],
        job_ids=[key.job_id for key in keys],
        scheduled_ats=[key.scheduled_at for key in keys],
        full=full,
    )
    records = (_record(row) for row in rows)
    return {record.key: record for record in records}


async def attempts(
    connection: Connection, run: RunRecord, *, before: int, limit: int
) -> list[AttemptRecord]:
    """Recorded attempts with numbers under `before`, newest first."""
    rows = await connection.fetch(
        _SQL["list_attempts"],
        job_id=run.key.job_id,
        scheduled_at=run.key.scheduled_at,
        since=run.created_at,
        before=before,
        page_max=limit,
    )
    return [
        AttemptRecord(
            attempt=row["attempt"],
            worker_id=_text(row["worker_id"]),
            outcome=AttemptOutcome[row["outcome"].upper()],
            claimed_at=row["claimed_at"],
            ended_at=row["ended_at"],
            failure=row["failure"],
            timings=row["timings"],
            late=row["late"],
        )
        for row in rows
    ]


def _record(row: Row) -> RunRecord:
    spec = None if row["spec"] is None else JobSpec.from_json(row["spec"])
    if spec is not None and row["default_retry_policy"] is not None:
        default = RetryPolicy.from_json(row["default_retry_policy"])
        spec = replace(spec, retry_policy=spec.retry_policy.over(default))
    labels = row["labels"]
    if labels is None:
        labels = {} if spec is None else spec.labels
    skipped, dead, cause = row["skip_reason"], row["dead_reason"], row["cancel_cause"]
    payload = row["payload"]
    return RunRecord(
        key=RunKey(str(row["job_id"]), row["scheduled_at"]),
        tenant=row["tenant_name"],
        job_name=row["job_name"],
        job_is_deleted=row["job_is_deleted"],
        version=row["version"],
        spec=spec,
        state=RunState.of(row["state"]),
        origin=RunOrigin[row["origin"].upper()],
        queue_name=row["queue_name"],
        kind=row["kind_name"],
        priority=row["priority"],
        created_at=row["created_at"],
        available_at=row["available_at"],
        labels=labels,
        concurrency_key=row["concurrency_key"] or "",
        unique_key=row["unique_key"] or "",
        attempt=row["attempt"],
        attempt_open=row["attempt_open"],
        failure_count=row["failure_count"],
        lost_lease_count=row["lost_lease_count"],
        snooze_count=row["snooze_count"],
        replay_count=row["replay_count"],
        worker_id=_text(row["worker_id"]),
        first_claimed_at=row["first_claimed_at"],
        claimed_at=row["claimed_at"],
        lease_until=row["lease_until"],
        ended_at=row["ended_at"],
        discarded_at=row["discarded_at"],
        payload=row["job_payload"] if payload is None else payload,
        result=row["result"],
        progress=row["progress"],
        last_failure=row["last_failure"],
        timings=row["timings"],
        skip_reason=None if skipped is None else SkipReason[skipped.upper()],
        dead_reason=None if dead is None else DeadReason[dead.upper()],
        cancel_cause=None if cause is None else CancelCause[cause.upper()],
        cancel_reason=row["cancel_reason"] or "",
        cancel_requested=row["cancel_requested"],
        trace_context=row["trace_context"],
        blocked_by=row["blocked_by"],
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
