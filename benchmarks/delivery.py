"""Queued no-op runs to durable completion through worker sessions: the Python SDK's worker and
the lean client in Go, with 1 and with 200 sessions, and the bare pipeline with its own client
and with the lean one. All of them in turn in each round; medians and ratios at the end.

Server, worker and Postgres are processes of one machine. CPU is of each process per run.
Usage: python -m benchmarks.delivery [--runs 500000] [--rounds 5] [--only sdk-1 lean-200 ...]
"""

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import asyncpg
import uvloop
from fencepost import Client, NewRun

from benchmarks import lean, pipeline, sdk
from benchmarks.measure import Cost, Meter, Worker, copy_database, drained, postmaster_of, wal_place
from benchmarks.setting import fresh_database, median, postgres, server

UNFINISHED = "SELECT EXISTS (SELECT FROM fencepost.run_queue)"
_FULL, _COPY = "fencepost_bench_delivery_full", "fencepost_bench_delivery"
_PIPE_FULL, _PIPE_COPY = "fencepost_bench_pipe_full", "fencepost_bench_pipe"
_SLOTS = 1000
_FILL_BATCH = 20_000
_FILL_CALLERS = 4
_SESSIONS = (1, 200)


async def enqueue(url: str, runs: int) -> None:
    """`runs` runs of one job that does nothing, through BatchEnqueueRuns of a server."""
    async with server(url) as (address, _), Client(address) as client:
        await client.create_job(sdk.HANDLED, kind=sdk.HANDLED)
        left = iter([_FILL_BATCH] * (runs // _FILL_BATCH) + [runs % _FILL_BATCH])

        async def caller() -> None:
            for number in left:
                made = await client.enqueue_many(NewRun(job=sdk.HANDLED) for _ in range(number))
                bad = [each for each in made if isinstance(each, Exception)]
                assert not bad, bad[0]

        await asyncio.gather(*(caller() for _ in range(_FILL_CALLERS)))


async def fill(dsn: str, name: str, runs: int) -> None:
    """A database with `runs` queued runs, for copies to be made of."""
    url = await fresh_database(dsn, name)
    await enqueue(url, runs)
    connection = await asyncpg.connect(url)
    made = await connection.fetchval("SELECT count(*) FROM fencepost.run_queue")
    assert made == runs, f"{runs} runs enqueued, {made} are there"
    await settle(connection)
    await connection.close()


async def settle(connection: asyncpg.Connection) -> None:
    """What autovacuum does to a backlog before long."""
    await connection.execute("VACUUM ANALYZE")


async def measure(dsn: str, command: Callable[[str], list[str]], *, runs: int) -> Cost:
    """Drain a copy of what `fill` made; `command` starts a worker for an address."""
    url = await copy_database(dsn, _FULL, _COPY)
    connection = await asyncpg.connect(url)
    try:
        postmaster = await postmaster_of(connection)
        async with server(url) as (address, pid):
            before = await wal_place(connection)
            worker = Worker(command(address))
            try:
                meter = Meter(connection, postmaster, {"server": pid, "workers": worker.pid})
                cost = await drained(
                    connection, worker, meter, runs=runs, unfinished=UNFINISHED, wal_from=before
                )
            finally:
                await worker.stop()
        ended = await connection.fetchval(
            "SELECT count(*) FROM fencepost.job_runs WHERE state = 'succeeded' AND attempt = 1"
        )
        assert ended == runs, f"{runs} runs, {ended} succeeded at the first attempt"
    finally:
        await connection.close()
    return cost


async def _bare(dsn: str, runs: int, command: list[str] | None) -> Cost:
    url = await copy_database(dsn, _PIPE_FULL, _PIPE_COPY)
    return await pipeline.measure(url, runs=runs, command=command)


def lean_command(program: Path, sessions: int, runs: int, address: str) -> list[str]:
    """The lean client for an address."""
    return [
        str(program),
        *("--address", address, "--sessions", str(sessions), "--runs", str(runs)),
    ]


def _variants(
    dsn: str, program: Path, runs: int, slots: int
) -> dict[str, Callable[[], Awaitable[Cost]]]:
    """What is measured, by name, in the order of a round."""
    found: dict[str, Callable[[], Awaitable[Cost]]] = {
        "pipeline": partial(_bare, dsn, runs, None),
    }
    for sessions in _SESSIONS:
        found[f"pipeline-lean-{sessions}"] = partial(
            _bare, dsn, runs, [str(program), "--sessions", str(sessions)]
        )
        found[f"lean-{sessions}"] = partial(
            measure, dsn, partial(lean_command, program, sessions, runs), runs=runs
        )
        found[f"sdk-{sessions}"] = partial(
            measure,
            dsn,
            partial(sdk.command, sessions=sessions, slots=slots, runs=runs),
            runs=runs,
        )
    return found


def told(name: str, costs: list[Cost]) -> str:
    """One line: the median of each figure."""

    def middle(figure: Callable[[Cost], float]) -> float:
        return median([figure(each) for each in costs])

    cpu = {
        each: middle(lambda cost, each=each: cost.cpu_us[each])  # type: ignore[misc]
        for each in costs[0].cpu_us
    }
    parts = ", ".join(f"{each} {used:.1f}" for each, used in cpu.items())
    return (
        f"{name:17} {middle(lambda cost: cost.rate):8,.0f} runs/s   CPU µs/run {parts}, "
        f"sum {sum(cpu.values()):.1f}   WAL {middle(lambda cost: cost.wal):,.0f} B/run "
        f"+ {middle(lambda cost: cost.page_images):,.0f} B page images"
    )


def _ratios(costs: dict[str, list[Cost]]) -> list[str]:
    """Each of ours against the pipelines of the same rounds."""
    lines = []
    for name, floor in (
        *((f"lean-{n}", "pipeline") for n in _SESSIONS),
        *((f"lean-{n}", f"pipeline-lean-{n}") for n in _SESSIONS),
        *((f"sdk-{n}", "pipeline") for n in _SESSIONS),
    ):
        if name in costs and floor in costs:
            pairs = list(zip(costs[name], costs[floor], strict=True))
            rate = median([ours.rate / bare.rate for ours, bare in pairs])
            cpu = median([sum(b.cpu_us.values()) / sum(o.cpu_us.values()) for o, b in pairs])
            lines.append(f"{name} / {floor}: {rate:.2f} by rate, {cpu:.2f} by CPU")
    return lines


async def main() -> None:
    """Interleaved rounds, then medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=_SLOTS, help="of the SDK, all sessions")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    options = parser.parse_args()
    program = lean.build()
    costs: dict[str, list[Cost]] = defaultdict(list)
    with postgres() as dsn:
        variants = _variants(dsn, program, options.runs, options.slots)
        names = options.only or list(variants)
        if unknown := [each for each in names if each not in variants]:
            parser.error(f"--only: {unknown[0]!r}; known are {', '.join(variants)}")
        if any(not each.startswith("pipeline") for each in names):
            await fill(dsn, _FULL, options.runs)
        if any(each.startswith("pipeline") for each in names):
            await pipeline.fill(dsn, _PIPE_FULL, options.runs)
        for number in range(1, options.rounds + 1):
            print(f"round {number}", flush=True)
            for name in names:
                cost = await variants[name]()
                costs[name].append(cost)
                print("  " + told(name, [cost]), flush=True)
    print(f"delivery, {options.runs:,} runs, medians of {options.rounds}")
    for name in names:
        print("  " + told(name, costs[name]))
    for line in _ratios(costs):
        print("  " + line)


if __name__ == "__main__":
    uvloop.run(main())
