"""Finds, locks and reads one job, and the refusals that go with it."""

from fencepost_server.clock import Instant
from fencepost_server.domain.names import JobName
from fencepost_server.engine.settle import Settled, settle
from fencepost_server.errors import EtagMismatch, JobNotFound
from fencepost_server.store import jobs as store
from fencepost_server.store.database import Connection
from fencepost_server.store.jobs import JobRecord


class SeenOldError(Exception):
    """The job is not as it was when a change was worked out; nothing is stored."""


def etag_mismatch(name: JobName, job: JobRecord) -> EtagMismatch:
    """The refusal of an etag that is not the job's."""
    return EtagMismatch(
        f"{name} has changed since it was read; read it again (its etag is {job.etag})",
        field="etag",
        resource=str(name),
        name=str(name),
        currentEtag=job.etag,
    )


def job_not_found(name: JobName, *, version: int | None = None) -> JobNotFound:
    """The one text for a job that this caller cannot see."""
    if version is not None:
        return JobNotFound(
            f"{name} does not exist with version {version}",
            resource=str(name),
            name=str(name),
            version=str(version),
        )
    return JobNotFound(f"{name} does not exist", resource=str(name), name=str(name))


async def read_named(
    connection: Connection, tenant_id: int, name: JobName, *, version: int | None = None
) -> JobRecord:
    """A job as it is now. Raises JobNotFound, also for a version that is not kept."""
    job_id = await store.find(connection, tenant_id, job=name.job, is_id=name.is_id)
    found = {} if job_id is None else await store.read(connection, [job_id], version=version)
    for record in found.values():
        return record
    raise job_not_found(name, version=None if job_id is None else version)


async def lock_named(connection: Connection, tenant_id: int, name: JobName) -> JobRecord:
    """Locks a job and reads what the last holder of the lock has left."""
    job_id = await store.find(connection, tenant_id, job=name.job, is_id=name.is_id)
    if job_id is not None:
        await store.lock(connection, job_id)
        found = await store.read(connection, [job_id])
        if job_id in found:
            return found[job_id]
    raise job_not_found(name)


async def lock_seen(connection: Connection, seen: JobRecord) -> JobRecord:
    """Locks a job. Raises SeenOldError if it was changed or deleted since it was seen."""
    await store.lock(connection, seen.job_id)
    found = await store.read(connection, [seen.job_id])
    job = found.get(seen.job_id)
    if job is None or job.revision != seen.revision:
        raise SeenOldError
    return job


async def settle_owed(
    connection: Connection, job: JobRecord, *, now: Instant
) -> tuple[JobRecord, Settled]:
    """Decides every fire up to `now` of a job whose rule ends here; the job as it is then.

    A paused job makes no run of them. One call of settle leaves a very long backlog due, and
    after this nobody would look at it again.
    """
    owed = Settled()
    while job.next_run_at is not None and job.next_run_at <= now:
        before = job.next_run_at
        settled = await settle(connection, job_ids=[job.job_id], now=now, deleting=True)
        owed.add(settled)
        job = await reread(connection, job)
        assert job.next_run_at is None or job.next_run_at > before, "settling goes forward"
    return job, owed


async def reread(connection: Connection, job: JobRecord) -> JobRecord:
    """The job after a change by this transaction, which holds its lock."""
    return (await store.read(connection, [job.job_id]))[job.job_id]
