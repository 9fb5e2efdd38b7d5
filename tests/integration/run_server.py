"""A server of JobService and RunService on a real socket, with the engine behind claims and
completions, over a real database. Nothing fires and nothing is reaped unless a test does it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import grpc.aio
from fencepost.v1 import (
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    payload_pb2,
    run_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
    worker_pb2,
)
from fencepost_server.api.dead_letter_calls import DeadLetterCalls
from fencepost_server.api.explain_calls import ExplainCalls, subscriptions_of
from fencepost_server.api.fire_calls import FireCalls
from fencepost_server.api.jobs import JobServicer
from fencepost_server.api.operation_calls import OperationCalls
from fencepost_server.api.page_tokens import PageTokens
from fencepost_server.api.plain_batch import PlainBatchCalls
from fencepost_server.api.runs import RunServicer
from fencepost_server.api.status import StatusInterceptor
from fencepost_server.api.unary_calls import UnaryCalls
from fencepost_server.api.watch_calls import WatchCalls
from fencepost_server.api.wire_assignment import Assignments
from fencepost_server.api.wire_run import read_remembered, write_enqueued, write_remembered
from fencepost_server.clock import MILLISECOND, SECOND, Instant
from fencepost_server.engine.backfill import Operations
from fencepost_server.engine.bulk import BulkUpdates
from fencepost_server.engine.claims import Claimer
from fencepost_server.engine.dead_letters import DeadLetters
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.engine.end_waits import EndWaits
from fencepost_server.engine.enqueue import Enqueues
from fencepost_server.engine.explain_run import RunExplanations
from fencepost_server.engine.handout import HandOuts
from fencepost_server.engine.jobs import Jobs
from fencepost_server.engine.ledger import Ledger
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.plain_enqueue import PlainEnqueues
from fencepost_server.engine.retention import Retention
from fencepost_server.engine.run_reads import RunReads
from fencepost_server.engine.single_enqueue import Answers, SingleEnqueues
from fencepost_server.engine.specs import SpecCache
from fencepost_server.engine.unary_work import UnaryWork
from fencepost_server.engine.wake import Wakes
from fencepost_server.engine.watch import Watches
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

QUEUE = "tenants/default/queues/default"
WORKER = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"


@dataclass
class SeenWorkers:
    """Remembers who asked for work."""

    seen: list[dict[str, Any]] = field(default_factory=list)

    def seen_polling(self, **mark: Any) -> None:
        self.seen.append(mark)


class NoSessions:
    """These tests open none."""

    async def serve(self, requests: Any, context: Any) -> None:
        raise AssertionError("no session was expected")


@dataclass(kw_only=True)
class RunServer:
    """Stubs that speak to the server, and what tests look behind the curtain with."""

    jobs: Any
    runs: Any
    database: Database
    servicer: RunServicer
    work: UnaryWork
    workers: SeenWorkers
    watches: Watches
    dsn: str

    def now(self) -> Instant:
        return self.database.clock.now()

    async def query(self, sql: str, *arguments: Any) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self.dsn)
        try:
            rows: list[asyncpg.Record] = await connection.fetch(sql, *arguments)
            return rows
        finally:
            await connection.close()

    async def make_job(self, name: str, *, tenant: str = "default", **values: Any) -> job_pb2.Job:
        values.setdefault("target", job_pb2.Target(kind="mail.send"))
        created = await self.jobs.CreateJob(
            job_service_pb2.CreateJobRequest(
                parent=f"tenants/{tenant}", job_name=name, job=job_pb2.Job(**values)
            )
        )
        job: job_pb2.Job = created.job
        return job

    async def enqueue(self, job: str, **values: Any) -> run_pb2.Run:
        response = await self.runs.EnqueueRun(
            run_service_pb2.EnqueueRunRequest(job=f"tenants/default/jobs/{job}", **values)
        )
        run: run_pb2.Run = response.run
        return run

    async def claim(self, *, max_runs: int = 1, wait_s: float = 0, **values: Any) -> Any:
        request = run_service_pb2.ClaimRunsRequest(
            subscriptions=[worker_pb2.QueueSubscription(queue=QUEUE)],
            worker_id=WORKER,
            max_runs=max_runs,
        )
        request.wait.FromMilliseconds(int(wait_s * 1000))
        request.MergeFrom(run_service_pb2.ClaimRunsRequest(**values))
        return await self.runs.ClaimRuns(request)

    async def complete(self, assignment: worker_pb2.Assignment, **outcome: Any) -> Any:
        if not outcome:
            outcome = {"success": worker_pb2.Success()}
        return await self.runs.CompleteRun(
            run_service_pb2.CompleteRunRequest(
                completion=worker_pb2.Completion(
                    run=assignment.run, attempt=assignment.attempt, **outcome
                )
            )
        )

    async def get(self, run: run_pb2.Run) -> run_pb2.Run:
        response = await self.runs.GetRun(run_service_pb2.GetRunRequest(name=run.name))
        found: run_pb2.Run = response.run
        return found


def json_payload(text: str) -> payload_pb2.Payload:
    return payload_pb2.Payload(json=text)


@asynccontextmanager
async def serving(dsn: str) -> AsyncIterator[RunServer]:
    async with Database(dsn, hot_size=4, requests_size=8) as database:
        await database.sample_clock(load("upkeep")["clock"])
        retention = Retention(database=database, clock=database.clock, days=30, days_ahead=7)
        await retention.ensure_day_tables()
        wakes, clock = Wakes(), database.clock
        catalogue = Catalogue(pool=database.requests)
        specs = SpecCache(database.requests, size=1000)
        claimer = Claimer(pool=database.hot, clock=clock, specs=specs)
        dispatcher = Dispatcher(
            pool=database.hot, clock=clock, claimer=claimer, batch_max=500, poll=SECOND
        )
        wakes.lanes_woken.append(dispatcher.hint)
        lifecycle = Lifecycle(
            database=database,
            clock=clock,
            specs=specs,
            wake=wakes,
            gather=5 * MILLISECOND,
            batch_max=1000,
        )
        work = UnaryWork(
            database=database,
            clock=clock,
            claimer=claimer,
            dispatcher=dispatcher,
            lifecycle=lifecycle,
        )
        workers = SeenWorkers()
        tokens = PageTokens(key=await catalogue.page_token_key())
        operations = Operations(database=database, catalogue=catalogue)
        watches, waits = Watches(database=database, clock=database.clock), EndWaits()
        lifecycle.changed += [waits.ended, lambda keys: watches.hint()]
        reads = RunReads(database=database, catalogue=catalogue, wake=wakes, waits=waits)
        enqueues = Enqueues(database=database, catalogue=catalogue, specs=specs, wake=wakes)
        handouts = HandOuts(dispatcher=dispatcher, claimer=claimer)
        servicer = RunServicer(
            enqueues=enqueues,
            singles=SingleEnqueues(
                database=database,
                catalogue=catalogue,
                specs=specs,
                wake=wakes,
                handouts=handouts,
                enqueues=enqueues,
                answers=Answers(
                    encode=write_enqueued, remember=write_remembered, recall=read_remembered
                ),
            ),
            reads=reads,
            unary=UnaryCalls(
                work=work,
                lifecycle=lifecycle,
                catalogue=catalogue,
                assignments=Assignments(),
                workers=workers,
                heartbeat_interval=10 * SECOND,
            ),
            sessions=NoSessions(),
            operations=OperationCalls(
                operations=operations,
                bulk=BulkUpdates(database=database, catalogue=catalogue),
                page_tokens=tokens,
            ),
            dead_letters=DeadLetterCalls(
                dead_letters=DeadLetters(
                    database=database, catalogue=catalogue, specs=specs, wake=wakes
                )
            ),
            watching=WatchCalls(
                watches=watches, reads=reads, catalogue=catalogue, page_tokens=tokens
            ),
            explaining=ExplainCalls(
                explanations=RunExplanations(
                    database=database,
                    clock=database.clock,
                    reads=reads,
                    subscriptions_of=subscriptions_of,
                )
            ),
            page_tokens=tokens,
        )
        server = grpc.aio.server(interceptors=[StatusInterceptor()])
        job_service_pb2_grpc.add_JobServiceServicer_to_server(
            JobServicer(
                jobs=Jobs(database=database, catalogue=catalogue, wake=wakes),
                fires=FireCalls(
                    ledger=Ledger(database=database, catalogue=catalogue),
                    operations=operations,
                    page_tokens=tokens,
                ),
                page_tokens=tokens,
            ),
            server,
        )
        run_service_pb2_grpc.add_RunServiceServicer_to_server(servicer, server)
        PlainBatchCalls(
            enqueues=PlainEnqueues(database=database, catalogue=catalogue, specs=specs, wake=wakes),
            otherwise=servicer.BatchEnqueueRuns,
        ).add_to_server(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        loops = [asyncio.create_task(each.run()) for each in (lifecycle, dispatcher, watches)]
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield RunServer(
                    jobs=job_service_pb2_grpc.JobServiceStub(channel),
                    runs=run_service_pb2_grpc.RunServiceStub(channel),
                    database=database,
                    servicer=servicer,
                    work=work,
                    workers=workers,
                    watches=watches,
                    dsn=dsn,
                )
        finally:
            servicer.drain()
            await server.stop(grace=None)
            await work.finish()
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
