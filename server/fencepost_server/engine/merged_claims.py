"""Merges claims of long polls: those that want the same lanes of a queue while one of them is
under way share the next statement, and with it one commit.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.errors import StorageUnavailable


class _Source(NamedTuple):
    """What claims must have in common to be one."""

    queue_id: int
    lanes: frozenset[tuple[int, int]]
    is_capped: bool


@dataclass(slots=True, kw_only=True)
class _Wish:
    worker_id: str
    wanted: int
    runs: "asyncio.Future[list[Claimed]]"


class MergedClaims:
    """Claims that commit by themselves. Callers must not be cancelled while they wait, because
    their runs are claimed all the same.
    """

    def __init__(self, *, claimer: Claimer, batch_max: int) -> None:
        """At most `batch_max` runs in one statement, unless one caller alone wants more."""
        self._claimer = claimer
        self._batch_max = batch_max
        self._waiting: dict[_Source, deque[_Wish]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def claim(
        self,
        queue_id: int,
        *,
        lanes: frozenset[tuple[int, int]],
        worker_id: str,
        wanted: int,
        is_capped: bool,
    ) -> list[Claimed]:
        """Up to `wanted` runs. Raises StorageUnavailable."""
        source = _Source(queue_id, lanes, is_capped)
        loop = asyncio.get_running_loop()
        wish = _Wish(worker_id=worker_id, wanted=wanted, runs=loop.create_future())
        if source in self._waiting:
            self._waiting[source].append(wish)
        else:
            self._waiting[source] = deque([wish])
            serving = loop.create_task(self._serve(source))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
        return await wish.runs

    async def _serve(self, source: _Source) -> None:
        """One claim after another, until nobody wants anything from there."""
        waiting = self._waiting[source]
        try:
            while waiting:
                batch = [waiting.popleft()]
                slots = batch[0].wanted
                while waiting and slots + waiting[0].wanted <= self._batch_max:
                    slots += waiting[0].wanted
                    batch.append(waiting.popleft())
                await self._claim(source, batch)
        finally:
            del self._waiting[source]
            for wish in waiting:
                wish.runs.cancel()

    async def _claim(self, source: _Source, batch: list[_Wish]) -> None:
        # One run for each first, so that few runs go to many callers.
        order = [
            wish
            for turn in range(max(wish.wanted for wish in batch))
            for wish in batch
            if turn < wish.wanted
        ]
        try:
            runs = await self._claimer.claim(
                source.queue_id,
                lanes=source.lanes,
                worker_ids=[wish.worker_id for wish in order],
                is_capped=source.is_capped,
            )
        except StorageUnavailable as error:
            for wish in batch:
                wish.runs.set_exception(error)
            return
        except BaseException:
            for wish in batch:
                wish.runs.cancel()
            raise
        dealt: dict[int, list[Claimed]] = {id(wish): [] for wish in batch}
        for run in runs:
            dealt[id(order[run.place - 1])].append(run)
        for wish in batch:
            wish.runs.set_result(dealt[id(wish)])
