"""Watches the local deadlines of all held runs with one timer for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from fencepost.held import Held
from fencepost.roster import Roster

_MIN_PACE = 0.02
_FIRST_LOOK = 0.1
"""Seconds until a new run's deadlines are read at all: most runs have ended by then.

No deadline is shorter, except of a lease that had no time left when it came.
"""


class Deadlines:
    """Leases that run out, attempts that overrun, runs buffered too long."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        roster: Roster,
        on_due: Callable[[Held, float], None],
        on_short_lease: Callable[[float], None],
    ) -> None:
        self._loop = loop
        self._roster = roster
        self._on_due = on_due
        self._on_short_lease = on_short_lease
        self._new: list[Held] = []
        self._first_look: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.max_buffer_time = 5.0
        """Seconds, as the server said."""

    def watch(self, runs: Iterable[Held]) -> None:
        """These came in: see to it that somebody looks by their first deadlines."""
        self._new.extend(runs)
        if self._first_look is None and self._new:
            self._first_look = self._loop.call_later(_FIRST_LOOK, self._look_at_new)

    def look(self) -> None:
        """Acts on every deadline that has come, then waits for the next."""
        self._timer = None
        now = self._loop.time()
        due = [h for h in self._roster if h.next_deadline(self.max_buffer_time) <= now]
        for held in due:
            # What was done about one run may have changed another's turn.
            if held.next_deadline(self.max_buffer_time) <= now:
                self._on_due(held, now)
        if len(self._roster):
            earliest = min(h.next_deadline(self.max_buffer_time) for h in self._roster)
            self._look_by(max(earliest, now + _MIN_PACE))

    def stop(self) -> None:
        """No more timers."""
        for timer in (self._first_look, self._timer):
            if timer is not None:
                timer.cancel()

    def _look_at_new(self) -> None:
        self._first_look = None
        new, self._new = self._new, []
        stayed = [held for held in new if self._roster.get(held.id) is held]
        if stayed:
            self._on_short_lease(min(held.lease.ttl for held in stayed))
            # Judged as if they were started already, whichever way is earlier.
            self._look_by(
                min(
                    min(h.next_deadline(self.max_buffer_time), h.attempt_deadline, h.lease.deadline)
                    for h in stayed
                )
            )

    def _look_by(self, due: float) -> None:
        if due == float("inf") or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self.look)
