"""Gives back what a session leaves behind: runs that never reached their worker for certain, and
those that it abandons when it says goodbye.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog

from fencepost_server.clock import SECOND, Duration
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.last_reports import store_last
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.verdicts import Report
from fencepost_server.policy.outcome import Released

_log = structlog.get_logger("settlement")

# What a broken stream leaves a worker to say that it has a run it never receipted.
UNRECEIPTED_FUSE: Duration = 5 * SECOND


class Settlement:
    """Gives back runs that never reached a worker, also after their session is gone."""

    def __init__(self, *, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._running: set[asyncio.Task[None]] = set()

    def undelivered(self, runs: Sequence[tuple[RunKey, int]]) -> None:
        """Release runs whose write never began: free at once, no budget used."""
        if runs:
            self._start(self._release(runs))

    def unreceipted(self, runs: Sequence[tuple[RunKey, int]]) -> None:
        """Cut the leases of runs that were written without a receipt."""
        if runs:
            self._start(self._lifecycle.cut_leases(runs, fuse=UNRECEIPTED_FUSE))

    async def store(self, reports: Sequence[Report]) -> None:
        """Store the last reports of a worker that will not wait for verdicts.

        Raises StorageUnavailable or ServerOverloaded.
        """
        await store_last(self._lifecycle, reports)

    async def finish(self) -> None:
        """Until everything started so far is stored."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        running = asyncio.get_running_loop().create_task(work)
        self._running.add(running)
        running.add_done_callback(self._ended)

    def _ended(self, running: asyncio.Task[None]) -> None:
        self._running.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            # Their leases run out by themselves; nothing is lost but time.
            _log.warning("settlement_failed", error=repr(error))

    async def _release(self, runs: Sequence[tuple[RunKey, int]]) -> None:
        ending = Released(undelivered=True)
        await self.store([Report(key=key, attempt=attempt, ending=ending) for key, attempt in runs])
