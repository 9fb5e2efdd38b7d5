"""Makes ad-hoc runs of existing jobs, one or a thousand in one transaction; each entry
succeeds or fails alone, and all that can be done set by set is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fencepost_server.clock import HOUR, Duration, Instant
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import Lane, RunKey, RunOrigin, RunState
from fencepost_server.engine.job_access import job_not_found
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.run_keys import NewRun, insert_runs
from fencepost_server.engine.specs import RunSpec, SpecCache, SpecKey
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import FencepostError, InvalidField
from fencepost_server.store import requests
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.requests import RequestKey, RequestScope
from fencepost_server.store.runs import RunRecord
from fencepost_server.store.statements import load

_SQL = load("enqueue")
REMEMBERED_FOR: Duration = HOUR
LABELS_MAX = 32
_METHOD = "EnqueueRun"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueEntry:
    """A run to make. None is the job's own; `due_at` None or in the past is now.

    `concurrency_key` "" is none at all.
    """

    job: JobName
    due_at: Instant | None = None
    payload: bytes | None = None
    priority: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    concurrency_key: str | None = None
    request: RequestKey | None = None


# The answer for a run that was made, now or by the first call with its id; or a refusal.
Outcome: TypeAlias = bytes | FencepostError
Encode: TypeAlias = Callable[[RunRecord], bytes]


@dataclass(slots=True)
class _Batch:
    tenant_id: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    rows: dict[int, NewRun] = field(default_factory=dict)
    targets: dict[int, tuple[Row, RunSpec]] = field(default_factory=dict)


class Enqueues:
    """Serves EnqueueRun and BatchEnqueueRuns."""

    def __init__(
        self, *, database: Database, catalogue: Catalogue, specs: SpecCache, wake: Wake
    ) -> None:
        self._database = database
        self._catalogue = catalogue
        self._specs = specs
        self._wake = wake

    def now(self) -> Instant:
        """The database clock's instant."""
        return self._database.clock.now()

    async def enqueue(
        self, origin: Origin, entries: Sequence[EnqueueEntry], *, encode: Encode
    ) -> list[Outcome]:
        """One outcome per entry, in their order. `encode` makes the answer to remember.

        The runs are claimable with the commit. Raises TenantNotFound, ServerOverloaded, or
        StorageUnavailable with nothing made as far as known.
        """
        batch = _Batch(await self._catalogue.tenant_id(origin.tenant))
        copies, refused = requests.repeated([entry.request for entry in entries])
        batch.outcomes.update(refused)
        fresh = [
            index
            for index in range(len(entries))
            if index not in batch.outcomes and index not in copies
        ]
        async with self._database.requests.transaction() as connection:
            await self._make(connection, origin, entries, fresh, batch, encode)
        self._announce(batch, origin.now)
        for index, first in copies.items():
            batch.outcomes[index] = batch.outcomes[first]
        return [batch.outcomes[index] for index in range(len(entries))]

    async def _make(
        self,
        connection: Connection,
        origin: Origin,
        entries: Sequence[EnqueueEntry],
        fresh: Sequence[int],
        batch: _Batch,
        encode: Encode,
    ) -> None:
        """The transaction: request ids, then jobs, then runs, then answers."""
        scope = RequestScope(tenant_id=batch.tenant_id, method=_METHOD)
        index_of = {
            request.request_id: index
            for index in fresh
            if (request := entries[index].request) is not None
        }
        before = await requests.begin(
            connection,
            scope,
            [request for index in index_of.values() if (request := entries[index].request)],
            now=origin.now,
            keep_for=REMEMBERED_FOR,
        )
        for request_id, answer in before.items():
            batch.outcomes[index_of[request_id]] = answer
        wanted = [index for index in fresh if index not in batch.outcomes]
        await self._prepare(connection, origin, entries, wanted, batch)
        made = await insert_runs(
            connection,
            list(batch.rows.values()),
            tenant_id=batch.tenant_id,
            trace_context=origin.trace_context,
            now=origin.now,
        )
        for index, key in zip(batch.rows, made, strict=True):
            row, spec = batch.targets[index]
            batch.outcomes[index] = encode(_record(key, batch.rows[index], row, spec, origin))
        answers: dict[str, bytes | None] = {}
        for request_id, index in index_of.items():
            if request_id not in before:
                outcome = batch.outcomes[index]
                answers[request_id] = outcome if isinstance(outcome, bytes) else None
        await requests.finish(connection, scope, answers)

    async def _prepare(
        self,
        connection: Connection,
        origin: Origin,
        entries: Sequence[EnqueueEntry],
        wanted: Sequence[int],
        batch: _Batch,
    ) -> None:
        """Fills `rows` with what can be inserted, and `outcomes` with what cannot."""
        jobs = {entries[index].job for index in wanted}
        found = await connection.fetch(
            _SQL["find_enqueue_targets"],
            tenant_id=batch.tenant_id,
            job_ids=sorted(job.job for job in jobs if job.is_id),
            names=sorted(job.job for job in jobs if not job.is_id),
        )
        by_job: dict[str, Row] = {}
        for row in found:
            by_job[str(row["job_id"])] = by_job[row["name"]] = row
        specs = await self._specs.get(
            {SpecKey(str(row["job_id"]), row["version"]) for row in found}, connection=connection
        )
        for index in wanted:
            entry = entries[index]
            target = by_job.get(entry.job.job)
            spec = (
                None
                if target is None
                else specs.get(SpecKey(str(target["job_id"]), target["version"]))
            )
            if target is None or spec is None:
                batch.outcomes[index] = job_not_found(entry.job)
                continue
            try:
                batch.rows[index] = _new_run(entry, target, spec, origin.now)
            except InvalidField as error:
                batch.outcomes[index] = error
            else:
                batch.targets[index] = (target, spec)

    def _announce(self, batch: _Batch, now: Instant) -> None:
        ready: set[Lane] = set()
        coming: dict[Lane, Instant] = {}
        for run in batch.rows.values():
            lane = Lane(run.queue_id, run.kind_id, run.priority)
            if run.due_at <= now:
                ready.add(lane)
            else:
                coming[lane] = min(run.due_at, coming.get(lane, run.due_at))
        self._wake.lanes(ready)
        for lane, at in coming.items():
            self._wake.lanes([lane], at=at)


