"""Wakes those who wait for the end of a run when this process commits it.

The end may be committed elsewhere, so whoever waits looks by itself besides.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fencepost_server.domain.run import RunKey


class EndWaits:
    """Who waits for which run; as many as there are calls under way."""

    def __init__(self) -> None:
        self._waiting: dict[RunKey, set[asyncio.Event]] = {}

    def ended(self, keys: Iterable[RunKey]) -> None:
        """These runs have changed, and it is committed."""
        if self._waiting:
            for key in keys:
                for event in self._waiting.get(key, ()):
                    event.set()

    @contextmanager
    def waiting(self, key: RunKey, event: asyncio.Event) -> Iterator[None]:
        """Inside the block, `event` is set whenever the run may have ended."""
        events = self._waiting.setdefault(key, set())
        events.add(event)
        try:
            yield
        finally:
            events.discard(event)
            if not events and self._waiting.get(key) is events:
                del self._waiting[key]

    def wake_all(self) -> None:
        """The process leaves: all look once more and answer."""
        for events in self._waiting.values():
            for event in events:
                event.set()
