"""The short way of batches whose runs are all plain: due now, with no more than a payload, a
unique key and a request id (docs/adr/0035). What turns out not to be plain is left undone, and
left to `Enqueues`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from fencepost_server.clock import SECOND, Instant
from fencepost_server.domain.run import Lane, RunKey, RunOrigin, RunState
from fencepost_server.engine.enqueue import REMEMBERED_FOR
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.specs import RunSpec, SpecCache, SpecKey
from fencepost_server.engine.wake import Wake
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database, Row
from fencepost_server.store.enqueues import PlainColumns, enqueue_plain_runs
from fencepost_server.store.runs import RunRecord

# Jobs of one batch; more would fill the table of advisory locks.
JOBS_MAX = 64
# Places remembered in a process, and how far ahead of now they may be.
_JOBS_REMEMBERED_MAX = 10_000
_AHEAD_MAX = SECOND // 10
_TRIES_MAX = 4

# What remains to be said of a run when its job is known, by its instant.
Notes: TypeAlias = Callable[[Sequence[Instant]], Sequence[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRuns:
    """Runs to make, by column. `jobs`: distinct names or ids, all of the call's tenant.

    `numbers` says, from 1, which of them a run is of; empty when there is only one.
    `unique_keys` is empty when no run has one, `request_ids` and `body_hashes` when none has;
    keys of one job are distinct, and so are request ids.
    """

    jobs: Sequence[str]
    numbers: Sequence[int]
    payloads: Sequence[bytes | None]
    unique_keys: Sequence[str | None]
    request_ids: Sequence[str]
    body_hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMade:
    """Runs that were made: their instants in the order asked for, and per job a record of which
    only the key, the unique key and the instant in its name are not those of each run."""

    ats: Sequence[Instant]
    notes: Sequence[bytes]
    records: Sequence[RunRecord]


class Places:
    """Gives batches of this process places apart from each other: a batch that asked for the
    uncommitted place of another would wait for its commit, to be told that it is taken."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], Instant] = {}

    def take(self, tenant_id: int, job: str, count: int, *, now: Instant) -> list[Instant]:
        """Consecutive instants from now on, or from those given before; no whole seconds, which
        belong to fires."""
        last = self._last.get((tenant_id, job), 0)
        first = last + 1 if now <= last <= now + _AHEAD_MAX else now
        if first % SECOND == 0:
            first += 1
        # One whole second can be met, as `count` is far less than the microseconds of two.
        end = first + count
        second = first // SECOND * SECOND + SECOND
        places = (
            list(range(first, end))
            if end <= second
            else list(chain(range(first, second), range(second + 1, end + 1)))
        )
        if len(self._last) >= _JOBS_REMEMBERED_MAX:
            self._last.clear()
        self._last[tenant_id, job] = places[-1]
        return places

    def leave_out(self, tenant_id: int, job: str, *, until: Instant) -> None:
        """Somebody else has places up to this one."""
        self._last[tenant_id, job] = max(until, self._last.get((tenant_id, job), 0))


class PlainEnqueues:
    """Serves plain BatchEnqueueRuns."""

    def __init__(
        self, *, database: Database, catalogue: Catalogue, specs: SpecCache, wake: Wake
    ) -> None:
        self._database = database
        self._catalogue = catalogue
        self._specs = specs
        self._wake = wake
        self._places = Places()

    def now(self) -> Instant:
        """The database clock's instant."""
        return self._database.clock.now()

    async def enqueue(self, origin: Origin, runs: PlainRuns, *, notes: Notes) -> PlainMade | None:
        """All of the runs, claimable with the commit; None: none was made, as they are not plain.

        Raises TenantNotFound, or StorageUnavailable with nothing made as far as known.
        """
        tenant_id = await self._catalogue.tenant_id(origin.tenant)
        for _ in range(_TRIES_MAX):
            ats = self._take(tenant_id, runs, origin.now)
            written = notes(ats)
            rows = await enqueue_plain_runs(
                self._database.requests,
                PlainColumns(
                    jobs=runs.jobs,
                    numbers=runs.numbers,
                    places=[at - origin.now for at in ats],
                    payloads=runs.payloads,
                    unique_keys=runs.unique_keys,
                    request_ids=runs.request_ids,
                    body_hashes=runs.body_hashes,
                    notes=written if runs.request_ids else (),
                ),
                tenant_id=tenant_id,
                trace_context=origin.trace_context,
                remember_until=origin.now + REMEMBERED_FOR,
                now=origin.now,
            )
            if not rows:
                return None
            if rows[0]["taken_until"] is None:
                return PlainMade(
                    ats=ats, notes=written, records=await self._records(origin, rows, ats[0])
                )
            for job in runs.jobs:
                self._places.leave_out(tenant_id, job, until=rows[0]["taken_until"])
        return None

    def _take(self, tenant_id: int, runs: PlainRuns, now: Instant) -> list[Instant]:
        """An instant for each run."""
        if not runs.numbers:
            return self._places.take(tenant_id, runs.jobs[0], len(runs.payloads), now=now)
        counts = [0] * len(runs.jobs)
        for number in runs.numbers:
            counts[number - 1] += 1
        given = [
            iter(self._places.take(tenant_id, job, count, now=now))
            for job, count in zip(runs.jobs, counts, strict=True)
        ]
        return [next(given[number - 1]) for number in runs.numbers]

    async def _records(
        self, origin: Origin, rows: Sequence[Row], at: Instant
    ) -> Sequence[RunRecord]:
        self._wake.lanes({Lane(row["queue_id"], row["kind_id"], row["priority"]) for row in rows})
        keys = [SpecKey(str(row["job_id"]), row["version"]) for row in rows]
        specs = await self._specs.get(keys)
        return [_record(row, specs[key], origin, at) for row, key in zip(rows, keys, strict=True)]


def _record(row: Row, of: RunSpec, origin: Origin, at: Instant) -> RunRecord:
    """A run of the job, as all of them are."""
    return RunRecord(
        key=RunKey(str(row["job_id"]), at),
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
        available_at=origin.now,
        labels=of.spec.labels,
        concurrency_key=row["concurrency_key"] or "",
        trace_context=origin.trace_context,
    )
