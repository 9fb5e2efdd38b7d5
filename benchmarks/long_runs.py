"""Many long runs in flight: what their heartbeats cost, and that no lease is lost.

Usage: python -m benchmarks.long_runs [--runs 100000] [--seconds 600] [--held 5000]

The workers are sessions of the raw protocol in a process of their own: each holds up to --held
runs (5,000 is what a server allows) and sends its whole inventory every ten seconds.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import asyncpg
import grpc.aio
import uvloop
from fencepost import Client
from fencepost.v1 import run_service_pb2, run_service_pb2_grpc, worker_pb2

from benchmarks.long_data import settings
from benchmarks.long_gauges import (
    Connection,
    Shares,
    difference,
    memory_max,
    queue_size,
    shown_bytes,
    shown_shares,
    statements,
    table_counters,
    told,
    wal_position,
    watch_statements,
)
from benchmarks.measure import postmaster_of
from benchmarks.setting import fresh_database, percentile, postgres, server

_WINDOW = 1000
_CLAIM_MAX_S = 120

_FILL = """
INSERT INTO fencepost.run_queue
    (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version, state,
     origin, priority, lease_s, cancel_grace_s, attempt_timeout_s)
SELECT s.job_id, c.at + n * interval '1 microsecond', c.at, c.at, s.tenant_id, s.queue_id,
       s.kind_id, s.version, 'queued', 'enqueue', 0, s.lease_s, s.cancel_grace_s,
       s.attempt_timeout_s
FROM fencepost.job_schedules AS s
CROSS JOIN (SELECT date_trunc('second', fencepost.clock()) AS at) AS c
CROSS JOIN generate_series(1, $1) AS n
"""


class Holder:
    """One session that takes runs and keeps them."""

    def __init__(self, call: Any, want: int, queues: Sequence[str] = ("default",)) -> None:
        self._call = call
        self._want = want
        self._queues = queues
        self._heartbeat = worker_pb2.Heartbeat(complete_inventory=True)
        self.trips: list[float] = []
        self.notices = 0
        self._sent_at: dict[int, float] = {}

    @property
    def held(self) -> int:
        """Runs it has been given."""
        return len(self._heartbeat.runs)

    async def open(self) -> None:
        """Say hello, with as much credit as the window allows."""
        hello = worker_pb2.Hello(
            worker_id=str(uuid.uuid4()), min_revision=1, max_revision=1, slots=self._want
        )
        for queue in self._queues:
            hello.subscriptions.add(queue=f"tenants/default/queues/{queue}")
        await self._call.write(
            run_service_pb2.WorkRequest(hello=hello, credit_limit=min(self._want, _WINDOW))
        )

    async def read(self) -> None:
        """Take what comes until the stream ends."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            match message.WhichOneof("event"):
                case "runs":
                    for run in message.runs.runs:
                        self._heartbeat.runs.add(run=run.run, attempt=run.attempt)
                    await self._call.write(
                        run_service_pb2.WorkRequest(
                            received_batch_seq=message.runs.batch_seq,
                            credit_limit=min(self._want, self.held + _WINDOW),
                        )
                    )
                case "heartbeat_ack":
                    ack = message.heartbeat_ack
                    self.trips.append(time.monotonic() - self._sent_at.pop(ack.seq))
                    self.notices += len(ack.notices) + len(ack.not_renewed)
                case "notices":
                    self.notices += len(message.notices.notices)

    async def beat(self, *, after: float) -> None:
        """A heartbeat every ten seconds, the first `after` seconds from now."""
        await asyncio.sleep(after)
        while True:
            self._heartbeat.seq += 1
            began = time.monotonic()
            self._sent_at[self._heartbeat.seq] = began
            await self._call.write(run_service_pb2.WorkRequest(heartbeat=self._heartbeat))
            await asyncio.sleep(began + 10 - time.monotonic())


async def hold(address: str, runs: int, held: int) -> None:
    """The workers' process: holds runs until its input ends, then prints what it saw."""
    async with AsyncExitStack() as stack:
        holders = []
        for first in range(0, runs, held):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(address, options=options)
            )
            call = run_service_pb2_grpc.RunServiceStub(channel).Work()
            holders.append(Holder(call, min(held, runs - first)))
        readers = []
        for place, holder in enumerate(holders):
            await holder.open()
            readers.append(asyncio.create_task(holder.read()))
            readers.append(asyncio.create_task(holder.beat(after=10 * place / len(holders))))
        left = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([left, *readers], return_when=asyncio.FIRST_COMPLETED)
        for reader in readers:
            if reader.done():
                await reader
            reader.cancel()
        for reader in readers:
            with suppress(asyncio.CancelledError):
                await reader
        trips = [trip for holder in holders for trip in holder.trips]
        found = {
            "sessions": len(holders),
            "held": sum(holder.held for holder in holders),
            "heartbeats": len(trips),
            "notices": sum(holder.notices for holder in holders),
            "p50_ms": 1000 * percentile(trips, 0.5) if trips else 0,
            "max_ms": 1000 * max(trips, default=0),
        }
        print(json.dumps(found))


