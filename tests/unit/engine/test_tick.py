"""Many callers, one statement per tick: answers find their callers, failures find only theirs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from fencepost_server.clock import MILLISECOND
from fencepost_server.engine.tick import Ticker
from fencepost_server.errors import InternalError, ServerOverloaded, StorageUnavailable

Work = Callable[[Sequence[int]], Awaitable[Sequence[int]]]


@asynccontextmanager
async def _ticking(
    work: Work, *, batch_max: int = 100, pending_max: int = 1000
) -> AsyncIterator[Ticker[int, int]]:
    ticker = Ticker(work, gather=MILLISECOND, batch_max=batch_max, pending_max=pending_max)
    loop = asyncio.create_task(ticker.run())
    try:
        yield ticker
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


class Doubler:
    """Doubles what it gets, one batch at a time, and remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()

    async def __call__(self, entries: Sequence[int]) -> Sequence[int]:
        self.batches.append(list(entries))
        self.started.set()
        await self.gate.wait()
        if -1 in entries:
            raise StorageUnavailable
        if -2 in entries:
            raise ValueError("cannot be stored")
        return [2 * entry for entry in entries]


async def test_answers_come_in_the_order_of_the_entries() -> None:
    async with _ticking(Doubler()) as ticker:
        assert await ticker.submit([3, 1, 2]) == [6, 2, 4]
        assert await ticker.submit([]) == []


async def test_what_comes_while_a_batch_is_stored_becomes_one_batch() -> None:
    work = Doubler()
    work.gate.clear()
    async with _ticking(work) as ticker:
        first = asyncio.create_task(ticker.submit([1]))
        await work.started.wait()
        rest = [asyncio.create_task(ticker.submit([n, n])) for n in range(2, 12)]
        await asyncio.sleep(0)
        work.gate.set()
        answers = await asyncio.gather(first, *rest)
    assert answers == [[2], *([2 * n, 2 * n] for n in range(2, 12))]
    assert [len(batch) for batch in work.batches] == [1, 20]


async def test_a_batch_has_a_size_and_a_larger_submission_goes_whole() -> None:
    work = Doubler()
    work.gate.clear()
    async with _ticking(work, batch_max=10) as ticker:
        submitted = [asyncio.create_task(ticker.submit([1]))]
        await work.started.wait()
        submitted += [asyncio.create_task(ticker.submit([n] * 4)) for n in range(5)]
        submitted += [asyncio.create_task(ticker.submit([7] * 30))]
        await asyncio.sleep(0)
        work.gate.set()
        await asyncio.gather(*submitted)
    assert [len(batch) for batch in work.batches] == [1, 12, 38]


async def test_too_many_waiting_entries_are_refused_and_the_others_answered() -> None:
    work = Doubler()
    work.gate.clear()
    async with _ticking(work, pending_max=5) as ticker:
        running = asyncio.create_task(ticker.submit([1]))
        await work.started.wait()
        waiting = asyncio.create_task(ticker.submit([2] * 5))
        await asyncio.sleep(0)
        with pytest.raises(ServerOverloaded):
            await ticker.submit([3])
        work.gate.set()
        assert await running == [2]
        assert await waiting == [4] * 5
        assert await ticker.submit([1] * 50) == [2] * 50


async def test_a_storage_error_reaches_every_caller_of_its_batch_and_no_other() -> None:
    async with _ticking(Doubler()) as ticker:
        with pytest.raises(StorageUnavailable):
            await ticker.submit([-1])
        assert await ticker.submit([1]) == [2]


async def test_an_entry_that_cannot_be_stored_fails_its_caller_only() -> None:
    work = Doubler()
    work.gate.clear()
    async with _ticking(work) as ticker:
        first = asyncio.create_task(ticker.submit([1]))
        await work.started.wait()
        rest = [asyncio.create_task(ticker.submit([n])) for n in (2, -2, 3)]
        await asyncio.sleep(0)
        work.gate.set()
        assert await first == [2]
        good, bad, fine = await asyncio.gather(*rest, return_exceptions=True)
        assert isinstance(bad, InternalError)
        assert (good, fine) == ([4], [6])
        assert await ticker.submit([9]) == [18]


async def test_a_caller_that_has_left_does_not_disturb_the_others() -> None:
    work = Doubler()
    work.gate.clear()
    async with _ticking(work) as ticker:
        leaving = asyncio.create_task(ticker.submit([1]))
        staying = asyncio.create_task(ticker.submit([2]))
        await work.started.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        work.gate.set()
        assert await staying == [4]
