"""Enqueues: one call at a time, batches of 1,000 by several callers with and without unique keys,
3,000 runs of one producer, and calls of the database's own function from a transaction.

Server and Postgres are processes of one machine; the caller is this one.
Usage: python -m benchmarks.enqueue [--calls 500] [--batches 20] [--callers 4]
"""

import argparse
import asyncio
import time
from collections.abc import Callable

import asyncpg
import uvloop
from fencepost import Client, NewRun

from benchmarks.setting import cpu_seconds, fresh_database, percentile, postgres, server

_BATCH = 1000
_WARM = 50
_PAYLOAD = {"order": "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42", "amount": 1999}


async def _alone(client: Client, calls: int, *, keyed: bool) -> list[float]:
    """Milliseconds per call, one after the other."""
    took = []
    for number in range(_WARM + calls):
        started = time.perf_counter()
        key = f"alone-{number}" if keyed else None
        await client.enqueue("noop", _PAYLOAD, unique=key)
        took.append((time.perf_counter() - started) * 1000)
    return took[_WARM:]


async def _batches(
    client: Client, options: argparse.Namespace, key: Callable[[int], str | None]
) -> float:
    """Runs per second in batches of 1,000 by several callers at once."""
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

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(options.callers)))
    rate: float = options.batches * _BATCH / (time.perf_counter() - started)
    return rate


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


async def main() -> None:
    """All of it, in one database."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--callers", type=int, default=4)
    options = parser.parse_args()
    with postgres() as dsn:
        url = await fresh_database(dsn, "fencepost_bench_enqueue")
        async with server(url) as (address, pid), Client(address) as client:
            await client.create_job("noop", kind="noop")
            _told("EnqueueRun alone", await _alone(client, options.calls, keyed=False))
            _told("EnqueueRun alone, unique key", await _alone(client, options.calls, keyed=True))
            _told("fencepost.enqueue, unique key", await _in_transaction(url, options.calls))
            before = cpu_seconds(pid)
            plain = await _batches(client, options, lambda n: None)
            used = (cpu_seconds(pid) - before) / (options.batches * _BATCH) * 1e6
            print(f"BatchEnqueueRuns: {plain:,.0f} runs/s, server {used:.0f} µs per run")
            half = await _batches(client, options, lambda n: f"half-{n}" if n % 2 else None)
            print(f"BatchEnqueueRuns, keys on half: {half:,.0f} runs/s")
            held = await _batches(client, options, lambda n: f"half-{n | 1}")
            print(f"BatchEnqueueRuns, keys that are all held: {held:,.0f} runs/s")
            started = time.perf_counter()
            made = await client.enqueue_many(NewRun(job="noop") for _ in range(3 * _BATCH))
            assert len(made) == 3 * _BATCH
            print(f"3,000 runs of one producer: {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    uvloop.run(main())
