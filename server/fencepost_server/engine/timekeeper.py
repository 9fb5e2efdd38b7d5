"""Follows the database clock, and says when not to trust it.

A step against the monotonic clock of this process stops firing, reaping and retention for
the length of a lease: a clock that jumped ahead would fire early and expire every lease.
"""

import asyncio
from collections.abc import Callable

import structlog

from fencepost_server.clock import SECOND, Duration, monotonic
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

_SQL = load("upkeep")
_log = structlog.get_logger("timekeeper")

STEP_MAX: Duration = 5 * SECOND
DISTRUST: Duration = 30 * SECOND


class Timekeeper:
    """Run `run` until it is cancelled."""

    def __init__(self, *, database: Database, storage_changed: Callable[[bool], None]) -> None:
        """`storage_changed(reachable)` is called when that changes."""
        self._database = database
        self._storage_changed = storage_changed
        self._reachable: bool | None = None
        self._distrusted_until = 0

    @property
    def is_trusted(self) -> bool:
        """Whether decisions may rest on the clock now."""
        return monotonic() >= self._distrusted_until

    async def first_sample(self) -> None:
        """Until the database has answered once; it may start after this process."""
        while not self._database.clock.is_set:
            await self._sample()
            if not self._database.clock.is_set:
                await asyncio.sleep(1)

    async def run(self, *, interval: Duration) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(interval / SECOND)
            await self._sample()

    async def _sample(self) -> None:
        try:
            step = await self._database.sample_clock(_SQL["clock"])
        except StorageUnavailable as error:
            if self._reachable is not False:
                _log.warning("storage_unavailable", error=repr(error.__cause__))
            self._tell(False)
            return
        self._tell(True)
        if step is not None and abs(step) > STEP_MAX:
            self._distrusted_until = monotonic() + DISTRUST
            _log.error("clock_stepped", step_s=step / SECOND, paused_s=DISTRUST / SECOND)

    def _tell(self, reachable: bool) -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            self._storage_changed(reachable)
