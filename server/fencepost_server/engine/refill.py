"""Gives the places that ended attempts leave under caps to waiting runs, in the transaction
that ends them: no place is empty between two runs of one server.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

from fencepost_server.clock import Clock
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.dealing import Subscriber
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.store.database import Connection, Pool, Row

End: TypeAlias = Callable[[Connection], Awaitable[Sequence[Row]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    slots: Sequence[Subscriber]
    runs: Sequence[Claimed]


class Refills:
    """Claims beside ends, for subscribers of the dispatcher of this process.

    Only where no run is passed over for ever: every ready lane that competes for the place must
    be one that the taker takes. Elsewhere all servers compete for a place once it is free.
    """

    def __init__(
        self, *, pool: Pool, clock: Clock, claimer: Claimer, dispatcher: Dispatcher
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._claimer = claimer
        self._dispatcher = dispatcher

    def is_wanted(self) -> bool:
        """Whether some queue under caps has runs that a worker here could take."""
        now = self._clock.now()
        dispatcher = self._dispatcher
        return any(dispatcher.takers_of_all(each, now) for each in dispatcher.held())

    async def commit(self, end: End) -> tuple[Sequence[Row], set[int]]:
        """What `end` returned, rows with a queue_id, and the queues whose places were all taken
        again by this server. Raises what `end` raises, or the claims; then nothing was written
        as far as known.
        """
        filled: dict[int, _Filled] = {}
        try:
            with ExitStack() as offers:
                async with self._pool.transaction() as connection:
                    rows = await end(connection)
                    freed = Counter(int(row["queue_id"]) for row in rows)
                    for queue_id in sorted(freed):
                        claim = await self._claim(connection, queue_id, offers)
                        if claim is not None:
                            filled[queue_id] = claim
                for queue_id, claim in filled.items():
                    self._dispatcher.dealer.deliver(queue_id, claim.slots, claim.runs)
        finally:
            # The dispatcher may have found its credit on offer here.
            self._dispatcher.credit_raised()
        return rows, {each for each in filled if self._is_full(each, freed[each], filled[each])}

    async def _claim(
        self, connection: Connection, queue_id: int, offers: ExitStack
    ) -> _Filled | None:
        now = self._clock.now()
        takers = self._dispatcher.takers_of_all(queue_id, now)
        giving = self._dispatcher.giving() | {queue_id}
        self._dispatcher.dealer.order(giving)
        slots = self._dispatcher.dealer.deal(queue_id, takers, giving)
        if not slots:
            return None
        offers.enter_context(self._dispatcher.dealer.offered(slots))
        runs = await self._claimer.claim(
            queue_id,
            lanes=self._dispatcher.lanes.ready(queue_id, now),
            worker_ids=[slot.worker_id for slot in slots],
            is_capped=True,
            connection=connection,
            is_refill=True,
        )
        return _Filled(slots=slots, runs=runs)

    def _is_full(self, queue_id: int, freed: int, filled: _Filled) -> bool:
        """Whether nobody else need look at the places of a queue."""
        given = len(filled.runs)
        # Of jobs and keys, others than those that had a place freed may have been served.
        in_parts = self._dispatcher.book.settings[queue_id].is_capped_in_parts
        return given >= freed and (not in_parts or given < len(filled.slots))
