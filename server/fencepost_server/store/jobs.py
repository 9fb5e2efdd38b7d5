"""Reads and writes of jobs: identity, versions and scheduling state.

Whoever changes a job takes `lock` first; the reads after it see what the last holder left.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fencepost_server.clock import Instant
from fencepost_server.domain.job import JobSpec, JobState, job_state
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.job_settings import JobSettings, NewJob
from fencepost_server.store.statements import load

_SQL = load("jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as stored; `version` is that of `spec`, the newest unless another was asked for."""

    job_id: str
    tenant_id: int
    name: str
    version: int
    newest_version: int
    revision: int
    spec: JobSpec
    payload: bytes | None
    paused: bool
    pause_reason: str
    next_run_at: Instant | None
    # The end of the last fire's run decides next_run_at, which is None until then.
    awaits_end: bool
    last_scheduled_at: Instant | None
    fire_count: int
    created_at: Instant
    updated_at: Instant
    trace_context: Mapping[str, str] | None
    queue_id: int
    kind_id: int
    partition_id: int
    # Of the newest version.
    has_schedule: bool

    @property
    def state(self) -> JobState:
        """Derived from the newest schedule and its next fire."""
        return job_state(
            paused=self.paused,
            has_schedule=self.has_schedule,
            next_run_at=self.next_run_at,
            awaits_end=self.awaits_end,
        )

    @property
    def etag(self) -> str:
        """Changes with every change; part of the id tells it from a namesake's."""
        return f"{self.job_id[-12:]}-{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """What a list asks for; `conditions` are the JSON values that list_jobs.sql reads."""

    names: Sequence[str] | None = None
    created_from: Instant | None = None
    created_before: Instant | None = None
    next_from: Instant | None = None
    next_before: Instant | None = None
    conditions: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    @property
    def is_all(self) -> bool:
        """Whether every job fits."""
        return self == JobQuery()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Ids of one page, newest first, and where the next one begins (None: nowhere)."""

    job_ids: Sequence[str]
    before: str | None


async def insert(
    connection: Connection,
    jobs: Sequence[NewJob],
    *,
    tenant_id: int,
    trace_context: Mapping[str, str] | None,
    now: Instant,
) -> set[str]:
    """The ids of those made; a job whose name is taken is left out."""
    rows = await connection.fetch(
        _SQL["insert_jobs"],
        tenant_id=tenant_id,
        trace_context=trace_context,
        now=now,
        job_ids=[job.job_id for job in jobs],
        names=[job.name for job in jobs],
        specs=[job.spec.to_json() for job in jobs],
        payloads=[job.payload for job in jobs],
        next_run_ats=[job.next_run_at for job in jobs],
        partition_ids=[job.partition_id for job in jobs],
        paused=[job.paused for job in jobs],
        pause_reasons=[job.pause_reason for job in jobs],
        end_ats=[job.settings.end_at for job in jobs],
        max_fires=[job.settings.max_fires for job in jobs],
        queue_ids=[job.settings.queue_id for job in jobs],
        kind_ids=[job.settings.kind_id for job in jobs],
        schedule_ids=[job.settings.schedule_id for job in jobs],
        every_ss=[job.settings.every_s for job in jobs],
        after_completions=[job.settings.after_completion for job in jobs],
        jitter_ss=[job.settings.jitter_s for job in jobs],
        misfires=[job.settings.misfire for job in jobs],
        misfire_after_ss=[job.settings.misfire_after_s for job in jobs],
        misfire_window_ss=[job.settings.misfire_window_s for job in jobs],
        overlaps=[job.settings.overlap for job in jobs],
        priorities=[job.settings.priority for job in jobs],
        lease_ss=[job.settings.lease_s for job in jobs],
        cancel_grace_ss=[job.settings.cancel_grace_s for job in jobs],
        attempt_timeout_ss=[job.settings.attempt_timeout_s for job in jobs],
        max_in_flights=[job.settings.max_in_flight for job in jobs],
        concurrency_keys=[job.settings.concurrency_key for job in jobs],
        queue_timeout_ss=[job.settings.queue_timeout_s for job in jobs],
        total_timeout_ss=[job.settings.total_timeout_s for job in jobs],
    )
    made = {str(row["job_id"]) for row in rows}
    await mark_capped(connection, (job.settings for job in jobs if job.job_id in made))
    return made


async def mark_capped(connection: Connection, settings: Iterable[JobSettings]) -> None:
    """Makes claims of the queues that capped jobs send runs to count."""
    if queue_ids := sorted({each.queue_id for each in settings if each.is_capped}):
        await connection.execute(_SQL["mark_capped_queues"], queue_ids=queue_ids)


async def taken_names(connection: Connection, tenant_id: int, names: Sequence[str]) -> set[str]:
    """Those of `names` that a job of the tenant has."""
    rows = await connection.fetch(
        _SQL["find_taken_names"], tenant_id=tenant_id, names=sorted(names)
    )
    return {row["name"] for row in rows}


