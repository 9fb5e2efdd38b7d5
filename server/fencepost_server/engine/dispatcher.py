"""Brings ready runs to workers: claims for the credit in hand, and never for more.

Sessions and long polls subscribe; one loop claims per queue for the sum of its subscribers'
credits and deals the runs in rotation. A run never waits in the server for a worker.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from fencepost_server.clock import SECOND, Clock, Duration, Instant
from fencepost_server.domain.run import Lane
from fencepost_server.engine.claims import Claimer
from fencepost_server.engine.dealing import Dealer, Subscriber, Subscription
from fencepost_server.engine.lanes import Lanes
from fencepost_server.engine.queue_book import QueueBook, QueueSettings
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Pool
from fencepost_server.store.statements import load

_SQL = load("claims")
_log = structlog.get_logger("dispatcher")

_LANES_MAX = 100_000
# Settings of so many queues that hold nothing are read again with each scan.
_IDLE_READ = 500


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
        self.lanes = Lanes()
        self.book = QueueBook(pool=pool, clock=clock)
        self.dealer = Dealer(book=self.book, batch_max=batch_max)
        # Queues with places that other processes have not heard of yet.
        self._untold: set[int] = set()
        # Queues that were subscribed to and whose settings nobody has read yet.
        self._unread: set[int] = set()
        self._scan_asked = False
        self._woken = asyncio.Event()
        self._ready: dict[int, set[asyncio.Event]] = {}
        self.is_draining = False

    # Subscribers -----------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber) -> None:
        """Runs of its queues may go to it from now on."""
        self.dealer.subscribe(subscriber)
        self._unread |= subscriber.subscriptions.keys() - self.book.settings.keys()
        self._woken.set()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Nothing more is claimed for it; a claim under way may still deliver."""
        self.dealer.unsubscribe(subscriber)

    def credit_raised(self) -> None:
        """Some subscriber may take more."""
        self._woken.set()

    def hint(self, lanes: Iterable[Lane], at: Instant) -> None:
        """Runs of these lanes are claimable `at`; no lanes: look everywhere."""
        known = list(lanes)
        self._scan_asked |= not known
        self.lanes.hint(known, at)
        for lane in known:
            for event in self._ready.get(lane.queue_id, ()):
                event.set()
        self._woken.set()

    def places_freed(self, queue_ids: Collection[int]) -> None:
        """Attempts of these queues have ended: under caps, others may begin."""
        # What is claimed here at once, and whole, need not wake up every other server.
        now = self._clock.now()
        own = {each for each in queue_ids if self.takers_of_all(each, now)}
        self._untold |= own
        self.book.tell(set(queue_ids) - own)
        self._opened(self.book.open(self.book.capped_tenants(queue_ids)))

    def places_freed_elsewhere(self, tenant_ids: Collection[int]) -> None:
        """Another process says so of queues of these tenants."""
        self._opened(self.book.open(tenant_ids))

    def _opened(self, queue_ids: Collection[int]) -> None:
        for queue_id in queue_ids:
            for event in self._ready.get(queue_id, ()):
                event.set()
        # Also if none was closed: a claim under way may have counted before that end, and
        # then asks once more.
        self._woken.set()

    def workers_of(self, queue_id: int) -> int:
        """Subscribers of a queue on this server."""
        return self.dealer.workers_of(queue_id)

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
        await self.book.load(queue_ids)
        return self.book.settings

    def ready_lanes(self, subscription: Subscription) -> set[tuple[int, int]]:
        """The (kind_id, priority) it may take runs of now, as far as this process knows."""
        ready = self.lanes.ready(subscription.queue_id, self._clock.now())
        return {lane for lane in ready if subscription.takes(lane[0])}

    def next_ready_at(self, queue_ids: Iterable[int]) -> Instant | None:
        """When the next lane of these queues gets ready, as far as this process knows."""
        return self.lanes.next_at(queue_ids, self._clock.now())

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
        self.book.open_all()
        self.lanes.begin()
        rows = await self._pool.fetch(_SQL["ready_lanes"], lanes_max=_LANES_MAX)
        found = [
            (Lane(row["queue_id"], row["kind_id"], row["priority"]), row["available_at"])
            for row in rows
        ]
        self.lanes.replace(found)
        self.book.lower_bounds(found)
        now = self._clock.now()
        for queue_id, events in self._ready.items():
            if self.lanes.ready(queue_id, now):
                for event in events:
                    event.set()
        # Of queues that hold nothing, a claim that comes with a hint finds out what has changed.
        held = self.held()
        idle = (each for each in {*self.dealer.queue_ids, *self._ready} if each not in held)
        await self.book.load({*held, *self.book.oldest(idle, _IDLE_READ)})

    async def dispatch(self) -> int:
        """One round over the queues that have both credit and ready runs; runs claimed."""
        untold, self._untold = self._untold, set()
        try:
            return 0 if self.is_draining else await self._round(untold)
        finally:
            self.book.tell(untold)

    async def _round(self, untold: set[int]) -> int:
        """Takes queues out of `untold` whose places it has all used."""
        unread = set(self._unread)
        await self.book.load(unread)
        self._unread -= unread
        claimed, giving = 0, self.giving()
        while giving and not claimed:
            before = giving
            for queue_id in self.dealer.order(giving):
                claimed += await self._dispatch_queue(queue_id, giving, untold)
            # The turn may have been that of queues that have nothing, and now this is known.
            giving = self.giving()
            if len(giving) >= len(before):
                break
        return claimed

    def giving(self) -> set[int]:
        """Queues with a subscriber and, as far as known, with something for it."""
        return {queue_id for queue_id in self.held() if self._gives(queue_id)}

    def held(self) -> set[int]:
        """Queues with a subscriber that hold something, now or later, as far as known."""
        return self.lanes.queue_ids & self.dealer.queue_ids

    def _gives(self, queue_id: int) -> bool:
        """Whether a claim may find something, as far as this process knows."""
        settings = self.book.settings.get(queue_id)
        return (
            settings is not None
            and not settings.paused
            and not self.book.is_closed(queue_id)
            and bool(self.lanes.ready(queue_id, self._clock.now()))
        )

    def gives_at_once(self, queue_id: int) -> bool:
        """Whether a new run of this queue may go to a subscriber with the commit that makes it:
        nothing limits or pauses the queue, and no long poll waits for its turn there.
        """
        settings = self.book.settings.get(queue_id)
        return (
            settings is not None
            and not (self.is_draining or settings.paused or settings.is_capped)
            and queue_id not in self._ready
        )

    def is_idle_for(self, subscriber: Subscriber, now: Instant) -> bool:
        """Whether, as far as known, nothing is ready that this subscriber takes."""
        subscriptions = subscriber.subscriptions
        return not any(
            subscriptions[queue_id].takes(kind_id)
            for queue_id in self.lanes.queue_ids & subscriptions.keys()
            for kind_id, _ in self.lanes.ready(queue_id, now)
        )

    def takers_of_all(self, queue_id: int, now: Instant) -> Sequence[Subscriber]:
        """Those with credit who take all that competes for the places of a queue under caps."""
        settings = self.book.settings.get(queue_id)
        if self.is_draining or settings is None or settings.paused or not settings.is_capped:
            return ()
        if settings.shares_places and any(
            other != queue_id and self._competes(other, settings.tenant_id)
            for other in self.lanes.ready_queues(now)
        ):
            return ()
        lanes = frozenset(self.lanes.ready(queue_id, now))
        return self.dealer.takers(queue_id, lanes).get(lanes, ())

    def _competes(self, queue_id: int, tenant_id: int) -> bool:
        settings = self.book.settings.get(queue_id)
        return settings is None or settings.tenant_id == tenant_id

    async def _dispatch_queue(
        self, queue_id: int, giving: Collection[int], untold: set[int]
    ) -> int:
        settings = self.book.settings[queue_id]
        claimed = 0
        lanes = self.lanes.ready(queue_id, self._clock.now())
        for accepted, takers in self.dealer.takers(queue_id, lanes).items():
            full = self.lanes.full_claims(queue_id, accepted)
            slots = self.dealer.deal(queue_id, takers, giving, full)
            if not slots:
                continue
            with self.dealer.offered(slots):
                given = 0
                if full and len(accepted) > 1 and not settings.is_capped:
                    given = await self._claim_heads(queue_id, accepted, slots)
                if not given:
                    given = await self._claim(queue_id, accepted, slots, settings)
            if given < len(slots) and accepted == lanes:
                untold.discard(queue_id)
            claimed += given
        return claimed

    async def _claim(
        self,
        queue_id: int,
        lanes: frozenset[tuple[int, int]],
        slots: Sequence[Subscriber],
        settings: QueueSettings,
    ) -> int:
        self.lanes.begin()
        frees = self.book.frees(queue_id)
        started_at = self._clock.now()
        runs = await self._claimer.claim(
            queue_id,
            lanes=lanes,
            worker_ids=[slot.worker_id for slot in slots],
            is_capped=settings.is_capped,
            after=self.book.bound(queue_id, lanes, started_at),
        )
        self.dealer.deliver(queue_id, slots, runs)
        if len(runs) < len(slots) or len(slots) >= self._batch_max:
            self.lanes.gave(queue_id, lanes, is_full=len(runs) == len(slots))
        if len(runs) < len(slots):
            if settings.is_capped:
                # Fewer runs do not mean that no more are ready: the lanes stay, and the queue
                # is asked again once it has places or tokens.
                await self.book.exhausted(queue_id, wanted=len(slots), given=len(runs), frees=frees)
            else:
                self.lanes.drained(queue_id, lanes)
                self.book.raise_bounds(queue_id, lanes, started_at)
        return len(runs)

    async def _claim_heads(
        self, queue_id: int, lanes: frozenset[tuple[int, int]], slots: Sequence[Subscriber]
    ) -> int:
        """As `_claim` while several lanes hold a backlog: locks no more runs than it takes.

        If it gives less, others hold some of them or the backlog is over; that nothing is left
        is not known then.
        """
        self.lanes.begin()
        after = self.book.bound(queue_id, lanes, self._clock.now())
        heads = await self._claimer.heads(queue_id, lanes=lanes, runs_max=len(slots), after=after)
        if not heads:
            return 0
        runs = await self._claimer.claim(
            queue_id,
            lanes=heads.keys(),
            worker_ids=[slot.worker_id for slot in slots],
            is_capped=False,
            after=after,
            heads=heads,
        )
        self.dealer.deliver(queue_id, slots, runs)
        if len(runs) < len(slots):
            self.lanes.gave(queue_id, lanes, is_full=False)
        return len(runs)

    async def _sleep(self, until: float) -> None:
        """Until a hint, new credit, a lane that gets ready, or the next scan."""
        now = self._clock.now()
        loop = asyncio.get_running_loop()
        held = self.held()
        for coming in (self.lanes.next_at(held, now), self.book.opens_at(held)):
            if coming is not None:
                until = min(until, loop.time() + (coming - now) / SECOND + 0.001)
        try:
            async with asyncio.timeout_at(until):
                await self._woken.wait()
        except TimeoutError:
            pass
