"""Counts jobs for forecasts where they are too many to be counted for each: a slice of the
table per statement, every ten minutes, by one of the schedulers.
"""

import asyncio
from collections.abc import Callable

import structlog

from fencepost_server.clock import HOUR, MINUTE, SECOND, Clock, Duration, Instant, monotonic
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

_SQL = load("forecast")
_log = structlog.get_logger("forecast")

# Up to about so many jobs are counted when somebody asks; it takes a third of a second.
JOBS_LIVE_MAX = 250_000
# The longest window of a forecast, and how old a count may be that it is made of.
AHEAD: Duration = 168 * HOUR
COUNT_AGE_MAX: Duration = 2 * HOUR
_EVERY: Duration = 10 * MINUTE
# A second's work. Larger slices are fewer rows, smaller ones shorter statements.
_SLICE_BLOCKS = 16_384
_ROWS_DROPPED = 20_000


class ForecastCount:
    """Run `run` until it is cancelled."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        jobs_live_max: int = JOBS_LIVE_MAX,
        slice_blocks: int = _SLICE_BLOCKS,
    ) -> None:
        self._pool = database.requests
        self._clock = clock
        self._jobs_live_max = jobs_live_max
        self._slice_blocks = slice_blocks
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True

    async def run(self, *, interval: Duration) -> None:
        """Look every `interval` whether to count, until cancelled."""
        while True:
            try:
                if self.is_trusted():
                    await self.count()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            await asyncio.sleep(interval / SECOND)

    async def count(self) -> bool:
        """Count if there are many jobs and it is time; whether a count was completed."""
        row = await self._pool.fetch_one(_SQL["jobs_estimated"])
        if row is None or row["jobs"] <= self._jobs_live_max:
            return False
        now = self._clock.now()
        next_at = now + _EVERY
        taken = await self._pool.fetch_one(_SQL["take_count"], now=now, next_at=next_at)
        if taken is None:
            return False
        # The count before stays until the next one begins: somebody may be reading it.
        while await self._pool.execute(_SQL["drop_counts"], rows_max=_ROWS_DROPPED):
            pass
        # Nobody else's: what a server writes that was overtaken is in no count that is read.
        count_id = next_at
        # Jobs that fire meanwhile may move past the end, or be counted at both places: few.
        for block in range(0, taken["blocks"] + 1, self._slice_blocks):
            begun = monotonic()
            await self._slice(count_id, now, next_at, block)
            # Half of a core at the most.
            await asyncio.sleep((monotonic() - begun) / SECOND)
        finished = await self._pool.fetch_one(
            _SQL["finish_count"], count_id=count_id, start_at=now, next_at=next_at
        )
        _log.debug("jobs_counted", finished=finished is not None)
        return finished is not None

    async def _slice(self, count_id: int, now: Instant, next_at: Instant, block: int) -> None:
        async with self._pool.transaction() as connection:
            await connection.execute(_SQL["memory_for_groups"])
            await connection.execute(
                _SQL["count_groups"],
                count_id=count_id,
                start_at=now // MINUTE * MINUTE,
                until_at=now + AHEAD + COUNT_AGE_MAX + HOUR,
                from_block=block,
                to_block=block + self._slice_blocks,
                next_at=next_at,
            )
