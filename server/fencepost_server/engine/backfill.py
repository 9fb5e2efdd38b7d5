"""Starts backfills, and reads and stops operations; `backfill_steps` carries them out."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fencepost_server.clock import Instant, format_instant
from fencepost_server.domain.fire import Fire, FireDisposition
from fencepost_server.domain.names import JobName, OperationName
from fencepost_server.domain.operation import (
    OperationAction,
    OperationState,
    make_operation_id,
)
from fencepost_server.domain.schedule import Schedule
from fencepost_server.engine.job_access import read_named
from fencepost_server.errors import (
    FencepostError,
    InvalidField,
    NoSchedule,
    OperationNotFound,
    TooManyFires,
)
from fencepost_server.policy.backfill import ExistingRun, backfill_rule, fires_of
from fencepost_server.policy.calendar import exclusions, zone_of
from fencepost_server.policy.exclusion import ExcludingRule
from fencepost_server.policy.ledger import local_time
from fencepost_server.policy.schedule import Rule
from fencepost_server.store import operations as store
from fencepost_server.store import requests
from fencepost_server.store.calendars import calendars_of
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Connection, Database
from fencepost_server.store.jobs import JobRecord
from fencepost_server.store.operations import NewBackfill, OperationRecord
from fencepost_server.store.requests import RequestKey, RequestScope
from fencepost_server.store.statements import load

_SQL = load("operations")
SAMPLES_MAX = 20
# Fires between two looks at what else there is to do.
_CHUNK = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillAsked:
    """What BackfillJob asks for: fires in [since, until), at `rate` runs per second."""

    name: JobName
    since: Instant
    until: Instant
    rate: float
    max_runs: int
    allows_overlap: bool
    reason: str
    dry_run: bool
    request: RequestKey | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfill:
    """The operation (None: a dry run), the fires that get a run, and the first of them."""

    operation: OperationRecord | None
    matched: int
    samples: Sequence[Fire]


Encode = Callable[[Backfill], bytes]


class Operations:
    """What JobService and RunService ask of operations."""

    def __init__(self, *, database: Database, catalogue: Catalogue) -> None:
        self._database = database
        self._catalogue = catalogue

    def now(self) -> Instant:
        """The database clock's instant."""
        return self._database.clock.now()

    async def backfill(self, asked: BackfillAsked, *, now: Instant, encode: Encode) -> bytes:
        """Stores a backfill, or with `dry_run` only counts; the encoded answer.

        Raises TenantNotFound, JobNotFound, NoSchedule, TooManyFires, RequestIdReused, or
        InvalidField for a range that is not all past and kept.
        """
        tenant_id = await self._catalogue.tenant_id(asked.name.tenant)
        scope = RequestScope(tenant_id=tenant_id, method="BackfillJob")
        keys = [] if asked.request is None or asked.dry_run else [asked.request]
        # A call that was answered before gets that answer, whatever has changed since.
        for answer in (
            await requests.recall(self._database.requests, scope, keys, now=now)
        ).values():
            return _answered(answer)
        async with self._database.requests.connection() as connection:
            job = await read_named(connection, tenant_id, asked.name)
            rule = await _rule_of(connection, job, asked)
            floor = await _retention_floor(connection)
            until = _checked_end(job, asked, floor)
            fires = await _enumerate(rule, asked, until=until)
            matched, samples = await _match(connection, job, rule, fires)
        if asked.dry_run:
            return encode(Backfill(operation=None, matched=matched, samples=samples))
        operation_id = make_operation_id(now=now, entropy=os.urandom(10))
        async with self._database.requests.transaction() as connection:
            for answer in (await requests.begin(connection, scope, keys, now=now)).values():
                return _answered(answer)
            await store.insert(
                connection,
                NewBackfill(
                    operation_id=operation_id,
                    tenant_id=tenant_id,
                    job_id=job.job_id,
                    version=job.newest_version,
                    since=asked.since,
                    until=until,
                    rate=asked.rate,
                    allows_overlap=asked.allows_overlap,
                    matched=matched,
                    filter=f"job:{job.name} scheduled_at>={format_instant(asked.since)} "
                    f"scheduled_at<{format_instant(until)}",
                    reason=asked.reason,
                    now=now,
                ),
            )
            made = await store.read(connection, tenant_id, operation_id)
            encoded = encode(Backfill(operation=made, matched=matched, samples=samples))
            await requests.finish(connection, scope, {key.request_id: encoded for key in keys})
        return encoded

    async def get(self, name: OperationName) -> OperationRecord:
        """Raises TenantNotFound or OperationNotFound."""
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        async with self._database.requests.connection() as connection:
            return await _existing(connection, tenant_id, name)

    async def list(
        self,
        tenant: str,
        *,
        states: Sequence[OperationState] | None,
        actions: Sequence[OperationAction] | None,
        before: str | None,
        page_size: int,
    ) -> tuple[Sequence[OperationRecord], str | None]:
        """A page, newest first, and where the next one begins. Raises TenantNotFound."""
        tenant_id = await self._catalogue.tenant_id(tenant)
        async with self._database.requests.connection() as connection:
            ids = await store.page(
                connection,
                tenant_id,
                states=states,
                actions=actions,
                before=before,
                limit=page_size + 1,
            )
            found = [await store.read(connection, tenant_id, each) for each in ids[:page_size]]
        following = ids[page_size - 1] if len(ids) > page_size else None
        return [record for record in found if record is not None], following

    async def stop(self, name: OperationName, *, now: Instant) -> OperationRecord:
        """Ends it before its next step; an ended one stays. Raises OperationNotFound."""
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        async with self._database.requests.connection() as connection:
            await store.stop(connection, tenant_id, name.operation_id, now=now)
            return await _existing(connection, tenant_id, name)


