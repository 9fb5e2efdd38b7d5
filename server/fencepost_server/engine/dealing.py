"""Who takes runs of which queue, and who of them gets the next: round-robin over credit."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.queue_book import QueueBook
from fencepost_server.policy.fairness import Turns


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
    def queue_ids(self) -> Collection[int]:
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
        for subscriber in self._subscribers.get(queue_id, ()):
            if self._credit(queue_id, subscriber) <= 0:
                continue
            subscription = subscriber.subscriptions[queue_id]
            accepted = frozenset(lane for lane in lanes if subscription.takes(lane[0]))
            if accepted:
                groups.setdefault(accepted, []).append(subscriber)
        return groups

    def deal(
        self, queue_id: int, takers: Sequence[Subscriber], giving: Collection[int]
    ) -> list[Subscriber]:
        """Who gets the first run, the second, ...: round-robin over the credit in hand.

        A worker that listens to several of the queues that are `giving`, as in the last
        `order`, leaves each its share.
        """
        shares = [(subscriber, self._share(queue_id, subscriber, giving)) for subscriber in takers]
        left = [(subscriber, share) for subscriber, share in shares if share > 0]
        self._turn += 1
        start = self._turn % max(1, len(left))
        left = left[start:] + left[:start]
        slots: list[Subscriber] = []
        while left and len(slots) < self._batch_max:
            room = self._batch_max - len(slots)
            slots.extend(subscriber for subscriber, _ in left[:room])
            left = [(subscriber, n - 1) for subscriber, n in left if n > 1]
        return slots

    @contextmanager
    def offered(self, slots: Sequence[Subscriber]) -> Iterator[None]:
        """While a claim for these slots is under way, no other is made for the same credit."""
        for slot in slots:
            self._offered[id(slot)] = self._offered.get(id(slot), 0) + 1
        try:
            yield
        finally:
            for slot in slots:
                self._offered[id(slot)] -= 1
                if not self._offered[id(slot)]:
                    del self._offered[id(slot)]

    def deliver(self, queue_id: int, slots: Sequence[Subscriber], runs: Sequence[Claimed]) -> None:
        """Hands over what a claim for these slots gave."""
        settings = self._book.settings[queue_id]
        hands: dict[int, tuple[Subscriber, list[Claimed]]] = {}
        for run in runs:
            slot = slots[run.place - 1]
            hands.setdefault(id(slot), (slot, []))[1].append(run)
        for subscriber, dealt in hands.values():
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
        known = [each for each in subscriber.subscriptions if each in giving]
        settings = self._book.settings
        shares = self._turns.shares(
            self._credit(queue_id, subscriber),
            self._book.tenants(known),
            {
                each: (subscriber.subscriptions[each].weight, settings[each].weight)
                for each in known
            },
        )
        return shares[queue_id]
