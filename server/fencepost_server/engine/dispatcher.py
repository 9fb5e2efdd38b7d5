"""Brings ready runs to workers: claims for the credit in hand, and never for more.

Sessions and long polls subscribe; one loop claims per queue for the sum of its subscribers'
credits and deals the runs round-robin. A run never waits in the server for a worker.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from fencepost_server.clock import SECOND, Clock, Duration, Instant
from fencepost_server.domain.run import Lane
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.lanes import Lanes
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Pool
from fencepost_server.store.statements import load

_SQL = load("claims")
_log = structlog.get_logger("dispatcher")

_LANES_MAX = 100_000
# Claims skip index entries that are known to be dead: the bound trails the last claim that
# drained the queue. A claim without the bound comes every minute.
_BOUND_LAG: Duration = 10 * SECOND
_UNBOUNDED_EVERY: Duration = 60 * SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """One queue a subscriber takes runs from. `kind_ids` None: all kinds.

    `in_flight_max` 0: no bound of its own.
    """

    queue_id: int
    kind_ids: frozenset[int] | None
    in_flight_max: int = 0
    weight: int = 1

    def takes(self, kind_id: int) -> bool:
        """Whether runs of this kind may be handed to the subscriber."""
        return self.kind_ids is None or kind_id in self.kind_ids


class Subscriber(Protocol):
    """Somebody with credit. Called from the dispatcher's loop only."""

    @property
    def worker_id(self) -> str:
        """Who the runs are claimed for."""
        ...

    @property
    def subscriptions(self) -> Mapping[int, Subscription]:
        """By queue_id."""
        ...

    def credit(self, queue_id: int) -> int:
        """How many runs of this queue it may be sent now."""
        ...

    def deliver(self, runs: Sequence[Claimed]) -> None:
        """Takes claimed runs; if it has ended meanwhile it gives them back itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What a claim must know of its queue."""

    name: str
    tenant: str
    paused: bool
    is_capped: bool
    # Of the tenant, among tenants that share workers.
    weight: int = 1


