"""Decides about single dead letters: replay, discard; and groups them by how they died."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from fencepost_server.clock import Instant
from fencepost_server.domain.names import JobName, RunName
from fencepost_server.domain.run import DeadReason, RunKey, RunState
from fencepost_server.engine.job_access import job_not_found
from fencepost_server.engine.replay import ReplayOptions, lock_dead_letters, replay_locked
from fencepost_server.engine.run_reads import run_not_found
from fencepost_server.engine.specs import SpecCache
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import FencepostError, RunNotDead, ServerOverloaded
from fencepost_server.store import matches, requests
from fencepost_server.store import runs as store
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.requests import RequestKey, RequestScope
from fencepost_server.store.runs import RunQuery, RunRecord
from fencepost_server.store.statements import load

_SQL = load("dead_letters")
_log = structlog.get_logger("dead_letters")
# Dead letters that one call groups.
GROUPED_MAX = 100_000
# Looks at one run that dies, and is replayed by somebody else, between each two of them.
_LOOKS_MAX = 10

Encode = Callable[[RunRecord], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAsked:
    """What ReplayRun asks for."""

    name: RunName
    options: ReplayOptions
    reason: str
    request: RequestKey | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterGroup:
    """Dead letters that ended alike; `sample` died last, with `last_failure` (a message)."""

    sample: RunName
    job: str
    kind: str
    failure_code: str
    dead_reason: DeadReason
    count: int
    oldest_at: Instant
    newest_at: Instant
    last_failure: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterGroups:
    """The groups that died last, how many there are, and of how many dead letters."""

    groups: Sequence[DeadLetterGroup]
    total_groups: int
    grouped: int


class DeadLetters:
    """Serves ReplayRun, DiscardRun and ListDeadLetterGroups."""

    def __init__(
        self, *, database: Database, catalogue: Catalogue, specs: SpecCache, wake: Wake
    ) -> None:
        self._database = database
        self._catalogue = catalogue
        self._specs = specs
        self._wake = wake

    def now(self) -> Instant:
        """The database clock's instant."""
        return self._database.clock.now()

    async def replay(self, asked: ReplayAsked, *, now: Instant, encode: Encode) -> bytes:
        """Queues a dead letter again under its key; the encoded answer.

        Raises TenantNotFound, RunNotFound, RunNotDead, RunDiscarded, JobNotFound for a deleted
        job, VersionNotKept, or RequestIdReused.
        """
        tenant_id = await self._catalogue.tenant_id(asked.name.tenant)
        scope = RequestScope(tenant_id=tenant_id, method="ReplayRun")
        request_keys = [] if asked.request is None else [asked.request]
        async with self._database.requests.transaction() as connection:
            before = await requests.begin(connection, scope, request_keys, now=now)
            for answer in before.values():
                if isinstance(answer, FencepostError):
                    raise answer
                return answer
            key = await self._key(connection, tenant_id, asked.name)
            rows = await _lock_dead(connection, asked.name, key)
            replayed = await replay_locked(connection, rows, self._specs, asked.options, now=now)
            for refusal in replayed.refused.values():
                raise refusal
            record = (await store.read(connection, [key], full=False))[key]
            encoded = encode(record)
            await requests.finish(
                connection, scope, {each.request_id: encoded for each in request_keys}
            )
        self._wake.lanes(replayed.lanes)
        _log.info("run_replayed", run=str(key), replays=record.replay_count, reason=asked.reason)
        return encoded

    async def discard(self, name: RunName, *, reason: str, now: Instant) -> RunRecord:
        """Gives a dead letter up; one that was given up before stays as it is.

        Raises TenantNotFound, RunNotFound or RunNotDead.
        """
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        async with self._database.requests.connection() as connection:
            key = await self._key(connection, tenant_id, name)
            for _ in range(_LOOKS_MAX):
                await discard_runs(
                    connection, [key], reason=reason, died_until=store.FOREVER, now=now
                )
                found = (await store.read(connection, [key], full=True)).get(key)
                if found is None:
                    raise run_not_found(name)
                if found.state is not RunState.DEAD:
                    raise _not_dead(name, found.state)
                # If not, it died between the two looks: look again.
                if found.discarded_at is not None:
                    return found
            raise _changes_too_fast(name)

    async def groups(
        self, parent: JobName, query: RunQuery, *, groups_max: int
    ) -> DeadLetterGroups:
        """How dead letters that match died; `parent` without a job: all of the tenant's.

        Raises TenantNotFound or JobNotFound.
        """
        tenant_id = await self._catalogue.tenant_id(parent.tenant)
        async with self._database.requests.connection() as connection:
            try:
                job_id = await resolve_job(connection, tenant_id, parent, query)
            except NoSuchFilterJobError:
                return DeadLetterGroups(groups=(), total_groups=0, grouped=0)
            rows = await matches.groups(
                connection,
                query,
                tenant_id=tenant_id,
                job_id=job_id,
                matches_max=GROUPED_MAX,
                groups_max=groups_max,
            )
        return DeadLetterGroups(
            groups=[_group(row, parent.tenant) for row in rows],
            total_groups=rows[0]["total_groups"] if rows else 0,
            grouped=rows[0]["grouped"] if rows else 0,
        )

    async def _key(self, connection: Connection, tenant_id: int, name: RunName) -> RunKey:
        job_id = await store.find_job(connection, tenant_id, name)
        if job_id is None:
            raise run_not_found(name)
        return RunKey(job_id, name.scheduled_at)


