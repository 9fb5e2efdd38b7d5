"""A scripted RunService on a real socket: the reference peer of worker and client tests.

It answers like a server by default; a test changes the knobs, looks at everything that
came over the wire, and waits for what it expects instead of sleeping.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from fencepost.v1 import (
    job_service_pb2_grpc,
    run_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
    worker_pb2,
)

from tests.sdk.fake_jobs import FakeJobs
from tests.sdk.fake_session import FakeSession, Refusal, a_verdict

__all__ = ["FakeServer", "FakeSession", "Refusal", "a_verdict", "serving"]

PATIENCE = 15.0
"""Seconds after which an event that did not come fails the test."""

VerdictOf = Callable[[worker_pb2.Completion | worker_pb2.Release], worker_pb2.AttemptVerdict | None]


class FakeServer(run_service_pb2_grpc.RunServiceServicer):
    """Start it with `serving()`."""

    def __init__(self) -> None:
        self.address = ""
        self.sessions: list[FakeSession] = []
        self.heartbeat_interval = 0.2
        self.heartbeat_ack_timeout = 5.0
        self.max_buffer_time = 10.0
        self.answer_heartbeats = True
        self.end_on_half_close = True
        self.prefetch = 0
        """What the worker under test was given, for the check of its credit."""
        self.verdict_of: VerdictOf = a_verdict
        self.work_refusals: list[Refusal] = []
        """Statuses for the next Work calls, first one first."""
        self.unary_refusals: list[Refusal] = []
        """Statuses for the next unary calls."""
        self.enqueued: list[run_service_pb2.EnqueueRunRequest] = []
        self.batches: list[int] = []
        self.completed_by_call: list[worker_pb2.Completion] = []
        self.released_by_call: list[worker_pb2.Release] = []
        self.waits_before_end = 0
        self.work_calls = 0
        self.jobs = FakeJobs()  # type: ignore[abstract]
        self.metadata: list[dict[str, str | bytes]] = []
        self._condition = asyncio.Condition()
        self._instants = itertools.count(1)

    async def on_hello(self, session: FakeSession) -> None:
        """Welcomes; tests that want another opening replace it."""
        await session.welcome()

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Waits until the condition is true; fails the test after PATIENCE."""
        async with self._condition:
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._condition.wait_for(condition)
            except TimeoutError:
                raise AssertionError(f"{what or 'the condition'} did not come true") from None

    async def changed(self) -> None:
        """Something came in: look again."""
        async with self._condition:
            self._condition.notify_all()

    async def session(self, number: int = 1) -> FakeSession:
        """The session with this number, counted from 1, once its Hello is in."""
        await self.until(lambda: len(self.sessions) >= number, f"session {number}")
        return self.sessions[number - 1]

    async def Work(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[run_service_pb2.WorkRequest],
        context: grpc.aio.ServicerContext[
            run_service_pb2.WorkRequest, run_service_pb2.WorkResponse
        ],
    ) -> None:
        """A session."""
        self.work_calls += 1
        await self.changed()
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if self.work_refusals:
            await self.work_refusals.pop(0).abort(context)
        await FakeSession(self, context).serve(request_iterator)

    async def BatchCompleteRuns(
        self,
        request: run_service_pb2.BatchCompleteRunsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> run_service_pb2.BatchCompleteRunsResponse:
        """Applies all."""
        self.completed_by_call += request.completions
        verdicts = [a_verdict(completion) for completion in request.completions]
        return run_service_pb2.BatchCompleteRunsResponse(verdicts=verdicts)

    async def ReleaseRuns(
        self,
        request: run_service_pb2.ReleaseRunsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> run_service_pb2.ReleaseRunsResponse:
        """Applies all."""
        self.released_by_call += request.releases
        verdicts = [a_verdict(release) for release in request.releases]
        return run_service_pb2.ReleaseRunsResponse(verdicts=verdicts)

    async def EnqueueRun(
        self,
        request: run_service_pb2.EnqueueRunRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> run_service_pb2.EnqueueRunResponse:
        """Makes a run, or refuses as scripted."""
        self.enqueued.append(request)
        await self._refuse(context)
        return run_service_pb2.EnqueueRunResponse(run=self._make_run(request))

    async def BatchEnqueueRuns(
        self,
        request: run_service_pb2.BatchEnqueueRunsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> run_service_pb2.BatchEnqueueRunsResponse:
        """Makes runs; those of a job that ends in "missing" get a problem."""
        await self._refuse(context)
        self.batches.append(len(request.requests))
        answer = run_service_pb2.BatchEnqueueRunsResponse()
        for entry in request.requests:
            outcome = answer.outcomes.add()
            if entry.job.endswith("missing"):
                outcome.problem.code = grpc.StatusCode.NOT_FOUND.value[0]
                outcome.problem.reason = "JOB_NOT_FOUND"
                outcome.problem.metadata["job"] = entry.job
            else:
                outcome.response.run.CopyFrom(self._make_run(entry))
        return answer

    async def WaitRun(
        self,
        request: run_service_pb2.WaitRunRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> run_service_pb2.WaitRunResponse:
        """Ended once `waits_before_end` polls have gone by."""
        await self._refuse(context)
        self.waits_before_end -= 1
        ended = self.waits_before_end < 0
        state = run_pb2.RUN_STATE_SUCCEEDED if ended else run_pb2.RUN_STATE_RUNNING
        run = run_pb2.Run(name=request.name, state=state)
        return run_service_pb2.WaitRunResponse(run=run, ended=ended)

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self.unary_refusals:
            await self.unary_refusals.pop(0).abort(context)

    def _make_run(self, request: run_service_pb2.EnqueueRunRequest) -> run_pb2.Run:
        run = run_pb2.Run(
            name=f"{request.job}/runs/2026-12-01T09:00:00.{next(self._instants):06d}Z",
            job=request.job,
            state=run_pb2.RUN_STATE_QUEUED,
        )
        run.payload.CopyFrom(request.payload)
        return run


@asynccontextmanager
async def serving(server: FakeServer | None = None, *, port: int = 0) -> AsyncIterator[FakeServer]:
    """A fake server on the loopback interface; port 0 takes a free one."""
    fake = server or FakeServer()  # type: ignore[abstract]
    grpc_server = grpc.aio.server()
    run_service_pb2_grpc.add_RunServiceServicer_to_server(fake, grpc_server)
    job_service_pb2_grpc.add_JobServiceServicer_to_server(fake.jobs, grpc_server)
    port = grpc_server.add_insecure_port(f"127.0.0.1:{port}")
    fake.address = f"127.0.0.1:{port}"
    await grpc_server.start()
    try:
        yield fake
    finally:
        for session in fake.sessions:
            session.end()
        await grpc_server.stop(grace=0)
