"""The definitions that runs were made with, cached per (job, version): they never change. What
their tenants say of retries may change, and is read again every five seconds.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fencepost_server.clock import SECOND, Duration, monotonic
from fencepost_server.domain.job import JobSpec, RetryPolicy
from fencepost_server.store.database import Connection, Pool
from fencepost_server.store.statements import load

_SQL = load("claims")

# How long a change of a tenant's default_retry_policy may be overlooked.
DEFAULTS_KEPT: Duration = 5 * SECOND
_TENANTS_MAX = 10_000


class SpecKey(NamedTuple):
    """One version of one job."""

    job_id: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What an assignment and a retry decision need of a job's version.

    `payload` is the serialized payload message, None without one.
    """

    tenant: str
    job_name: str
    spec: JobSpec
    payload: bytes | None


class SpecCache:
    """Loads versions in batches and keeps the `size` used last."""

    def __init__(self, pool: Pool, *, size: int) -> None:
        self._pool = pool
        self._size = size
        self._specs: OrderedDict[SpecKey, RunSpec] = OrderedDict()
        # By tenant: when it was read, and what applies where a job says nothing.
        self._defaults: dict[str, tuple[int, RetryPolicy]] = {}

    async def get(
        self, keys: Collection[SpecKey], *, connection: Connection | None = None
    ) -> Mapping[SpecKey, RunSpec]:
        """The versions that exist. Inside a transaction, hand in its connection."""
        found: dict[SpecKey, RunSpec] = {}
        missing: list[SpecKey] = []
        for key in set(keys):
            spec = self._specs.get(key)
            if spec is None:
                missing.append(key)
            else:
                self._specs.move_to_end(key)
                found[key] = spec
        if missing:
            source = self._pool if connection is None else connection
            rows = await source.fetch(
                _SQL["versions_of_runs"],
                job_ids=[key.job_id for key in missing],
                versions=[key.version for key in missing],
            )
            for row in rows:
                key = SpecKey(str(row["job_id"]), row["version"])
                found[key] = self._specs[key] = RunSpec(
                    tenant=row["tenant_name"],
                    job_name=row["name"],
                    spec=JobSpec.from_json(row["spec"]),
                    payload=row["payload"],
                )
            while len(self._specs) > self._size:
                self._specs.popitem(last=False)
        return found

    async def policies(
        self, keys: Collection[SpecKey], *, connection: Connection
    ) -> Mapping[SpecKey, RetryPolicy]:
        """The retry policies that apply to runs of these versions, field by field: the job's,
        else the tenant's, else the default. A version that does not exist is left out.
        """
        specs = await self.get(keys, connection=connection)
        await self._read_defaults({spec.tenant for spec in specs.values()}, connection)
        return {
            key: spec.spec.retry_policy.over(self._defaults[spec.tenant][1])
            for key, spec in specs.items()
        }

    async def _read_defaults(self, tenants: Collection[str], connection: Connection) -> None:
        now = monotonic()
        old = [
            name
            for name in tenants
            if name not in self._defaults or now - self._defaults[name][0] >= DEFAULTS_KEPT
        ]
        if not old:
            return
        if len(self._defaults) + len(old) > _TENANTS_MAX:
            self._defaults = {n: kept for n, kept in self._defaults.items() if n in tenants}
        for row in await connection.fetch(_SQL["tenant_defaults"], names=sorted(old)):
            policy = RetryPolicy.from_json(row["default_retry_policy"] or {})
            self._defaults[row["name"]] = (now, policy)
