"""The way out: no more runs, grace, cancel, last verdicts, Goodbye.

A deploy is a hand-over, not a failure: what cannot be finished is given back, with its
checkpoint and at no cost to its retry budget.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from fencepost.completions import read_completions, read_releases
from fencepost.context import Cause
from fencepost.engine import Engine
from fencepost.events import event
from fencepost.held import COMPLETING, HANDLING, Held
from fencepost.v1 import run_service_pb2, run_service_pb2_grpc, worker_pb2

_BATCH = 1000


async def leave(engine: Engine) -> None:
    """Drains the worker within its grace. The sessions still stand afterwards."""
    timings = engine.settings.timings
    engine.leaving = True
    engine.send_drain()
    for held in engine.roster.waiting():
        engine.endings.release(held, worker_pb2.RELEASE_REASON_NOT_STARTED)
    engine.keep_going()
    # A later, more urgent stop sets the grace to 0.
    await _until(engine, lambda: engine.roster.active == 0 or not engine.grace, engine.grace)
    await stop_handlers(engine)
    await _until(engine, lambda: _all_told(engine), timings.farewell)


async def stop_handlers(engine: Engine) -> None:
    """Cancels what still runs, cause SHUTDOWN, and waits a little."""
    running = [held for held in engine.roster if held.phase == HANDLING]
    for held in running:
        engine.cancel(held, Cause.SHUTDOWN)
    if engine.roster.active:
        timings = engine.settings.timings
        await _until(engine, lambda: engine.roster.active == 0, timings.stop_wait)


async def say_goodbye(engine: Engine) -> None:
    """Last message, with what is still held; over unary calls if the stream is gone."""
    abandoned = [held for held in engine.roster if held.phase != COMPLETING]
    session = engine.link.current
    timings = engine.settings.timings
    if session is not None and session.live:
        goodbye = worker_pb2.Goodbye(abandoned=[held.describe() for held in abandoned])
        session.send(run_service_pb2.WorkRequest(goodbye=goodbye))
        session.half_close()
        await asyncio.wait({session.ended}, timeout=timings.farewell)
    elif abandoned or len(engine.outbox):
        await asyncio.to_thread(_tell_by_calls, engine, abandoned)


def _all_told(engine: Engine) -> bool:
    session = engine.link.current
    if session is None or not session.live:
        return not len(engine.outbox) and not len(engine.roster)
    acknowledged = session.drain_ack is not None
    return (
        acknowledged
        and session.received_batch_seq >= (session.drain_ack or 0)
        and not len(engine.outbox)
    )


def _tell_by_calls(engine: Engine, abandoned: list[Held]) -> None:
    entries = engine.outbox.remaining()
    completions = read_completions(entry.body for entry in entries if not entry.is_release)
    releases = read_releases(entry.body for entry in entries if entry.is_release)
    releases += [
        worker_pb2.Release(
            run=held.assignment.run,
            attempt=held.attempt,
            reason=worker_pb2.RELEASE_REASON_SHUTDOWN,
        )
        for held in abandoned
    ]
    worker_id = engine.settings.worker_id
    timeout = engine.settings.timings.farewell
    metadata = engine.connection.metadata
    with engine.connection.open_session_channel() as channel:
        stub = run_service_pb2_grpc.RunServiceStub(channel)
        try:
            for at in range(0, len(completions), _BATCH):
                stub.BatchCompleteRuns(
                    run_service_pb2.BatchCompleteRunsRequest(
                        completions=completions[at : at + _BATCH], worker_id=worker_id
                    ),
                    timeout=timeout,
                    metadata=metadata,
                )
            for at in range(0, len(releases), _BATCH):
                stub.ReleaseRuns(
                    run_service_pb2.ReleaseRunsRequest(
                        releases=releases[at : at + _BATCH], worker_id=worker_id
                    ),
                    timeout=timeout,
                    metadata=metadata,
                )
        except grpc.RpcError as error:
            # The leases run out by themselves; nothing is lost, only late.
            event(logging.WARNING, "farewell.failed", error=str(error))


async def _until(engine: Engine, done: Callable[[], bool], timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            while not done():
                engine.changed.clear()
                await engine.changed.wait()
    except TimeoutError:
        return
