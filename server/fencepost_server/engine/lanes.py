"""What a process knows of ready lanes: hints as they come, and a scan every second.

A lane that a claim has drained is forgotten until a hint or the next scan; so ten thousand
idle queues cost one scan, not a query each.
"""

from collections.abc import Collection, Iterable, KeysView

from fencepost_server.clock import Instant
from fencepost_server.domain.run import Lane


class Lanes:
    """The earliest available_at known of each lane, 0 for "now"."""

    def __init__(self) -> None:
        self._earliest: dict[int, dict[tuple[int, int], Instant]] = {}
        self._hinted: set[Lane] = set()
        # Claims in a row that were as large as a claim may be, and full: there is a backlog.
        self._full: dict[Lane, int] = {}

    def hint(self, lanes: Iterable[Lane], at: Instant) -> None:
        """Something in these lanes is claimable `at`."""
        for lane in lanes:
            known = self._earliest.setdefault(lane.queue_id, {})
            key = (lane.kind_id, lane.priority)
            known[key] = min(at, known.get(key, at))
            self._hinted.add(lane)

    def begin(self) -> None:
        """A claim or a scan begins: hints from here on are newer than what it will see."""
        self._hinted.clear()

    def drained(self, queue_id: int, lanes: Iterable[tuple[int, int]]) -> None:
        """A claim took all that was ready in these lanes."""
        known = self._earliest.get(queue_id, {})
        for kind_id, priority in lanes:
            if Lane(queue_id, kind_id, priority) not in self._hinted:
                known.pop((kind_id, priority), None)
        if not known:
            self._earliest.pop(queue_id, None)

    def replace(self, scanned: Iterable[tuple[Lane, Instant]]) -> None:
        """What a scan found, with the hints that came while it ran."""
        newer = {
            lane: self._earliest[lane.queue_id][lane.kind_id, lane.priority]
            for lane in self._hinted
            if (lane.kind_id, lane.priority) in self._earliest.get(lane.queue_id, {})
        }
        self._earliest = {}
        for lane, at in scanned:
            self._earliest.setdefault(lane.queue_id, {})[lane.kind_id, lane.priority] = at
        for lane, at in newer.items():
            known = self._earliest.setdefault(lane.queue_id, {})
            key = (lane.kind_id, lane.priority)
            known[key] = min(at, known.get(key, at))
        self._full = {
            lane: count
            for lane, count in self._full.items()
            if (lane.kind_id, lane.priority) in self._earliest.get(lane.queue_id, {})
        }

    def gave(self, queue_id: int, lanes: Iterable[tuple[int, int]], *, is_full: bool) -> None:
        """A claim gave all that was asked for, which was as much as a claim may; or less."""
        for lane in (Lane(queue_id, *each) for each in lanes):
            if is_full:
                self._full[lane] = self._full.get(lane, 0) + 1
            else:
                self._full.pop(lane, None)

    def full_claims(self, queue_id: int, lanes: Iterable[tuple[int, int]]) -> int:
        """How many claims in a row were full, of the fullest of these lanes."""
        if not self._full:
            return 0
        return max((self._full.get(Lane(queue_id, *lane), 0) for lane in lanes), default=0)

    @property
    def queue_ids(self) -> KeysView[int]:
        """The queues that hold something, now or later, as far as known."""
        return self._earliest.keys()

    def of(self, queue_id: int) -> Collection[tuple[int, int]]:
        """The lanes of a queue that hold something, now or later, as far as known."""
        return self._earliest.get(queue_id, {}).keys()

    def ready(self, queue_id: int, now: Instant) -> set[tuple[int, int]]:
        """The lanes of a queue that hold something claimable, as far as known."""
        return {key for key, at in self._earliest.get(queue_id, {}).items() if at <= now}

    def ready_queues(self, now: Instant) -> set[int]:
        """The queues that hold something claimable, as far as known."""
        return {
            queue_id
            for queue_id, lanes in self._earliest.items()
            if any(at <= now for at in lanes.values())
        }

    def next_at(self, queue_ids: Iterable[int], now: Instant) -> Instant | None:
        """When the next lane of these queues gets ready that is not ready yet."""
        coming = [
            at
            for queue_id in queue_ids
            for at in self._earliest.get(queue_id, {}).values()
            if at > now
        ]
        return min(coming, default=None)
