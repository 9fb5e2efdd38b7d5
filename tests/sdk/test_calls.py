"""How handlers are called: each on its own, however many share an asyncio task or a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
from fencepost import Context, Worker, current_context
from fencepost.handler import make_handler
from fencepost.held import Held
from fencepost.threads import Threads
from fencepost.v1 import worker_pb2

from tests.sdk.conftest import running
from tests.sdk.factories import a_cancel, an_assignment
from tests.sdk.fake_server import FakeServer
from tests.sdk.fake_session import FakeSession

MakeWorker = Callable[..., Worker]

_seen: ContextVar[str] = ContextVar("seen", default="")


async def _ended(session: FakeSession, number: int) -> list[worker_pb2.Completion]:
    await session.until(lambda: len(session.completions) >= number, f"{number} completions")
    return session.completions


@pytest.mark.parametrize("how", ["returns", "waits", "sync"])
async def test_no_handler_sees_the_variables_of_another(
    server: FakeServer, make_worker: MakeWorker, how: str
) -> None:
    worker = make_worker(slots=50)
    found: list[tuple[str, str]] = []

    def note(context: Context) -> None:
        before = _seen.get()
        _seen.set(context.idempotency_key)
        assert current_context() is context
        found.append((before, context.idempotency_key))

    async def returns(context: Context) -> None:
        note(context)

    async def waits(context: Context) -> str:
        note(context)
        await asyncio.sleep(0)
        assert current_context() is context
        assert _seen.get() == context.idempotency_key
        return "the same after the wait"

    handler: Any = {"returns": returns, "waits": waits, "sync": note}[how]
    worker.handler("noted")(handler)
    runs = [an_assignment("noted") for _ in range(100)]
    async with running(worker):
        session = await server.session()
        await session.feed(runs)
        completions = await _ended(session, len(runs))
    assert {c.WhichOneof("outcome") for c in completions} == {"success"}
    assert [before for before, _ in found] == [""] * len(runs)
    assert len({key for _, key in found}) == len(runs)


async def test_handlers_that_wait_all_begin_before_any_goes_on_and_none_shares_its_asyncio_task(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=30)
    gate = asyncio.Event()
    order: list[int] = []
    tasks: list[asyncio.Task[Any] | None] = []

    @worker.handler("gated")
    async def gated(number: int) -> None:
        order.append(number)
        tasks.append(asyncio.current_task())
        if len(order) == 30:
            gate.set()
        async with asyncio.timeout(30):
            await gate.wait()
        assert asyncio.current_task() is tasks[order.index(number)]

    async with running(worker):
        session = await server.session()
        await session.give(*[an_assignment("gated", json=str(n)) for n in range(30)])
        completions = await _ended(session, 30)
    assert {c.WhichOneof("outcome") for c in completions} == {"success"}
    assert order == list(range(30))
    assert len(set(map(id, tasks))) == 30


async def test_handlers_that_wait_and_others_keep_the_order_of_their_batch(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=40)
    order: list[int] = []
    gate = asyncio.Event()

    @worker.handler("even")
    async def even(number: int) -> None:
        order.append(number)

    @worker.handler("odd")
    async def odd(number: int) -> None:
        order.append(number)
        await gate.wait()

    async with running(worker):
        session = await server.session()
        for start in (0, 20):
            batch = [
                an_assignment("odd" if n % 2 else "even", json=str(n))
                for n in range(start, start + 20)
            ]
            await session.give(*batch)
        await _ended(session, 20)
        gate.set()
        completions = await _ended(session, 40)
    assert {c.WhichOneof("outcome") for c in completions} == {"success"}
    assert order == list(range(40))


async def test_a_handler_that_cancels_its_asyncio_task_hits_no_other(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=20)

    @worker.handler("mixed")
    async def mixed(number: int) -> str:
        if number == 3:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        elif number > 3:
            await asyncio.sleep(0)
        return "done"

    runs = [an_assignment("mixed", json=str(number)) for number in range(10)]
    async with running(worker):
        session = await server.session()
        await session.give(*runs)
        completions = await _ended(session, len(runs))
    assert {c.WhichOneof("outcome") for c in completions} == {"success"}


async def test_a_cancel_hits_the_handler_that_waits_and_not_the_next_of_its_kind(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=5)
    begun = asyncio.Event()

    @worker.handler("maybe")
    async def maybe(waits: bool) -> str:
        if waits:
            begun.set()
            await asyncio.Event().wait()
        return "done"

    cancelled = an_assignment("maybe", json="true")
    others = [an_assignment("maybe", json="false") for _ in range(8)]
    async with running(worker):
        session = await server.session()
        await session.give(cancelled, *others[:4])
        await begun.wait()
        await session.notify(a_cancel(cancelled))
        await session.until(lambda: session.completions_of(cancelled))
        await session.give(*others[4:])
        await _ended(session, 9)
    outcomes = [session.completions_of(run)[0].WhichOneof("outcome") for run in others]
    assert outcomes == ["success"] * 8
    assert session.completions_of(cancelled)[0].WhichOneof("outcome") == "cancelled"


async def test_a_handler_that_raises_generator_exit_has_failed_like_any_other(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=5)

    @worker.handler("odd")
    async def odd(raises: bool) -> None:
        if raises:
            raise GeneratorExit

    runs = [an_assignment("odd", json=text) for text in ("true", "false", "false")]
    async with running(worker):
        session = await server.session()
        await session.give(*runs)
        await _ended(session, 3)
    assert session.completions_of(runs[0])[0].failure.code == "PANIC"
    assert [session.completions_of(run)[0].WhichOneof("outcome") for run in runs[1:]] == [
        "success",
        "success",
    ]


async def test_sync_handlers_that_block_get_a_thread_each_up_to_the_slots(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=8)
    together = threading.Barrier(8, timeout=30)
    threads: set[str] = set()

    @worker.handler("blocks")
    def blocks() -> None:
        threads.add(threading.current_thread().name)
        together.wait()

    async with running(worker):
        session = await server.session()
        for _ in range(3):
            await session.give(*[an_assignment("blocks") for _ in range(8)])
        completions = await _ended(session, 24)
    assert {c.WhichOneof("outcome") for c in completions} == {"success"}
    assert len(threads) == 8


async def test_a_sync_handler_that_blocks_keeps_no_other_waiting(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=3)
    gate = threading.Event()

    @worker.handler("sync")
    def sync(blocks: bool) -> None:
        if blocks:
            assert gate.wait(30)

    blocking = [an_assignment("sync", json="true") for _ in range(2)]
    others = [an_assignment("sync", json="false") for _ in range(20)]
    async with running(worker):
        session = await server.session()
        await session.give(*blocking)
        for run in others:
            await session.give(run)
        await _ended(session, len(others))
        assert not any(session.completions_of(run) for run in blocking)
        gate.set()
        completions = await _ended(session, 22)
    assert {c.WhichOneof("outcome") for c in completions} == {"success"}


def test_when_no_more_threads_can_be_had_runs_wait_for_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = make_handler("noop", lambda: None)
    runs = [Held(an_assignment("noop"), handler, 0.0) for _ in range(5)]
    begun, gate, done = threading.Event(), threading.Event(), threading.Event()
    handled: list[Held] = []

    def handle(held: Held) -> None:
        begun.set()
        assert gate.wait(30)
        handled.append(held)
        if len(handled) == len(runs):
            done.set()

    threads = Threads(4, handle)
    threads.submit(runs[:1])
    assert begun.wait(30)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads.submit(runs[1:])
    gate.set()
    assert done.wait(30)
    assert handled == runs
    threads.close()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Threads(4, handle).submit(runs[:1])
