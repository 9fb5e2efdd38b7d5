"""The definitions that runs were made with, cached per (job, version): they never change."""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fencepost_server.domain.job import JobSpec
from fencepost_server.store.database import Connection, Pool
from fencepost_server.store.statements import load

_SQL = load("claims")


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