async def find(connection: Connection, tenant_id: int, *, job: str, is_id: bool) -> str | None:
    """The id of a job that is not deleted, by name or id."""
    if is_id:
        row = await connection.fetch_one(_SQL["find_job_by_id"], tenant_id=tenant_id, job_id=job)
    else:
        row = await connection.fetch_one(_SQL["find_job_by_name"], tenant_id=tenant_id, name=job)
    return None if row is None else str(row["job_id"])


async def lock(connection: Connection, job_id: str) -> None:
    """Takes the job's scheduling row until the end of the transaction."""
    await connection.execute(_SQL["lock_job"], job_id=job_id)


async def read(
    connection: Connection,
    job_ids: Sequence[str],
    *,
    version: int | None = None,
    with_payload: bool = True,
) -> dict[str, JobRecord]:
    """By id; those deleted, or without that version, are left out."""
    rows = await connection.fetch(
        _SQL["read_jobs"], job_ids=list(job_ids), version=version, with_payload=with_payload
    )
    records = (_record(row) for row in rows)
    return {record.job_id: record for record in records}


async def page(
    connection: Connection,
    tenant_id: int,
    query: JobQuery,
    *,
    before: str | None,
    page_size: int,
    scan_max: int,
) -> JobPage:
    """At most `page_size` jobs; a filter looks at no more than `scan_max` for them."""
    scan_max = page_size + 1 if query.is_all else scan_max
    row = await connection.fetch_one(
        _SQL["list_jobs"],
        tenant_id=tenant_id,
        before=before,
        names=None if query.names is None else list(query.names),
        created_from=query.created_from,
        created_before=query.created_before,
        next_from=query.next_from,
        next_before=query.next_before,
        conditions=list(query.conditions),
        scan_max=scan_max,
        page_max=page_size + 1,
    )
    assert row is not None, "list_jobs always answers one row"
    job_ids = [str(each) for each in row["job_ids"]]
    if len(job_ids) > page_size:
        return JobPage(job_ids=job_ids[:page_size], before=job_ids[page_size - 1])
    is_more = row["scanned"] == scan_max
    return JobPage(job_ids=job_ids, before=str(row["last_scanned"]) if is_more else None)


async def add_version(
    connection: Connection, job: JobRecord, spec: JobSpec, payload: bytes | None, *, now: Instant
) -> None:
    """Stores the definition that follows the newest one of `job`."""
    version = job.newest_version + 1
    await connection.execute(
        _SQL["insert_version"],
        job_id=job.job_id,
        version=version,
        spec=spec.to_json(),
        payload=payload,
        now=now,
    )
    await connection.execute(
        _SQL["touch_job"],
        job_id=job.job_id,
        version=version,
        pause_reason=job.pause_reason,
        now=now,
    )


async def redefine(
    connection: Connection,
    job: JobRecord,
    settings: JobSettings,
    *,
    moves: bool,
    next_run_at: Instant | None,
    awaits_end: bool = False,
) -> None:
    """Brings the scheduling row up to the version that `add_version` has made."""
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    await connection.execute(
        _SQL["redefine_schedule"],
        job_id=job.job_id,
        version=job.newest_version + 1,
        moves=moves,
        next_run_at=next_run_at,
        awaits_end=awaits_end,
        **values,
    )
    await mark_capped(connection, [settings])


async def set_paused(
    connection: Connection, job: JobRecord, *, paused: bool, reason: str, now: Instant
) -> None:
    """Stops or allows fires."""
    await connection.execute(_SQL["set_paused"], job_id=job.job_id, paused=paused)
    await connection.execute(
        _SQL["touch_job"],
        job_id=job.job_id,
        version=job.newest_version,
        pause_reason=reason,
        now=now,
    )


async def bury(connection: Connection, job_id: str, *, now: Instant) -> None:
    """Leaves a tombstone: the name is free, nothing fires any more."""
    await connection.execute(_SQL["bury_job"], job_id=job_id, now=now)


def _record(row: Row) -> JobRecord:
    return JobRecord(
        job_id=str(row["job_id"]),
        tenant_id=row["tenant_id"],
        name=row["name"],
        version=row["version"],
        newest_version=row["newest_version"],
        revision=row["revision"],
        spec=JobSpec.from_json(row["spec"]),
        payload=row["payload"],
        paused=row["paused"],
        pause_reason=row["pause_reason"],
        next_run_at=row["next_run_at"],
        awaits_end=row["awaits_end"],
        last_scheduled_at=row["last_scheduled_at"],
        fire_count=row["fire_count"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        trace_context=row["trace_context"],
        queue_id=row["queue_id"],
        kind_id=row["kind_id"],
        partition_id=row["partition_id"],
        has_schedule=row["has_schedule"],
    )
