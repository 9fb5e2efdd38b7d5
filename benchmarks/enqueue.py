"""Enqueues: one call at a time, batches of 1,000 by several callers with and without unique keys,
and calls of the database's own function from a transaction.

Server and Postgres are processes of one machine; the caller is this one. Batches are sent by the
Python SDK, which makes the requests and reads the answers while the clock runs, and by a lean
caller, whose requests are ready before and whose answers are read after. Rounds of all kinds take
turns; medians are told, with the CPU time of each process and the WAL, per run.
Usage: python -m benchmarks.enqueue [--calls 500] [--batches 20] [--callers 4] [--rounds 5]
"""

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import grpc.aio
import uvloop
from fencepost import Client, NewRun
from fencepost.v1 import run_service_pb2

from benchmarks.setting import cpu_seconds, fresh_database, median, percentile, postgres, server

_BATCH = 1000
_WARM = 50
_PAYLOAD = {"order": "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42", "amount": 1999}
_METHOD = "/fencepost.v1.RunService/BatchEnqueueRuns"

_UNBOUNDED = [("grpc.max_receive_message_length", -1)]

# The unique key of the n-th run of a round.
Key = Callable[[int], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one round gave: runs per second, and per run microseconds of CPU and bytes of WAL."""

    rate: float
    caller: float
    server: float
    postgres: float
    wal: float


class Meter:
    """Reads what the processes have used so far."""

    def __init__(self, probe: "asyncpg.Connection[asyncpg.Record]", server_pid: int) -> None:
        self._probe = probe
        self._server_pid = server_pid

    async def read(self) -> tuple[float, float, float, float, int]:
        """Seconds: by the clock, and of CPU here, of the server and of Postgres; bytes of WAL."""
        row = await self._probe.fetchrow(
            "SELECT pg_backend_pid(), pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
        )
        assert row is not None
        postmaster = _parent(row[0])
        family = [postmaster, *(pid for pid in _pids() if _parent(pid) == postmaster)]
        return (
            time.perf_counter(),
            time.process_time(),
            cpu_seconds(self._server_pid),
            sum(cpu_seconds(pid) for pid in family),
            int(row[1]),
        )

    async def of(self, work: Awaitable[None], runs: int) -> Figures:
        """Does the work and says what it took."""
        before = await self.read()
        await work
        after = await self.read()
        took, caller, served, stored, wal = (b - a for a, b in zip(before, after, strict=True))
        return Figures(
            rate=runs / took,
            caller=caller / runs * 1e6,
            server=served / runs * 1e6,
            postgres=stored / runs * 1e6,
            wal=wal / runs,
        )


def _pids() -> Sequence[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


async def _alone(client: Client, calls: int, *, keyed: bool) -> list[float]:
    """Milliseconds per call, one after the other."""
    took = []
    for number in range(_WARM + calls):
        started = time.perf_counter()
        key = f"alone-{number}" if keyed else None
        await client.enqueue("noop", _PAYLOAD, unique=key)
        took.append((time.perf_counter() - started) * 1000)
    return took[_WARM:]


async def _by_sdk(client: Client, options: argparse.Namespace, key: Key) -> None:
    numbers = iter(range(options.batches))

    async def caller() -> None:
        for number in numbers:
            first = number * _BATCH
            made = await client.enqueue_many(
                NewRun(job="noop", payload=_PAYLOAD, unique=key(n))
                for n in range(first, first + _BATCH)
            )
            bad = [each for each in made if isinstance(each, Exception)]
            assert not bad, bad[0]

    await asyncio.gather(*(caller() for _ in range(options.callers)))


class Lean:
    """A caller whose requests are ready before the clock runs."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Callable[..., Awaitable[bytes]] = channel.unary_unary(_METHOD)
        self._requests: list[bytes] = []
        self._answers: list[bytes] = []

    def prepare(self, batches: int, key: Key) -> None:
        """Requests as the SDK makes them."""
        self._answers = []
        self._requests = [self._request(number * _BATCH, key) for number in range(batches)]

    def check(self) -> None:
        """Whether the answers are all runs."""
        for answer in self._answers:
            outcomes = run_service_pb2.BatchEnqueueRunsResponse.FromString(answer).outcomes
            assert len(outcomes) == _BATCH
            bad = [each.problem for each in outcomes if each.HasField("problem")]
            assert not bad, bad[0]

    def _request(self, first: int, key: Key) -> bytes:
        batch = run_service_pb2.BatchEnqueueRunsRequest(parent="tenants/default")
        call = uuid.uuid4().hex[:24]
        for number in range(first, first + _BATCH):
            each = batch.requests.add(
                job="tenants/default/jobs/noop", request_id=f"{call}-{number}"
            )
            each.payload.json = json.dumps(_PAYLOAD)
            unique = key(number)
            if unique is not None:
                each.unique_key.key = unique
        return batch.SerializeToString()

    async def send(self, callers: int) -> None:
        """Sends them and keeps the answers."""
        waiting = iter(self._requests)

        async def caller() -> None:
            for request in waiting:
                self._answers.append(await self._call(request, timeout=60))

        await asyncio.gather(*(caller() for _ in range(callers)))


async def _in_transaction(url: str, calls: int) -> list[float]:
    """Milliseconds per call of fencepost.enqueue, a transaction each."""
    connection = await asyncpg.connect(url)
    took = []
    for number in range(_WARM + calls):
        started = time.perf_counter()
        await connection.fetchrow(
            "SELECT * FROM fencepost.enqueue('noop', payload => $1, unique_key => $2)",
            '{"order": 1}',
            f"sql-{number}",
        )
        took.append((time.perf_counter() - started) * 1000)
    await connection.close()
    return took[_WARM:]


def _told(name: str, took: list[float]) -> None:
    print(
        f"{name}: p50 {percentile(took, 0.5):.2f} ms, p99 {percentile(took, 0.99):.2f} ms",
        flush=True,
    )


def _told_rounds(name: str, rounds: Sequence[Figures]) -> None:
    def middle(of: Callable[[Figures], float]) -> float:
        return median([of(each) for each in rounds])

    print(
        f"{name}: {middle(lambda f: f.rate):,.0f} runs/s; per run: caller "
        f"{middle(lambda f: f.caller):.1f} µs, server {middle(lambda f: f.server):.1f} µs, "
        f"Postgres {middle(lambda f: f.postgres):.1f} µs, WAL {middle(lambda f: f.wal):,.0f} B",
        flush=True,
    )


def _keys(kind: str, number: int) -> Key:
    """Which unique keys the runs of a round ask for."""
    if kind == "plain":
        return lambda n: None
    if kind == "held":
        return lambda n: f"sdk-half-1-{n % _BATCH | 1}"
    return lambda n: f"{kind}-{number}-{n}" if n % 2 else None


async def _batches(
    client: Client, channel: grpc.aio.Channel, meter: Meter, options: argparse.Namespace
) -> None:
    lean = Lean(channel)
    told: dict[str, list[Figures]] = {}
    runs = options.batches * _BATCH
    # The first round warms up what the others use.
    for number in range(options.rounds + 1):
        for kind in ("plain", "sdk-half", "lean-half", "held"):
            key = _keys(kind, number)
            if kind == "lean-half":
                lean.prepare(options.batches, key)
                figures = await meter.of(lean.send(options.callers), runs)
                lean.check()
            else:
                figures = await meter.of(_by_sdk(client, options, key), runs)
            if number:
                told.setdefault(kind, []).append(figures)
    _told_rounds("SDK", told["plain"])
    _told_rounds("SDK, keys on half", told["sdk-half"])
    _told_rounds("lean caller, keys on half", told["lean-half"])
    _told_rounds("SDK, keys that are all held", told["held"])


async def main() -> None:
    """All of it, in one database."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with postgres() as dsn:
        url = await fresh_database(dsn, "fencepost_bench_enqueue")
        async with (
            server(url) as (address, pid),
            Client(address) as client,
            grpc.aio.insecure_channel(address, options=_UNBOUNDED) as channel,
        ):
            await client.create_job("noop", kind="noop")
            if options.calls:
                plain = await _alone(client, options.calls, keyed=False)
                _told("EnqueueRun alone", plain)
                keyed = await _alone(client, options.calls, keyed=True)
                _told("EnqueueRun alone, unique key", keyed)
                _told("fencepost.enqueue, unique key", await _in_transaction(url, options.calls))
            probe = await asyncpg.connect(url)
            await _batches(client, channel, Meter(probe, pid), options)
            await probe.close()


if __name__ == "__main__":
    uvloop.run(main())
