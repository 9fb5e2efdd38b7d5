"""A worker that is told to go: by signal, by its program, or by an operator."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from fencepost import Cause, Context, Worker
from fencepost.status import StatusDetails
from fencepost.v1 import run_service_pb2, worker_pb2

from tests.sdk.factories import an_assignment
from tests.sdk.fake_server import FakeServer, Refusal

MakeWorker = Callable[..., Worker]
_PROGRAM = Path(__file__).parent / "worker_program.py"


@asynccontextmanager
async def _process(server: FakeServer, grace: float) -> AsyncIterator[asyncio.subprocess.Process]:
    server.prefetch = 4
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(_PROGRAM), server.address, str(grace)
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_gives_back_what_waits_and_finishes_what_runs(server: FakeServer) -> None:
    async with _process(server, grace=20) as process:
        session = await server.session()
        runs = [an_assignment("sleep_ms", json="700") for _ in range(4)]
        await session.give(*runs)
        await session.until(lambda: session.received_batch_seq == 1)
        process.send_signal(signal.SIGTERM)
        await session.until(lambda: session.drained, "the WorkerDrain")
        late = an_assignment("sleep_ms", json="0")
        await session.push(late)
        await session.until(lambda: session.goodbye is not None, "the Goodbye")
        assert await asyncio.wait_for(process.wait(), 15) == 0
    assert session.goodbye == worker_pb2.Goodbye()
    assert [c.run for c in session.completions] == [r.run for r in runs[:2]]
    assert all(c.success.result.json == '"slept"' for c in session.completions)
    given_back = {r.run.scheduled_at.seconds for r in session.releases}
    assert given_back >= {r.run.scheduled_at.seconds for r in runs[2:]}
    assert {r.reason for r in session.releases} == {worker_pb2.RELEASE_REASON_NOT_STARTED}


async def test_when_the_grace_is_over_handlers_are_cancelled_and_runs_abandoned(
    server: FakeServer,
) -> None:
    async with _process(server, grace=0.6) as process:
        session = await server.session()
        obeying = an_assignment("sleep_ms", json="60000")
        deaf = an_assignment("ignore_cancel")
        await session.give(obeying, deaf)
        await session.until(lambda: session.received_batch_seq == 1)
        process.send_signal(signal.SIGTERM)
        await session.until(lambda: session.drained)
        drained_at = len(session.beats)
        await session.until(lambda: session.goodbye is not None, "the Goodbye")
        assert await asyncio.wait_for(process.wait(), 15) == 0
    assert session.goodbye is not None
    abandoned = [held.run for held in session.goodbye.abandoned]
    assert abandoned == [obeying.run, deaf.run]
    assert session.completions == []
    assert len(session.beats) >= drained_at + 2
    assert len(session.beats[-1].message.runs) == 2


async def test_a_thread_that_never_ends_does_not_keep_the_process(server: FakeServer) -> None:
    async with _process(server, grace=0.1) as process:
        session = await server.session()
        run = an_assignment("block_thread")
        await session.give(run)
        await session.until(lambda: session.received_batch_seq == 1)
        process.send_signal(signal.SIGINT)
        await session.until(lambda: session.goodbye is not None, "the Goodbye")
        assert await asyncio.wait_for(process.wait(), 15) == 0
    assert session.goodbye is not None
    assert [held.run for held in session.goodbye.abandoned] == [run.run]


async def test_a_second_signal_ends_the_process_at_once(server: FakeServer) -> None:
    async with _process(server, grace=60) as process:
        session = await server.session()
        await session.give(an_assignment("sleep_ms", json="60000"))
        await session.until(lambda: session.received_batch_seq == 1)
        process.send_signal(signal.SIGTERM)
        await session.until(lambda: session.drained)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 15) == 128 + signal.SIGTERM
    assert session.goodbye is None


async def test_a_server_of_another_revision_makes_the_process_exit_with_an_error(
    server: FakeServer,
) -> None:
    details = StatusDetails(reason="UNSUPPORTED_PROTOCOL")
    server.work_refusals = [Refusal(code=grpc.StatusCode.FAILED_PRECONDITION, details=details)] * 5
    async with _process(server, grace=1) as process:
        assert await asyncio.wait_for(process.wait(), 15) == 1
    assert server.work_calls == 1


async def test_a_worker_stop_drains_like_a_signal(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(grace=20.0)

    @worker.handler("slow")
    async def slow(ctx: Context) -> str:
        await session.until(lambda: session.drained)
        return "finished"

    work = asyncio.create_task(worker.run_async())
    session = await server.session()
    run = an_assignment("slow")
    await session.give(run)
    await session.until(lambda: session.received_batch_seq == 1)
    stop = worker_pb2.WorkerStop(reason="moving house")
    await session.send(run_service_pb2.WorkResponse(worker_stop=stop))
    await asyncio.wait_for(work, 15)
    assert session.completions_of(run)[0].success.result.json == '"finished"'
    assert session.goodbye is not None


async def test_without_a_stream_the_farewell_goes_by_plain_calls(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(grace=0.0)

    @worker.handler("slow")
    async def slow() -> None:
        await asyncio.Event().wait()

    @worker.handler("noop")
    async def noop() -> None:
        return None

    work = asyncio.create_task(worker.run_async())
    session = await server.session()
    server.verdict_of = lambda message: None
    slow_run, done_run = an_assignment("slow"), an_assignment("noop")
    await session.give(slow_run, done_run)
    await session.until(lambda: session.completions_of(done_run))
    server.work_refusals = [Refusal(code=grpc.StatusCode.UNAVAILABLE)] * 1000
    session.reset()
    await session.until(lambda: server.work_calls > 1, "a reconnect")
    worker.stop()
    await asyncio.wait_for(work, 15)
    assert [c.run for c in server.completed_by_call] == [done_run.run]
    assert [(r.run, r.reason) for r in server.released_by_call] == [
        (slow_run.run, worker_pb2.RELEASE_REASON_SHUTDOWN)
    ]


async def test_a_cancelled_worker_gives_everything_back_without_grace(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(grace=60.0)
    causes: list[Cause | None] = []

    @worker.handler("slow")
    async def slow(ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            causes.append(ctx.cause)
            raise

    work = asyncio.create_task(worker.run_async())
    session = await server.session()
    run = an_assignment("slow")
    await session.give(run)
    await session.until(lambda: session.received_batch_seq == 1)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert causes == [Cause.SHUTDOWN]
    assert session.goodbye is not None
    assert [held.run for held in session.goodbye.abandoned] == [run.run]
