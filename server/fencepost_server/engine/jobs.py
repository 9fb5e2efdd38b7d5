"""Reads and changes of jobs, one transaction per change, the scheduling row locked first.

Before a change of the time rule, a resume or a deletion, what is due by the old rule is
settled in the same transaction.
"""

from collections.abc import Sequence

from fencepost_server.clock import Instant
from fencepost_server.domain.job import JobState
from fencepost_server.domain.names import JobName
from fencepost_server.domain.schedule import Schedule
from fencepost_server.engine.cancel import cancel_job_runs
from fencepost_server.engine.job_access import (
    etag_mismatch,
    lock_named,
    read_named,
    reread,
    settle_owed,
)
from fencepost_server.engine.job_creation import Encode, JobCreation, JobEntry, Origin, Outcome
from fencepost_server.engine.job_update import (
    EncodeUpdate,
    JobUpdate,
    JobUpdates,
    Updated,
    announce,
)
from fencepost_server.engine.preview import NEVER, Preview, PreviewRange, preview_schedule
from fencepost_server.engine.settle import Settled, settle
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import InvalidField, JobFinished, JobNotFound
from fencepost_server.policy.due import counts_from_ends
from fencepost_server.policy.schedule import first_fire, validate
from fencepost_server.store import jobs as store
from fencepost_server.store.calendars import CalendarStore, set_job_calendars
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.enqueues import lock_out
from fencepost_server.store.jobs import JobPage, JobQuery, JobRecord

# Jobs that one page of a filtered list looks at.
LIST_SCAN_MAX = 5_000
# Seeds `H` in the preview of a job without a name yet.
_PLACEHOLDER = "job"


