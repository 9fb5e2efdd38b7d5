"""Calls the database's function that makes ad-hoc runs, and turns its refusals into ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from fencepost_server.clock import Instant
from fencepost_server.errors import ServerOverloaded, StorageUnavailable
from fencepost_server.store.database import Connection, Pool, Row
from fencepost_server.store.requests import RequestKey
from fencepost_server.store.statements import load

_SQL = load("enqueue")
# Codes that the function raises.
_SENT_TWICE, _NO_PLACE, _NOT_PLAIN = "FP001", "FP002", "FP003"
_TRIES_MAX = 8
KEY_BUSY_TEXT = "another transaction is taking this unique key; try again"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRun:
    """A run to make of `job`, a name or an id. None is the job's own, or now, or none at all.

    `conflict` 1 returns the run that holds `unique_key`, 2 refuses, 3 replaces one that waits;
    `keep_for_s` in seconds.
    """

    job: str
    due_at: Instant | None
    payload: bytes | None
    priority: int | None
    labels: Mapping[str, str]
    concurrency_key: str | None
    unique_key: str | None
    conflict: int
    keep_for_s: int
    request: RequestKey | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainColumns:
    """Plain runs to make, by column, as fencepost.enqueue_plain_runs takes them; `places` are
    microseconds after `now`."""

    jobs: Sequence[str]
    numbers: Sequence[int]
    places: Sequence[int]
    payloads: Sequence[bytes | None]
    unique_keys: Sequence[str | None]
    request_ids: Sequence[str]
    body_hashes: Sequence[bytes]
    notes: Sequence[bytes]


async def enqueue_plain_runs(
    pool: Pool,
    runs: PlainColumns,
    *,
    tenant_id: int,
    trace_context: Mapping[str, str] | None,
    remember_until: Instant,
    now: Instant,
) -> Sequence[Row]:
    """A row per job, in a transaction of its own; or nothing was made, and there is no row, or
    one that says until where places are taken.
    """
    async with pool.connection() as connection:
        try:
            return await connection.fetch(
                _SQL["enqueue_plain_runs"],
                tenant_id=tenant_id,
                now=now,
                jobs=runs.jobs,
                numbers=runs.numbers,
                places=runs.places,
                payloads=runs.payloads,
                unique_keys=runs.unique_keys,
                trace_context=None if trace_context is None else dict(trace_context),
                request_ids=runs.request_ids,
                body_hashes=runs.body_hashes,
                notes=runs.notes,
                remember_until=remember_until,
            )
        except (
            # Somebody was faster with a key, a place or a request id, or is about to be.
            asyncpg.UniqueViolationError,
            asyncpg.LockNotAvailableError,
            asyncpg.DeadlockDetectedError,
        ):
            return ()
        except asyncpg.PostgresError as error:
            if error.sqlstate != _NOT_PLAIN:
                raise
            return ()


async def enqueue_runs(
    pool: Pool,
    wanted: Sequence[WantedRun],
    *,
    tenant_id: int,
    trace_context: Mapping[str, str] | None,
    remember_until: Instant,
    now: Instant,
) -> Sequence[Row]:
    """One row per entry, in their order, in a transaction of its own.

    Raises ServerOverloaded when too many callers press into one instant, StorageUnavailable
    also when a single entry's key is being taken; nothing is made then.
    """
    requests = [each.request for each in wanted]
    has_requests = any(requests)
    has_keys = any(each.unique_key is not None for each in wanted)
    has_labels = any(each.labels for each in wanted)
    values: dict[str, Any] = {
        "jobs": [each.job for each in wanted],
        "due_ats": [each.due_at for each in wanted],
        "payloads": [each.payload for each in wanted],
        "priorities": [each.priority for each in wanted],
        "labels": [dict(each.labels) or None for each in wanted] if has_labels else [],
        "concurrency_keys": [each.concurrency_key for each in wanted],
        "unique_keys": [each.unique_key for each in wanted] if has_keys else [],
        "conflicts": [each.conflict for each in wanted] if has_keys else [],
        "keep_fors": [each.keep_for_s for each in wanted] if has_keys else [],
        "request_ids": [each and each.request_id for each in requests] if has_requests else [],
        "body_hashes": [each and each.body_hash for each in requests] if has_requests else [],
        "trace_context": None if trace_context is None else dict(trace_context),
    }
    tries = 0
    async with pool.connection() as connection:
        while True:
            tries += 1
            try:
                return await connection.fetch(
                    _SQL["enqueue_runs"],
                    tenant_id=tenant_id,
                    remember_until=remember_until,
                    now=now,
                    **values,
                )
            except asyncpg.LockNotAvailableError as error:
                raise StorageUnavailable(f"unique_key: {KEY_BUSY_TEXT}") from error
            except asyncpg.DeadlockDetectedError:
                if tries == _TRIES_MAX:
                    raise
            except asyncpg.PostgresError as error:
                if error.sqlstate == _NO_PLACE:
                    raise ServerOverloaded(str(error), retry_after_ms=1000) from error
                # All is rolled back, and the call that came first has committed.
                if error.sqlstate != _SENT_TWICE or tries == _TRIES_MAX:
                    raise


async def lock_out(connection: Connection, job_id: str) -> None:
    """Waits for enqueues of the job that are under way; none begins until the caller commits.

    Raises StorageUnavailable when one of them, such as a transaction of an application, does
    not end.
    """
    try:
        await connection.execute(_SQL["lock_out_enqueues"], job_id=job_id)
    except asyncpg.LockNotAvailableError as error:
        raise StorageUnavailable(
            "a transaction that enqueues runs of this job goes on; try again when it has ended"
        ) from error
