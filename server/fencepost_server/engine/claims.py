"""Claims runs of one queue: the statement, and what a worker needs to know of each run.

The dispatcher (for sessions) and the long poll (for unary calls) both come here.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from fencepost_server.clock import SECOND, Clock, Duration, Instant
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.specs import RunSpec, SpecCache, SpecKey
from fencepost_server.store.database import Connection, Pool, Row
from fencepost_server.store.statements import load

_SQL = load("claims")
_log = structlog.get_logger("claims")

# One level of priority is worth this much waiting: what has waited longer goes first.
AGEING_S = 60


@dataclass(slots=True, kw_only=True)
class Claimed:
    """A run in the hands of a worker: its key and fence, and everything the handler needs.

    `payload`, `progress` and `last_failure` are serialized messages; `payload` and `labels`
    None: the job's. `place` counts from 1 in the order of the claim.
    """

    key: RunKey
    attempt: int
    place: int
    queue_id: int
    kind_id: int
    version: int
    spec: RunSpec
    lease_ttl: Duration
    lease_until: Instant
    failure_count: int
    payload: bytes | None
    labels: dict[str, str] | None
    progress: bytes | None
    last_failure: bytes | None


class Claimer:
    """Takes the oldest runs of some lanes of a queue."""

    def __init__(self, *, pool: Pool, clock: Clock, specs: SpecCache) -> None:
        self._pool = pool
        self._clock = clock
        self._specs = specs

    async def claim(
        self,
        queue_id: int,
        *,
        lanes: Collection[tuple[int, int]],
        worker_ids: Sequence[str],
        is_capped: bool,
        after: Instant = 0,
        connection: Connection | None = None,
        is_refill: bool = False,
    ) -> list[Claimed]:
        """Up to one run per entry of `worker_ids`, the first for the first.

        `lanes` are (kind_id, priority); `after` is a lower bound of available_at. Commits
        by itself, or belongs to the transaction of `connection`. `is_refill`: after ends in
        that transaction; nothing if others claim in the tenant just now.
        """
        now = self._clock.now()
        values: dict[str, Any] = {
            "queue_id": queue_id,
            "kind_ids": [kind_id for kind_id, _ in lanes],
            "priorities": [priority for _, priority in lanes],
            "worker_ids": worker_ids,
            "runs_max": len(worker_ids),
            "ageing_s": AGEING_S,
            "now": now,
        }
        if not is_capped:
            values["after"] = after
        capped = "refill_capped_runs" if is_refill else "claim_capped_runs"
        statement = _SQL[capped if is_capped else "claim_runs"]
        source = self._pool if connection is None else connection
        rows = await source.fetch(statement, **values)
        return await self.assemble(rows, queue_id=queue_id, now=now, connection=connection)

    async def lease(self, connection: Connection, key: RunKey, *, worker_id: str) -> Claimed | None:
        """One named run, if it is claimable now."""
        now = self._clock.now()
        row = await connection.fetch_one(
            _SQL["lease_run"],
            job_id=key.job_id,
            scheduled_at=key.scheduled_at,
            worker_id=worker_id,
            now=now,
        )
        if row is None:
            return None
        found = await self.assemble([row], queue_id=row["queue_id"], now=now, connection=connection)
        return found[0]

    async def assemble(
        self,
        rows: Sequence[Row],
        *,
        queue_id: int | None = None,
        now: Instant,
        connection: Connection | None = None,
    ) -> list[Claimed]:
        """Rows of a claim with the definitions their runs were made with.

        `queue_id` None: the rows say their own queue and lease_until.
        """
        keys = [SpecKey(str(row["job_id"]), row["version"]) for row in rows]
        specs = await self._specs.get(keys, connection=connection)
        claimed: list[Claimed] = []
        for place, (row, key) in enumerate(zip(rows, keys, strict=True), start=1):
            spec = specs.get(key)
            if spec is None:
                _log.error("version_missing", job_id=key.job_id, version=key.version)
                continue
            lease_ttl = row["lease_s"] * SECOND
            claimed.append(
                Claimed(
                    key=RunKey(key.job_id, row["scheduled_at"]),
                    attempt=row["attempt"],
                    place=place,
                    queue_id=row["queue_id"] if queue_id is None else queue_id,
                    kind_id=row["kind_id"],
                    version=key.version,
                    spec=spec,
                    lease_ttl=lease_ttl,
                    lease_until=now + lease_ttl if queue_id is not None else row["lease_until"],
                    failure_count=row["failure_count"],
                    payload=row["payload"],
                    labels=row["labels"],
                    progress=row["progress"],
                    last_failure=row["last_failure"],
                )
            )
        return claimed
