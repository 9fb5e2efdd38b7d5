"""Claims runs of one queue: the statement, and what a worker needs to know of each run.

The dispatcher (for sessions) and the long poll (for unary calls) both come here.
"""

from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

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


class Claimed(NamedTuple):
    """A run in the hands of a worker: its key and fence, and everything the handler needs.

    `payload`, `progress` and `last_failure` are serialized messages; `payload` and `labels`
    None: the job's. `place` counts from 1 in the order of the claim. A tuple, because one is
    made for every run.
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


# What every claim returns of a run.
_VERSION = itemgetter("job_id", "version")
_COLUMNS = itemgetter(
    "scheduled_at", "attempt", "kind_id", "version", "lease_s", "failure_count", "payload",
    "labels", "progress", "last_failure",
)  # fmt: skip


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
        heads: Mapping[tuple[int, int], int] | None = None,
        connection: Connection | None = None,
        is_refill: bool = False,
    ) -> list[Claimed]:
        """Up to one run per entry of `worker_ids`, the first for the first.

        `lanes` are (kind_id, priority); `after` is a lower bound of available_at; `heads`, of a
        queue that is not capped, says how many runs of each lane at most. Commits by itself, or
        belongs to the transaction of `connection`. `is_refill`: after ends in that transaction;
        nothing if others claim in the tenant just now.
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
            values["lane_maxes"] = [
                len(worker_ids) if heads is None else heads.get(lane, 0) for lane in lanes
            ]
            # Many runs go to few workers, and ids take long to encode.
            workers = {worker_id: n for n, worker_id in enumerate(dict.fromkeys(worker_ids), 1)}
            values["worker_ids"] = list(workers)
            values["slots"] = (
                [] if len(workers) == 1 else [workers[worker_id] for worker_id in worker_ids]
            )
        capped = "refill_capped_runs" if is_refill else "claim_capped_runs"
        statement = _SQL[capped if is_capped else "claim_runs"]
        source = self._pool if connection is None else connection
        rows = await source.fetch(statement, **values)
        return await self.assemble(rows, queue_id=queue_id, now=now, connection=connection)

    async def heads(
        self,
        queue_id: int,
        *,
        lanes: Collection[tuple[int, int]],
        runs_max: int,
        after: Instant = 0,
    ) -> dict[tuple[int, int], int]:
        """How many of the next `runs_max` runs each of these lanes has, without locking them."""
        rows = await self._pool.fetch(
            _SQL["lane_heads"],
            queue_id=queue_id,
            kind_ids=[kind_id for kind_id, _ in lanes],
            priorities=[priority for _, priority in lanes],
            runs_max=runs_max,
            ageing_s=AGEING_S,
            after=after,
            now=self._clock.now(),
        )
        return {(row["kind_id"], row["priority"]): row["runs"] for row in rows}

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
        # Many runs are of few versions: what follows is done once for each.
        keys = {each: SpecKey(str(each[0]), each[1]) for each in set(map(_VERSION, rows))}
        specs = await self._specs.get(keys.values(), connection=connection)
        found = {each: (key.job_id, specs.get(key)) for each, key in keys.items()}
        claimed: list[Claimed] = []
        place = 0
        for row in rows:
            place += 1
            at, attempt, kind_id, version, lease_s, failures, payload, labels, progress, last = (
                _COLUMNS(row)
            )
            job_id, spec = found[_VERSION(row)]
            if spec is None:
                _log.error("version_missing", job_id=job_id, version=version)
                continue
            lease_ttl = lease_s * SECOND
            claimed.append(
                Claimed(
                    RunKey(job_id, at),
                    attempt,
                    place,
                    row["queue_id"] if queue_id is None else queue_id,
                    kind_id,
                    version,
                    spec,
                    lease_ttl,
                    row["lease_until"] if queue_id is None else now + lease_ttl,
                    failures,
                    payload,
                    labels,
                    progress,
                    last,
                )
            )
        return claimed
