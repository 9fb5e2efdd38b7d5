"""Merges what many callers submit into batches for one statement each.

While a batch is being stored the next one gathers, so batches grow with load by themselves;
an idle ticker works at once.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import structlog

from fencepost_server.clock import SECOND, Duration
from fencepost_server.errors import FencepostError, InternalError, ServerOverloaded

_log = structlog.get_logger("tick")

Entry = TypeVar("Entry")
Answer = TypeVar("Answer")

# A batch this small needs no gathering: nobody else is waiting.
_IDLE_BATCH = 8


class Ticker(Generic[Entry, Answer]):
    """Hands batches of submitted entries to `work`, which answers each in order.

    Run `run` until it is cancelled.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Entry]], Awaitable[Sequence[Answer]]],
        *,
        gather: Duration,
        batch_max: int,
        pending_max: int,
    ) -> None:
        """Under load a batch gathers for `gather`; more than `pending_max` waiting is refused."""
        self._work = work
        self._gather = gather
        self._batch_max = batch_max
        self._pending_max = pending_max
        self._pending: deque[tuple[Sequence[Entry], asyncio.Future[Sequence[Answer]]]] = deque()
        self._pending_entries = 0
        self._ready = asyncio.Event()
        self._last_batch = 0

    async def submit(self, entries: Sequence[Entry]) -> Sequence[Answer]:
        """Answers in the order of `entries`, after their commit.

        Raises ServerOverloaded when too many wait, or whatever storing them raised.
        """
        if not entries:
            return []
        if self._pending_entries + len(entries) > max(self._pending_max, len(entries)):
            raise ServerOverloaded("too many entries wait to be stored", retry_after_ms=500)
        future: asyncio.Future[Sequence[Answer]] = asyncio.get_running_loop().create_future()
        self._pending.append((entries, future))
        self._pending_entries += len(entries)
        self._ready.set()
        return await future

    async def run(self) -> None:
        """Work through what is submitted, one batch at a time."""
        while True:
            await self._ready.wait()
            if self._last_batch > _IDLE_BATCH and self._pending_entries < self._batch_max:
                await asyncio.sleep(self._gather / SECOND)
            await self._tick()

    async def _tick(self) -> None:
        batch: list[Entry] = []
        waiting: list[tuple[int, int, asyncio.Future[Sequence[Answer]]]] = []
        while self._pending and (not batch or len(batch) < self._batch_max):
            entries, future = self._pending.popleft()
            self._pending_entries -= len(entries)
            waiting.append((len(batch), len(batch) + len(entries), future))
            batch.extend(entries)
        if not self._pending:
            self._ready.clear()
        self._last_batch = len(batch)
        await self._answer(batch, waiting)

    async def _answer(
        self,
        batch: Sequence[Entry],
        waiting: Sequence[tuple[int, int, asyncio.Future[Sequence[Answer]]]],
    ) -> None:
        try:
            answers = await self._work(batch)
        except FencepostError as error:
            _fail(waiting, error)
        except Exception as error:  # noqa: BLE001 - logged; the rest must go on
            # A bug, or an entry that cannot be stored: it must not hold up the others.
            if len(waiting) > 1:
                for start, end, future in waiting:
                    await self._answer(batch[start:end], [(0, end - start, future)])
            else:
                _log.exception("entries_not_stored", entries=len(batch), error=repr(error))
                _fail(waiting, InternalError("these entries could not be stored"))
        except BaseException as error:
            _fail(waiting, error)
            raise
        else:
            for start, end, future in waiting:
                if not future.done():
                    future.set_result(answers[start:end])


def _fail(
    waiting: Sequence[tuple[int, int, asyncio.Future[Sequence[Answer]]]], error: BaseException
) -> None:
    for _, _, future in waiting:
        if not future.done():
            future.set_exception(error)
