"""Which runs a session holds of each queue, as far as its subscriptions bound that."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from fencepost_server.domain.run import RunKey
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.dealing import Subscription

Attempt: TypeAlias = tuple[RunKey, int]


class InFlight:
    """Counts nothing while no subscription has a bound."""

    def __init__(self, subscriptions: Mapping[int, Subscription]) -> None:
        self._bounds = {each.queue_id: each.in_flight_max for each in subscriptions.values()}
        self.is_bounded = any(self._bounds.values())
        self._queues: dict[Attempt, int] = {}
        self._unlisted: set[Attempt] = set()

    def free(self, queue_id: int, credit: int) -> int:
        """How much of `credit` the bound of a queue leaves."""
        bound = self._bounds[queue_id]
        if not bound:
            return credit
        return min(credit, bound - sum(1 for each in self._queues.values() if each == queue_id))

    def took(self, runs: Iterable[Claimed]) -> None:
        """These runs were handed to the session."""
        if self.is_bounded:
            for run in runs:
                self._queues[run.key, run.attempt] = run.queue_id

    def ended(self, attempt: Attempt) -> None:
        """The session holds it no more."""
        self._queues.pop(attempt, None)

    def keep(self, listed: Iterable[Attempt]) -> None:
        """A full inventory. A run that ended by a unary call gets no verdict in the session:
        what two in a row leave out is no longer in flight."""
        unlisted = self._queues.keys() - set(listed)
        for attempt in unlisted & self._unlisted:
            del self._queues[attempt]
        self._unlisted = unlisted
