"""What a process knows of the queues it serves: their settings, from where on their lanes hold
something, and which of them can give nothing before a place or a token is free.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest

from fencepost_server.clock import SECOND, Clock, Duration, Instant
from fencepost_server.domain.run import Lane
from fencepost_server.store.database import Pool
from fencepost_server.store.statements import load

_SQL = load("claims")

# Claims skip index entries that are known to be dead: the bound trails the last claim that
# drained the queue. A claim without the bound comes every minute.
_BOUND_LAG: Duration = 10 * SECOND
_UNBOUNDED_EVERY: Duration = 60 * SECOND
# A fast rate is claimed for in strokes of so much of its tokens, not one by one.
_STROKES_PER_SECOND = 20
# No token is waited for longer than this without another look: the rate may have changed.
_LOOK_AGAIN: Duration = SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """What a claim must know of its queue. `rate_limit`: claims per second."""

    name: str
    tenant_id: int
    tenant: str
    paused: bool
    # Under a cap or a rate of its own, its tenant or its jobs.
    is_capped: bool
    # Only some of its runs may be at their cap, those of a job or of a key.
    is_capped_in_parts: bool
    # Under a cap that counts runs of the tenant's other queues, too.
    shares_places: bool
    rate_limit: float | None
    # Of the tenant, among tenants that share workers.
    weight: int


class QueueBook:
    """Filled by looks into the database; what it says of a queue may be a poll old."""

    def __init__(self, *, pool: Pool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self.settings: dict[int, QueueSettings] = {}
        self._bounds: dict[Lane, Instant] = {}
        self._unbounded_at: dict[int, Instant] = {}
        # Queues that gave less than was asked for, until a place is free or (not 0) until then.
        self._closed: dict[int, Instant] = {}
        # When the settings of a queue were last read, by the number of the look.
        self._read: dict[int, int] = {}
        self._looks = 0
        # How often places of a tenant were freed: a claim under way may not have seen the last.
        self._frees: dict[int, int] = {}
        # Hears which tenants have places free again, for the other processes.
        self.tell_freed: Callable[[Collection[int]], None] | None = None

    async def load(self, queue_ids: Iterable[int]) -> None:
        """Reads the settings of these queues as they are now."""
        wanted = sorted(set(queue_ids))
        if not wanted:
            return
        rows = await self._pool.fetch(_SQL["queue_settings"], queue_ids=wanted)
        self._looks += 1
        for queue_id in wanted:
            self._read[queue_id] = self._looks
        for row in rows:
            self.settings[row["queue_id"]] = QueueSettings(
                name=row["name"],
                tenant_id=row["tenant_id"],
                tenant=row["tenant_name"],
                paused=row["paused"],
                is_capped=row["is_capped"],
                is_capped_in_parts=row["is_capped_in_parts"],
                shares_places=row["shares_places"],
                rate_limit=row["rate_limit"],
                weight=row["weight"],
            )

    def oldest(self, queue_ids: Iterable[int], count: int) -> list[int]:
        """Those `count` of these queues whose settings were read longest ago, or never."""
        return nsmallest(count, queue_ids, key=lambda queue_id: self._read.get(queue_id, 0))

    # Places and tokens ----------------------------------------------------------------------

    def frees(self, queue_id: int) -> int:
        """Read before a claim, for `exhausted` after it."""
        return self._frees.get(self.settings[queue_id].tenant_id, 0)

    async def exhausted(self, queue_id: int, *, wanted: int, given: int, frees: int) -> None:
        """A claim of a queue under limits gave less than `wanted`: nothing is asked of it until
        that may have changed."""
        settings = self.settings[queue_id]
        opens_at = 0
        if settings.rate_limit is not None:
            allowed_at = await self.allowed_at(queue_id, wanted=wanted - given)
            if allowed_at > self._clock.now():
                opens_at = allowed_at
        is_spent = not given or not settings.is_capped_in_parts
        if opens_at or (is_spent and frees == self.frees(queue_id)):
            self._closed[queue_id] = opens_at

    async def allowed_at(self, queue_id: int, *, wanted: int) -> Instant:
        """When the rate of a queue allows some of `wanted` claims; a past instant: now."""
        rate = self.settings[queue_id].rate_limit
        if rate is None:
            return 0
        stroke = max(1, min(wanted, int(rate / _STROKES_PER_SECOND)))
        row = await self._pool.fetch_one(_SQL["claims_allowed"], queue_id=queue_id, wanted=stroke)
        if row is None or row["tokens"] >= stroke:
            return 0
        # By the process's clock, which may differ a little from the database's own.
        left: Duration = row["allowed_at"] - row["clock"]
        return self._clock.now() + min(left + 1, _LOOK_AGAIN)

    def is_closed(self, queue_id: int) -> bool:
        """Whether it is no use to ask this queue now."""
        opens_at = self._closed.get(queue_id)
        if opens_at is None:
            return False
        if opens_at and opens_at <= self._clock.now():
            del self._closed[queue_id]
            return False
        return True

    def opens_at(self, queue_ids: Iterable[int]) -> Instant | None:
        """When the next of these queues has tokens, as far as known."""
        closed = [self._closed[queue_id] for queue_id in queue_ids if queue_id in self._closed]
        return min((at for at in closed if at), default=None)

    def open_all(self) -> None:
        """Ask every queue again, except those that wait for tokens."""
        self._closed = {queue_id: at for queue_id, at in self._closed.items() if at}

    def open(self, tenant_ids: Collection[int]) -> set[int]:
        """Places of these tenants may be free; the queues that are asked again."""
        for tenant_id in tenant_ids:
            self._frees[tenant_id] = self._frees.get(tenant_id, 0) + 1
        opened = {
            queue_id
            for queue_id, at in self._closed.items()
            if not at and self.settings[queue_id].tenant_id in tenant_ids
        }
        for queue_id in opened:
            del self._closed[queue_id]
        return opened

    def capped_tenants(self, queue_ids: Iterable[int]) -> set[int]:
        """The tenants of those of these queues that are under caps, as far as known."""
        return {
            settings.tenant_id
            for queue_id in queue_ids
            if (settings := self.settings.get(queue_id)) is not None and settings.is_capped
        }

    def tell(self, queue_ids: Iterable[int]) -> None:
        """Other processes may have the places that are free in these queues."""
        tenant_ids = self.capped_tenants(queue_ids)
        if tenant_ids and self.tell_freed is not None:
            self.tell_freed(tenant_ids)

    # Bounds -----------------------------------------------------------------------------------

    def bound(self, queue_id: int, lanes: Iterable[tuple[int, int]], now: Instant) -> Instant:
        """The lowest bound of these lanes: what others drained says nothing about them."""
        if now - self._unbounded_at.get(queue_id, 0) >= _UNBOUNDED_EVERY:
            self._unbounded_at[queue_id] = now
            return 0
        return min(self._bounds.get(Lane(queue_id, *lane), 0) for lane in lanes)

    def drained_until(self, queue_id: int, lanes: Iterable[tuple[int, int]]) -> Instant:
        """From where on these lanes may hold something, by the claims that drained them."""
        return min(self._bounds.get(Lane(queue_id, *lane), 0) for lane in lanes)

    def raise_bounds(
        self, queue_id: int, lanes: Iterable[tuple[int, int]], drained_at: Instant
    ) -> None:
        """A claim took all that these lanes held at `drained_at`."""
        for lane in lanes:
            key = Lane(queue_id, *lane)
            self._bounds[key] = max(self._bounds.get(key, 0), drained_at - _BOUND_LAG)

    def lower_bounds(self, found: Iterable[tuple[Lane, Instant]]) -> None:
        """Lanes hold something from then on, which a claim may have passed over because others
        had it locked."""
        for lane, earliest in found:
            if earliest <= self._bounds.get(lane, 0):
                self._bounds[lane] = earliest - 1

    def tenants(self, queue_ids: Iterable[int]) -> Mapping[int, int]:
        """The tenant_id of each of these queues whose settings are known."""
        return {
            queue_id: self.settings[queue_id].tenant_id
            for queue_id in queue_ids
            if queue_id in self.settings
        }
