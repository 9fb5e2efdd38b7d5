"""Watches the local deadlines of all held runs with a single timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fencepost.held import Held
from fencepost.roster import Roster

_MIN_PACE = 0.02


class Deadlines:
    """Leases that run out, attempts that overrun, runs buffered too long."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        roster: Roster,
        on_due: Callable[[Held, float], None],
    ) -> None:
        self._loop = loop
        self._roster = roster
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        self.max_buffer_time = 5.0
        """Seconds, as the server said."""

    def watch(self, held: Held) -> None:
        """A run came in: make sure to look by its first deadline."""
        # Judged as if it were started already, whichever way is earlier.
        due = min(
            held.next_deadline(self.max_buffer_time), held.attempt_deadline, held.lease.deadline
        )
        self._look_by(due)

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
        if self._timer is not None:
            self._timer.cancel()

    def _look_by(self, due: float) -> None:
        if due == float("inf") or (self._timer is not None and self._timer.when() <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self.look)
