"""Work for callers without a session: long polls that claim, and single runs by name.

A long poll holds no connection while it waits. A claim whose caller has gone by the time it
commits is given back at once.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog

from fencepost_server.clock import Clock, Instant
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.claim_memory import ClaimMemory
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.engine.last_reports import store_last
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.long_poll import (
    DRAINING_RETRY_AFTER,
    ClaimAnswer,
    ClaimAsk,
    LongPolls,
)
from fencepost_server.engine.named_lease import LeaseAnswer, LeaseRefusal, NamedLeases
from fencepost_server.engine.verdicts import Report
from fencepost_server.errors import FencepostError
from fencepost_server.policy.outcome import Released
from fencepost_server.store.database import Database
from fencepost_server.store.requests import RequestKey

_log = structlog.get_logger("unary_work")


class UnaryWork:
    """Claims for ClaimRuns and LeaseRun."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        claimer: Claimer,
        dispatcher: Dispatcher,
        lifecycle: Lifecycle,
    ) -> None:
        self._database = database
        self._clock = clock
        self._claimer = claimer
        self._dispatcher = dispatcher
        self._lifecycle = lifecycle
        self._memory = ClaimMemory(clock=clock, claimer=claimer)
        self._named = NamedLeases(
            database=database, clock=clock, claimer=claimer, memory=self._memory
        )
        self._polls = LongPolls(
            database=database,
            clock=clock,
            claimer=claimer,
            dispatcher=dispatcher,
            memory=self._memory,
            abandoned=self._abandoned,
        )
        self._settling: set[asyncio.Task[None]] = set()
        self._is_draining = False

    def now(self) -> Instant:
        """The database clock's instant."""
        return self._clock.now()

    def drain(self) -> None:
        """End all polls; nothing is claimed from now on."""
        self._is_draining = True
        self._polls.drain()

    async def finish(self) -> None:
        """Until what callers left behind is given back."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    @property
    def is_settling(self) -> bool:
        """Whether something that a caller left behind is being given back."""
        return bool(self._settling)

    def give_back(self, runs: Sequence[Claimed]) -> None:
        """Releases runs whose answer nobody will read, in the background."""
        if runs:
            self._start(self._release(runs))

    async def claim(self, ask: ClaimAsk) -> ClaimAnswer:
        """Up to `runs_max` runs as soon as there are any, else none after `wait`.

        Raises RequestIdReused or StorageUnavailable.
        """
        return await self._polls.claim(ask)

    # One named run ------------------------------------------------------------------------

    async def lease(
        self, key: RunKey, *, worker_id: str, request: RequestKey | None
    ) -> LeaseAnswer:
        """The run, if it is claimable and the limits allow it.

        Raises RunNotFound, RequestIdReused or StorageUnavailable.
        """
        if self._is_draining:
            return LeaseAnswer(
                worker_id=worker_id,
                refusal=LeaseRefusal.LIMITED,
                state=await self._named.state_of(key),
                retry_after=DRAINING_RETRY_AFTER,
            )
        taking = asyncio.get_running_loop().create_task(
            self._named.take(key, worker_id=worker_id, request=request)
        )
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            self._start(self._give_back_later(taking))
            raise

    # What callers leave behind --------------------------------------------------------------

    def _abandoned(
        self, taking: "asyncio.Task[ClaimAnswer | None]", before: Sequence[Claimed]
    ) -> None:
        self._start(self._give_back_later(taking))
        self.give_back(before)

    async def _give_back_later(
        self, taking: "asyncio.Task[ClaimAnswer | None] | asyncio.Task[LeaseAnswer]"
    ) -> None:
        answer = await taking
        if answer is None or answer.is_repeat:
            return
        if isinstance(answer, LeaseAnswer):
            await self._release([] if answer.run is None else [answer.run])
        else:
            await self._release(answer.runs)

    async def _release(self, runs: Sequence[Claimed]) -> None:
        ending = Released(undelivered=True)
        await store_last(
            self._lifecycle,
            [Report(key=run.key, attempt=run.attempt, ending=ending) for run in runs],
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        running = asyncio.get_running_loop().create_task(work)
        self._settling.add(running)
        running.add_done_callback(self._settled)

    def _settled(self, running: "asyncio.Task[None]") -> None:
        self._settling.discard(running)
        if not running.cancelled() and (error := running.exception()) is not None:
            # The leases run out by themselves; nothing is lost but time.
            level = _log.warning if isinstance(error, FencepostError) else _log.error
            level("give_back_failed", error=repr(error))
