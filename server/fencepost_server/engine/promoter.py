"""Frees what waited for the end of a run: later runs of its job, and the next fire of an
interval that counts from it. At once after an end, and by a sweep every second.

It locks the job first, without waiting, and looks at its runs in the next statement;
completions never lock jobs.
"""

import asyncio
from collections.abc import Collection, Sequence

import structlog

from fencepost_server.clock import SECOND, Clock, Duration
from fencepost_server.domain.run import Lane
from fencepost_server.engine.after_completion import CompletionFollower
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

_SQL = load("outcomes")
_log = structlog.get_logger("promoter")

_BATCH = 500
_HINTS_MAX = 10_000
_FIRST_ID = "00000000-0000-0000-0000-000000000000"


class Promoter:
    """Run `run` until it is cancelled."""

    def __init__(self, *, database: Database, clock: Clock, wake: Wake) -> None:
        self._database = database
        self._clock = clock
        self._wake = wake
        self._follower = CompletionFollower(database=database, clock=clock, wake=wake)
        self._hinted: set[str] = set()
        self._woken = asyncio.Event()

    def ended(self, job_ids: Collection[str]) -> None:
        """Runs of these jobs have ended: others of theirs may be free now."""
        if len(self._hinted) < _HINTS_MAX:
            self._hinted.update(job_ids)
        self._woken.set()

    async def run(self, *, interval: Duration) -> None:
        """Promote until cancelled; a sweep over all blocked runs every `interval`."""
        loop = asyncio.get_running_loop()
        sweep_at = loop.time()
        while True:
            try:
                if loop.time() >= sweep_at:
                    sweep_at = loop.time() + interval / SECOND
                    await self.sweep()
                    await self.sweep_ends()
                else:
                    await self._promote_hinted()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            self._woken.clear()
            if not self._hinted:
                try:
                    async with asyncio.timeout_at(sweep_at):
                        await self._woken.wait()
                except TimeoutError:
                    pass

    async def sweep(self) -> int:
        """Look at every job with blocked runs; the number of runs freed."""
        freed = 0
        after = _FIRST_ID
        while True:
            rows = await self._database.hot.fetch(
                _SQL["jobs_with_blocked_runs"], after=after, jobs_max=_BATCH
            )
            job_ids = [str(row["job_id"]) for row in rows]
            if job_ids:
                freed += await self.promote(job_ids)
                after = job_ids[-1]
            if len(job_ids) < _BATCH:
                return freed

    async def promote(self, job_ids: Sequence[str]) -> int:
        """Free the oldest blocked run of each job that has no other due live run."""
        async with self._database.hot.transaction() as connection:
            locked = await connection.fetch(_SQL["lock_jobs_to_promote"], job_ids=job_ids)
            rows = await connection.fetch(
                _SQL["promote_runs"],
                job_ids=[row["job_id"] for row in locked],
                now=self._clock.now(),
            )
        self._wake.lanes({Lane(row["queue_id"], row["kind_id"], row["priority"]) for row in rows})
        return len(rows)

    async def follow(self, job_ids: Sequence[str]) -> int:
        """Set the next fires of those of these jobs that waited for an end which has come."""
        return await self._follower.follow(job_ids)

    async def sweep_ends(self) -> int:
        """Look at jobs that wait for an end; the number whose next fire was set."""
        return await self._follower.sweep()

    async def _promote_hinted(self) -> None:
        batch = [self._hinted.pop() for _ in range(min(_BATCH, len(self._hinted)))]
        if batch:
            await self.promote(sorted(batch))
            await self.follow(sorted(batch))
