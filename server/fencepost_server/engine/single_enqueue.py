"""Makes one ad-hoc run in as little time as it takes, and hands it to a waiting worker in the
same commit (docs/adr/0044). Whatever is not plain goes the way of batches.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from fencepost_server.clock import SECOND
from fencepost_server.domain.run import Lane, RunKey, RunOrigin, RunState
from fencepost_server.engine.enqueue import (
    REMEMBERED_FOR,
    Encode,
    Enqueued,
    EnqueueEntry,
    Enqueues,
    Recall,
)
from fencepost_server.engine.handout import HandOuts, Offer
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.specs import RunSpec, SpecCache, SpecKey
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import FencepostError
from fencepost_server.store.catalogue import Catalogue, Remembered
from fencepost_server.store.database import Database, Row
from fencepost_server.store.runs import RunRecord
from fencepost_server.store.single_enqueues import PlainRun, enqueue_run

_log = structlog.get_logger("enqueue")

# Writes what a request id is remembered by: of a tenant's run of this key.
Remember: TypeAlias = Callable[[str, RunKey], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How answers are written, and what request ids are remembered by is written and read."""

    encode: Encode
    remember: Remember
    recall: Recall


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownJob:
    """The lane of the last run of a job; the statement sees whether the next is of it, too."""

    job_id: str
    lane: Lane


