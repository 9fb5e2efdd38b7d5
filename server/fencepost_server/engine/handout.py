"""Hands a run out in the commit of its enqueue: who would get it, and how it gets there
(docs/adr/0044). Only where nothing waits: a busy system claims in batches, which costs less.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

from fencepost_server.clock import Instant
from fencepost_server.domain.run import Lane
from fencepost_server.engine.claims import Claimer
from fencepost_server.engine.dealing import Subscriber
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.store.database import Row
from fencepost_server.store.single_enqueues import PlainRun, Taker

# With more enqueues under way at once there is load, and one claim for all of them is cheaper.
UNDER_WAY_MAX = 4
# Lanes of the queue that the statement looks into besides the run's own.
_LANES_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Credit of a subscriber that a run may use; `taker` is what the statement must know."""

    subscriber: Subscriber
    taker: Taker
    now: Instant


class HandOuts:
    """Offers credit of this process's subscribers, and delivers what was claimed with it."""

    def __init__(self, *, dispatcher: Dispatcher, claimer: Claimer) -> None:
        self._dispatcher = dispatcher
        self._claimer = claimer
        self._under_way = 0
        # Hears of each run that was handed out.
        self.handed_out: list[Callable[[], None]] = []

    def offer(self, lane: Lane, *, now: Instant) -> Offer | None:
        """Who would get a run of this lane, if as far as this process knows nothing is waiting
        for the same credit and nothing limits or pauses the queue.
        """
        queue_id = lane.queue_id
        dispatcher = self._dispatcher
        if self._under_way >= UNDER_WAY_MAX or not dispatcher.gives_at_once(queue_id):
            return None
        subscriber = dispatcher.dealer.next_taker(queue_id, lane.kind_id)
        if subscriber is None or not dispatcher.is_idle_for(subscriber, now):
            return None
        subscription = subscriber.subscriptions[queue_id]
        own = (lane.kind_id, lane.priority)
        others = (
            each
            for each in dispatcher.lanes.of(queue_id)
            if each != own and subscription.takes(each[0])
        )
        lanes = [own, *islice(others, _LANES_MAX)]
        taker = Taker(
            worker_id=subscriber.worker_id,
            queue_id=queue_id,
            lanes=lanes,
            seen_after=dispatcher.book.drained_until(queue_id, lanes),
        )
        return Offer(subscriber=subscriber, taker=taker, now=now)

    def reserve(self, offer: Offer) -> Callable[[], None]:
        """Nobody else uses the credit until what this returns is called. To be called in the
        same turn of the event loop as `offer`.
        """
        reserved = ExitStack()
        self._under_way += 1
        reserved.callback(self._ended)
        reserved.enter_context(self._dispatcher.dealer.offered([offer.subscriber]))
        return reserved.close

    async def deliver(self, offer: Offer, run: PlainRun, row: Row) -> None:
        """Brings a run to the subscriber it was claimed for, while its credit is reserved.

        Raises StorageUnavailable when its definition cannot be read.
        """
        queue_id = offer.taker.queue_id
        claim = {
            "job_id": run.key.job_id,
            "scheduled_at": run.key.scheduled_at,
            "attempt": 1,
            "kind_id": row["kind_id"],
            "version": row["version"],
            "lease_s": row["lease_s"],
            "failure_count": 0,
            "payload": run.payload,
            "labels": row["run_labels"],
            "progress": None,
            "last_failure": None,
            "serial": False,
        }
        runs = await self._claimer.assemble([claim], queue_id=queue_id, now=offer.now)
        # The statement saw that nothing else was ready there.
        self._dispatcher.book.raise_bounds(queue_id, offer.taker.lanes, offer.now)
        self._dispatcher.dealer.deliver(queue_id, [offer.subscriber], runs)
        for told in self.handed_out:
            told()

    def _ended(self) -> None:
        self._under_way -= 1
        # The dispatcher may have found its credit on offer here.
        self._dispatcher.credit_raised()
