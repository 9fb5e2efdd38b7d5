"""Who takes runs of which queue, and who of them gets the next: round-robin over credit, and
with a backlog by whole messages.
"""

from collections import Counter
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.queue_book import QueueBook
from fencepost_server.policy.fairness import Turns

# Subscribers that are asked for credit when one run looks for one of them.
_ASKED_MAX = 8
# With a backlog, subscribers take turns by so many runs, as many as a message holds.
_BLOCK_MAX = 128
# Each claim in a row that was as large as a claim may be, and full, makes the block larger.
_BLOCKS = (1, 4, 16, 64, _BLOCK_MAX)


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
    """Somebody with credit. Called from the event loop of the dispatcher only."""

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


class Dealer:
    """Deals in slots: one per run that is asked for, with the subscriber that shall get it."""

    def __init__(self, *, book: QueueBook, batch_max: int) -> None:
        """At most `batch_max` slots at once."""
        self._book = book
        self._batch_max = batch_max
        self._turns = Turns()
        self._turn = 0
        self._subscribers: dict[int, list[Subscriber]] = {}
        # Slots of claims under way, by id of the subscriber: more than one claim may be.
        self._offered: dict[int, int] = {}

    def subscribe(self, subscriber: Subscriber) -> None:
        """Runs of its queues may go to it from now on."""
        for queue_id in subscriber.subscriptions:
            self._subscribers.setdefault(queue_id, []).append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Nothing more is dealt to it; a claim under way may still deliver."""
        for queue_id in subscriber.subscriptions:
            found = self._subscribers.get(queue_id, [])
            if subscriber in found:
                found.remove(subscriber)
            if not found:
                self._subscribers.pop(queue_id, None)

    @property
    def queue_ids(self) -> KeysView[int]:
        """Queues with a subscriber."""
        return self._subscribers.keys()

    def workers_of(self, queue_id: int) -> int:
        """Subscribers of a queue."""
        return len(self._subscribers.get(queue_id, ()))

    def order(self, giving: Collection[int]) -> list[int]:
        """The queues that have something to give, whose turn it is first."""
        return self._turns.order(self._book.tenants(giving))

    def takers(
        self, queue_id: int, lanes: Collection[tuple[int, int]]
    ) -> dict[frozenset[tuple[int, int]], list[Subscriber]]:
        """Subscribers with credit, grouped by the ready lanes they take."""
        groups: dict[frozenset[tuple[int, int]], list[Subscriber]] = {}
        # By what a subscription takes, which is the same for most.
        accepted: dict[frozenset[int] | None, frozenset[tuple[int, int]]] = {}
        for subscriber in self._subscribers.get(queue_id, ()):
            if self._credit(queue_id, subscriber) <= 0:
                continue
            subscription = subscriber.subscriptions[queue_id]
            taken = accepted.get(subscription.kind_ids)
            if taken is None:
                taken = frozenset(lane for lane in lanes if subscription.takes(lane[0]))
                accepted[subscription.kind_ids] = taken
            if taken:
                groups.setdefault(taken, []).append(subscriber)
        return groups

    def next_taker(self, queue_id: int, kind_id: int) -> Subscriber | None:
        """One with credit who takes runs of this kind, another one each time. Only some are
        asked, so that the answer costs the same however many there are.
        """
        subscribers = self._subscribers.get(queue_id, ())
        self._turn += 1
        for step in range(min(len(subscribers), _ASKED_MAX)):
            subscriber = subscribers[(self._turn + step) % len(subscribers)]
            if subscriber.subscriptions[queue_id].takes(kind_id) and (
                self._credit(queue_id, subscriber) > 0
            ):
                return subscriber
        return None

    def deal(
        self,
        queue_id: int,
        takers: Sequence[Subscriber],
        giving: Collection[int],
        full: int = 0,
    ) -> list[Subscriber]:
        """Who gets the first run, the second, ...: round-robin over the credit in hand.

        A worker that listens to several of the queues that are `giving`, as in the last
        `order`, leaves each its share. `full`: how many claims in a row gave as many runs as a
        claim may. With such a backlog and more credit than one claim can use, some take part
        with whole messages, and the others in the next claims. Those who take part are dealt
        round-robin all the same: if the claim finds little, it spreads.
        """
        shares = [(subscriber, self._share(queue_id, subscriber, giving)) for subscriber in takers]
        left = [(subscriber, share) for subscriber, share in shares if share > 0]
        block = _BLOCKS[min(full, len(_BLOCKS) - 1)]
        if block > 1 and sum(min(share, block) for _, share in left) > self._batch_max:
            left = self._next_by_blocks(queue_id, left, block)
        else:
            self._turn += 1
            start = self._turn % max(1, len(left))
            left = left[start:] + left[:start]
        slots: list[Subscriber] = []
        while left and len(slots) < self._batch_max:
            # As many rounds at once as everybody who is left takes part in.
            room = self._batch_max - len(slots)
            rounds = max(1, min(min(share for _, share in left), room // len(left)))
            slots += [subscriber for subscriber, _ in left[:room]] * rounds
            left = [(subscriber, n - rounds) for subscriber, n in left if n > rounds]
        return slots

    def _next_by_blocks(
        self, queue_id: int, left: Sequence[tuple[Subscriber, int]], block: int
    ) -> list[tuple[Subscriber, int]]:
        """Those whose turn it is, enough for one claim; whoever has had its turn is last."""
        chosen: list[tuple[Subscriber, int]] = []
        room = self._batch_max
        for subscriber, share in left:
            chosen.append((subscriber, min(share, block)))
            room -= chosen[-1][1]
            if room <= 0:
                break
        served = {id(subscriber) for subscriber, _ in chosen}
        subscribers = self._subscribers.get(queue_id, [])
        # Sorting is stable.
        subscribers.sort(key=lambda subscriber: id(subscriber) in served)
        return chosen

    @contextmanager
    def offered(self, slots: Sequence[Subscriber]) -> Iterator[None]:
        """While a claim for these slots is under way, no other is made for the same credit."""
        counts = Counter(map(id, slots))
        for place, count in counts.items():
            self._offered[place] = self._offered.get(place, 0) + count
        try:
            yield
        finally:
            for place, count in counts.items():
                self._offered[place] -= count
                if not self._offered[place]:
                    del self._offered[place]

    def deliver(self, queue_id: int, slots: Sequence[Subscriber], runs: Sequence[Claimed]) -> None:
        """Hands over what a claim for these slots gave."""
        settings = self._book.settings[queue_id]
        takers = {id(slot): slot for slot in slots}
        hands: dict[int, Sequence[Claimed]] = {id(slots[0]): runs} if runs else {}
        if len(takers) > 1:
            lists: dict[int, list[Claimed]] = {}
            for run in runs:
                lists.setdefault(id(slots[run.place - 1]), []).append(run)
            hands = dict(lists)
        for place, dealt in hands.items():
            subscriber = takers[place]
            subscriber.deliver(dealt)
            self._turns.charge(
                queue_id,
                settings.tenant_id,
                len(dealt),
                weight=subscriber.subscriptions[queue_id].weight,
                tenant_weight=settings.weight,
            )

    def _credit(self, queue_id: int, subscriber: Subscriber) -> int:
        return subscriber.credit(queue_id) - self._offered.get(id(subscriber), 0)

    def _share(self, queue_id: int, subscriber: Subscriber, giving: Collection[int]) -> int:
        credit = self._credit(queue_id, subscriber)
        known = [each for each in subscriber.subscriptions if each in giving]
        if len(known) == 1:
            return credit
        settings = self._book.settings
        shares = self._turns.shares(
            credit,
            self._book.tenants(known),
            {
                each: (subscriber.subscriptions[each].weight, settings[each].weight)
                for each in known
            },
        )
        return shares[queue_id]