class SingleEnqueues:
    """Serves EnqueueRun."""

    def __init__(
        self,
        *,
        database: Database,
        catalogue: Catalogue,
        specs: SpecCache,
        wake: Wake,
        handouts: HandOuts,
        enqueues: Enqueues,
        answers: Answers,
    ) -> None:
        self._database = database
        self._catalogue = catalogue
        self._specs = specs
        self._wake = wake
        self._handouts = handouts
        self._enqueues = enqueues
        self._answers = answers
        # By tenant and name of the job.
        self._jobs: Remembered[tuple[str, str], _KnownJob] = Remembered()
        self._under_way: set[asyncio.Task[Row | None]] = set()

    async def enqueue(self, origin: Origin, entry: EnqueueEntry) -> bytes:
        """The encoded answer. The run is claimable, or already claimed, with the commit.

        Raises whatever refuses the entry, and what `Enqueues.enqueue` raises.
        """
        made = await self._plain(origin, entry)
        if made is not None:
            return self._answers.encode(made)
        told: list[Enqueued] = []

        def listen(enqueued: Enqueued) -> bytes:
            told.append(enqueued)
            return self._answers.encode(enqueued)

        (outcome,) = await self._enqueues.enqueue(
            origin, [entry], encode=listen, recall=self._answers.recall
        )
        if isinstance(outcome, FencepostError):
            raise outcome
        await self._learn(origin, entry, told)
        return outcome

    async def finish(self) -> None:
        """Until runs that callers no longer wait for are with their workers."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _learn(self, origin: Origin, entry: EnqueueEntry, told: list[Enqueued]) -> None:
        """Remember where runs of the job go. A job asked for by its id is not remembered."""
        for each in told:
            record = each.record
            if record is None or record.job_name != entry.job.job:
                continue
            tenant_id = await self._catalogue.tenant_id(origin.tenant)
            queues = await self._catalogue.find_queue_ids(tenant_id, [record.queue_name])
            kinds = await self._catalogue.kind_ids([record.kind])
            lane = Lane(queues[record.queue_name], kinds[record.kind], record.priority)
            known = _KnownJob(job_id=each.key.job_id, lane=lane)
            self._jobs.add({(origin.tenant, record.job_name): known})

    async def _plain(self, origin: Origin, entry: EnqueueEntry) -> Enqueued | None:
        """The run, made the short way; None: nothing was made."""
        known = self._jobs.find([(origin.tenant, entry.job.job)]).get(
            (origin.tenant, entry.job.job)
        )
        if known is None or (entry.due_at is not None and entry.due_at > origin.now):
            return None
        # Whole seconds belong to fires.
        at = origin.now if origin.now % SECOND else origin.now + 1
        key = RunKey(known.job_id, at)
        unique = entry.unique
        run = PlainRun(
            key=key,
            job_name=entry.job.job,
            payload=entry.payload,
            priority=entry.priority,
            labels=entry.labels,
            concurrency_key=entry.concurrency_key,
            unique_key=None if unique is None else unique.key,
            # Rounded up: a key is kept no shorter than asked.
            keep_for_s=0 if unique is None else -(-unique.keep_for // SECOND),
            request=entry.request,
            note=None if entry.request is None else self._answers.remember(origin.tenant, key),
        )
        tenant_id = await self._catalogue.tenant_id(origin.tenant)
        lane = known.lane
        if entry.priority is not None:
            lane = lane._replace(priority=entry.priority)
        offer = self._handouts.offer(lane, now=origin.now)
        if offer is None:
            row = await self._make(run, None, tenant_id, origin)
        else:
            # The caller may go; the run is brought to its worker all the same.
            row = await asyncio.shield(self._start(run, offer, tenant_id, origin))
        if row is None:
            return None
        lane = Lane(row["queue_id"], row["kind_id"], row["priority"])
        if row["claimed_at"] is None:
            self._wake.lanes([lane])
        if entry.priority is not None:
            lane = lane._replace(priority=known.lane.priority)
        if lane != known.lane:
            known = _KnownJob(job_id=known.job_id, lane=lane)
            self._jobs.add({(origin.tenant, run.job_name): known})
        spec_key = SpecKey(known.job_id, row["version"])
        spec = (await self._specs.get([spec_key])).get(spec_key)
        return Enqueued(
            key=key,
            job=entry.job,
            record=None if spec is None else _record(row, spec, run, origin, offer),
            existing=False,
            unique_key=run.unique_key or "",
        )

    def _start(
        self, run: PlainRun, offer: Offer, tenant_id: int, origin: Origin
    ) -> "asyncio.Task[Row | None]":
        end = self._handouts.reserve(offer)
        making = asyncio.get_running_loop().create_task(
            self._hand_out(run, offer, tenant_id, origin)
        )
        self._under_way.add(making)
        making.add_done_callback(self._ended)
        making.add_done_callback(lambda _: end())
        return making

    async def _hand_out(
        self, run: PlainRun, offer: Offer, tenant_id: int, origin: Origin
    ) -> Row | None:
        row = await self._make(run, offer, tenant_id, origin)
        if row is not None and row["claimed_at"] is not None:
            await self._handouts.deliver(offer, run, row)
        return row

    async def _make(
        self, run: PlainRun, offer: Offer | None, tenant_id: int, origin: Origin
    ) -> Row | None:
        return await enqueue_run(
            self._database.requests,
            run,
            None if offer is None else offer.taker,
            tenant_id=tenant_id,
            trace_context=origin.trace_context,
            remember_until=origin.now + REMEMBERED_FOR,
            now=origin.now,
        )

    def _ended(self, making: "asyncio.Task[Row | None]") -> None:
        self._under_way.discard(making)
        if not making.cancelled() and (error := making.exception()) is not None:
            # Its caller, if it still waits, hears it too.
            level = _log.debug if isinstance(error, FencepostError) else _log.error
            level("hand_out_failed", error=repr(error))


def _record(row: Row, of: RunSpec, run: PlainRun, origin: Origin, offer: Offer | None) -> RunRecord:
    """The run as its row is now, without another read."""
    claimed_at = row["claimed_at"]
    is_claimed = claimed_at is not None and offer is not None
    labels = row["run_labels"]
    return RunRecord(
        key=run.key,
        tenant=origin.tenant,
        job_name=of.job_name,
        job_is_deleted=False,
        version=row["version"],
        spec=of.spec,
        state=RunState.RUNNING if is_claimed else RunState.QUEUED,
        origin=RunOrigin.ENQUEUE,
        queue_name=of.spec.target.queue_name,
        kind=of.spec.target.kind,
        priority=row["priority"],
        created_at=origin.now,
        available_at=origin.now,
        labels=of.spec.labels if labels is None else labels,
        concurrency_key=row["concurrency_key"] or "",
        unique_key=run.unique_key or "",
        attempt=1 if is_claimed else 0,
        attempt_open=is_claimed,
        worker_id=offer.taker.worker_id if is_claimed and offer is not None else None,
        first_claimed_at=claimed_at,
        claimed_at=claimed_at,
        lease_until=claimed_at + row["lease_s"] * SECOND if is_claimed else None,
        trace_context=origin.trace_context,
    )
