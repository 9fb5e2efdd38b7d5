"""Work for callers without a session: long polls that claim, and single runs by name.

A long poll holds no connection while it waits. A claim whose caller has gone by the time it
commits is given back at once.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from fencepost_server.clock import SECOND, Clock, Duration, Instant, monotonic
from fencepost_server.domain.run import RunKey, stable_fraction
from fencepost_server.engine.claim_memory import ClaimMemory, NothingTakenError
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.dispatcher import Dispatcher, QueueSettings, Subscription
from fencepost_server.engine.lifecycle import Lifecycle, Report
from fencepost_server.engine.named_lease import (
    PAUSED_RETRY_AFTER,
    LeaseAnswer,
    LeaseRefusal,
    NamedLeases,
)
from fencepost_server.errors import FencepostError
from fencepost_server.policy.outcome import Released
from fencepost_server.store.database import Database
from fencepost_server.store.requests import RequestKey
from fencepost_server.store.statements import load

_SQL = load("unary_work")
_log = structlog.get_logger("unary_work")

DRAINING_RETRY_AFTER: Duration = SECOND
# A lane that is ready but gives nothing (caps, others were faster) is tried again this late.
_LOOK_AGAIN: Duration = SECOND
_LANES_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAsk:
    """One long poll. `is_alive` says whether the caller still waits for its answer."""

    worker_id: str
    subscriptions: Mapping[int, Subscription]
    runs_max: int
    wait: Duration
    request: RequestKey | None
    is_alive: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswer:
    """Runs, or none and when to ask again (None: at once).

    `is_repeat`: they were handed out before, to an earlier call with the same id.
    """

    worker_id: str
    runs: Sequence[Claimed] = ()
    retry_after: Duration | None = None
    is_repeat: bool = False


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
        self._polls: set[asyncio.Event] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._turn = 0
        self._is_draining = False

    def now(self) -> Instant:
        """The database clock's instant."""
        return self._clock.now()

    def drain(self) -> None:
        """End all polls; nothing is claimed from now on."""
        self._is_draining = True
        for poll in self._polls:
            poll.set()

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

    # Long polls ---------------------------------------------------------------------------

    async def claim(self, ask: ClaimAsk) -> ClaimAnswer:
        """Up to `runs_max` runs of one queue as soon as there are any, else none after `wait`.

        Raises RequestIdReused or StorageUnavailable.
        """
        if ask.request is not None:
            async with self._database.requests.connection() as connection:
                before = await self._memory.recall(connection, ask.request)
            if before is not None:
                return ClaimAnswer(worker_id=before[0], runs=before[1], is_repeat=True)
        until = monotonic() + ask.wait
        event = asyncio.Event()
        self._polls.add(event)
        self._dispatcher.watch(ask.subscriptions, event)
        try:
            lanes = await self._first_lanes(ask)
            while True:
                if self._is_draining:
                    return ClaimAnswer(worker_id=ask.worker_id, retry_after=DRAINING_RETRY_AFTER)
                event.clear()
                settings = await self._dispatcher.settings_of(ask.subscriptions)
                if all(settings[queue_id].paused for queue_id in ask.subscriptions):
                    return ClaimAnswer(worker_id=ask.worker_id, retry_after=PAUSED_RETRY_AFTER)
                answer = await self._try_queues(ask, lanes, settings)
                if answer is not None:
                    return answer
                if not await self._sleep(ask, event, until):
                    return ClaimAnswer(worker_id=ask.worker_id)
                lanes = self._known_lanes(ask)
        finally:
            self._dispatcher.unwatch(ask.subscriptions, event)
            self._polls.discard(event)

    async def _first_lanes(self, ask: ClaimAsk) -> dict[int, set[tuple[int, int]]]:
        """What is known, else what one look into each queue finds: a poll that does not wait
        must not depend on what this process has heard."""
        known = self._known_lanes(ask)
        if known:
            return known
        now = self._clock.now()
        async with self._database.requests.connection() as connection:
            for queue_id, subscription in ask.subscriptions.items():
                rows = await connection.fetch(
                    _SQL["ready_lanes_of_queue"],
                    queue_id=queue_id,
                    now=now,
                    lanes_max=_LANES_MAX,
                )
                found = {
                    (row["kind_id"], row["priority"])
                    for row in rows
                    if subscription.takes(row["kind_id"])
                }
                if found:
                    known[queue_id] = found
        return known

    def _known_lanes(self, ask: ClaimAsk) -> dict[int, set[tuple[int, int]]]:
        return {
            queue_id: lanes
            for queue_id, subscription in ask.subscriptions.items()
            if (lanes := self._dispatcher.ready_lanes(subscription))
        }

    async def _try_queues(
        self,
        ask: ClaimAsk,
        lanes: Mapping[int, set[tuple[int, int]]],
        settings: Mapping[int, QueueSettings],
    ) -> ClaimAnswer | None:
        """The first queue that gives something, in an order that favours weight."""
        self._turn += 1
        turn = str(self._turn)
        order = sorted(
            lanes,
            key=lambda queue_id: (
                stable_fraction(turn, ask.worker_id, str(queue_id))
                ** (1 / ask.subscriptions[queue_id].weight)
            ),
            reverse=True,
        )
        for queue_id in order:
            if settings[queue_id].paused:
                continue
            if self._is_draining or not ask.is_alive():
                return ClaimAnswer(worker_id=ask.worker_id)
            taking = asyncio.get_running_loop().create_task(
                self._take(ask, queue_id, lanes[queue_id], settings[queue_id])
            )
            try:
                answer = await asyncio.shield(taking)
            except asyncio.CancelledError:
                # The caller is gone, the claim may commit all the same.
                self._start(self._give_back_later(taking))
                raise
            if answer is not None:
                return answer
        return None

    async def _take(
        self,
        ask: ClaimAsk,
        queue_id: int,
        lanes: set[tuple[int, int]],
        settings: QueueSettings,
    ) -> ClaimAnswer | None:
        wanted = ask.runs_max
        if bound := ask.subscriptions[queue_id].in_flight_max:
            wanted = min(wanted, bound)
        worker_ids = [ask.worker_id] * wanted
        if ask.request is None:
            runs = await self._claimer.claim(
                queue_id, lanes=lanes, worker_ids=worker_ids, is_capped=settings.is_capped
            )
            return ClaimAnswer(worker_id=ask.worker_id, runs=runs) if runs else None
        try:
            async with self._database.hot.transaction() as connection:
                if not await self._memory.reserve(connection, ask.request, ask.worker_id):
                    before = await self._memory.recall(connection, ask.request)
                    if before is None:
                        return None
                    return ClaimAnswer(worker_id=before[0], runs=before[1], is_repeat=True)
                runs = await self._claimer.claim(
                    queue_id,
                    lanes=lanes,
                    worker_ids=worker_ids,
                    is_capped=settings.is_capped,
                    connection=connection,
                )
                if not runs:
                    raise NothingTakenError
                await self._memory.remember(connection, ask.request, runs)
        except NothingTakenError:
            return None
        return ClaimAnswer(worker_id=ask.worker_id, runs=runs)

    async def _sleep(self, ask: ClaimAsk, event: asyncio.Event, until: int) -> bool:
        """Until something may be ready; False when the poll is over."""
        now = monotonic()
        if now >= until or not ask.is_alive():
            return False
        wake_at = min(until, now + _LOOK_AGAIN)
        if not self._known_lanes(ask):
            wake_at = until
        coming = self._dispatcher.next_ready_at(ask.subscriptions)
        if coming is not None:
            wake_at = min(wake_at, now + max(coming - self._clock.now(), 0) + 1000)
        try:
            async with asyncio.timeout((wake_at - now) / SECOND):
                await event.wait()
        except TimeoutError:
            return wake_at < until or self._is_draining
        return True

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
        await self._lifecycle.report(
            [Report(key=run.key, attempt=run.attempt, ending=ending) for run in runs]
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
