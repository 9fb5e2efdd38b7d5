"""Calls the database's function that makes one run, and claims it where that is allowed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import asyncpg

from fencepost_server.clock import Instant
from fencepost_server.domain.run import RunKey
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Pool, Row
from fencepost_server.store.enqueues import KEY_BUSY_TEXT
from fencepost_server.store.requests import RequestKey
from fencepost_server.store.statements import load

_SQL = load("handout")
# Codes of the function for what it leaves to others; all is rolled back.
_SENT_TWICE, _NOT_PLAIN = "FP001", "FP003"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """A run to make now. None is the job's own, or none at all; `job_name` is the name that the
    job must still have, `keep_for_s` in seconds, `note` what `request` is remembered by.
    """

    key: RunKey
    job_name: str
    payload: bytes | None
    priority: int | None
    labels: Mapping[str, str]
    concurrency_key: str | None
    unique_key: str | None
    keep_for_s: int
    request: RequestKey | None
    note: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taker:
    """Who may have a run of this queue and the first of `lanes` at once, unless another is ready
    in one of them, (kind_id, priority), with an available_at after `seen_after`.
    """

    worker_id: str
    queue_id: int
    lanes: Sequence[tuple[int, int]]
    seen_after: Instant


async def enqueue_run(
    pool: Pool,
    run: PlainRun,
    taker: Taker | None,
    *,
    tenant_id: int,
    trace_context: Mapping[str, str] | None,
    remember_until: Instant,
    now: Instant,
) -> Row | None:
    """The run as made, in a transaction of its own; its claimed_at is None unless it was handed
    out. None: nothing was made, it is a case for `enqueue_runs`.

    Raises StorageUnavailable, also when the unique key is just being taken.
    """
    lanes = () if taker is None else taker.lanes
    request = run.request
    async with pool.connection() as connection:
        try:
            return await connection.fetch_one(
                _SQL["enqueue_run"],
                tenant_id=tenant_id,
                now=now,
                job_id=run.key.job_id,
                job_name=run.job_name,
                scheduled_at=run.key.scheduled_at,
                payload=run.payload,
                priority=run.priority,
                labels=dict(run.labels) or None,
                concurrency_key=run.concurrency_key,
                unique_key=run.unique_key,
                keep_for_s=run.keep_for_s,
                trace_context=None if trace_context is None else dict(trace_context),
                request_id=None if request is None else request.request_id,
                body_hash=None if request is None else request.body_hash,
                note=run.note,
                remember_until=remember_until,
                worker_id=None if taker is None else taker.worker_id,
                queue_id=None if taker is None else taker.queue_id,
                lane_kinds=[kind_id for kind_id, _ in lanes],
                lane_priorities=[priority for _, priority in lanes],
                seen_after=0 if taker is None else taker.seen_after,
            )
        except asyncpg.LockNotAvailableError as error:
            raise StorageUnavailable(f"unique_key: {KEY_BUSY_TEXT}") from error
        except asyncpg.PostgresError as error:
            if error.sqlstate in (_SENT_TWICE, _NOT_PLAIN):
                return None
            raise
