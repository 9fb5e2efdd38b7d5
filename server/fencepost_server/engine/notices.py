"""Tells workers at once what somebody else did to the runs they hold: asked to stop, or lost.

A hint names the attempt; what there is to tell is read when it is told, so a hint that is
old, doubled or lost does no harm: every heartbeat is answered with the same notices.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import structlog

from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.verdicts import Held, Notice
from fencepost_server.engine.wake import Affected
from fencepost_server.errors import StorageUnavailable

_log = structlog.get_logger("notices")

# More than these hear of it with their next heartbeat.
_PENDING_MAX = 10_000
_BATCH = 500

Tell: TypeAlias = Callable[[Sequence[Notice]], None]


class NoticeBoard:
    """Which workers have a session here, and what is to be told to them.

    Run `run` until it is cancelled.
    """

    def __init__(self, *, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._listeners: dict[str, list[Tell]] = {}
        self._pending: set[Affected] = set()
        self._ready = asyncio.Event()

    def listen(self, worker_id: str, tell: Tell) -> None:
        """`tell` takes the notices of a worker from now on; the newest listener gets them."""
        self._listeners.setdefault(worker_id, []).append(tell)

    def leave(self, worker_id: str, tell: Tell) -> None:
        """The reverse of `listen`."""
        listeners = self._listeners.get(worker_id, [])
        if tell in listeners:
            listeners.remove(tell)
        if not listeners:
            self._listeners.pop(worker_id, None)

    def affected(self, attempts: Collection[Affected]) -> None:
        """Something was done to these attempts; those of other servers' workers are ignored."""
        own = {each for each in attempts if each.worker_id in self._listeners}
        if own and len(self._pending) < _PENDING_MAX:
            self._pending |= own
            self._ready.set()

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = sorted(self._pending), set()
            for start in range(0, len(pending), _BATCH):
                try:
                    await self._tell(pending[start : start + _BATCH])
                except StorageUnavailable as error:
                    _log.debug("storage_unavailable", error=repr(error.__cause__))

    async def _tell(self, batch: Sequence[Affected]) -> None:
        held = [Held(each.key, each.attempt) for each in batch]
        notices = {
            (notice.key, notice.attempt): notice for notice in await self._lifecycle.notices(held)
        }
        by_worker: dict[str, list[Notice]] = {}
        for each in batch:
            notice = notices.get((each.key, each.attempt))
            if notice is not None:
                by_worker.setdefault(each.worker_id, []).append(notice)
        for worker_id, told in by_worker.items():
            for tell in self._listeners.get(worker_id, [])[-1:]:
                tell(told)
