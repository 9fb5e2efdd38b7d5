"""Tenants, queues and workers as an administrator sees them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from fencepost_server.clock import Instant
from fencepost_server.domain.job import RetryPolicy
from fencepost_server.errors import RequestIdReused
from fencepost_server.store import requests
from fencepost_server.store.database import Connection, Database, Pool, Row
from fencepost_server.store.queue_stats import QueueStats
from fencepost_server.store.requests import RequestKey, RequestScope
from fencepost_server.store.statements import load

_SQL = load("admin")
# Request ids of calls that belong to no tenant are kept under this number.
_WHOLE_SERVER = 0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """What can change of a tenant; no `max_in_flight`: no limit."""

    display_name: str
    labels: Mapping[str, str]
    max_in_flight: int | None
    weight: int
    default_retry_policy: RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRecord:
    """A tenant as stored."""

    tenant_id: int
    name: str
    settings: TenantSettings
    revision: int
    created_at: Instant
    updated_at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What can change of a queue; no cap or rate: no limit."""

    labels: Mapping[str, str]
    paused: bool
    pause_reason: str
    max_in_flight: int | None
    max_in_flight_per_key: int | None
    # Claims per second; None: no limit.
    rate_limit: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord:
    """A queue as stored."""

    queue_id: int
    name: str
    settings: QueueSettings
    revision: int
    created_at: Instant
    updated_at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker as last heard from; `sdk` and `subscriptions` are messages as bytes."""

    worker_id: str
    display_name: str
    state: str
    sdk: bytes | None
    subscriptions: bytes | None
    labels: Mapping[str, str]
    slots: int
    held_runs: int
    free_credits: int
    session_id: str
    server_id: str
    first_seen_at: Instant
    last_heartbeat_at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Remember(Generic[T]):
    """A request id to remember the call by, and how to write down its answer."""

    request: RequestKey
    encode: Callable[[T], bytes]


class AdminStore:
    """Reads and writes, each a transaction of its own."""

    def __init__(self, *, database: Database) -> None:
        self._database = database
        self._pool = database.requests
        self.queue_stats = QueueStats(database.requests)

    async def create_tenant(
        self,
        name: str,
        settings: TenantSettings,
        *,
        now: Instant,
        remember: Remember[TenantRecord] | None = None,
    ) -> TenantRecord | bytes | None:
        """The tenant with its queue "default", or None if the name is taken.

        The stored answer if the call was answered before. Raises RequestIdReused.
        """

        async def make(connection: Connection) -> TenantRecord | None:
            row = await connection.fetch_one(
                _SQL["insert_tenant"], name=name, now=now, **_values(settings)
            )
            return None if row is None else _tenant(row)

        scope = RequestScope(tenant_id=_WHOLE_SERVER, method="CreateTenant")
        return await make_once(self._pool, scope, make, remember, now)

    async def read_tenant(self, name: str) -> TenantRecord | None:
        """None if there is none."""
        row = await self._pool.fetch_one(_SQL["read_tenant"], name=name)
        return None if row is None else _tenant(row)

    async def list_tenants(self, *, after: str | None, limit: int) -> Sequence[TenantRecord]:
        """By name, those later than `after`."""
        rows = await self._pool.fetch(_SQL["list_tenants"], after=after, page_max=limit)
        return [_tenant(row) for row in rows]

    async def update_tenant(
        self, name: str, change: Callable[[TenantRecord], TenantSettings], *, now: Instant
    ) -> TenantRecord | None:
        """Applies `change` to the locked row; the same settings change nothing.

        None if there is no such tenant. What `change` raises undoes everything.
        """
        async with self._pool.transaction() as connection:
            row = await connection.fetch_one(_SQL["lock_tenant"], name=name)
            if row is None:
                return None
            stored = _tenant(row)
            settings = change(stored)
            if settings == stored.settings:
                return stored
            row = await connection.fetch_one(
                _SQL["update_tenant"], name=name, now=now, **_values(settings)
            )
        assert row is not None, "a locked row is updated"
        return _tenant(row)

    async def create_queue(
        self,
        tenant_id: int,
        name: str,
        settings: QueueSettings,
        *,
        now: Instant,
        remember: Remember[QueueRecord] | None = None,
    ) -> QueueRecord | bytes | None:
        """None if the name is taken; otherwise as create_tenant."""

        async def make(connection: Connection) -> QueueRecord | None:
            row = await connection.fetch_one(
                _SQL["insert_queue"], tenant_id=tenant_id, name=name, now=now, **_values(settings)
            )
            return None if row is None else _queue(row)

        scope = RequestScope(tenant_id=tenant_id, method="CreateQueue")
        return await make_once(self._pool, scope, make, remember, now)

    async def read_queue(self, tenant_id: int, name: str) -> QueueRecord | None:
        """None if there is none."""
        row = await self._pool.fetch_one(_SQL["read_queue"], tenant_id=tenant_id, name=name)
        return None if row is None else _queue(row)

    async def list_queues(
        self, tenant_id: int, *, after: str | None, limit: int
    ) -> Sequence[QueueRecord]:
        """By name, those later than `after`."""
        rows = await self._pool.fetch(
            _SQL["list_queues"], tenant_id=tenant_id, after=after, page_max=limit
        )
        return [_queue(row) for row in rows]

    async def update_queue(
        self,
        tenant_id: int,
        name: str,
        change: Callable[[QueueRecord], QueueSettings],
        *,
        now: Instant,
    ) -> QueueRecord | None:
        """As update_tenant."""
        async with self._pool.transaction() as connection:
            row = await connection.fetch_one(_SQL["lock_queue"], tenant_id=tenant_id, name=name)
            if row is None:
                return None
            stored = _queue(row)
            settings = change(stored)
            if settings == stored.settings:
                return stored
            await connection.execute(_SQL["hold_claims"], queue_id=stored.queue_id)
            row = await connection.fetch_one(
                _SQL["update_queue"], tenant_id=tenant_id, name=name, now=now, **_values(settings)
            )
        assert row is not None, "a locked row is updated"
        return _queue(row)

    async def read_worker(self, worker_id: str) -> WorkerRecord | None:
        """None if nobody remembers it."""
        row = await self._pool.fetch_one(_SQL["read_worker"], worker_id=worker_id)
        return None if row is None else _worker(row)

    async def list_workers(
        self,
        *,
        tenant_id: int | None,
        since: Instant,
        before: tuple[Instant, str] | None,
        limit: int,
    ) -> Sequence[WorkerRecord]:
        """Newest heartbeat first, later than `since`, of one tenant or (None) of all."""
        rows = await self._pool.fetch(
            _SQL["list_workers"],
            tenant_id=tenant_id,
            since=since,
            before_at=None if before is None else before[0],
            before_id=None if before is None else before[1],
            page_max=limit,
        )
        return [_worker(row) for row in rows]


async def make_once(
    pool: Pool,
    scope: RequestScope,
    make: Callable[[Connection], Awaitable[T | None]],
    remember: Remember[T] | None,
    now: Instant,
) -> T | bytes | None:
    """What `make` makes in a transaction, None if it makes nothing, or the stored answer of an
    earlier call. Raises RequestIdReused.
    """
    async with pool.transaction() as connection:
        keys = [] if remember is None else [remember.request]
        for answer in (await requests.begin(connection, scope, keys, now=now)).values():
            if isinstance(answer, RequestIdReused):
                raise answer
            return answer
        made = await make(connection)
        if remember is not None:
            answers = {remember.request.request_id: None if made is None else remember.encode(made)}
            await requests.finish(connection, scope, answers)
    return made


def _values(settings: TenantSettings | QueueSettings) -> dict[str, Any]:
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    if isinstance(settings, TenantSettings):
        values["default_retry_policy"] = settings.default_retry_policy.to_json() or None
    return values


def _tenant(row: Row) -> TenantRecord:
    return TenantRecord(
        tenant_id=row["tenant_id"],
        name=row["name"],
        settings=TenantSettings(
            display_name=row["display_name"],
            labels=row["labels"],
            max_in_flight=row["max_in_flight"],
            weight=row["weight"],
            default_retry_policy=RetryPolicy.from_json(row["default_retry_policy"] or {}),
        ),
        revision=row["revision"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _queue(row: Row) -> QueueRecord:
    return QueueRecord(
        queue_id=row["queue_id"],
        name=row["name"],
        settings=QueueSettings(
            labels=row["labels"],
            paused=row["paused"],
            pause_reason=row["pause_reason"],
            max_in_flight=row["max_in_flight"],
            max_in_flight_per_key=row["max_in_flight_per_key"],
            rate_limit=row["rate_limit"],
        ),
        revision=row["revision"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _worker(row: Row) -> WorkerRecord:
    values = {each.name: row[each.name] for each in fields(WorkerRecord)}
    return WorkerRecord(**{**values, "worker_id": str(row["worker_id"])})
