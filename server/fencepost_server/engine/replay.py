"""Puts locked dead letters back into the queue, in the caller's transaction.

The dead letter is locked before its run is inserted, against the common lock order. That is
safe: the key of a dead letter is nowhere else, so the insert waits for nobody, and whoever
holds rows of the queue only ever inserts dead letters, which waits for nobody either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from fencepost_server.clock import Instant
from fencepost_server.domain.names import JobName, RunName
from fencepost_server.domain.run import Lane, RunKey
from fencepost_server.engine.specs import RunSpec, SpecCache, SpecKey
from fencepost_server.errors import (
    FencepostError,
    InternalError,
    JobNotFound,
    RunDiscarded,
    VersionNotKept,
)
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.job_settings import JobSettings
from fencepost_server.store.statements import load

_SQL = load("dead_letters")
_log = structlog.get_logger("replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """With which input and definition a run is replayed; None: the payload it has."""

    payload: bytes | None = None
    use_newest_version: bool = False


@dataclass(slots=True, kw_only=True)
class Replayed:
    """The new replay_count of each run that is queued again, the lanes they are in, and why
    the others are not."""

    counts: dict[RunKey, int] = field(default_factory=dict)
    lanes: set[Lane] = field(default_factory=set)
    refused: dict[RunKey, FencepostError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """What a replayed run takes from a version of its job; columns of the queue."""

    version: int
    queue_id: int
    kind_id: int
    priority: int
    lease_s: int
    cancel_grace_s: int
    attempt_timeout_s: int
    queue_timeout_s: int | None
    total_timeout_s: int | None
    max_in_flight: int | None
    concurrency_key: str | None


async def lock_dead_letters(connection: Connection, keys: Sequence[RunKey]) -> Sequence[Row]:
    """Those of these runs that are dead letters, locked in key order, with their jobs.

    Until the transaction ends no job of theirs can be deleted: a deletion that cancels all runs
    must not miss one.
    """
    await connection.fetch(_SQL["share_jobs"], job_ids=sorted({key.job_id for key in keys}))
    return await connection.fetch(
        _SQL["lock_dead_letters"],
        job_ids=[key.job_id for key in keys],
        scheduled_ats=[key.scheduled_at for key in keys],
    )


async def replay_locked(
    connection: Connection,
    rows: Sequence[Row],
    specs: SpecCache,
    options: ReplayOptions,
    *,
    now: Instant,
) -> Replayed:
    """Replays dead letters that `lock_dead_letters` has returned."""
    known = await specs.get(
        {SpecKey(str(row["job_id"]), row["version"]) for row in rows}, connection=connection
    )
    newest_keys = (
        await _newest_concurrency_keys(connection, rows, options)
        if options.use_newest_version
        else None
    )
    replayed = Replayed()
    picked: list[tuple[Row, _Settings]] = []
    for row in rows:
        spec = known.get(SpecKey(str(row["job_id"]), row["version"]))
        try:
            picked.append((row, _settings(row, spec, newest_keys)))
        except (JobNotFound, RunDiscarded, VersionNotKept) as error:
            replayed.refused[key_of(row)] = error
    if picked:
        await _put_back(connection, picked, options, replayed, now=now)
    return replayed


async def _newest_concurrency_keys(
    connection: Connection, rows: Sequence[Row], options: ReplayOptions
) -> Mapping[RunKey, str | None]:
    found = await connection.fetch(
        _SQL["newest_concurrency_keys"],
        job_ids=[row["job_id"] for row in rows],
        scheduled_ats=[row["scheduled_at"] for row in rows],
        payload=options.payload,
    )
    return {key_of(row): row["concurrency_key"] for row in found}


async def _put_back(
    connection: Connection,
    picked: Sequence[tuple[Row, _Settings]],
    options: ReplayOptions,
    replayed: Replayed,
    *,
    now: Instant,
) -> None:
    keyed = [row for row, _ in picked if row["unique_key"] is not None]
    if keyed:
        # Before the runs leave the dead letters, where their keys are read.
        await connection.fetch(
            _SQL["retake_keys"],
            job_ids=[row["job_id"] for row in keyed],
            scheduled_ats=[row["scheduled_at"] for row in keyed],
            now=now,
        )
    settings = [each for _, each in picked]
    made = await connection.fetch(
        _SQL["replay_runs"],
        job_ids=[row["job_id"] for row, _ in picked],
        scheduled_ats=[row["scheduled_at"] for row, _ in picked],
        attempts=[row["attempt"] for row, _ in picked],
        versions=[each.version for each in settings],
        queue_ids=[each.queue_id for each in settings],
        kind_ids=[each.kind_id for each in settings],
        priorities=[each.priority for each in settings],
        leases_s=[each.lease_s for each in settings],
        graces_s=[each.cancel_grace_s for each in settings],
        timeouts_s=[each.attempt_timeout_s for each in settings],
        queue_timeouts_s=[each.queue_timeout_s for each in settings],
        total_timeouts_s=[each.total_timeout_s for each in settings],
        job_caps=[each.max_in_flight for each in settings],
        concurrency_keys=[each.concurrency_key for each in settings],
        serials=[row["serial"] for row, _ in picked],
        payloads=[options.payload] * len(picked),
        now=now,
    )
    for row in made:
        replayed.counts[key_of(row)] = row["replay_count"]
        replayed.lanes.add(Lane(row["queue_id"], row["kind_id"], row["priority"]))
    for row, _ in picked:
        key = key_of(row)
        if key not in replayed.counts:
            # A run in two places is a bug; it must not hold up the others.
            _log.error("replay_refused_by_queue", run=str(key))
            replayed.refused[key] = InternalError(
                f"{run_name(row)} is live as well as dead; this is a bug, see the server's log"
            )


def _settings(
    row: Row, recorded: RunSpec | None, newest_keys: Mapping[RunKey, str | None] | None
) -> _Settings:
    """`newest_keys` None: the recorded version goes on.

    Raises RunDiscarded, JobNotFound or VersionNotKept.
    """
    name = run_name(row)
    if row["discarded_at"] is not None:
        raise discarded(name)
    if row["job_is_deleted"]:
        job = JobName(tenant=row["tenant_name"], job=str(row["job_id"]))
        raise JobNotFound(
            f"{job} was deleted, so {name} cannot be replayed",
            resource=str(job),
            name=str(job),
            run=str(name),
        )
    if newest_keys is not None:
        return _newest(row, newest_keys[key_of(row)])
    if recorded is None:
        raise VersionNotKept(
            f"{name} was made with version {row['version']} of its job, which is not kept any "
            "more; replay it with use_newest_version",
            field="use_newest_version",
            name=str(name),
            version=str(row["version"]),
        )
    own = JobSettings.of(
        recorded.spec, queue_id=row["queue_id"], kind_id=row["kind_id"], schedule_id=None
    )
    return _Settings(
        version=row["version"],
        queue_id=row["queue_id"],
        kind_id=row["kind_id"],
        priority=row["priority"],
        lease_s=own.lease_s,
        cancel_grace_s=own.cancel_grace_s,
        attempt_timeout_s=own.attempt_timeout_s,
        queue_timeout_s=own.queue_timeout_s,
        total_timeout_s=own.total_timeout_s,
        max_in_flight=own.max_in_flight,
        concurrency_key=row["concurrency_key"],
    )


def _newest(row: Row, concurrency_key: str | None) -> _Settings:
    return _Settings(
        version=row["newest_version"],
        queue_id=row["newest_queue_id"],
        kind_id=row["newest_kind_id"],
        priority=row["newest_priority"],
        lease_s=row["lease_s"],
        cancel_grace_s=row["cancel_grace_s"],
        attempt_timeout_s=row["attempt_timeout_s"],
        queue_timeout_s=row["queue_timeout_s"],
        total_timeout_s=row["total_timeout_s"],
        max_in_flight=row["max_in_flight"],
        concurrency_key=concurrency_key,
    )


def key_of(row: Row) -> RunKey:
    """The run key in a row."""
    return RunKey(str(row["job_id"]), row["scheduled_at"])


def run_name(row: Row) -> RunName:
    """The name that a locked dead letter goes by."""
    job = str(row["job_id"]) if row["job_is_deleted"] else row["job_name"]
    return RunName(tenant=row["tenant_name"], job=job, scheduled_at=row["scheduled_at"])


def discarded(name: RunName) -> RunDiscarded:
    """The refusal of a replay of a run that was given up."""
    return RunDiscarded(
        f"{name} was discarded, so it cannot be replayed",
        resource=str(name),
        name=str(name),
        runState="DEAD",
    )
