"""Changes of definitions: worked out on what is stored, then stored if that still holds.

Names are interned before the transaction, so the wanted definition must be known before
the lock; whoever finds the job changed under the lock starts again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from fencepost_server.clock import Instant, ceil_second
from fencepost_server.domain.job import LAST_INSTANT
from fencepost_server.domain.names import JobName
from fencepost_server.domain.schedule import IntervalSpec, Schedule
from fencepost_server.engine.after_completion import read_ends
from fencepost_server.engine.definition import Definition
from fencepost_server.engine.job_access import (
    SeenOldError,
    etag_mismatch,
    lock_seen,
    read_named,
    reread,
    settle_owed,
)
from fencepost_server.engine.job_creation import JobCreation, JobEntry, Origin
from fencepost_server.engine.settle import Settled, settle
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import EtagMismatch, FencepostError, JobAlreadyExists, JobNotFound
from fencepost_server.policy.schedule import after_completion, first_fire, validate
from fencepost_server.store import jobs as store
from fencepost_server.store import requests
from fencepost_server.store.calendars import hold, set_job_calendars
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Connection, Database
from fencepost_server.store.job_settings import JobSettings
from fencepost_server.store.jobs import JobRecord
from fencepost_server.store.requests import RequestKey, RequestScope

_ROUNDS_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUpdate:
    """What UpdateJob asks for; `change` makes the wanted definition of a stored job.

    `create` is the definition that allow_missing makes a job of.
    """

    name: JobName
    change: Callable[[JobRecord], Definition]
    etag: str = ""
    create: Callable[[], Definition] | None = None
    request: RequestKey | None = None
    validate_only: bool = False


# The job and whether the call made it, or the stored answer of an earlier call.
Updated: TypeAlias = tuple[JobRecord, bool] | bytes
EncodeUpdate: TypeAlias = Callable[[JobRecord, bool], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A job as it was seen, and what it is to become."""

    seen: JobRecord
    definition: Definition
    settings: JobSettings


class _TakenBack(Exception):
    """Ends a transaction that was only to see what would be stored."""


class JobUpdates:
    """Serves UpdateJob."""

    def __init__(
        self, *, database: Database, catalogue: Catalogue, creation: JobCreation, wake: Wake
    ) -> None:
        self._database = database
        self._catalogue = catalogue
        self._creation = creation
        self._wake = wake

    async def update(self, origin: Origin, asked: JobUpdate, *, encode: EncodeUpdate) -> Updated:
        """Changes the definition; an identical one changes nothing.

        Raises JobNotFound, EtagMismatch, RequestIdReused, and what the new definition is
        refused for.
        """
        tenant_id = await self._catalogue.tenant_id(asked.name.tenant)
        scope = RequestScope(tenant_id=tenant_id, method="UpdateJob")
        for _ in range(_ROUNDS_MAX):
            try:
                return await self._update(origin, asked, scope, encode)
            except SeenOldError:
                continue
        raise EtagMismatch(
            f"{asked.name} was changed by others at the same time; read it and try again",
            resource=str(asked.name),
        )

    async def _update(
        self, origin: Origin, asked: JobUpdate, scope: RequestScope, encode: EncodeUpdate
    ) -> Updated:
        """One round: work the change out on what is stored now, then store it if that holds."""
        try:
            change = await self._work_out(origin, asked)
        except FencepostError as error:
            # A call that was answered before gets that answer, whatever has changed since.
            if asked.request is not None and not asked.validate_only:
                before = await requests.recall(
                    self._database.requests, scope, [asked.request], now=origin.now
                )
                for answer in before.values():
                    return _answered(answer)
            if isinstance(error, JobNotFound) and asked.create is not None and not asked.etag:
                return await self._create_missing(origin, asked, encode)
            raise
        request = None if asked.validate_only else asked.request
        try:
            async with self._database.requests.transaction() as connection:
                before = await requests.begin(
                    connection, scope, [] if request is None else [request], now=origin.now
                )
                for answer in before.values():
                    return _answered(answer)
                job, settled = await _store(connection, origin, change)
                if request is not None:
                    await requests.finish(
                        connection, scope, {request.request_id: encode(job, False)}
                    )
                if asked.validate_only:
                    raise _TakenBack
        except _TakenBack:
            return job, False
        if job.revision != change.seen.revision:
            announce(self._wake, job, settled)
        return job, False

    async def _work_out(self, origin: Origin, asked: JobUpdate) -> _Change:
        tenant_id = await self._catalogue.tenant_id(asked.name.tenant)
        async with self._database.requests.connection() as connection:
            seen = await read_named(connection, tenant_id, asked.name)
        if asked.etag and asked.etag != seen.etag:
            raise etag_mismatch(asked.name, seen)
        definition = asked.change(seen)
        schedule = definition.spec.schedule
        if schedule is not None and schedule != seen.spec.schedule:
            validate(schedule, origin.now, seed=f"{origin.tenant}/{seen.name}")
        settings = await self._creation.settings(
            definition, tenant=origin.tenant, job_name=seen.name
        )
        return _Change(seen=seen, definition=definition, settings=settings)

    async def _create_missing(
        self, origin: Origin, asked: JobUpdate, encode: EncodeUpdate
    ) -> Updated:
        assert asked.create is not None
        entry = JobEntry(job_name=asked.name.job, definition=asked.create(), request=asked.request)
        (outcome,) = await self._creation.create(
            origin,
            [entry],
            method="UpdateJob",
            encode=lambda created: encode(created.job, True),
            validate_only=asked.validate_only,
        )
        if isinstance(outcome, FencepostError):
            if isinstance(outcome, JobAlreadyExists):
                raise SeenOldError  # Somebody was faster: now it is an update.
            raise outcome
        return outcome if isinstance(outcome, bytes) else (outcome.job, True)