async def _claimed(connection: Connection, runs: int) -> None:
    deadline = time.monotonic() + _CLAIM_MAX_S
    while (
        await connection.fetchval("SELECT count(*) FROM fencepost.run_queue WHERE attempt_open")
        < runs
    ):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all runs were claimed in {_CLAIM_MAX_S} s")
        await asyncio.sleep(0.2)


async def _told(connection: Connection, runs: int, worker: "subprocess.Popen[str]") -> None:
    output, _ = await asyncio.to_thread(worker.communicate, "", 60)
    seen = json.loads(output.splitlines()[-1])
    row = await connection.fetchrow(
        """
        SELECT count(*) FILTER (WHERE attempt_open AND state = 'running') AS running,
               coalesce(sum(lost_lease_count + attempt - 1), 0) AS lost,
               (SELECT count(*) FROM fencepost.run_attempts) AS ended
        FROM fencepost.run_queue
        """
    )
    assert row is not None
    told(
        f"{seen['sessions']} sessions with {seen['held']:,} runs: {seen['heartbeats']:,} heartbeats"
        f" answered, round trip p50 {seen['p50_ms']:.0f} ms, max {seen['max_ms']:.0f} ms"
    )
    lost = row["lost"] + row["ended"] + seen["notices"]
    told(f"running {row['running']:,} of {runs:,}, leases lost {lost:,}")


async def _run(dsn: str, options: argparse.Namespace) -> None:
    url = await fresh_database(dsn, "fencepost_bench_long_runs")
    connection = await asyncpg.connect(url)
    async with server(url) as (address, pid):
        async with Client(address) as client:
            await client.create_job("long", kind="long")
        await connection.execute(_FILL, options.runs)
        command = [sys.executable, "-m", "benchmarks.long_runs", "--hold", address]
        command += ["--runs", str(options.runs), "--held", str(options.held)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            await _claimed(connection, options.runs)
            # The vacuum after so many claims, and the first round of heartbeats.
            await asyncio.sleep(options.settle)
            await _measure(connection, pid, worker, options)
            await _told(connection, options.runs, worker)
        finally:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        told(f"server memory at most {shown_bytes(memory_max(pid))}")
    await connection.close()


async def _measure(
    connection: Connection, pid: int, worker: "subprocess.Popen[str]", options: argparse.Namespace
) -> None:
    await watch_statements(connection)
    shares = Shares(
        {"server": pid, "workers": worker.pid}, postmaster_pid=await postmaster_of(connection)
    )
    whole = Shares({"server": pid}, postmaster_pid=await postmaster_of(connection))
    before = await table_counters(connection)
    begin = await wal_position(connection)
    seconds = 0.0
    while seconds < options.seconds:
        pause = min(options.every, options.seconds - seconds)
        await asyncio.sleep(pause)
        seconds += pause
        size = await queue_size(connection)
        told(
            f"{seconds:6.0f} s: queue {shown_bytes(size.table)} + {shown_bytes(size.indexes)}, "
            f"dead rows {size.dead:,}; {shown_shares(shares.since())}"
        )
    used = whole.since()
    written = await connection.fetchval(
        "SELECT pg_current_wal_insert_lsn() - $1::text::pg_lsn", begin
    )
    # Counters of sessions that work all the time arrive a second late.
    await asyncio.sleep(1.5)
    changed = difference(await table_counters(connection), before)["run_queue"]
    renewals = changed["updated"]
    told(
        f"{renewals:,} renewals in {seconds:.0f} s ({renewals / seconds:,.0f}/s), "
        f"{100 * changed['updated_hot'] / max(1, renewals):.1f} % HOT, "
        f"{float(written) / max(1, renewals):.0f} WAL bytes each, full-page images included"
    )
    for name, share in used.items():
        told(
            f"{name}: {100 * share:.1f} % of a core, {share * seconds / renewals * 1e6:.1f} µs each"
        )
    for row in (await statements(connection))[:6]:
        buffers = row["buffers"] / max(1, row["rows"])
        told(
            f"  {row['name']}: {row['calls']:,} calls, {row['rows']:,} rows, "
            f"{row['ms'] / seconds / 10:.1f} % of a core, {buffers:.1f} buffers per row"
        )


def main() -> None:
    """Lines over time, then the sums."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--held", type=int, default=5000, help="runs of one session")
    parser.add_argument("--every", type=float, default=30, help="seconds between two lines")
    parser.add_argument("--settle", type=float, default=30, help="seconds before measuring")
    parser.add_argument("--shared-buffers", default="2GB")
    parser.add_argument("--hold", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        uvloop.run(hold(options.hold, options.runs, options.held))
        return
    with postgres(settings(shared_buffers=options.shared_buffers)) as dsn:
        uvloop.run(_run(dsn, options))


if __name__ == "__main__":
    main()
