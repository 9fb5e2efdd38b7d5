"""Long polls: claims for callers that wait for runs without a session.

A poll holds no connection while it waits, and deals fairly over the queues it names.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fencepost_server.clock import SECOND, Clock, Duration, Instant, monotonic
from fencepost_server.engine.claim_memory import ClaimMemory, NothingTakenError
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.dealing import Subscription
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.engine.merged_claims import MergedClaims
from fencepost_server.engine.named_lease import PAUSED_RETRY_AFTER
from fencepost_server.engine.queue_book import QueueSettings
from fencepost_server.errors import StorageUnavailable
from fencepost_server.policy.fairness import Turns
from fencepost_server.store.database import Database
from fencepost_server.store.requests import RequestKey
from fencepost_server.store.statements import load

_SQL = load("unary_work")

DRAINING_RETRY_AFTER: Duration = SECOND
# A lane that is ready but gives nothing (caps, others were faster) is tried again this late.
_LOOK_AGAIN: Duration = SECOND
_LANES_MAX = 1000
# Runs that callers together claim in one statement.
_MERGED_MAX = 500


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


class LongPolls:
    """The polls that are open. `abandoned(taking, before)` hears of a claim under way whose
    caller has gone, and of the runs claimed before it for the same answer.
    """

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        claimer: Claimer,
        dispatcher: Dispatcher,
        memory: ClaimMemory,
        abandoned: "Callable[[asyncio.Task[ClaimAnswer | None], Sequence[Claimed]], None]",
    ) -> None:
        self._database = database
        self._clock = clock
        self._claimer = claimer
        self._merged = MergedClaims(claimer=claimer, batch_max=_MERGED_MAX)
        self._dispatcher = dispatcher
        self._memory = memory
        self._abandoned = abandoned
        self._open: set[asyncio.Event] = set()
        self._turns = Turns()
        self._is_draining = False

    def drain(self) -> None:
        """End all polls; nothing is claimed from now on."""
        self._is_draining = True
        for poll in self._open:
            poll.set()

    async def claim(self, ask: ClaimAsk) -> ClaimAnswer:
        """Up to `runs_max` runs as soon as there are any, else none after `wait`.

        Raises RequestIdReused or StorageUnavailable.
        """
        if ask.request is not None:
            async with self._database.requests.connection() as connection:
                before = await self._memory.recall(connection, ask.request)
            if before is not None:
                return ClaimAnswer(worker_id=before[0], runs=before[1], is_repeat=True)
        until = monotonic() + ask.wait
        event = asyncio.Event()
        self._open.add(event)
        self._dispatcher.watch(ask.subscriptions, event)
        try:
            lanes = await self._first_lanes(ask)
            while True:
                if self._is_draining:
                    return ClaimAnswer(worker_id=ask.worker_id, retry_after=DRAINING_RETRY_AFTER)
                event.clear()
                settings = await self._settings(ask)
                if all(settings[queue_id].paused for queue_id in ask.subscriptions):
                    return ClaimAnswer(worker_id=ask.worker_id, retry_after=PAUSED_RETRY_AFTER)
                answer = await self._try_queues(ask, lanes, settings)
                if answer is not None:
                    return answer
                if await self._have_changed(settings):
                    continue
                lanes = self._known_lanes(ask)
                tokens_at = await self._tokens_at(ask, lanes, settings)
                left = 0 if tokens_at is None else max(0, tokens_at - self._clock.now())
                if tokens_at is not None and monotonic() + left >= until:
                    return ClaimAnswer(worker_id=ask.worker_id, retry_after=max(left, 1))
                if not await self._sleep(ask, event, until, tokens_at):
                    return ClaimAnswer(worker_id=ask.worker_id)
                lanes = self._known_lanes(ask)
        finally:
            self._dispatcher.unwatch(ask.subscriptions, event)
            self._open.discard(event)

    async def _settings(self, ask: ClaimAsk) -> Mapping[int, QueueSettings]:
        """Those that are known and may be a second old: a claim by old ones takes nothing that it
        may not."""
        known = self._dispatcher.book.settings
        if any(each not in known or known[each].paused for each in ask.subscriptions):
            await self._dispatcher.settings_of(ask.subscriptions)
        return {queue_id: known[queue_id] for queue_id in ask.subscriptions}

    async def _have_changed(self, settings: Mapping[int, QueueSettings]) -> bool:
        """Whether a claim by these settings may have given nothing because they were old."""
        current = await self._dispatcher.settings_of(settings)
        return any(current[queue_id] != settings[queue_id] for queue_id in settings)

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

    async def _tokens_at(
        self,
        ask: ClaimAsk,
        lanes: Mapping[int, set[tuple[int, int]]],
        settings: Mapping[int, QueueSettings],
    ) -> Instant | None:
        """When the first rate allows a claim, if nothing else holds back all that is ready."""
        waits = []
        for queue_id in lanes:
            if not settings[queue_id].paused:
                allowed_at = await self._dispatcher.book.allowed_at(queue_id, wanted=ask.runs_max)
                if allowed_at <= self._clock.now():
                    return None
                waits.append(allowed_at)
        return min(waits, default=None)

    async def _try_queues(
        self,
        ask: ClaimAsk,
        lanes: Mapping[int, set[tuple[int, int]]],
        settings: Mapping[int, QueueSettings],
    ) -> ClaimAnswer | None:
        """What the queues give whose turn it is: each its share first, then whatever is left.

        With a request id it is one queue alone, since locks of two tenants would be taken in
        one transaction.
        """
        tenants = {
            queue_id: settings[queue_id].tenant_id
            for queue_id in lanes
            if not settings[queue_id].paused
        }
        weights = {
            queue_id: (ask.subscriptions[queue_id].weight, settings[queue_id].weight)
            for queue_id in tenants
        }
        order = self._turns.order(tenants)
        shares = self._turns.shares(ask.runs_max, tenants, weights)
        if ask.request is not None:
            rounds = [(queue_id, ask.runs_max) for queue_id in order]
        else:
            rounds = [(each, shares[each]) for each in order]
            rounds += [(each, ask.runs_max) for each in order]
        runs: list[Claimed] = []
        spent: set[int] = set()
        for queue_id, bound in rounds:
            room = min(bound, ask.runs_max - len(runs))
            if own_max := ask.subscriptions[queue_id].in_flight_max:
                room = min(room, own_max - sum(run.queue_id == queue_id for run in runs))
            if room <= 0 or queue_id in spent:
                continue
            if self._is_draining or not ask.is_alive():
                break
            answer = await self._taken(
                ask, queue_id, lanes[queue_id], settings[queue_id], room, runs
            )
            if answer is not None and (answer.is_repeat or ask.request is not None):
                return answer
            given = [] if answer is None else answer.runs
            runs.extend(given)
            if len(given) < room:
                spent.add(queue_id)
        return ClaimAnswer(worker_id=ask.worker_id, runs=runs) if runs else None

    async def _taken(
        self,
        ask: ClaimAsk,
        queue_id: int,
        lanes: set[tuple[int, int]],
        settings: QueueSettings,
        wanted: int,
        before: Sequence[Claimed],
    ) -> ClaimAnswer | None:
        """As `_take`; if the caller goes meanwhile, its runs and those `before` go back."""
        taking = asyncio.get_running_loop().create_task(
            self._take(ask, queue_id, lanes, settings, wanted)
        )
        try:
            answer = await asyncio.shield(taking)
        except asyncio.CancelledError:
            # The caller is gone, the claim may commit all the same.
            self._abandoned(taking, before)
            raise
        except StorageUnavailable:
            if not before:
                raise
            return None
        if answer is not None and not answer.is_repeat:
            self._turns.charge(
                queue_id,
                settings.tenant_id,
                len(answer.runs),
                weight=ask.subscriptions[queue_id].weight,
                tenant_weight=settings.weight,
            )
        return answer

    async def _take(
        self,
        ask: ClaimAsk,
        queue_id: int,
        lanes: set[tuple[int, int]],
        settings: QueueSettings,
        wanted: int,
    ) -> ClaimAnswer | None:
        if ask.request is None:
            runs = await self._merged.claim(
                queue_id,
                lanes=frozenset(lanes),
                worker_id=ask.worker_id,
                wanted=wanted,
                is_capped=settings.is_capped,
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
                    worker_ids=[ask.worker_id] * wanted,
                    is_capped=settings.is_capped,
                    connection=connection,
                )
                if not runs:
                    raise NothingTakenError
                await self._memory.remember(connection, ask.request, runs)
        except NothingTakenError:
            return None
        return ClaimAnswer(worker_id=ask.worker_id, runs=runs)

    async def _sleep(
        self, ask: ClaimAsk, event: asyncio.Event, until: int, tokens_at: Instant | None
    ) -> bool:
        """Until something may be ready; False when the poll is over."""
        now = monotonic()
        if now >= until or not ask.is_alive():
            return False
        wake_at = min(until, now + _LOOK_AGAIN)
        if not self._known_lanes(ask):
            wake_at = until
        for coming in (self._dispatcher.next_ready_at(ask.subscriptions), tokens_at):
            if coming is not None:
                wake_at = min(wake_at, now + max(coming - self._clock.now(), 0) + 1000)
        try:
            async with asyncio.timeout((wake_at - now) / SECOND):
                await event.wait()
        except TimeoutError:
            return wake_at < until or self._is_draining
        return True