class NoSuchFilterJobError(Exception):
    """The filter names a job that does not exist: nothing matches."""


async def resolve_job(
    connection: Connection, tenant_id: int, parent: JobName, query: RunQuery
) -> str | None:
    """The id of the one job that parent or filter name; None: all jobs.

    Raises JobNotFound when it is the parent that does not exist, NoSuchFilterJobError when it
    is the filter's job.
    """
    job = parent.job or query.job
    if not job:
        return None
    job_id = await store.find_job(
        connection, tenant_id, RunName(tenant=parent.tenant, job=job, scheduled_at=0)
    )
    if job_id is None:
        if parent.job:
            raise job_not_found(parent)
        raise NoSuchFilterJobError
    return job_id


async def discard_runs(
    connection: Connection,
    keys: Sequence[RunKey],
    *,
    reason: str,
    died_until: Instant,
    now: Instant,
) -> list[RunKey]:
    """Gives up runs that died no later than `died_until`; those that it did, in no order."""
    rows = await connection.fetch(
        _SQL["discard_dead_letters"],
        job_ids=[key.job_id for key in keys],
        scheduled_ats=[key.scheduled_at for key in keys],
        reason=reason or None,
        died_until=died_until,
        now=now,
    )
    return [RunKey(str(row["job_id"]), row["scheduled_at"]) for row in rows]


async def _lock_dead(connection: Connection, name: RunName, key: RunKey) -> Sequence[Row]:
    """Its locked row. Raises RunNotFound or RunNotDead, also when another replay was first."""
    for _ in range(_LOOKS_MAX):
        rows = await lock_dead_letters(connection, [key])
        if rows:
            return rows
        # In a new statement, which sees what the lock was waited for.
        found = (await store.read(connection, [key], full=False)).get(key)
        if found is None:
            raise run_not_found(name)
        # If it is, it died between the two looks: look again.
        if found.state is not RunState.DEAD:
            raise _not_dead(name, found.state)
    raise _changes_too_fast(name)


def _changes_too_fast(name: RunName) -> ServerOverloaded:
    return ServerOverloaded(
        f"{name} changes faster than it can be looked at; try again",
        retry_after_ms=1000,
        name=str(name),
    )


def _not_dead(name: RunName, state: RunState) -> RunNotDead:
    return RunNotDead(
        f"{name} is {state.name}; only a run that is DEAD can be replayed or discarded",
        resource=str(name),
        name=str(name),
        runState=state.name,
    )


def _group(row: Row, tenant: str) -> DeadLetterGroup:
    job = str(row["job_id"]) if row["job_is_deleted"] else str(row["job_name"])
    return DeadLetterGroup(
        sample=RunName(tenant=tenant, job=job, scheduled_at=row["sample_at"]),
        job=job,
        kind=row["kind_name"],
        failure_code=row["failure_code"] or "",
        dead_reason=DeadReason[row["dead_reason"].upper()],
        count=row["dead"],
        oldest_at=row["oldest_at"],
        newest_at=row["newest_at"],
        last_failure=row["last_failure"],
    )