class Dispatcher:
    """Run `run` until it is cancelled."""

    def __init__(
        self, *, pool: Pool, clock: Clock, claimer: Claimer, batch_max: int, poll: Duration
    ) -> None:
        """`batch_max` runs per claim; `poll` is the longest time between two looks."""
        self._pool = pool
        self._clock = clock
        self._claimer = claimer
        self._batch_max = batch_max
        self._poll = poll
        self._lanes = Lanes()
        self._settings: dict[int, QueueSettings] = {}
        self._bounds: dict[Lane, Instant] = {}
        self._unbounded_at: dict[int, Instant] = {}
        self._scan_asked = False
        self._subscribers: dict[int, list[Subscriber]] = {}
        self._turn = 0
        self._woken = asyncio.Event()
        self._ready: dict[int, set[asyncio.Event]] = {}
        self.is_draining = False

    # Subscribers -----------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        """Runs of its queues may go to it from now on."""
        for queue_id in subscriber.subscriptions:
            self._subscribers.setdefault(queue_id, []).append(subscriber)
        self._woken.set()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Nothing more is claimed for it; a claim under way may still deliver."""
        for queue_id in subscriber.subscriptions:
            found = self._subscribers.get(queue_id, [])
            if subscriber in found:
                found.remove(subscriber)
            if not found:
                self._subscribers.pop(queue_id, None)

    def credit_raised(self) -> None:
        """Some subscriber may take more."""
        self._woken.set()

    def hint(self, lanes: Iterable[Lane], at: Instant) -> None:
        """Runs of these lanes are claimable `at`; no lanes: look everywhere."""
        known = list(lanes)
        self._scan_asked |= not known
        self._lanes.hint(known, at)
        for lane in known:
            for event in self._ready.get(lane.queue_id, ()):
                event.set()
        self._woken.set()

    def workers_of(self, queue_id: int) -> int:
        """Subscribers of a queue on this server."""
        return len(self._subscribers.get(queue_id, ()))

    # What the long poll needs ------------------------------------------------------------

    def watch(self, queue_ids: Iterable[int], event: asyncio.Event) -> None:
        """Set `event` when something may be ready in one of these queues."""
        for queue_id in queue_ids:
            self._ready.setdefault(queue_id, set()).add(event)

    def unwatch(self, queue_ids: Iterable[int], event: asyncio.Event) -> None:
        """The reverse of `watch`."""
        for queue_id in queue_ids:
            events = self._ready.get(queue_id)
            if events is not None:
                events.discard(event)
                if not events:
                    del self._ready[queue_id]

    async def settings_of(self, queue_ids: Iterable[int]) -> Mapping[int, QueueSettings]:
        """Settings as they are now."""
        await self._load_settings(queue_ids)
        return self._settings

    def ready_lanes(self, subscription: Subscription) -> set[tuple[int, int]]:
        """The (kind_id, priority) it may take runs of now, as far as this process knows."""
        ready = self._lanes.ready(subscription.queue_id, self._clock.now())
        return {lane for lane in ready if subscription.takes(lane[0])}

    def next_ready_at(self, queue_ids: Iterable[int]) -> Instant | None:
        """When the next lane of these queues gets ready, as far as this process knows."""
        return self._lanes.next_at(queue_ids, self._clock.now())

    # The loop --------------------------------------------------------------------------

    async def run(self) -> None:
        """Scan, claim and deal until cancelled."""
        loop = asyncio.get_running_loop()
        scan_at = loop.time()
        while True:
            self._woken.clear()
            try:
                if self._scan_asked or loop.time() >= scan_at:
                    scan_at = loop.time() + self._poll / SECOND
                    await self.scan()
                claimed = await self.dispatch()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
                claimed = 0
                await asyncio.sleep(self._poll / SECOND / 4)
            if claimed:
                continue
            await self._sleep(scan_at)

    async def scan(self) -> None:
        """Learn which lanes hold runs, and the settings of the queues in use."""
        self._scan_asked = False
        self._lanes.begin()
        rows = await self._pool.fetch(_SQL["ready_lanes"], lanes_max=_LANES_MAX)
        self._lanes.replace(
            (Lane(row["queue_id"], row["kind_id"], row["priority"]), row["available_at"])
            for row in rows
        )
        now = self._clock.now()
        for queue_id, events in self._ready.items():
            if self._lanes.ready(queue_id, now):
                for event in events:
                    event.set()
        await self._load_settings({*self._subscribers, *self._ready})

    async def dispatch(self) -> int:
        """One round over the queues that have both credit and ready runs; runs claimed."""
        if self.is_draining:
            return 0
        claimed = 0
        queue_ids = list(self._subscribers)
        # Rotated, so that no queue is always the first to use a shared worker's credit.
        self._turn = (self._turn + 1) % max(1, len(queue_ids))
        for queue_id in queue_ids[self._turn :] + queue_ids[: self._turn]:
            lanes = self._lanes.ready(queue_id, self._clock.now())
            if lanes:
                claimed += await self._dispatch_queue(queue_id, lanes)
        return claimed

    async def _dispatch_queue(self, queue_id: int, lanes: set[tuple[int, int]]) -> int:
        if queue_id not in self._settings:
            await self._load_settings([queue_id])
        settings = self._settings.get(queue_id)
        if settings is None or settings.paused:
            return 0
        claimed = 0
        for accepted, takers in self._takers(queue_id, lanes).items():
            slots = self._deal(queue_id, takers)
            if slots:
                claimed += await self._claim(queue_id, accepted, slots, settings)
        return claimed

    async def _claim(
        self,
        queue_id: int,
        lanes: frozenset[tuple[int, int]],
        slots: Sequence[Subscriber],
        settings: QueueSettings,
    ) -> int:
        self._lanes.begin()
        started_at = self._clock.now()
        runs = await self._claimer.claim(
            queue_id,
            lanes=lanes,
            worker_ids=[slot.worker_id for slot in slots],
            is_capped=settings.is_capped,
            after=self._bound(queue_id, lanes, started_at),
        )
        # Under caps fewer runs do not mean that no more are ready: a place may get free with
        # the next completion, so the lanes stay until the next scan says otherwise.
        if len(runs) < len(slots) and not settings.is_capped:
            self._lanes.drained(queue_id, lanes)
            self._raise_bounds(queue_id, lanes, started_at)
        hands: dict[int, tuple[Subscriber, list[Claimed]]] = {}
        for run in runs:
            slot = slots[run.place - 1]
            hands.setdefault(id(slot), (slot, []))[1].append(run)
        for subscriber, dealt in hands.values():
            subscriber.deliver(dealt)
        return len(runs)

    def _takers(
        self, queue_id: int, lanes: set[tuple[int, int]]
    ) -> dict[frozenset[tuple[int, int]], list[Subscriber]]:
        """Subscribers with credit, grouped by the ready lanes they take."""
        groups: dict[frozenset[tuple[int, int]], list[Subscriber]] = {}
        for subscriber in self._subscribers.get(queue_id, ()):
            if subscriber.credit(queue_id) <= 0:
                continue
            subscription = subscriber.subscriptions[queue_id]
            accepted = frozenset(lane for lane in lanes if subscription.takes(lane[0]))
            if accepted:
                groups.setdefault(accepted, []).append(subscriber)
        return groups

    def _deal(self, queue_id: int, takers: Sequence[Subscriber]) -> list[Subscriber]:
        """Who gets the first run, the second, ...: round-robin over the credit in hand.

        A worker that listens to several queues with ready runs gives each its share.
        """
        now = self._clock.now()
        left: list[tuple[Subscriber, int]] = []
        for subscriber in takers:
            own = self._weight(subscriber.subscriptions[queue_id])
            total = sum(
                self._weight(each)
                for each in subscriber.subscriptions.values()
                if each.queue_id == queue_id or self._lanes.ready(each.queue_id, now)
            )
            credit = subscriber.credit(queue_id)
            left.append((subscriber, max(1, credit * own // total)))
        self._turn += 1
        start = self._turn % len(left)
        left = left[start:] + left[:start]
        slots: list[Subscriber] = []
        while left and len(slots) < self._batch_max:
            room = self._batch_max - len(slots)
            slots.extend(subscriber for subscriber, _ in left[:room])
            left = [(subscriber, n - 1) for subscriber, n in left if n > 1]
        return slots

    def _weight(self, subscription: Subscription) -> int:
        """The worker's own weight of the queue times its tenant's."""
        settings = self._settings.get(subscription.queue_id)
        return subscription.weight * (1 if settings is None else settings.weight)

    def _bound(self, queue_id: int, lanes: Iterable[tuple[int, int]], now: Instant) -> Instant:
        """The lowest bound of these lanes: what others drained says nothing about them."""
        if now - self._unbounded_at.get(queue_id, 0) >= _UNBOUNDED_EVERY:
            self._unbounded_at[queue_id] = now
            return 0
        return min(self._bounds.get(Lane(queue_id, *lane), 0) for lane in lanes)

    def _raise_bounds(
        self, queue_id: int, lanes: Iterable[tuple[int, int]], drained_at: Instant
    ) -> None:
        for lane in lanes:
            key = Lane(queue_id, *lane)
            self._bounds[key] = max(self._bounds.get(key, 0), drained_at - _BOUND_LAG)

    async def _load_settings(self, queue_ids: Iterable[int]) -> None:
        wanted = sorted(set(queue_ids))
        if not wanted:
            return
        rows = await self._pool.fetch(_SQL["queue_settings"], queue_ids=wanted)
        for row in rows:
            self._settings[row["queue_id"]] = QueueSettings(
                name=row["name"],
                tenant=row["tenant_name"],
                paused=row["paused"],
                is_capped=row["is_capped"],
                weight=row["weight"],
            )

    async def _sleep(self, until: float) -> None:
        """Until a hint, new credit, a lane that gets ready, or the next scan."""
        now = self._clock.now()
        coming = self._lanes.next_at(self._subscribers, now)
        loop = asyncio.get_running_loop()
        if coming is not None:
            until = min(until, loop.time() + (coming - now) / SECOND + 0.001)
        try:
            async with asyncio.timeout_at(until):
                await self._woken.wait()
        except TimeoutError:
            pass
