"""How much of a cap is used while runs wait for its places: servers with a worker each on one
database, handlers that sleep, and the mean of open attempts over the cap, sampled every 5 ms.

Usage: python -m benchmarks.caps [--servers 4] [--cap 5] [--handler-ms 50 100] [--seconds 5]
       [--scopes tenant queue job key]
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import asyncpg
import uvloop
from fencepost import Client, NewRun
from fencepost.v1 import job_pb2

from benchmarks.setting import cpu_seconds, fresh_database, postgres, server

_WORKER = """
import asyncio, sys, logging
from fencepost import Client, Worker
logging.basicConfig(level=logging.WARNING)
worker = Worker(Client(sys.argv[1]), slots=40)
@worker.handler("nap")
async def nap(seconds: float) -> None:
    await asyncio.sleep(seconds)
worker.run()
"""

_SCOPES = ("tenant", "queue", "job", "key")
_KEYS = 8
_KEY_CAP = 2
_WARM_S = 1.5
_SAMPLE_S = 0.005
_UNLIMITED = """
    UPDATE fencepost.tenants SET max_in_flight = NULL;
    UPDATE fencepost.queues SET max_in_flight = NULL, max_in_flight_per_key = NULL,
                                has_capped_jobs = false
"""
_CAPS = {
    "tenant": "UPDATE fencepost.tenants SET max_in_flight = $1",
    "queue": "UPDATE fencepost.queues SET max_in_flight = $1",
    "key": "UPDATE fencepost.queues SET max_in_flight_per_key = $1",
}
_OPEN = """
    SELECT coalesce(max(n), 0), coalesce(sum(n), 0)
    FROM (SELECT count(*) AS n FROM fencepost.run_queue WHERE attempt_open
          GROUP BY concurrency_key) AS o
"""
_ENDED = "SELECT count(*) FROM fencepost.job_runs"


@dataclass(kw_only=True)
class _Seen:
    most: int = 0
    ended_per_s: float = 0
    open: list[int] = field(default_factory=list)

    def used(self, places: int) -> float:
        return sum(self.open) / len(self.open) / places


async def _sample(probe: asyncpg.Connection, seconds: float) -> _Seen:
    seen, loop = _Seen(), asyncio.get_running_loop()
    ended = await probe.fetchval(_ENDED)
    started = loop.time()
    while loop.time() < started + seconds:
        [(most, total)] = await probe.fetch(_OPEN)
        seen.most = max(seen.most, most)
        seen.open.append(int(total))
        await asyncio.sleep(_SAMPLE_S)
    ended = await probe.fetchval(_ENDED) - ended
    seen.ended_per_s = ended / (loop.time() - started)
    return seen


@asynccontextmanager
async def _fleet(dsn: str, servers: int) -> AsyncIterator[tuple[str, list[int]]]:
    """Servers with a worker each; the address of one, and the pids of all."""
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(server(dsn)) for _ in range(servers)]
        workers = [
            subprocess.Popen([sys.executable, "-c", _WORKER, address]) for address, _ in started
        ]
        try:
            yield started[0][0], [pid for _, pid in started]
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                await asyncio.to_thread(worker.wait, 30)


async def _round(
    client: Client, probe: asyncpg.Connection, scope: str, cap: int, nap: float, seconds: float
) -> _Seen:
    """A backlog that outlasts the measurement; what is left of it goes away afterwards."""
    places = _KEYS * cap if scope == "key" else cap
    await probe.execute(_UNLIMITED)
    if scope != "job":
        await probe.execute(_CAPS[scope], cap)
    limits = job_pb2.RunLimits(max_in_flight=cap) if scope == "job" else None
    job = await client.create_job("", kind="nap", limits=limits)
    runs = int(places * (seconds + _WARM_S + 1) / nap) + 10 * places
    await client.enqueue_many(
        NewRun(
            job=job.name,
            payload=nap,
            concurrency_key=f"key-{n % _KEYS}" if scope == "key" else None,
        )
        for n in range(runs)
    )
    while await probe.fetchval("SELECT count(*) FROM fencepost.run_queue WHERE attempt > 0") == 0:
        await asyncio.sleep(0.02)
    await asyncio.sleep(_WARM_S)
    seen = await _sample(probe, seconds)
    assert await probe.fetchval("SELECT EXISTS (SELECT FROM fencepost.run_queue)"), "no backlog"
    await probe.execute("DELETE FROM fencepost.run_queue WHERE NOT attempt_open")
    while await probe.fetchval("SELECT EXISTS (SELECT FROM fencepost.run_queue)"):
        await asyncio.sleep(0.02)
    assert seen.most <= cap, f"{seen.most} open attempts under a cap of {cap}"
    return seen


async def main() -> None:
    """One line per scope and handler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--cap", type=int, default=5)
    parser.add_argument("--handler-ms", type=int, nargs="+", default=[50, 100])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--scopes", nargs="+", choices=_SCOPES, default=_SCOPES)
    options = parser.parse_args()
    with postgres() as dsn:
        url = await fresh_database(dsn, "fencepost_bench_caps")
        probe = await asyncpg.connect(url)
        async with _fleet(url, options.servers) as (address, pids), Client(address) as client:
            # The workers have started and plans are made.
            await _round(client, probe, "queue", 5, 0.05, 1)
            for scope in options.scopes:
                cap = _KEY_CAP if scope == "key" else options.cap
                places = _KEYS * cap if scope == "key" else cap
                for handler_ms in options.handler_ms:
                    before = sum(map(cpu_seconds, pids))
                    seen = await _round(
                        client, probe, scope, cap, handler_ms / 1000, options.seconds
                    )
                    spent = sum(map(cpu_seconds, pids)) - before
                    print(
                        f"{scope} cap, {places} places, {options.servers} servers, handler "
                        f"{handler_ms} ms: {seen.used(places):.0%} used, at most {seen.most} of "
                        f"{cap}, {len(seen.open)} samples, {seen.ended_per_s:.0f} runs/s of "
                        f"{places * 1000 / handler_ms:.0f}, servers used {spent:.1f} s of CPU",
                        flush=True,
                    )
        await probe.close()


if __name__ == "__main__":
    uvloop.run(main())
