"""Numbers of queues for people: estimates, each counted up to a bound and kept for seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fencepost_server.clock import SECOND, Duration, Instant, monotonic
from fencepost_server.store.database import Pool
from fencepost_server.store.statements import load

_SQL = load("admin")

COUNT_MAX = 100_000
KEPT_FOR: Duration = 3 * SECOND
_QUEUES_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueNumbers:
    """What a queue held at `measured_at`; no number is above COUNT_MAX.

    `oldest_at`: available_at of the run that has waited longest, None if none waits.
    """

    ready: int
    delayed: int
    retrying: int
    blocked: int
    running: int
    dead: int
    oldest_at: Instant | None
    measured_at: Instant


class QueueStats:
    """Counts, and remembers for KEPT_FOR."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: dict[int, tuple[int, QueueNumbers]] = {}

    async def get(self, queue_ids: Sequence[int], *, now: Instant) -> Mapping[int, QueueNumbers]:
        """By queue_id."""
        fresh_from = monotonic() - KEPT_FOR
        kept = {
            queue_id: numbers
            for queue_id in queue_ids
            if (found := self._kept.get(queue_id)) is not None
            and found[0] > fresh_from
            # A test clock moves further than this one.
            and 0 <= now - (numbers := found[1]).measured_at < KEPT_FOR
        }
        wanted = [queue_id for queue_id in queue_ids if queue_id not in kept]
        if not wanted:
            return kept
        rows = await self._pool.fetch(
            _SQL["queue_stats"], queue_ids=wanted, count_max=COUNT_MAX, now=now
        )
        if len(self._kept) + len(rows) > _QUEUES_MAX:
            self._kept.clear()
        for row in rows:
            numbers = QueueNumbers(
                ready=row["ready"],
                delayed=row["delayed"],
                retrying=row["retrying"],
                blocked=row["blocked"],
                running=row["running"],
                dead=row["dead"],
                oldest_at=row["oldest_at"],
                measured_at=now,
            )
            kept[row["queue_id"]] = numbers
            self._kept[row["queue_id"]] = (monotonic(), numbers)
        return kept
