"""Which runs this worker holds, which of them may start, and how many more fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fencepost.held import BUFFERED, HANDLING, Held
from fencepost.run_key import RunId


class Roster:
    """Slots and the runs in them. Decides only; calls nobody."""

    def __init__(self, *, slots: int, prefetch: int) -> None:
        self._slots = slots
        self._prefetch = prefetch
        self._held: dict[RunId, Held] = {}
        self._ready: deque[Held] = deque()
        self.active = 0
        """Handlers that were called and have not ended, lost ones included."""
        self.buffered = 0
        """Received and not called, those waiting for a confirmation included."""
        self.max_held = 5000

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def get(self, run: RunId) -> Held | None:
        """What is held of this run."""
        return self._held.get(run)

    @property
    def free(self) -> int:
        """Runs that may still be sent to this worker, 0 or more."""
        by_slots = self._slots + self._prefetch - self.active - self.buffered
        return max(0, min(by_slots, self.max_held - len(self._held)))

    def buffer(self, held: Held) -> None:
        """A run was received and is to be started when its turn comes."""
        self._held[held.id] = held
        self.buffered += 1
        if not held.needs_confirmation:
            self._ready.append(held)

    def keep(self, held: Held) -> None:
        """A run was received that will never start here: held until its release is settled."""
        self._held[held.id] = held

    def confirm(self, held: Held) -> None:
        """The server has confirmed the attempt: it may start."""
        held.needs_confirmation = False
        if held.phase == BUFFERED and not held.lost:
            self._ready.append(held)

    def start(self, now: float) -> list[Held]:
        """The runs whose handlers are to be called now, in the order received."""
        starting = []
        while self._ready and self.active < self._slots:
            held = self._ready.popleft()
            if held.phase != BUFFERED or held.lost:
                continue
            held.phase = HANDLING
            held.started_at = now
            self.buffered -= 1
            self.active += 1
            starting.append(held)
        return starting

    def unbuffer(self, held: Held) -> None:
        """A buffered run will not start; call before its phase changes or it is lost."""
        if held.phase == BUFFERED and not held.lost:
            self.buffered -= 1

    def ended(self, count: int) -> None:
        """So many handlers have ended: their slots are free."""
        self.active -= count

    def remove(self, held: Held) -> None:
        """The run is no longer held; a newer attempt of it stays."""
        if self._held.get(held.id) is held:
            del self._held[held.id]

    def waiting(self) -> list[Held]:
        """Buffered runs."""
        return [held for held in self._held.values() if held.phase == BUFFERED]
