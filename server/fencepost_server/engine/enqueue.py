"""Makes ad-hoc runs of existing jobs, one or a thousand in one call; each entry succeeds or
fails alone. All that must hold in a race is done by one function of the database
(docs/adr/0035).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from fencepost_server.clock import DAY, HOUR, SECOND, Duration, Instant
from fencepost_server.domain.names import JobName, format_run
from fencepost_server.domain.run import Lane, RunKey, RunOrigin, RunState
from fencepost_server.engine.job_access import job_not_found
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.specs import RunSpec, SpecCache, SpecKey
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import (
    FencepostError,
    InvalidField,
    StorageUnavailable,
    UniqueKeyHeld,
)
from fencepost_server.store import requests
from fencepost_server.store import runs as run_store
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database, Row
from fencepost_server.store.enqueues import KEY_BUSY_TEXT, WantedRun, enqueue_runs
from fencepost_server.store.requests import RequestKey
from fencepost_server.store.runs import RunRecord

REMEMBERED_FOR: Duration = HOUR
KEEP_FOR_DEFAULT: Duration = DAY
LABELS_MAX = 32


class UniqueConflict(IntEnum):
    """What becomes of an entry whose unique key a run holds; numbers as in the contract."""

    RETURN_EXISTING = 1
    REJECT = 2
    REPLACE_WAITING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueKey:
    """A business key of the job: one run at a time holds it, and `keep_for` after its end."""

    key: str
    conflict: UniqueConflict = UniqueConflict.RETURN_EXISTING
    keep_for: Duration = KEEP_FOR_DEFAULT


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
    unique: UniqueKey | None = None
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """The run of an entry; `existing`: nothing was made, it holds the unique key.

    `record` None: the run's history is gone, and only its key is still held.
    """

    key: RunKey
    job: JobName
    record: RunRecord | None
    existing: bool
    unique_key: str = ""


Outcome: TypeAlias = bytes | FencepostError
Encode: TypeAlias = Callable[[Enqueued], bytes]
# Reads what a request id is remembered by: the run, and whether it was there before.
Recall: TypeAlias = Callable[[bytes], tuple[RunKey, bool]]


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
        self,
        origin: Origin,
        entries: Sequence[EnqueueEntry],
        *,
        encode: Encode,
        recall: Recall | None = None,
    ) -> list[Outcome]:
        """One outcome per entry, in their order; `recall` is needed for request ids.

        The runs are claimable with the commit. Raises TenantNotFound, ServerOverloaded, or
        StorageUnavailable with nothing made as far as known.
        """
        tenant_id = await self._catalogue.tenant_id(origin.tenant)
        copies, refused = requests.repeated([entry.request for entry in entries])
        outcomes: dict[int, Outcome] = {**refused}
        fresh = [i for i in range(len(entries)) if i not in refused and i not in copies]
        rows: Sequence[Row] = ()
        if fresh:
            rows = await enqueue_runs(
                self._database.requests,
                [_wanted(entries[index]) for index in fresh],
                tenant_id=tenant_id,
                trace_context=origin.trace_context,
                remember_until=origin.now + REMEMBERED_FOR,
                now=origin.now,
            )
        self._announce(rows, origin.now)
        answers = await self._answers(origin, dict(zip(fresh, rows, strict=True)), entries, recall)
        for index, answer in answers.items():
            outcomes[index] = answer if isinstance(answer, FencepostError) else encode(answer)
        for index, first in copies.items():
            outcomes[index] = outcomes[first]
        return [outcomes[index] for index in range(len(entries))]

    async def _answers(
        self,
        origin: Origin,
        rows: Mapping[int, Row],
        entries: Sequence[EnqueueEntry],
        recall: Recall | None,
    ) -> dict[int, Enqueued | FencepostError]:
        """What became of each entry, by position."""
        specs = await self._specs.get(
            {
                SpecKey(str(row["job_id"]), row["version"])
                for row in rows.values()
                if row["version"] is not None
            }
        )
        known: dict[int, tuple[RunKey, bool]] = {}
        answers: dict[int, Enqueued | FencepostError] = {}
        for index, row in rows.items():
            spec = specs.get(SpecKey(str(row["job_id"]), row["version"]))
            if spec is not None:
                record = _record(row, spec, entries[index], origin)
                answers[index] = _enqueued(entries[index], record.key, record, existing=False)
            elif row["outcome"] == "repeated":
                assert recall is not None, "request ids came without a way to read their answers"
                known[index] = recall(row["note"])
            elif row["outcome"] in ("made", "existing"):
                # Made, and replaced by a later entry of the same call.
                key = RunKey(str(row["job_id"]), row["scheduled_at"])
                known[index] = key, row["outcome"] == "existing"
            else:
                answers[index] = _refusal(row, entries[index], origin)
        records = await self._read([key for key, _ in known.values()])
        for index, (key, existing) in known.items():
            answers[index] = _enqueued(entries[index], key, records.get(key), existing=existing)
        return answers

    async def _read(self, keys: Sequence[RunKey]) -> Mapping[RunKey, RunRecord]:
        if not keys:
            return {}
        async with self._database.requests.connection() as connection:
            return await run_store.read(connection, sorted(set(keys)), full=False)

    def _announce(self, rows: Sequence[Row], now: Instant) -> None:
        ready: set[Lane] = set()
        coming: dict[Lane, Instant] = {}
        for row in rows:
            if row["version"] is None:
                continue
            lane, at = Lane(row["queue_id"], row["kind_id"], row["priority"]), row["available_at"]
            if at <= now:
                ready.add(lane)
            else:
                coming[lane] = min(at, coming.get(lane, at))
        self._wake.lanes(ready)
        for lane, at in coming.items():
            self._wake.lanes([lane], at=at)


def _wanted(entry: EnqueueEntry) -> WantedRun:
    unique = entry.unique
    return WantedRun(
        job=entry.job.job,
        due_at=entry.due_at,
        payload=entry.payload,
        priority=entry.priority,
        labels=entry.labels,
        concurrency_key=entry.concurrency_key,
        unique_key=None if unique is None else unique.key,
        conflict=int(UniqueConflict.RETURN_EXISTING if unique is None else unique.conflict),
        # Rounded up: a key is kept no shorter than asked.
        keep_for_s=0 if unique is None else -(-unique.keep_for // SECOND),
        request=entry.request,
    )


def _enqueued(
    entry: EnqueueEntry, key: RunKey, record: RunRecord | None, *, existing: bool
) -> Enqueued:
    return Enqueued(
        key=key,
        job=entry.job,
        record=record,
        existing=existing,
        unique_key="" if entry.unique is None else entry.unique.key,
    )


def _refusal(row: Row, entry: EnqueueEntry, origin: Origin) -> FencepostError:
    """Why an entry has no run."""
    match row["outcome"]:
        case "no_job":
            return job_not_found(entry.job)
        case "reused":
            assert entry.request is not None
            return requests.reused(entry.request.request_id)
        case "busy":
            return StorageUnavailable(f"unique_key: {KEY_BUSY_TEXT}")
        case "labels":
            total = row["priority"]
            return InvalidField(
                f"labels: {total} together with the job's, want at most {LABELS_MAX}",
                field="labels",
                value=str(total),
                allowed=f"at most {LABELS_MAX} labels",
            )
        case "held":
            assert entry.unique is not None
            holder = format_run(origin.tenant, entry.job.job, row["scheduled_at"])
            return UniqueKeyHeld(
                f"unique_key: {entry.unique.key!r} is held by {holder}; use another key, or wait "
                "until it is free",
                field="unique_key",
                resource=holder,
                run=holder,
                uniqueKey=entry.unique.key,
            )
    raise AssertionError(f"no such outcome: {row['outcome']}")


def _record(row: Row, of: RunSpec, entry: EnqueueEntry, origin: Origin) -> RunRecord:
    """The run as its row is now, without another read."""
    labels = row["run_labels"]
    return RunRecord(
        key=RunKey(str(row["job_id"]), row["scheduled_at"]),
        tenant=origin.tenant,
        job_name=of.job_name,
        job_is_deleted=False,
        version=row["version"],
        spec=of.spec,
        state=RunState.QUEUED,
        origin=RunOrigin.ENQUEUE,
        queue_name=of.spec.target.queue_name,
        kind=of.spec.target.kind,
        priority=row["priority"],
        created_at=origin.now,
        available_at=row["available_at"],
        labels=of.spec.labels if labels is None else labels,
        concurrency_key=row["concurrency_key"] or "",
        unique_key="" if entry.unique is None else entry.unique.key,
        trace_context=origin.trace_context,
    )