class Jobs:
    """All that JobService does with definitions."""

    def __init__(self, *, database: Database, catalogue: Catalogue, wake: Wake) -> None:
        self._database = database
        self._catalogue = catalogue
        self._wake = wake
        self._calendars = CalendarStore(database=database)
        self._creation = JobCreation(database=database, catalogue=catalogue, wake=wake)
        self._updates = JobUpdates(
            database=database, catalogue=catalogue, creation=self._creation, wake=wake
        )

    def now(self) -> Instant:
        """The database clock's instant."""
        return self._database.clock.now()

    async def create(
        self,
        origin: Origin,
        entries: Sequence[JobEntry],
        *,
        encode: Encode,
        validate_only: bool = False,
    ) -> list[Outcome]:
        """One outcome per entry, in their order. Raises TenantNotFound."""
        return await self._creation.create(
            origin, entries, method="CreateJob", encode=encode, validate_only=validate_only
        )

    async def get(self, name: JobName, *, version: int | None = None) -> JobRecord:
        """Raises TenantNotFound, or JobNotFound, also for a version that is not kept."""
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        async with self._database.requests.connection() as connection:
            return await read_named(connection, tenant_id, name, version=version)

    async def list(
        self, tenant: str, query: JobQuery, *, before: str | None, page_size: int
    ) -> tuple[Sequence[JobRecord], str | None]:
        """A page without payloads, newest first, and where the next one begins."""
        tenant_id = await self._catalogue.tenant_id(tenant)
        async with self._database.requests.connection() as connection:
            page: JobPage = await store.page(
                connection,
                tenant_id,
                query,
                before=before,
                page_size=page_size,
                scan_max=LIST_SCAN_MAX,
            )
            found = await store.read(connection, page.job_ids, with_payload=False)
        return [found[each] for each in page.job_ids if each in found], page.before

    async def update(self, origin: Origin, asked: JobUpdate, *, encode: EncodeUpdate) -> Updated:
        """Changes the definition; an identical one changes nothing.

        Raises JobNotFound, EtagMismatch, RequestIdReused, and what the new definition is
        refused for.
        """
        return await self._updates.update(origin, asked, encode=encode)

    async def delete(
        self, name: JobName, *, etag: str, allow_missing: bool, cancel_runs: bool, now: Instant
    ) -> None:
        """Leaves a tombstone. Raises JobNotFound unless `allow_missing`, and EtagMismatch."""
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        try:
            async with self._database.requests.transaction() as connection:
                job = await lock_named(connection, tenant_id, name)
                if etag and etag != job.etag:
                    raise etag_mismatch(name, job)
                if cancel_runs:
                    # Before the job is touched: a run that is just being made is seen below.
                    await lock_out(connection, job.job_id)
                _, settled = await settle_owed(connection, job, now=now)
                await store.bury(connection, job.job_id, now=now)
                if job.spec.schedule is not None and job.spec.schedule.exclude_calendars:
                    await set_job_calendars(connection, {job.job_id: ()}, is_new=False)
                if cancel_runs:
                    effects = await cancel_job_runs(
                        connection, job_id=job.job_id, cause="job_deleted", now=now
                    )
                    settled.affected |= effects.affected
        except JobNotFound:
            if not allow_missing:
                raise
            return
        settled.announce(self._wake)

    async def pause(self, name: JobName, *, reason: str, now: Instant) -> JobRecord:
        """Raises JobNotFound, or JobFinished; a paused job is left as it is."""
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        async with self._database.requests.transaction() as connection:
            job = await lock_named(connection, tenant_id, name)
            _refuse_finished(name, job)
            if not job.paused:
                await store.set_paused(connection, job, paused=True, reason=reason, now=now)
                job = await reread(connection, job)
        return job

    async def resume(self, name: JobName, *, now: Instant) -> JobRecord:
        """Raises JobNotFound, or JobFinished; an active job is left as it is."""
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        settled = Settled()
        async with self._database.requests.transaction() as connection:
            job = await lock_named(connection, tenant_id, name)
            _refuse_finished(name, job)
            if job.paused:
                settled = await settle(connection, job_ids=[job.job_id], now=now, resuming=True)
                await store.set_paused(connection, job, paused=False, reason="", now=now)
                job = await reread(connection, job)
        announce(self._wake, job, settled)
        return job

    async def preview(
        self,
        tenant: str,
        *,
        job_name: str,
        schedule: Schedule | None,
        wanted: PreviewRange,
    ) -> Preview:
        """Fires of `schedule`, or without one of the schedule stored for `job_name`.

        Raises TenantNotFound, JobNotFound, InvalidSchedule, or InvalidField for a job
        without a schedule.
        """
        anchor, fires_left = wanted.now, (schedule.max_fires or None) if schedule else None
        if schedule is None:
            job = await self.get(JobName(tenant=tenant, job=job_name))
            schedule = job.spec.schedule
            if schedule is None:
                raise InvalidField(
                    f"schedule: required, because the job {job_name!r} has none",
                    field="schedule",
                    value=job_name,
                )
            anchor = job.created_at
            if counts_from_ends(schedule):
                anchor = job.next_run_at or NEVER
            if schedule.max_fires:
                fires_left = max(schedule.max_fires - job.fire_count, 0)
            job_name = job.name
        else:
            await self._catalogue.tenant_id(tenant)
            validate(schedule, wanted.now, seed=f"{tenant}/{job_name}", path="schedule")
            if counts_from_ends(schedule):
                anchor = first_fire(schedule, now=wanted.now) or NEVER
        calendars = await self._calendars.find(
            tenant, await self._catalogue.tenant_id(tenant), schedule.exclude_calendars
        )
        return preview_schedule(
            schedule,
            wanted,
            calendars=calendars,
            seed=f"{tenant}/{job_name or _PLACEHOLDER}",
            anchor=anchor,
            fires_left=fires_left,
        )


def _refuse_finished(name: JobName, job: JobRecord) -> None:
    if job.state is JobState.FINISHED:
        raise JobFinished(
            f"{name} is FINISHED: it will not fire again; give it a new schedule with UpdateJob",
            resource=str(name),
            name=str(name),
        )
