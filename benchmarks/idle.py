"""A server with nothing to do: CPU, and what is read in Postgres each second, with few and with
many schedules, queues and sessions. No query may grow with what merely is there.

Usage: python -m benchmarks.idle [--schedules 10000 10000000] [--seconds 60]
       [--queues 10000] [--sessions 200]

The queues (0: those of the jobs only) and the sessions come as a second round at each size.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta

import asyncpg
import grpc.aio
import uvloop
from fencepost.v1 import run_service_pb2_grpc

from benchmarks.long_data import EPOCH, copied, jobs_template, settings
from benchmarks.long_gauges import (
    Connection,
    Shares,
    database_counters,
    difference,
    memory_max,
    shown_bytes,
    statements,
    table_counters,
    told,
    watch_statements,
)
from benchmarks.long_runs import Holder
from benchmarks.measure import postmaster_of
from benchmarks.setting import postgres, server
from benchmarks.steady import told_statements

_RATE = 2800
_QUEUES_MAX = 64  # of one session

_QUEUES = """
INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at)
SELECT 1, 'idle-' || n, fencepost.clock(), fencepost.clock() FROM generate_series(1, $1) AS n
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """One round: shares of one core by process, and counts per second of the database."""

    title: str
    shares: Mapping[str, float]
    counts: Mapping[str, float]


async def _sessions(
    stack: AsyncExitStack, address: str, number: int, queues: int
) -> Sequence["asyncio.Task[None]"]:
    """Opens sessions that listen to all the queues between them and get nothing."""
    if number == 0:
        return []
    names = [f"idle-{n}" for n in range(1, queues + 1)] or ["default"]
    each = min(_QUEUES_MAX, max(1, -(-len(names) // number)))
    readers = []
    for place in range(number):
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        )
        first = place * each % len(names)
        call = run_service_pb2_grpc.RunServiceStub(channel).Work()
        holder = Holder(call, 10, names[first : first + each])
        await holder.open()
        readers.append(asyncio.create_task(holder.read()))
        readers.append(asyncio.create_task(holder.beat(after=10 * place / number)))
    return readers


async def _told_statements(connection: Connection, seconds: float, title: str) -> None:
    told(f"  {title}:")
    told_statements(await statements(connection), seconds)


async def _measure(
    url: str, title: str, options: argparse.Namespace, *, queues: int, sessions: int
) -> Idle:
    connection = await asyncpg.connect(url)
    if queues:
        await connection.execute(_QUEUES, queues)
    await watch_statements(connection)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(connection.close)
        address, pid = await stack.enter_async_context(server(url))
        readers = await _sessions(stack, address, sessions, queues)
        await asyncio.sleep(options.settle)
        told(f"{title}:")
        await _told_statements(connection, options.settle, "since the start of the server")
        await watch_statements(connection)
        shares = Shares({"server": pid}, postmaster_pid=await postmaster_of(connection))
        before, begun = await table_counters(connection), await database_counters(connection)
        await asyncio.sleep(options.seconds)
        used = shares.since()
        # Counters of sessions that work all the time arrive a second late.
        await asyncio.sleep(1.5)
        ended = await database_counters(connection)
        seconds = options.seconds + 1.5
        for name, changed in sorted(difference(await table_counters(connection), before).items()):
            shown = ", ".join(f"{v / seconds:,.1f} {k}" for k, v in changed.items() if v)
            told(f"    {name}: {shown} per second")
        await _told_statements(connection, seconds, "by statement")
        told(f"  server memory at most {shown_bytes(memory_max(pid))}")
        for reader in readers:
            assert not reader.done(), "a session has ended"
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    counts = {name: (ended[name] - begun[name]) / seconds for name in ended}
    return Idle(title=title, shares=used, counts=counts)


def _told_table(rounds: Sequence[Idle]) -> None:
    names = list(rounds[0].shares)
    head = " ".join(f"{name + ' %':>12}" for name in names)
    told(f"{'':<44} {head} {'commits/s':>10} {'buffers/s':>10} {'rows read/s':>12}")
    for each in rounds:
        shares = " ".join(f"{100 * each.shares[name]:12.2f}" for name in names)
        told(
            f"{each.title:<44} {shares} {each.counts['commits']:10.1f} "
            f"{each.counts['buffers']:10,.0f} {each.counts['rows_read']:12,.0f}"
        )


async def _run(dsn: str, options: argparse.Namespace) -> None:
    rounds = []
    loads = [(0, 0)]
    if options.queues or options.sessions:
        loads.append((options.queues, options.sessions))
    for schedules in options.schedules:
        template = await jobs_template(dsn, jobs=schedules, rate=_RATE)
        for queues, sessions in loads:
            title = f"{schedules:,} schedules"
            if queues or sessions:
                title += f", {queues:,} queues, {sessions} sessions"
            # The first fire is an hour away.
            async with copied(dsn, template, begin=EPOCH - timedelta(hours=1)) as url:
                rounds.append(await _measure(url, title, options, queues=queues, sessions=sessions))
    _told_table(rounds)


def main() -> None:
    """What was read, then a table of all rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, nargs="*", default=[10_000, 10_000_000])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--settle", type=float, default=60, help="seconds before measuring")
    parser.add_argument("--queues", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=0)
    parser.add_argument("--shared-buffers", default="2GB")
    options = parser.parse_args()
    with postgres(settings(shared_buffers=options.shared_buffers)) as dsn:
        uvloop.run(_run(dsn, options))


if __name__ == "__main__":
    main()
