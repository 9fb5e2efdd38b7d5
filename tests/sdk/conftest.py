"""A fake server per test, and workers that are stopped when the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from fencepost import Client, Timings, Worker

from tests.sdk.fake_server import FakeServer, serving

QUICK = Timings(reconnect_base=0.1, reconnect_cap=0.5, handover=1.0, stop_wait=1.0, farewell=3.0)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    """A fake server."""
    async with serving() as fake:
        yield fake


@pytest.fixture
def make_worker(server: FakeServer) -> Callable[..., Worker]:
    """Makes a worker of the fake server; `grace` is 0 unless given."""

    def make(**options: Any) -> Worker:
        options.setdefault("grace", 0.0)
        options.setdefault("timings", QUICK)
        return Worker(Client(server.address), **options)

    return make


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """The worker at work in this loop; drained at the end of the block."""
    work = asyncio.create_task(worker.run_async())
    try:
        yield work
    finally:
        worker.stop()
        await asyncio.wait({work}, timeout=20)
        assert work.done(), "the worker did not stop"
