"""What a measurement reads: CPU of processes, bytes of WAL, and when the work was done."""

import asyncio
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import asyncpg

from benchmarks.setting import cpu_seconds

# Programs and packages that benchmarks need and the repository does not hold.
CACHE = Path(__file__).parent / ".cache"
_POLL_S = 0.005
_DRAIN_MAX_S = 1800


async def postmaster_of(connection: asyncpg.Connection) -> int:
    """The process id of the Postgres behind a superuser's connection, on this machine."""
    text = await connection.fetchval("SELECT pg_read_file('postmaster.pid', 0, 32)")
    return int(text.split()[0])


def tree_cpu_seconds(pid: int) -> float:
    """What a process and all its children used so far, those that have ended included."""
    total = cpu_seconds(pid)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = (Path(entry) / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid:
                total += cpu_seconds(int(entry.name))
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Counters at one moment."""

    at: float  # seconds of the monotonic clock
    cpu: Mapping[str, float]  # seconds by name of process
    lsn: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What some runs cost, each."""

    seconds: float  # all of them, from the first handler to the last durable end
    rate: float  # runs per second
    cpu_us: Mapping[str, float]  # microseconds by name of process
    wal: float  # bytes without full-page images
    page_images: float  # bytes of full-page images; both as one in `wal` if nobody can tell


class Meter:
    """Reads counters of some processes and of the Postgres behind a connection."""

    def __init__(
        self, connection: asyncpg.Connection, postmaster: int, pids: Mapping[str, int]
    ) -> None:
        self._connection = connection
        self._postmaster = postmaster
        self._pids = pids

    async def read(self) -> Reading:
        """The counters now."""
        cpu = {name: tree_cpu_seconds(pid) for name, pid in self._pids.items()}
        cpu["postgres"] = tree_cpu_seconds(self._postmaster)
        lsn = await wal_place(self._connection)
        return Reading(at=time.monotonic(), cpu=cpu, lsn=lsn)

    async def cost(self, before: Reading, after: Reading, *, runs: int, seconds: float) -> Cost:
        """What `runs` runs cost between two readings."""
        wal, images = await _wal(self._connection, before.lsn, after.lsn)
        return Cost(
            seconds=seconds,
            rate=runs / seconds,
            cpu_us={
                name: (used - before.cpu[name]) / runs * 1e6 for name, used in after.cpu.items()
            },
            wal=wal / runs,
            page_images=images / runs,
        )


async def _wal(connection: asyncpg.Connection, start: str, end: str) -> tuple[int, int]:
    """Bytes of records and of full-page images between two places."""
    if start == end:
        return 0, 0
    try:
        await connection.execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect")
    except asyncpg.PostgresError:
        # An installation without its extensions, or older than 15.
        total = await connection.fetchval("SELECT $1::text::pg_lsn - $2::text::pg_lsn", end, start)
        return int(total), 0
    row = await connection.fetchrow(
        "SELECT sum(record_size)::bigint AS records, sum(fpi_size)::bigint AS images "
        "FROM pg_get_wal_stats($1::text::pg_lsn, $2::text::pg_lsn)",
        start,
        end,
    )
    assert row is not None
    return row["records"], row["images"]


async def copy_database(dsn: str, template: str, name: str) -> str:
    """A fresh copy of a database that nobody is connected to; its connection string."""
    admin = await asyncpg.connect(dsn)
    try:
        await admin.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        by_file = await admin.fetchval(
            "SELECT current_setting('server_version_num')::int >= 150000"
        )
        strategy = " STRATEGY file_copy" if by_file else ""
        await admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"{strategy}')
    finally:
        await admin.close()
    return dsn.rsplit("/", 1)[0] + f"/{name}"


class Worker:
    """A worker process that says `first` and `last` with seconds of the monotonic clock."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    async def line(self) -> str:
        """The next line. Raises RuntimeError when the process has ended instead."""
        assert self.process.stdout is not None
        text = await asyncio.to_thread(self.process.stdout.readline)
        if not text:
            raise RuntimeError(f"{self.process.args!r} ended; its output is above")
        return str(text).strip()

    async def said(self, word: str) -> float:
        """The moment of the next line, which must begin with `word`."""
        found, moment = (await self.line()).split()
        if found != word:
            raise RuntimeError(f"{self.process.args!r} said {found!r} instead of {word!r}")
        return float(moment)

    async def stop(self) -> None:
        """Ask it to leave and wait; it may have left already. Raises RuntimeError if it failed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            await asyncio.to_thread(self.process.communicate, timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"{self.process.args!r} did not leave in 30 s") from None
        # By the signal is how programs end that do not handle it.
        if self.process.returncode not in (0, -15, 143):
            raise RuntimeError(f"{self.process.args!r} failed ({self.process.returncode})")


async def wal_place(connection: asyncpg.Connection) -> str:
    """How far the cluster has written."""
    return str(await connection.fetchval("SELECT pg_current_wal_lsn()::text"))


async def drained(
    connection: asyncpg.Connection,
    worker: Worker,
    meter: Meter,
    *,
    runs: int,
    unfinished: str,
    wal_from: str,
) -> Cost:
    """Cost from the first handler to the moment that the query `unfinished` says false.

    WAL counts from `wal_from`, before the worker began: claims come before the first handler.
    Raises TimeoutError after half an hour.
    """
    async with asyncio.timeout(_DRAIN_MAX_S):
        started = await worker.said("first")
        before = replace(await meter.read(), lsn=wal_from)
        await worker.said("last")
        while await connection.fetchval(unfinished):
            await asyncio.sleep(_POLL_S)
        after = await meter.read()
    return await meter.cost(before, after, runs=runs, seconds=after.at - started)
