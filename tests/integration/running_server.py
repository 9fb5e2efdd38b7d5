"""A whole server in this process, as `app.run_server` puts it together."""

import asyncio
import gc
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import grpc
import grpc.aio
from fencepost.v1 import (
    admin_service_pb2_grpc,
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    payload_pb2,
    run_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
    worker_pb2,
)
from fencepost_server.app import run_server
from fencepost_server.config import load_config
from fencepost_server.domain.run import RunKey
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.worker_session import WAIT_S, WorkerSession

QUEUE = "tenants/default/queues/default"


@dataclass(kw_only=True)
class RunningServer:
    """Stubs that speak to the server, and what tests look behind the curtain with."""

    address: str
    dsn: str
    channel: Any
    jobs: Any
    runs: Any
    admin: Any
    health: Any
    stopping: asyncio.Event
    serving: "asyncio.Task[None]"

    async def query(self, sql: str, *arguments: Any) -> list[asyncpg.Record]:
        """Rows of a statement of the test's own."""
        connection = await asyncpg.connect(self.dsn)
        try:
            rows: list[asyncpg.Record] = await connection.fetch(sql, *arguments)
            return rows
        finally:
            await connection.close()

    async def until(self, sql: str, *arguments: Any, want: Any = True) -> None:
        """Until the first column of the first row is `want`."""

        async def is_so() -> bool:
            rows = await self.query(sql, *arguments)
            return bool(rows) and rows[0][0] == want

        await until(is_so, what=sql)

    async def make_job(self, name: str = "mail", **values: Any) -> job_pb2.Job:
        """A job without a schedule, of kind mail.send unless said otherwise."""
        values.setdefault("target", job_pb2.Target(kind="mail.send"))
        created = await self.jobs.CreateJob(
            job_service_pb2.CreateJobRequest(
                parent="tenants/default", job_name=name, job=job_pb2.Job(**values)
            )
        )
        job: job_pb2.Job = created.job
        return job

    async def enqueue(self, count: int = 1, *, job: str = "mail", **values: Any) -> list[RunKey]:
        """Runs in one batch, and their keys."""
        parent = "tenants/default"
        request = run_service_pb2.EnqueueRunRequest(job=f"{parent}/jobs/{job}", **values)
        answer = await self.runs.BatchEnqueueRuns(
            run_service_pb2.BatchEnqueueRunsRequest(parent=parent, requests=[request] * count)
        )
        problems = [each.problem for each in answer.outcomes if not each.HasField("response")]
        assert not problems, f"not made: {problems}"
        return [key_of(outcome.response.run.key) for outcome in answer.outcomes]

    async def storage_health(self) -> int:
        """The status of the check `fencepost.storage`."""
        return await self.check("fencepost.storage")

    async def check(self, service: str) -> int:
        """The status of a health check; 0 if there is none."""
        try:
            answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return 0
        status: int = answer.status
        return status

    @asynccontextmanager
    async def stream(
        self, *, worker_id: str | None = None, read: bool = True
    ) -> AsyncIterator[WorkerSession]:
        """A Work call before its first message, on a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(self.address, options=options) as channel:
            call = run_service_pb2_grpc.RunServiceStub(channel).Work()
            session = WorkerSession(call, worker_id or str(uuid.uuid4()))
            if read:
                session.read()
            try:
                yield session
            finally:
                await session.close()

    @asynccontextmanager
    async def session(
        self, *, credit: int = 0, worker_id: str | None = None, read: bool = True, **values: Any
    ) -> AsyncIterator[WorkerSession]:
        """A stream whose Hello was answered, with the Welcome taken unless nothing is read."""
        async with self.stream(worker_id=worker_id, read=read) as session:
            await session.say(hello=hello(session.worker_id, **values), credit_limit=credit)
            if read:
                await session.hear("welcome")
            yield session


def hello(worker_id: str, **values: Any) -> worker_pb2.Hello:
    """A valid Hello of a worker that listens to the default queue, unless said otherwise."""
    message = worker_pb2.Hello(
        worker_id=worker_id, display_name="tester", min_revision=1, max_revision=1, slots=10
    )
    if "subscriptions" not in values:
        message.subscriptions.add(queue=QUEUE)
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            getattr(message, name).update(value)
        elif isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


def held(assignment: worker_pb2.Assignment, **values: Any) -> worker_pb2.HeldRun:
    """An assignment as an entry of an inventory."""
    return worker_pb2.HeldRun(run=assignment.run, attempt=assignment.attempt, **values)


def success(assignment: worker_pb2.Assignment, text: str = "") -> worker_pb2.Completion:
    """The handler returned."""
    outcome = worker_pb2.Success()
    if text:
        outcome.result.json = text
    return worker_pb2.Completion(run=assignment.run, attempt=assignment.attempt, success=outcome)


def key_of(message: run_pb2.RunKey) -> RunKey:
    """A key as the engine has it."""
    at = message.scheduled_at
    return RunKey(message.job_id, at.seconds * 1_000_000 + at.nanos // 1000)


def keys_of(assignments: Sequence[worker_pb2.Assignment]) -> list[RunKey]:
    """Keys in the order of delivery."""
    return [key_of(each.run) for each in assignments]


def json_payload(text: str) -> payload_pb2.Payload:
    """A payload of JSON text."""
    return payload_pb2.Payload(json=text)


async def until(
    is_so: Callable[[], Awaitable[bool]], *, what: str, seconds: float = WAIT_S
) -> None:
    """Polls a condition that nobody announces."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not await is_so():
        assert loop.time() < deadline, f"not so after {seconds} s: {what}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def running(dsn: str, **settings: Any) -> AsyncIterator[RunningServer]:
    """A server on a free port that looks for work often; it has left when the block ends."""
    given = {
        "database_url": dsn,
        "listen": "127.0.0.1:0",
        "claim_poll_s": 0.2,
        "reap_interval_s": 0.1,
        "drain_grace_s": 5.0,
        **settings,
    }
    unheard: list[dict[str, Any]] = []

    def hear(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A future inside asyncpg, of a connection that broke while it was being made; whoever
        # asked for the connection has had an error of its own.
        if "unexpected connection_lost() call" not in str(context.get("exception")):
            unheard.append(context)

    asyncio.get_running_loop().set_exception_handler(hear)
    stopping = asyncio.Event()
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        run_server(load_config(**given), stopping=stopping, started=started.set_result)
    )
    try:
        waited: set[asyncio.Future[Any]] = {serving, started}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await serving
        address = f"127.0.0.1:{started.result()}"
        # A connection of its own: gRPC would share one with other channels of this process.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            yield RunningServer(
                address=address,
                dsn=dsn,
                channel=channel,
                jobs=job_service_pb2_grpc.JobServiceStub(channel),
                runs=run_service_pb2_grpc.RunServiceStub(channel),
                admin=admin_service_pb2_grpc.AdminServiceStub(channel),
                health=health_pb2_grpc.HealthStub(channel),
                stopping=stopping,
                serving=serving,
            )
    finally:
        stopping.set()
        await asyncio.wait_for(serving, 30)
    gc.collect()
    assert not unheard, f"errors that nobody awaited: {unheard}"
