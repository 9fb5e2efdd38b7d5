"""An application with an outbox in a database of its own, and relays as real processes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import grpc
import grpc.aio
from fencepost.v1 import run_service_pb2
from fencepost_server.store.outbox import outbox_table

from tests.e2e.fleet import Process
from tests.integration.running_server import until

_INSERT = """
INSERT INTO fencepost_outbox
    (tenant, job, payload, labels, run_at, priority, concurrency_key, unique_key, traceparent)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) RETURNING id::text
"""


@dataclass(frozen=True, kw_only=True)
class App:
    """Writes what an application would, and looks at what is left of it."""

    dsn: str

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(self.dsn)
        try:
            yield connection
        finally:
            await connection.close()

    async def query(self, sql: str, *arguments: Any) -> list[asyncpg.Record]:
        async with self.connection() as connection:
            rows: list[asyncpg.Record] = await connection.fetch(sql, *arguments)
            return rows

    async def want(self, job: str = "mail", **values: Any) -> str:
        """One row, committed; its id."""
        async with self.connection() as connection:
            return await insert(connection, job, **values)

    async def want_many(self, count: int, job: str = "mail") -> None:
        """Rows of one transaction, with payloads 0, 1, 2 and so on."""
        await self.query(
            "INSERT INTO fencepost_outbox (job, payload)"
            " SELECT $1, to_json(n) FROM generate_series(0, $2 - 1) AS n",
            job,
            count,
        )

    async def left(self) -> int:
        """Rows that wait."""
        rows = await self.query("SELECT count(*) FROM fencepost_outbox WHERE failed_at IS NULL")
        count: int = rows[0][0]
        return count

    async def until_empty(self, *, seconds: float = 60) -> None:
        async def is_so() -> bool:
            return await self.left() == 0

        await until(is_so, what="no row waits", seconds=seconds)


async def insert(connection: asyncpg.Connection, job: str, **values: Any) -> str:
    """One row in the caller's transaction; its id."""
    names = ("payload", "labels", "run_at", "priority", "concurrency_key", "unique_key")
    row_id: str = await connection.fetchval(
        _INSERT,
        values.get("tenant"),
        job,
        *(values.get(name) for name in names),
        values.get("traceparent"),
    )
    return row_id


@asynccontextmanager
async def an_app(dsn: str) -> AsyncIterator[App]:
    """With its table, made by the DDL that users get."""
    app = App(dsn=dsn)
    async with app.connection() as connection:
        await connection.execute(outbox_table())
    yield app


@contextmanager
def relays() -> Iterator[list[Process]]:
    """A list to put relays into; all of them are gone afterwards."""
    started: list[Process] = []
    try:
        yield started
    finally:
        for process in started:
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()


def start_relay(app: App, address: str, *flags: str) -> Process:
    """`fencepost relay` as a process of its own."""
    command = [sys.executable, "-m", "fencepost_server.cli", "relay", "--server", address]
    return Process(
        [*command, "--database-url", app.dsn, "--poll", "20ms", *flags],
        FENCEPOST_LOG_FORMAT="json",
    )


async def kill(process: Process) -> None:
    """kill -9, and wait until it is gone."""
    os.kill(process.popen.pid, signal.SIGKILL)
    await asyncio.to_thread(process.popen.wait)


class HeldAnswers:
    """Has batches carried out by the real server and keeps its answers to itself."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.carried_out = asyncio.Event()

    async def BatchEnqueueRuns(
        self, request: run_service_pb2.BatchEnqueueRunsRequest, context: Any
    ) -> run_service_pb2.BatchEnqueueRunsResponse:
        await self._target.BatchEnqueueRuns(request)
        self.carried_out.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")


@asynccontextmanager
async def holding_answers(target: Any) -> AsyncIterator[tuple[str, HeldAnswers]]:
    """Address of a server that never answers, though everything it is asked for is done."""
    servicer = HeldAnswers(target)
    server = grpc.aio.server()
    held = grpc.unary_unary_rpc_method_handler(
        servicer.BatchEnqueueRuns,
        request_deserializer=run_service_pb2.BatchEnqueueRunsRequest.FromString,
        response_serializer=run_service_pb2.BatchEnqueueRunsResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                "fencepost.v1.RunService", {"BatchEnqueueRuns": held}
            )
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(grace=None)
