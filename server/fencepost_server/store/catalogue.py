"""Names interned to small integers: tenants, queues, kinds and cron rules.

Nothing here is ever renamed or removed while a server runs, so each process remembers what
it has seen, up to a bound; only cron rules that no job has any more are removed after a week,
so they are remembered for an hour. Interning commits by itself, before the transaction that uses
it: a name that nobody uses in the end does no harm, a lock held on one would.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from fencepost_server.clock import HOUR, Duration, monotonic
from fencepost_server.domain.names import format_queue, format_tenant
from fencepost_server.errors import QueueNotFound, TenantNotFound
from fencepost_server.store.database import Pool
from fencepost_server.store.statements import load

_SQL = load("catalogue")
REMEMBERED_MAX = 10_000
_RULES_REMEMBERED: Duration = HOUR

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """A mapping that forgets its oldest entry when it is full."""

    def __init__(self, size_max: int = REMEMBERED_MAX) -> None:
        self._size_max = size_max
        self._values: dict[K, V] = {}

    def find(self, keys: Iterable[K]) -> dict[K, V]:
        """What is remembered of `keys`."""
        return {key: self._values[key] for key in keys if key in self._values}

    def add(self, values: Mapping[K, V]) -> None:
        """Remember these too."""
        for key, value in values.items():
            if key not in self._values and len(self._values) >= self._size_max:
                del self._values[next(iter(self._values))]
            self._values[key] = value

    def __len__(self) -> int:
        return len(self._values)


class Catalogue:
    """Ids of names and names of ids. Call it outside of transactions only."""

    def __init__(self, *, pool: Pool, remembered_max: int = REMEMBERED_MAX) -> None:
        self._pool = pool
        self._tenants: Remembered[str, int] = Remembered(remembered_max)
        self._tenant_names: Remembered[int, str] = Remembered(remembered_max)
        self._queues: Remembered[tuple[int, str], int] = Remembered(remembered_max)
        self._queue_names: Remembered[int, tuple[int, str]] = Remembered(remembered_max)
        self._kinds: Remembered[str, int] = Remembered(remembered_max)
        self._kind_names: Remembered[int, str] = Remembered(remembered_max)
        self._schedules: Remembered[bytes, int] = Remembered(remembered_max)
        self._schedules_since = monotonic()
        self._remembered_max = remembered_max

    async def tenant_id(self, tenant: str) -> int:
        """Raises TenantNotFound."""
        known = self._tenants.find([tenant])
        if not known:
            row = await self._pool.fetch_one(_SQL["find_tenant"], name=tenant)
            if row is None:
                raise tenant_not_found(tenant)
            known = {tenant: row["tenant_id"]}
            self._tenants.add(known)
        return known[tenant]

    async def tenant_names(self, tenant_ids: Iterable[int]) -> dict[int, str]:
        """The names of these tenants."""
        wanted = set(tenant_ids)
        known = self._tenant_names.find(wanted)
        if missing := sorted(wanted - known.keys()):
            rows = await self._pool.fetch(_SQL["find_tenants"], tenant_ids=missing)
            found = {row["tenant_id"]: row["name"] for row in rows}
            self._tenant_names.add(found)
            known |= found
        return known

    async def find_queue_ids(self, tenant_id: int, names: Iterable[str]) -> dict[str, int]:
        """The ids of those queues of the tenant that exist."""
        wanted = {(tenant_id, name) for name in names}
        known = self._queues.find(wanted)
        if missing := sorted(name for _, name in wanted - known.keys()):
            rows = await self._pool.fetch(_SQL["find_queues"], tenant_id=tenant_id, names=missing)
            found = {(tenant_id, row["name"]): row["queue_id"] for row in rows}
            self._queues.add(found)
            known |= found
        return {name: queue_id for (_, name), queue_id in known.items()}

    async def queue_id(self, tenant: str, queue_name: str) -> int:
        """Raises TenantNotFound or QueueNotFound."""
        tenant_id = await self.tenant_id(tenant)
        found = await self.find_queue_ids(tenant_id, [queue_name])
        if queue_name not in found:
            raise queue_not_found(tenant, queue_name)
        return found[queue_name]

    async def queues(
        self, names: Iterable[tuple[str, str]]
    ) -> dict[tuple[str, str], tuple[int, int]]:
        """The (tenant_id, queue_id) of each (tenant, queue name), with one look for all.

        Raises TenantNotFound or QueueNotFound, for the first that does not exist.
        """
        wanted = list(dict.fromkeys(names))
        tenant_ids = self._tenants.find(tenant for tenant, _ in wanted)
        keys = {each: (tenant_ids.get(each[0], 0), each[1]) for each in wanted}
        known = self._queues.find(keys.values())
        found = {each: (key[0], known[key]) for each, key in keys.items() if key in known}
        if missing := [each for each in wanted if each not in found]:
            rows = await self._pool.fetch(
                _SQL["find_named_queues"],
                tenants=[tenant for tenant, _ in missing],
                names=[name for _, name in missing],
            )
            tenant_ids |= {row["tenant"]: row["tenant_id"] for row in rows}
            there = [row for row in rows if row["queue_id"] is not None]
            self._tenants.add({row["tenant"]: row["tenant_id"] for row in rows})
            self._queues.add({(row["tenant_id"], row["name"]): row["queue_id"] for row in there})
            found |= {
                (row["tenant"], row["name"]): (row["tenant_id"], row["queue_id"]) for row in there
            }
        for tenant, name in wanted:
            if tenant not in tenant_ids:
                raise tenant_not_found(tenant)
            if (tenant, name) not in found:
                raise queue_not_found(tenant, name)
        return found

    async def queue_names(self, queue_ids: Iterable[int]) -> dict[int, tuple[int, str]]:
        """Tenant id and name of these queues."""
        wanted = set(queue_ids)
        known = self._queue_names.find(wanted)
        if missing := sorted(wanted - known.keys()):
            rows = await self._pool.fetch(_SQL["find_queue_names"], queue_ids=missing)
            found = {row["queue_id"]: (row["tenant_id"], row["name"]) for row in rows}
            self._queue_names.add(found)
            known |= found
        return known

    async def kind_ids(self, names: Iterable[str]) -> dict[str, int]:
        """The ids of these kinds; kinds nobody has named before are added."""
        wanted = set(names)
        known = self._kinds.find(wanted)
        if missing := sorted(wanted - known.keys()):
            await self._pool.execute(_SQL["intern_kinds"], names=missing)
            rows = await self._pool.fetch(_SQL["find_kinds"], names=missing)
            found = {row["name"]: row["kind_id"] for row in rows}
            self._kinds.add(found)
            known |= found
        return known

    async def find_kind_ids(self, names: Iterable[str]) -> dict[str, int]:
        """The ids of those kinds that somebody has named before."""
        wanted = set(names)
        known = self._kinds.find(wanted)
        if missing := sorted(wanted - known.keys()):
            rows = await self._pool.fetch(_SQL["find_kinds"], names=missing)
            found = {row["name"]: row["kind_id"] for row in rows}
            self._kinds.add(found)
            known |= found
        return known

    async def kind_names(self, kind_ids: Iterable[int]) -> dict[int, str]:
        """The names of these kinds."""
        wanted = set(kind_ids)
        known = self._kind_names.find(wanted)
        if missing := sorted(wanted - known.keys()):
            rows = await self._pool.fetch(_SQL["find_kind_names"], kind_ids=missing)
            found = {row["kind_id"]: row["name"] for row in rows}
            self._kind_names.add(found)
            known |= found
        return known

    async def schedule_ids(self, rules: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of these rules, given as JSON, in their order; new rules are added."""
        if monotonic() - self._schedules_since > _RULES_REMEMBERED:
            self._schedules = Remembered(self._remembered_max)
            self._schedules_since = monotonic()
        hashes = [rule_hash(rule) for rule in rules]
        by_hash = dict(zip(hashes, rules, strict=True))
        known = self._schedules.find(by_hash)
        if missing := sorted(by_hash.keys() - known.keys()):
            await self._pool.execute(
                _SQL["intern_schedules"],
                hashes=missing,
                rules=[by_hash[each] for each in missing],
            )
            rows = await self._pool.fetch(_SQL["find_schedules"], hashes=missing)
            found = {row["rule_hash"]: row["schedule_id"] for row in rows}
            self._schedules.add(found)
            known |= found
        return [known[each] for each in hashes]

    async def page_token_key(self) -> bytes:
        """The key that signs page tokens of this database."""
        row = await self._pool.fetch_one(_SQL["page_token_key"])
        assert row is not None, "shard_state has its one row since the first migration"
        key: bytes = row["page_token_key"]
        return key


def rule_hash(rule: Mapping[str, Any]) -> bytes:
    """SHA-256 of a rule's canonical JSON."""
    canonical = json.dumps(rule, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()


def tenant_not_found(tenant: str) -> TenantNotFound:
    """The one text for a tenant that this caller cannot see."""
    name = format_tenant(tenant)
    return TenantNotFound(f"{name} does not exist", resource=name, name=name)


def queue_not_found(tenant: str, queue_name: str) -> QueueNotFound:
    """The one text for a queue that this caller cannot see."""
    name = format_queue(tenant, queue_name)
    return QueueNotFound(f"{name} does not exist", resource=name, name=name)
