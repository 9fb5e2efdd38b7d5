"""Fencepost: with the worker of the Python SDK, and with the lean client in Go."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version

from fencepost import Client
from fencepost_server.store.migrate import migrate

from benchmarks import delivery, lean, sdk
from benchmarks.compare.tool import About, NotMeasured, Working
from benchmarks.measure import Worker
from benchmarks.setting import server

_SLOTS = 1000
# (address, jobs, stamp) -> what starts a worker.
_Command = Callable[[str, int, bool], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fencepost:
    """See `compare.tool.Tool`. Each use starts a server process of its own."""

    about: About
    command: _Command
    unfinished: str = delivery.UNFINISHED

    async def prepare(self, dsn: str) -> None:
        """See Tool."""
        await migrate(dsn)

    async def fill(self, dsn: str, jobs: int) -> None:
        """See Tool."""
        await delivery.enqueue(dsn, jobs)

    @asynccontextmanager
    async def working(self, dsn: str, jobs: int, *, stamp: bool) -> AsyncIterator[Working]:
        """See Tool."""
        async with server(dsn) as (address, pid):
            _ADDRESSES[dsn] = address
            worker = Worker(self.command(address, jobs, stamp))
            try:
                yield Working(worker=worker, pids={"server": pid, "workers": worker.pid})
            finally:
                await worker.stop()
                del _ADDRESSES[dsn]

    async def produce(self, dsn: str, jobs: int, pause_ms: int) -> None:
        """See Tool. The caller is this process, as a client of the server of `working`."""
        async with Client(_ADDRESSES[dsn]) as client:
            job = await client.create_job("", kind=sdk.HANDLED)
            for _ in range(jobs):
                await client.enqueue(job.name, payload=time.monotonic())
                await asyncio.sleep(pause_ms / 1000)


_ADDRESSES: dict[str, str] = {}


def _about(name: str, settings: str) -> About:
    return About(
        name=f"Fencepost, {name}",
        version=version("fencepost-server"),
        history="yes, 30 days",
        fence="yes",
        settings=settings,
    )


async def with_sdk() -> Fencepost:
    """With the worker of the Python SDK."""

    def command(address: str, jobs: int, stamp: bool) -> list[str]:
        return sdk.command(address, sessions=1, slots=_SLOTS, runs=jobs, stamp=stamp)

    return Fencepost(about=_about("Python SDK", f"{_SLOTS:,} slots"), command=command)


async def with_lean() -> Fencepost:
    """With the lean client. Raises NotMeasured."""
    try:
        program = await asyncio.to_thread(lean.build)
    except SystemExit as error:
        raise NotMeasured(str(error)) from error

    def command(address: str, jobs: int, stamp: bool) -> list[str]:
        if stamp:
            return [str(program), "--address", address, "--stamp"]
        return delivery.lean_command(program, 1, jobs, address)

    return Fencepost(about=_about("lean client", "1 session"), command=command)