def _new_run(entry: EnqueueEntry, target: Row, spec: RunSpec, now: Instant) -> NewRun:
    """Raises InvalidField when the job's labels and the run's are too many together."""
    labels = None
    if entry.labels:
        labels = {**spec.spec.labels, **entry.labels}
        if len(labels) > LABELS_MAX:
            raise InvalidField(
                f"labels: {len(labels)} together with the job's, want at most {LABELS_MAX}",
                field="labels",
                value=str(len(labels)),
                allowed=f"at most {LABELS_MAX} labels",
            )
    key = target["concurrency_key"] if entry.concurrency_key is None else entry.concurrency_key
    return NewRun(
        job_id=str(target["job_id"]),
        due_at=now if entry.due_at is None else max(now, entry.due_at),
        queue_id=target["queue_id"],
        kind_id=target["kind_id"],
        version=target["version"],
        priority=target["priority"] if entry.priority is None else entry.priority,
        lease_s=target["lease_s"],
        cancel_grace_s=target["cancel_grace_s"],
        attempt_timeout_s=target["attempt_timeout_s"],
        max_in_flight=target["max_in_flight"],
        concurrency_key=key or None,
        payload=entry.payload,
        labels=labels,
    )


def _record(key: RunKey, run: NewRun, target: Row, spec: RunSpec, origin: Origin) -> RunRecord:
    """The run as its row is now, without another read."""
    return RunRecord(
        key=key,
        tenant=origin.tenant,
        job_name=target["name"],
        job_is_deleted=False,
        version=run.version,
        spec=spec.spec,
        state=RunState.QUEUED,
        origin=RunOrigin.ENQUEUE,
        queue_name=target["queue_name"],
        kind=target["kind_name"],
        priority=run.priority,
        created_at=origin.now,
        available_at=run.due_at,
        labels=spec.spec.labels if run.labels is None else run.labels,
        concurrency_key=run.concurrency_key or "",
        trace_context=origin.trace_context,
    )
