"""A server of JobService and AdminService on a real socket, over a real database."""

from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import grpc
import grpc.aio
from fencepost.v1 import admin_service_pb2_grpc, job_service_pb2_grpc
from fencepost_server.api.admin import AdminServicer
from fencepost_server.api.fire_calls import FireCalls
from fencepost_server.api.jobs import JobServicer
from fencepost_server.api.page_tokens import PageTokens
from fencepost_server.api.status import StatusInterceptor
from fencepost_server.clock import DAY, Instant
from fencepost_server.domain.run import Lane
from fencepost_server.engine.backfill import Operations
from fencepost_server.engine.forecast import Forecasts
from fencepost_server.engine.jobs import Jobs
from fencepost_server.engine.ledger import Ledger
from fencepost_server.engine.wake import Affected
from fencepost_server.store.admin import AdminStore
from fencepost_server.store.calendars import CalendarStore
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load
from google.rpc import error_details_pb2, status_pb2


@dataclass
class Woken:
    """Remembers the hints that the engine gave."""

    partitions: list[set[int]] = field(default_factory=list)
    lane_hints: list[set[Lane]] = field(default_factory=list)
    ended_jobs: set[str] = field(default_factory=set)
    affected: set[Affected] = field(default_factory=set)

    def jobs(self, partition_ids: Iterable[int]) -> None:
        self.partitions.append(set(partition_ids))

    def lanes(self, lanes: Iterable[Lane], *, at: Instant = 0) -> None:
        self.lane_hints.append(set(lanes))

    def ends(self, job_ids: Collection[str]) -> None:
        self.ended_jobs.update(job_ids)

    def attempts(self, affected: Collection[Affected]) -> None:
        self.affected.update(affected)


@dataclass(kw_only=True)
class DefinitionServer:
    """Stubs that speak to the server, and what tests look behind the curtain with."""

    jobs: "job_service_pb2_grpc.JobServiceAsyncStub"
    admin: "admin_service_pb2_grpc.AdminServiceAsyncStub"
    database: Database
    woken: Woken
    dsn: str
    address: str

    def now(self) -> Instant:
        return self.database.clock.now()

    async def query(self, sql: str, *arguments: Any) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self.dsn)
        try:
            rows: list[asyncpg.Record] = await connection.fetch(sql, *arguments)
            return rows
        finally:
            await connection.close()


@asynccontextmanager
async def serving(dsn: str) -> AsyncIterator[DefinitionServer]:
    async with Database(dsn, hot_size=2, requests_size=6) as database:
        await database.sample_clock(load("upkeep")["clock"])
        woken = Woken()
        catalogue = Catalogue(pool=database.requests)
        tokens = PageTokens(key=await catalogue.page_token_key())
        operations = Operations(database=database, catalogue=catalogue)
        server = grpc.aio.server(interceptors=[StatusInterceptor()])
        job_service_pb2_grpc.add_JobServiceServicer_to_server(
            JobServicer(
                jobs=Jobs(database=database, catalogue=catalogue, wake=woken),
                fires=FireCalls(
                    ledger=Ledger(database=database, catalogue=catalogue),
                    operations=operations,
                    page_tokens=tokens,
                ),
                page_tokens=tokens,
            ),
            server,
        )
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(
                store=AdminStore(database=database),
                catalogue=catalogue,
                clock=database.clock,
                page_tokens=tokens,
                forecasts=Forecasts(database=database, clock=database.clock),
                calendars=CalendarStore(database=database),
                version="0.0.0",
                history_kept=30 * DAY,
            ),
            server,
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield DefinitionServer(
                    jobs=job_service_pb2_grpc.JobServiceStub(channel),
                    admin=admin_service_pb2_grpc.AdminServiceStub(channel),
                    database=database,
                    woken=woken,
                    dsn=dsn,
                    address=f"127.0.0.1:{port}",
                )
        finally:
            await server.stop(grace=None)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What a caller sees of a refused call."""

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: dict[str, str]
    fields: list[str]
    resource: str


async def refusal(call: Any) -> Refusal:
    """Awaits a call that must be refused."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return read_refusal(error)
    raise AssertionError("the call was not refused")


def read_refusal(error: grpc.aio.AioRpcError) -> Refusal:
    trailers = dict(error.trailing_metadata() or ())
    raw = trailers["grpc-status-details-bin"]
    assert isinstance(raw, bytes)
    status = status_pb2.Status.FromString(raw)
    info, bad, resource = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.ResourceInfo(),
    )
    assert sum(detail.Is(info.DESCRIPTOR) for detail in status.details) == 1
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad)
        detail.Unpack(resource)
    assert info.domain == "fencepost.dev"
    assert status.message == error.details()
    return Refusal(
        code=error.code(),
        reason=info.reason,
        message=status.message,
        metadata=dict(info.metadata),
        fields=[violation.field for violation in bad.field_violations],
        resource=resource.resource_name,
    )