def announce(wake: Wake, job: JobRecord, settled: Settled) -> None:
    """After a commit: the job may be due earlier than before, and runs may be ready."""
    if job.next_run_at is not None and not job.paused:
        wake.jobs({job.partition_id})
    settled.announce(wake)


async def _store(
    connection: Connection, origin: Origin, change: _Change
) -> tuple[JobRecord, Settled]:
    """Locks the job and brings it to the wanted definition. Raises SeenOldError."""
    job = await lock_seen(connection, change.seen)
    if change.definition.same_as(Definition(spec=job.spec, payload=job.payload)):
        return job, Settled()
    settled = await _redefine(connection, job, change, tenant=origin.tenant, now=origin.now)
    return await reread(connection, job), settled


async def _redefine(
    connection: Connection, job: JobRecord, change: _Change, *, tenant: str, now: Instant
) -> Settled:
    """Stores the next version of a locked job; what was due by the old rule is settled first."""
    definition = change.definition
    schedule = definition.spec.schedule
    moves = _time_rule(schedule) != _time_rule(job.spec.schedule)
    settled = Settled()
    next_run_at, awaits_end = None, False
    names = () if schedule is None else schedule.exclude_calendars
    held = await hold(connection, tenant, job.tenant_id, names)
    if moves:
        job, settled = await settle_owed(connection, job, now=now)
        next_run_at, awaits_end = await _next_run_at(
            connection, schedule, job, seed=f"{tenant}/{job.name}", now=now
        )
    await store.add_version(connection, job, definition.spec, definition.payload, now=now)
    await store.redefine(
        connection,
        job,
        change.settings,
        moves=moves,
        next_run_at=next_run_at,
        awaits_end=awaits_end,
    )
    if names or _calendars(job.spec.schedule):
        calendar_ids = [held[name] for name in names]
        await set_job_calendars(connection, {job.job_id: calendar_ids}, is_new=False)
    if next_run_at is not None and next_run_at <= now:
        due = await settle(connection, job_ids=[job.job_id], now=now)
        settled.add(due)
    return settled


def _time_rule(schedule: Schedule | None) -> tuple[object, ...] | None:
    """What decides when a job fires."""
    if schedule is None:
        return None
    return (schedule.spec, schedule.start_at, schedule.end_at, schedule.max_fires)


def _calendars(schedule: Schedule | None) -> tuple[str, ...]:
    return () if schedule is None else schedule.exclude_calendars


async def _next_run_at(
    connection: Connection, schedule: Schedule | None, job: JobRecord, *, seed: str, now: Instant
) -> tuple[Instant | None, bool]:
    """The first fire of a changed rule, never at or before one that was decided already, and
    whether the end of a live run is to decide it.
    """
    if schedule is None or 0 < schedule.max_fires <= job.fire_count:
        return None, False
    last = job.last_scheduled_at
    after = now if last is None else max(now, last)
    spec = schedule.spec
    if (
        last is not None
        and isinstance(spec, IntervalSpec)
        and spec.after_completion
        and (spec.anchor is None or spec.anchor <= now)
    ):
        ends = await read_ends(connection, {job.job_id: last})
        if job.job_id not in ends:
            return None, True
        found = after_completion(schedule, counted_from=ends[job.job_id], after=after)
    else:
        if isinstance(spec, IntervalSpec) and spec.anchor is None:
            anchored = replace(spec, anchor=ceil_second(job.created_at))
            schedule = replace(schedule, spec=anchored)
        found = first_fire(schedule, now=after, seed=seed)
    if found is None or found > LAST_INSTANT or (last is not None and found <= last):
        return None, False
    return found, False


def _answered(answer: bytes | FencepostError) -> bytes:
    if isinstance(answer, FencepostError):
        raise answer
    return answer
