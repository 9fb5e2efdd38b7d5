"""What is compared: a queue, and how it is installed, filled, worked and enqueued to.

A tool's worker says `first` and `last` (see `benchmarks.measure`), or in the measurement of
latency one number of milliseconds per job.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.measure import Worker

HERE = Path(__file__).parent
_TIMEOUT_S = 900


class NotMeasured(Exception):
    """Why a tool cannot be measured on this machine, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the table says of a tool."""

    name: str
    version: str
    history: str
    fence: str
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """A worker that has been started, and the processes to charge for it, by name."""

    worker: Worker
    pids: Mapping[str, int]


class Tool(Protocol):
    """A queue."""

    @property
    def about(self) -> About:
        """What it is."""

    @property
    def unfinished(self) -> str:
        """A query that says whether jobs are left that have not ended durably."""

    async def prepare(self, dsn: str) -> None:
        """Its tables in an empty database."""

    async def fill(self, dsn: str, jobs: int) -> None:
        """Queue `jobs` jobs that do nothing."""

    def working(self, dsn: str, jobs: int, *, stamp: bool) -> AbstractAsyncContextManager[Working]:
        """A worker on the database, until the block ends."""

    async def produce(self, dsn: str, jobs: int, pause_ms: int) -> None:
        """Enqueue jobs one at a time, each with the moment at which its call began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """A tool whose work is done by a program of its own, with a command for each method."""

    about: About
    unfinished: str
    command: Sequence[str | Path]

    async def prepare(self, dsn: str) -> None:
        """See Tool."""
        await run([*self.command, "prepare", dsn])

    async def fill(self, dsn: str, jobs: int) -> None:
        """See Tool."""
        await run([*self.command, "fill", dsn, str(jobs)])

    @asynccontextmanager
    async def working(self, dsn: str, jobs: int, *, stamp: bool) -> AsyncIterator[Working]:
        """See Tool."""
        arguments = ["stamp", dsn] if stamp else ["work", dsn, str(jobs)]
        worker = Worker([*self.command, *arguments])
        try:
            yield Working(worker=worker, pids={"workers": worker.pid})
        finally:
            await worker.stop()

    async def produce(self, dsn: str, jobs: int, pause_ms: int) -> None:
        """See Tool."""
        await run([*self.command, "produce", dsn, str(jobs), str(pause_ms)])


async def run(command: Sequence[str | Path], *, cwd: Path | None = None) -> str:
    """The output of a command. Raises RuntimeError with it if it fails."""
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        told = " ".join(map(str, command[:3]))
        raise RuntimeError(f"{told}: {done.stdout.strip()[-2000:]}")
    return str(done.stdout)
