"""The same work through other queues on Postgres and through ours, on one cluster in one run:
jobs that do nothing, queued before the clock starts, until all have ended durably; and single
jobs every 20 ms on an idle system, from the call that enqueues to the start of the handler.

Each tool in its fastest documented durable configuration, one worker process, tools in turn in
each round; medians. Installs what is missing into benchmarks/.cache. Prints a Markdown table.
Usage: python -m benchmarks.compare [--jobs 100000] [--rounds 3] [--only river,pg-boss]
"""

import argparse
import asyncio
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import asyncpg
import uvloop

from benchmarks.compare import (
    fencepost,
    graphile_worker,
    pg_boss,
    pgqueuer,
    procrastinate,
    river,
)
from benchmarks.compare.tool import NotMeasured, Tool
from benchmarks.measure import Cost, Meter, copy_database, drained, postmaster_of, wal_place
from benchmarks.setting import empty_database, median, percentile, postgres

TOOLS: dict[str, Callable[[], Awaitable[Tool]]] = {
    "fencepost-lean": fencepost.with_lean,
    "fencepost-sdk": fencepost.with_sdk,
    "graphile-worker": graphile_worker.tool,
    "pg-boss": pg_boss.tool,
    "pgqueuer": pgqueuer.tool,
    "river": river.tool,
    "procrastinate": procrastinate.tool,
}
_DATABASE = "fencepost_bench_compare"
_PAUSE_MS = 20
_WARM = 50
_ROUND_MAX_S = 900
# Procrastinate drains hundreds a second; fewer jobs tell its rate as well.
_SLOW = {"procrastinate": 10}
_HEAD = (
    "tool | version | jobs/s | CPU µs/job | latency p50 | p99 | WAL B/job | page images B/job"
    " | history | fence"
)


@dataclass(slots=True, kw_only=True)
class _Found:
    """By name of tool: what was measured, and why others could not be."""

    costs: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, str] = field(default_factory=dict)


async def filled(dsn: str, name: str, tool: Tool, jobs: int) -> None:
    """A database with the tool's tables and `jobs` queued jobs, for copies to be made of."""
    url = await empty_database(dsn, name)
    await tool.prepare(url)
    await tool.fill(url, jobs)
    connection = await asyncpg.connect(url)
    await connection.execute("VACUUM ANALYZE")
    await connection.close()


async def drain(dsn: str, full: str, tool: Tool, jobs: int) -> Cost:
    """What it costs to work off a copy."""
    url = await copy_database(dsn, full, _DATABASE)
    connection = await asyncpg.connect(url)
    try:
        postmaster = await postmaster_of(connection)
        before = await wal_place(connection)
        async with tool.working(url, jobs, stamp=False) as working:
            meter = Meter(connection, postmaster, working.pids)
            return await drained(
                connection,
                working.worker,
                meter,
                runs=jobs,
                unfinished=tool.unfinished,
                wal_from=before,
            )
    finally:
        await connection.close()


async def latency(dsn: str, tool: Tool, jobs: int) -> list[float]:
    """Milliseconds of `jobs` single jobs, after some that warm up."""
    url = await empty_database(dsn, _DATABASE)
    await tool.prepare(url)
    async with tool.working(url, 0, stamp=True) as working:
        lines = asyncio.create_task(_lines(working.worker.line, _WARM + jobs))
        await tool.produce(url, _WARM + jobs, _PAUSE_MS)
        return (await lines)[_WARM:]


async def _lines(line: Callable[[], Awaitable[str]], number: int) -> list[float]:
    return [float(await line()) for _ in range(number)]


async def _machine(dsn: str) -> str:
    connection = await asyncpg.connect(dsn)
    version = await connection.fetchval("SELECT current_setting('server_version')")
    await connection.close()
    today = datetime.now(UTC).date().isoformat()
    return f"{today}, {os.cpu_count()} cores for all processes, Postgres {version}, durable commits"


def _row(tool: Tool, costs: list[Cost], waits: list[float]) -> str:
    def middle(figure: Callable[[Cost], float]) -> str:
        return f"{median([figure(each) for each in costs]):,.0f}"

    about = tool.about
    cells = [
        about.name,
        about.version,
        middle(lambda cost: cost.rate),
        middle(lambda cost: sum(cost.cpu_us.values())),
        f"{percentile(waits, 0.5):.1f} ms",
        f"{percentile(waits, 0.99):.1f} ms",
        middle(lambda cost: cost.wal),
        middle(lambda cost: cost.page_images),
        about.history,
        about.fence,
    ]
    return f"| {' | '.join(cells)} |"


async def _installed(names: list[str], found: _Found) -> dict[str, Tool]:
    """The tools that can be measured."""
    tools: dict[str, Tool] = {}
    for name in names:
        try:
            tools[name] = await TOOLS[name]()
        except NotMeasured as error:
            found.reasons[name] = str(error)
    return tools


async def _round(
    dsn: str, tools: dict[str, Tool], jobs: dict[str, int], latencies: int, found: _Found
) -> None:
    """Every tool once; one that fails is left out from then on."""
    for name, tool in tools.items():
        if name in found.reasons:
            continue
        try:
            async with asyncio.timeout(_ROUND_MAX_S):
                cost = await drain(dsn, f"{_DATABASE}_{name}", tool, jobs[name])
                took = await latency(dsn, tool, latencies)
        except (RuntimeError, TimeoutError) as error:
            found.reasons[name] = str(error) or f"not done in {_ROUND_MAX_S} s"
            print(f"  {name} failed: {found.reasons[name]}", flush=True)
            continue
        found.costs[name].append(cost)
        found.waits[name].extend(took)
        print(f"  {name}: {cost.rate:,.0f} jobs/s, p50 {percentile(took, 0.5):.1f} ms", flush=True)


def _table(tools: dict[str, Tool], found: _Found) -> str:
    lines = [f"| {_HEAD} |", f"|{'---|' * (_HEAD.count('|') + 1)}"]
    for name, tool in tools.items():
        if name not in found.reasons:
            lines.append(_row(tool, found.costs[name], found.waits[name]))
    for name, reason in found.reasons.items():
        cells = " |" * (_HEAD.count("|") - 2)
        lines.append(f"| {name} | | not measured: {reason.splitlines()[0]} |{cells}")
    settings = "; ".join(f"{tool.about.name}: {tool.about.settings}" for tool in tools.values())
    return "\n".join([*lines, "", f"Settings: {settings}."])


async def main() -> None:
    """Interleaved rounds, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latencies", type=int, default=500, help="single jobs per round")
    parser.add_argument("--only", default=",".join(TOOLS), help="names, separated by commas")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [each for each in names if each not in TOOLS]:
        parser.error(f"--only: {unknown[0]!r}; known are {', '.join(TOOLS)}")
    found = _Found()
    tools = await _installed(names, found)
    jobs = {name: max(1, options.jobs // _SLOW.get(name, 1)) for name in tools}
    with postgres() as dsn:
        for name, tool in tools.items():
            print(f"fills {name}", flush=True)
            await filled(dsn, f"{_DATABASE}_{name}", tool, jobs[name])
        for number in range(1, options.rounds + 1):
            print(f"round {number}", flush=True)
            await _round(dsn, tools, jobs, options.latencies, found)
        machine = await _machine(dsn)
    print(f"\n{options.jobs:,} jobs, medians of {options.rounds}; {machine}\n")
    print(_table(tools, found))


if __name__ == "__main__":
    uvloop.run(main())
