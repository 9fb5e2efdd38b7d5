"""After an outage the late runs of a tenant are released at a rate, the newest first.

Fires park what fell due while nobody fired; the governor takes it out again, once all that is
overdue has been fired and the newest are known. Schedulers say that they fire every second,
so an outage is a gap in that, and not merely a long queue.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from fencepost_server.clock import DAY, MINUTE, SECOND, Clock, Duration, Instant
from fencepost_server.domain.run import Lane
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

_SQL = load("governor")
_log = structlog.get_logger("governor")

# Nobody fired for longer than this: an outage. Fires that are late by less are never parked.
OUTAGE: Duration = 10 * SECOND
# So long at the most a run is parked, also if the servers that would release it are gone.
PARKED_MAX: Duration = 7 * DAY
# How far ahead places are given out; what is released follows the order to within that.
AHEAD: Duration = SECOND
# Nothing is released while overdue fires become fewer, or what is newest is not known yet.
HELD_MAX: Duration = 2 * MINUTE
_STILL: Duration = 5 * SECOND
_NOTED_EVERY: Duration = SECOND
_UNBOUNDED_RATE = 1_000_000.0
_TENANTS_MAX = 50
_RUNS_MAX = 10_000


class Outages:
    """Tells other schedulers that this one fires, and learns since when any has."""

    def __init__(self, *, database: Database) -> None:
        self._pool = database.hot
        self._noted_at: Instant | None = None
        self._firing_since: Instant = 0

    async def parked_before(self, now: Instant) -> Instant:
        """Fires due before this fell due in an outage. To be called before every batch."""
        if self._noted_at is None or not 0 <= now - self._noted_at < _NOTED_EVERY:
            row = await self._pool.fetch_one(_SQL["note_firing"], now=now, gap_s=OUTAGE // SECOND)
            # No row: this process's clock is not to be trusted, and nothing will be fired.
            if row is not None:
                self._noted_at, self._firing_since = now, row["firing_since"]
        return min(self._firing_since, now - OUTAGE)


class Governor:
    """Releases parked runs; several may run, one at a time releases those of a tenant."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        wake: Wake,
        rate: float,
        runs_max: int = _RUNS_MAX,
    ) -> None:
        """`rate` runs of a tenant become claimable per second; 0: what is parked is let go."""
        self._pool = database.hot
        self._clock = clock
        self._wake = wake
        self._rate = rate or _UNBOUNDED_RATE
        self._runs_max = runs_max
        self._backlog = _Backlog()
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True

    async def run(self, *, interval: Duration) -> None:
        """Release every `interval`, less than AHEAD, until cancelled."""
        while True:
            try:
                if self.is_trusted():
                    await self.release()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            await asyncio.sleep(interval / SECOND)

    async def release(self) -> int:
        """Give out the places up to AHEAD of now; the number of runs released."""
        released = 0
        after = 0
        while tenants := await self._tenants(after):
            now = self._clock.now()
            if not after and self._backlog.shrinks(await self._overdue(now), now):
                return 0
            released += await self._release(tenants, now)
            after = tenants[-1]
        if released:
            _log.debug("late_runs_released", runs=released)
        return released

    async def _tenants(self, after: int) -> Sequence[int]:
        rows = await self._pool.fetch(_SQL["parked_tenants"], after=after, tenants_max=_TENANTS_MAX)
        return [row["tenant_id"] for row in rows]

    async def _overdue(self, now: Instant) -> Sequence[tuple[int, Instant]]:
        rows = await self._pool.fetch(_SQL["overdue_fires"], before=now - OUTAGE)
        return [(row["partition_id"], row["next_run_at"]) for row in rows]

    async def _release(self, tenants: Sequence[int], now: Instant) -> int:
        """In bounded statements, each committed by itself, until no tenant was cut short."""
        released = 0
        await self._pool.execute(_SQL["begin_releases"], tenant_ids=tenants, now=now)
        while tenants:
            row = await self._pool.fetch_one(
                _SQL["release_runs"],
                tenant_ids=tenants,
                now=now,
                until=now + AHEAD,
                rate=self._rate,
                runs_max=max(1, self._runs_max // len(tenants)),
            )
            assert row is not None, "release_runs always answers one row"
            # No lanes would mean all of them.
            if row["lanes"]:
                self._wake.lanes({Lane(*lane) for lane in row["lanes"]})
            released += row["runs"]
            tenants = sorted(row["full_tenants"])
        return released


class _Backlog:
    """Whether the overdue fires, as they are seen from tick to tick, become fewer."""

    def __init__(self) -> None:
        self._seen: Sequence[tuple[int, Instant]] = ()
        self._since: Instant | None = None
        self._moved_at: Instant = 0
        self._stands_still = False

    def shrinks(self, overdue: Sequence[tuple[int, Instant]], now: Instant) -> bool:
        """True for HELD_MAX at the most: who is always behind must release, too."""
        if not overdue:
            self._since = None
            return False
        if self._since is None or overdue != self._seen:
            # What stood still and moves again is another backlog.
            if self._since is None or self._stands_still:
                self._since = now
            self._seen, self._moved_at, self._stands_still = overdue, now, False
        elif now - self._moved_at >= _STILL:
            self._stands_still = True
        return not self._stands_still and now - self._since < HELD_MAX
