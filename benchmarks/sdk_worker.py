"""Runs per second that one worker process handles, wire and SDK alone.

A fake server in a process of its own hands out no-op runs as fast as credit allows and
applies every completion; no database is involved. `python -m benchmarks.sdk_worker`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

from fencepost import Client, Worker
from fencepost.v1 import worker_pb2

from tests.sdk.factories import an_assignment
from tests.sdk.fake_server import FakeServer, serving


def serve(pipe: Pipe, runs: int) -> None:
    """The fake server's process: feeds `runs` runs and tells how long they took."""
    asyncio.run(_serve(pipe, runs))


async def _serve(pipe: Pipe, runs: int) -> None:
    server = FakeServer()  # type: ignore[abstract]
    applied = 0

    def count(
        message: worker_pb2.Completion | worker_pb2.Release,
    ) -> worker_pb2.AttemptVerdict:
        nonlocal applied
        applied += 1
        return worker_pb2.AttemptVerdict(
            run=message.run, attempt=message.attempt, verdict=worker_pb2.VERDICT_APPLIED
        )

    server.verdict_of = count
    server.heartbeat_interval = 10.0
    batch = [an_assignment("noop", json='{"n":1}') for _ in range(runs)]
    async with serving(server):
        pipe.send(server.address)
        session = await server.session()
        began = time.perf_counter()
        await session.feed(batch, batch_max=128)
        while applied < runs:
            await server.until(lambda: applied >= runs)
        pipe.send(time.perf_counter() - began)
        await session.until(lambda: session.goodbye is not None)
        pipe.send(session.completion_messages)


async def _returns() -> None:
    return None


async def _waits() -> None:
    await asyncio.sleep(0)


def _sync() -> None:
    return None


_HANDLERS: dict[str, Callable[[], object]] = {"returns": _returns, "waits": _waits, "sync": _sync}


async def _work(address: str, pipe: Pipe, slots: int, handler: str) -> tuple[float, float]:
    worker = Worker(Client(address), slots=slots, grace=5)
    worker.handler("noop")(_HANDLERS[handler])
    work = asyncio.create_task(worker.run_async())
    before = _cpu()
    seconds: float = await asyncio.to_thread(pipe.recv)
    cpu = _cpu() - before
    worker.stop()
    await work
    return seconds, cpu


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Prints one line per handler and number of slots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60_000)
    parser.add_argument("--slots", type=int, nargs="*", default=[10, 100, 500])
    parser.add_argument("--handlers", choices=_HANDLERS, nargs="*", default=list(_HANDLERS))
    options = parser.parse_args()
    for handler in options.handlers:
        for slots in options.slots:
            _measure(handler, slots, options.runs)


def _measure(handler: str, slots: int, runs: int) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, runs))
    process.start()
    seconds, cpu = asyncio.run(_work(here.recv(), here, slots, handler))
    messages = here.recv()
    process.join()
    print(
        f"{handler:7} slots {slots:4}: {runs / seconds:8,.0f} runs/s,"
        f" {cpu / runs * 1e6:5.1f} µs CPU of the worker per run,"
        f" {runs / messages:5.1f} completions per message",
        flush=True,
    )


if __name__ == "__main__":
    main()