async def existing_runs(
    connection: Connection, job_id: str, fires: Sequence[Instant]
) -> dict[Instant, ExistingRun]:
    """The runs that these fires, in order, have already, wherever they are."""
    if not fires:
        return {}
    rows = await connection.fetch(
        _SQL["find_run_keys"],
        job_id=job_id,
        first_at=fires[0],
        last_at=fires[-1],
        scheduled_ats=list(fires),
    )
    return {
        row["scheduled_at"]: ExistingRun(created_at=row["created_at"], is_expired=row["is_expired"])
        for row in rows
    }


async def past_rule(
    connection: Connection,
    job_id: str,
    schedule: Schedule,
    *,
    created_at: Instant,
    since: Instant,
    until: Instant,
    seed: str,
) -> Rule | None:
    """The rule of the fires in [since, until) that no calendar excludes; None: see the policy."""
    rule = backfill_rule(schedule, created_at=created_at, since=since, seed=seed)
    if rule is None or not schedule.exclude_calendars:
        return rule
    calendars = await calendars_of(connection, [job_id])
    excluded = exclusions(calendars.get(job_id, ()), zone_of(schedule), first=since, last=until - 1)
    return ExcludingRule(rule=rule, exclusions=excluded, first=since, last=until - 1)


async def _rule_of(connection: Connection, job: JobRecord, asked: BackfillAsked) -> Rule:
    if job.spec.schedule is None:
        raise NoSchedule(
            f"{asked.name} has no schedule, so it has no fires to backfill",
            resource=str(asked.name),
            name=str(asked.name),
        )
    rule = await past_rule(
        connection,
        job.job_id,
        job.spec.schedule,
        created_at=job.created_at,
        since=asked.since,
        until=asked.until,
        seed=f"{asked.name.tenant}/{job.name}",
    )
    if rule is None:
        raise NoSchedule(
            f"{asked.name} fires after the completion of its runs: its past has no fires but "
            "those that were made",
            resource=str(asked.name),
            name=str(asked.name),
        )
    return rule


async def _retention_floor(connection: Connection) -> Instant:
    row = await connection.fetch_one(_SQL["backfill_bounds"])
    assert row is not None
    floor: Instant = row["retention_floor"]
    return floor


def _checked_end(job: JobRecord, asked: BackfillAsked, floor: Instant) -> Instant:
    """The end of what may be made. Raises InvalidField."""
    oldest = max(asked.since, job.created_at)
    if oldest < min(floor, asked.until):
        raise InvalidField(
            f"since: history before {format_instant(floor)} is no longer kept, so nobody "
            f"knows which fires had a run; begin there, or end before the job's creation",
            field="since",
            value=format_instant(asked.since),
            allowed=f"{format_instant(floor)} or later",
        )
    following = job.next_run_at
    if following is None or following >= asked.until:
        return asked.until
    if job.paused:
        raise InvalidField(
            f"until: {asked.name} is paused and its fires from {format_instant(following)} "
            "on are pending; resume it first, or end there",
            field="until",
            value=format_instant(asked.until),
            allowed=f"at most {format_instant(following)}",
        )
    return max(following, asked.since)


async def _enumerate(rule: Rule, asked: BackfillAsked, *, until: Instant) -> list[Instant]:
    """All fires of the range. Raises TooManyFires."""
    fires: list[Instant] = []
    for at in fires_of(rule, since=asked.since, until=until):
        if len(fires) == asked.max_runs:
            raise TooManyFires(
                f"the range holds more than {asked.max_runs} fires; take a shorter one, or "
                "raise max_runs",
                field="max_runs",
                maxRuns=str(asked.max_runs),
            )
        fires.append(at)
        if len(fires) % _CHUNK == 0:
            await asyncio.sleep(0)
    return fires


async def _match(
    connection: Connection, job: JobRecord, rule: Rule, fires: Sequence[Instant]
) -> tuple[int, list[Fire]]:
    """How many of the fires get a run, and the first of them."""
    matched = 0
    samples: list[Fire] = []
    for start in range(0, len(fires), _CHUNK):
        chunk = fires[start : start + _CHUNK]
        existing = await existing_runs(connection, job.job_id, chunk)
        for at in chunk:
            run = existing.get(at)
            if run is not None and not run.is_expired:
                continue
            matched += 1
            if len(samples) < SAMPLES_MAX:
                samples.append(
                    Fire(
                        first=at,
                        last=at,
                        disposition=FireDisposition.BACKFILLED,
                        version=job.newest_version,
                        local_time=local_time(at, rule),
                    )
                )
    return matched, samples


async def _existing(connection: Connection, tenant_id: int, name: OperationName) -> OperationRecord:
    found = await store.read(connection, tenant_id, name.operation_id)
    if found is None:
        raise OperationNotFound(f"{name} does not exist", resource=str(name), name=str(name))
    return found


def _answered(answer: bytes | FencepostError) -> bytes:
    if isinstance(answer, FencepostError):
        raise answer
    return answer
