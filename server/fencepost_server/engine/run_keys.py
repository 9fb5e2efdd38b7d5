"""Finds free keys for ad-hoc runs and inserts them: moved off whole seconds, consecutive
within a batch, never the key of a run that lives or has lived.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fencepost_server.clock import Instant
from fencepost_server.domain.run import RunKey, key_in_second
from fencepost_server.errors import ServerOverloaded
from fencepost_server.store.database import Connection
from fencepost_server.store.statements import load

_SQL = load("enqueue")
# Each round goes on after the highest key that others have committed; who still finds none
# competes with that many callers for one instant of one job.
_ROUNDS_MAX = 64


@dataclass(slots=True, kw_only=True)
class NewRun:
    """An ad-hoc run on its way in; `due_at` is not before now."""

    job_id: str
    due_at: Instant
    queue_id: int
    kind_id: int
    version: int
    priority: int
    lease_s: int
    cancel_grace_s: int
    attempt_timeout_s: int
    max_in_flight: int | None
    concurrency_key: str | None
    payload: bytes | None
    labels: Mapping[str, str] | None


async def insert_runs(
    connection: Connection,
    runs: Sequence[NewRun],
    *,
    tenant_id: int,
    trace_context: Mapping[str, str] | None,
    now: Instant,
) -> list[RunKey]:
    """The keys of `runs`, in their order, inserted by the caller's transaction.

    Raises ServerOverloaded when too many callers press into one instant.
    """
    if not runs:
        return []
    keys: list[RunKey | None] = [None] * len(runs)
    pending = list(range(len(runs)))
    starts = [run.due_at for run in runs]
    for round_number in range(_ROUNDS_MAX):
        if round_number:
            await _move_on(connection, runs, pending, starts)
        tried = _place(runs, pending, starts)
        free = await _insert(connection, runs, tried, tenant_id, trace_context, now)
        for key in free:
            keys[tried[key]] = key
        pending = [index for index in pending if keys[index] is None]
        if not pending:
            return [key for key in keys if key is not None]
    raise ServerOverloaded(
        f"{len(pending)} runs found no free instant in {_ROUNDS_MAX} tries; spread run_at",
        retry_after_ms=1000,
    )


def _place(
    runs: Sequence[NewRun], pending: Sequence[int], starts: Sequence[Instant]
) -> dict[RunKey, int]:
    """A key for each pending run: where it starts, or the next that no other one of them has."""
    last: dict[str, Instant] = defaultdict(int)
    placed: dict[RunKey, int] = {}
    for index in sorted(pending, key=lambda i: (runs[i].job_id, starts[i], i)):
        job_id = runs[index].job_id
        at = key_in_second(max(starts[index], last[job_id] + 1))
        last[job_id] = at
        placed[RunKey(job_id, at)] = index
    return placed


async def _move_on(
    connection: Connection,
    runs: Sequence[NewRun],
    pending: Sequence[int],
    starts: list[Instant],
) -> None:
    """Sets the starts of pending runs behind the highest keys that are taken there."""
    wanted = sorted({(runs[index].job_id, starts[index]) for index in pending})
    rows = await connection.fetch(
        _SQL["highest_keys"],
        job_ids=[job_id for job_id, _ in wanted],
        from_ats=[at for _, at in wanted],
    )
    highest = {(str(row["job_id"]), row["from_at"]): row["highest_at"] for row in rows}
    for index in pending:
        at = highest.get((runs[index].job_id, starts[index]))
        if at is not None:
            starts[index] = at + 1


async def _insert(
    connection: Connection,
    runs: Sequence[NewRun],
    tried: Mapping[RunKey, int],
    tenant_id: int,
    trace_context: Mapping[str, str] | None,
    now: Instant,
) -> set[RunKey]:
    """Inserts what is free; returns the keys that are now ours."""
    keys = sorted(tried)
    picked = [runs[tried[key]] for key in keys]
    trace = None if trace_context is None else json.dumps(dict(trace_context))
    rows = await connection.fetch(
        _SQL["insert_enqueued"],
        job_ids=[key.job_id for key in keys],
        scheduled_ats=[key.scheduled_at for key in keys],
        available_ats=[run.due_at for run in picked],
        queue_ids=[run.queue_id for run in picked],
        kind_ids=[run.kind_id for run in picked],
        versions=[run.version for run in picked],
        priorities=[run.priority for run in picked],
        leases_s=[run.lease_s for run in picked],
        graces_s=[run.cancel_grace_s for run in picked],
        timeouts_s=[run.attempt_timeout_s for run in picked],
        job_caps=[run.max_in_flight for run in picked],
        concurrency_keys=[run.concurrency_key for run in picked],
        payloads=[run.payload for run in picked],
        labels=[None if run.labels is None else json.dumps(dict(run.labels)) for run in picked],
        trace_contexts=[trace] * len(picked),
        tenant_id=tenant_id,
        now=now,
    )
    inserted = sorted(RunKey(str(row["job_id"]), row["scheduled_at"]) for row in rows)
    if not inserted:
        return set()
    # A statement of its own: one snapshot with the insert would miss a run that has ended
    # between the snapshot and the check of the unique index.
    at = [key.scheduled_at for key in inserted]
    ended = await connection.fetch(
        _SQL["keys_of_ended_runs"],
        job_ids=[key.job_id for key in inserted],
        scheduled_ats=at,
        first_at=min(at),
        last_at=max(at),
    )
    if ended:
        await connection.execute(
            _SQL["withdraw_enqueued"],
            job_ids=[row["job_id"] for row in ended],
            scheduled_ats=[row["scheduled_at"] for row in ended],
        )
    return set(inserted) - {RunKey(str(row["job_id"]), row["scheduled_at"]) for row in ended}
