"""History's length: day tables made ahead, old ones dropped, and the bounded clean-up of
everything else that would grow.

The floor is raised an hour before a table is dropped, so that nobody makes a run for an
instant whose history is about to go.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import structlog

from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Clock, Duration, Instant, monotonic
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import ConflictError, Database
from fencepost_server.store.day_tables import DayTables, day_of, start_of
from fencepost_server.store.statements import load

_SQL = load("upkeep")
_log = structlog.get_logger("retention")

_TABLES_PER_PASS = 2
_ROWS_PER_STATEMENT = 5_000
_STATEMENTS_PER_PASS = 20
_WORKER_KEPT: Duration = DAY
_OPERATION_KEPT: Duration = 30 * DAY
_FLOOR_LEAD: Duration = HOUR
VACUUM_INTERVAL: Duration = 15 * SECOND


class Retention:
    """Run `run` until it is cancelled; `ensure_day_tables` before anything is served."""

    def __init__(self, *, database: Database, clock: Clock, days: int, days_ahead: int) -> None:
        """Ended runs are kept for `days`; tables are made `days_ahead`."""
        self._database = database
        self._clock = clock
        self._days = days
        self._days_ahead = days_ahead
        self._tables = DayTables(database.dsn)
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True

    async def run(self, *, interval: Duration) -> None:
        """A pass every `interval`, and a vacuum of the queue in between."""
        pass_at = monotonic()
        while True:
            try:
                if monotonic() >= pass_at and self.is_trusted():
                    pass_at = monotonic() + interval
                    await self.keep()
                await self._tables.vacuum_queue()
            except (StorageUnavailable, ConflictError) as error:
                _log.warning("retention_put_off", error=repr(error))
                pass_at = min(pass_at, monotonic() + MINUTE)
            await asyncio.sleep(min(VACUUM_INTERVAL, interval) / SECOND)

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
        await self._prune(now)

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

    async def _prune(self, now: Instant) -> None:
        floor = self._floor(now)
        bounds: dict[str, dict[str, Instant]] = {
            "prune_strays": {"before": floor},
            "prune_fire_skips": {"before": floor},
            "prune_requests": {"now": now},
            "prune_claim_requests": {"now": now},
            "prune_operations": {"before": now - _OPERATION_KEPT},
            "prune_workers": {"before": now - _WORKER_KEPT},
        }
        for name, values in bounds.items():
            for _ in range(_STATEMENTS_PER_PASS):
                rows = await self._database.requests.execute(
                    _SQL[name], rows_max=_ROWS_PER_STATEMENT, **values
                )
                if rows < _ROWS_PER_STATEMENT:
                    break
