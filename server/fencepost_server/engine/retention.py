"""History's length: day tables made ahead, indexed when their day is over, and dropped; and
when everything else that would grow is cleaned up.

The floor is raised an hour before a table is dropped, so that nobody makes a run for an
instant whose history is about to go.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import structlog

from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Clock, Duration, Instant
from fencepost_server.engine.cleanup import Cleanup
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import ConflictError, Database
from fencepost_server.store.day_tables import DayTables, day_of, start_of
from fencepost_server.store.statements import load

_SQL = load("upkeep")
_log = structlog.get_logger("retention")

_TABLES_PER_PASS = 2
_FLOOR_LEAD: Duration = HOUR
VACUUM_INTERVAL: Duration = 15 * SECOND
INDEX_INTERVAL: Duration = 10 * MINUTE
KEYS_INTERVAL: Duration = MINUTE


class Retention:
    """Run `run` until it is cancelled; `ensure_day_tables` before anything is served."""

    def __init__(self, *, database: Database, clock: Clock, days: int, days_ahead: int) -> None:
        """Ended runs are kept for `days`; tables are made `days_ahead`."""
        self._database = database
        self._clock = clock
        self._days = days
        self._days_ahead = days_ahead
        self._tables = DayTables(database.dsn)
        self._cleanup = Cleanup(database=database, history=days * DAY)
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True

    async def run(self, *, interval: Duration) -> None:
        """A pass every `interval`; in between, each at its own pace, the queue is vacuumed and
        days that are over get their indexes."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._repeat(self.keep, interval))
            loops.create_task(
                self._repeat(
                    self._tables.vacuum_queue, min(VACUUM_INTERVAL, interval), by_clock=False
                )
            )
            loops.create_task(self._repeat(self.index_days, min(INDEX_INTERVAL, interval)))
            loops.create_task(self._repeat(self.forget_keys, min(KEYS_INTERVAL, interval)))

    async def _repeat(
        self, step: Callable[[], Awaitable[None]], interval: Duration, *, by_clock: bool = True
    ) -> None:
        """`by_clock`: what it does follows from the time, so it waits for a trusted clock."""
        while True:
            pause = interval
            try:
                if self.is_trusted() or not by_clock:
                    await step()
                else:
                    pause = min(interval, SECOND)
            except (StorageUnavailable, ConflictError) as error:
                _log.warning("retention_put_off", step=step.__name__, error=repr(error))
                pause = min(interval, MINUTE)
            await asyncio.sleep(pause / SECOND)

    async def keep(self) -> None:
        """One pass: tables ahead, floor, drops, clean-up."""
        now = self._clock.now()
        await self.ensure_day_tables()
        await self._database.requests.execute(
            _SQL["raise_retention_floor"], floor=self._floor(now + _FLOOR_LEAD)
        )
        dropped = await self._tables.drop_before(
            day_of(self._floor(now)), tables_max=_TABLES_PER_PASS
        )
        if dropped:
            _log.info("day_tables_dropped", names=dropped)
            await self._set_bounds()
        await self._cleanup.prune(now, floor=self._floor(now))

    async def forget_keys(self) -> None:
        """Unique keys that no run holds any more."""
        await self._cleanup.forget_keys(self._clock.now())

    async def index_days(self) -> None:
        """Indexes for days that are over, as long as it takes: lists of runs live on them."""
        today = day_of(self._clock.now())
        while made := await self._tables.index_before(today, tables_max=_TABLES_PER_PASS):
            _log.info("day_tables_indexed", names=made)

    async def ensure_day_tables(self) -> None:
        """Tables from yesterday to `days_ahead` from now, known to everyone who ends runs."""
        today = day_of(self._clock.now())
        made = await self._tables.ensure(
            today - timedelta(days=1), today + timedelta(days=self._days_ahead)
        )
        if made:
            _log.info("day_tables_made", first=made[0], tables=len(made))
        await self._set_bounds()

    async def _set_bounds(self) -> None:
        days = await self._tables.attached_days()
        # A gap would refuse an end, so only the unbroken stretch up to the newest day counts.
        first = last = days[-1]
        for day in reversed(days[:-1]):
            if day != first - timedelta(days=1):
                break
            first = day
        await self._database.requests.execute(
            _SQL["set_history_bounds"],
            from_at=max(start_of(first), self._floor(self._clock.now() + _FLOOR_LEAD)),
            until_at=start_of(last + timedelta(days=1)),
        )

    def _floor(self, now: Instant) -> Instant:
        return start_of(day_of(now - self._days * DAY))
