"""A scripted RunService on a real socket: the reference peer of worker and client tests.

It answers like a server by default; a test changes the knobs, looks at everything that
came over the wire, and waits for what it expects instead of sleeping.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from fencepost.durations import to_duration
from fencepost.status import TRAILER, StatusDetails, encode_status
from fencepost.v1 import run_pb2, run_service_pb2, run_service_pb2_grpc, worker_pb2

PATIENCE = 15.0
"""Seconds after which an event that did not come fails the test."""

VerdictOf = Callable[[worker_pb2.Completion | worker_pb2.Release], worker_pb2.AttemptVerdict | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A status to answer a call with."""

    code: grpc.StatusCode
    text: str = "refused by the script"
    details: StatusDetails = field(default_factory=StatusDetails)

    async def abort(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Ends the call with it."""
        number = self.code.value[0]
        trailer = encode_status(number, self.text, self.details)
        await context.abort(self.code, self.text, ((TRAILER, trailer),))


def a_verdict(
    message: worker_pb2.Completion | worker_pb2.Release,
    verdict: worker_pb2.Verdict.ValueType = worker_pb2.VERDICT_APPLIED,
    *,
    retry_after: float = 0.0,
    reason: str = "",
) -> worker_pb2.AttemptVerdict:
    """The answer to one completion or release."""
    answer = worker_pb2.AttemptVerdict(
        run=message.run, attempt=message.attempt, verdict=verdict, reason=reason
    )
    if retry_after:
        answer.retry_after.CopyFrom(to_duration(retry_after))
    return answer


@dataclass(slots=True)
class Beat:
    """One heartbeat as it came in."""

    at: float
    message: worker_pb2.Heartbeat


class FakeSession:
    """One Work call, from the server's side."""

    def __init__(
        self,
        server: FakeServer,
        context: grpc.aio.ServicerContext[
            run_service_pb2.WorkRequest, run_service_pb2.WorkResponse
        ],
    ) -> None:
        self.peer = context.peer()
        self.hello = worker_pb2.Hello()
        self.requests: list[run_service_pb2.WorkRequest] = []
        self.beats: list[Beat] = []
        self.completions: list[worker_pb2.Completion] = []
        self.completed_at: list[float] = []
        self.completion_messages = 0
        self.releases: list[worker_pb2.Release] = []
        self.credit_limit = 0
        self.received_batch_seq = 0
        self.drained = False
        self.goodbye: worker_pb2.Goodbye | None = None
        self.half_closed = False
        self.ended = False
        self.answer_heartbeats = server.answer_heartbeats
        self.notices: list[worker_pb2.RunNotice] = []
        """Repeated in each heartbeat answer."""
        self.sent = 0
        self.batch_seq = 0
        self.over_credit: list[str] = []
        """How the credit rules were broken, if they were."""
        self._server = server
        self._context = context
        self._writing = asyncio.Lock()
        self._end: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self._welcomed = False

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Waits for something to become true on this server."""
        await self._server.until(condition, what)

    async def send(self, response: run_service_pb2.WorkResponse) -> None:
        """Writes one message."""
        async with self._writing:
            await self._context.write(response)

    async def welcome(self, notices: Iterable[worker_pb2.RunNotice] = ()) -> None:
        """Writes the Welcome."""
        server = self._server
        self._welcomed = True
        message = worker_pb2.Welcome(
            session_id=f"session-{len(server.sessions)}",
            server_id="fake",
            revision=1,
            heartbeat_interval=to_duration(server.heartbeat_interval),
            heartbeat_ack_timeout=to_duration(server.heartbeat_ack_timeout),
            max_buffer_time=to_duration(server.max_buffer_time),
            limits=worker_pb2.ServerLimits(
                max_payload_bytes=262144,
                max_result_bytes=262144,
                max_message_bytes=4194304,
                max_credit_window=1000,
                max_batch_entries=1000,
                max_held_runs=5000,
            ),
            notices=notices,
        )
        await self.send(run_service_pb2.WorkResponse(welcome=message))

    async def give(self, *runs: worker_pb2.Assignment) -> None:
        """Sends one batch, waiting for the credit first."""
        await self.until(lambda: self.credit_limit - self.sent >= len(runs), "credit")
        await self.push(*runs)

    async def push(self, *runs: worker_pb2.Assignment) -> None:
        """Sends one batch, credit or not."""
        self.sent += len(runs)
        self.batch_seq += 1
        batch = worker_pb2.RunBatch(batch_seq=self.batch_seq, runs=runs)
        await self.send(run_service_pb2.WorkResponse(runs=batch))

    async def feed(self, runs: list[worker_pb2.Assignment], batch_max: int = 64) -> None:
        """Sends all of them, as fast as credit allows."""
        at = 0
        while at < len(runs):
            await self.until(lambda: self.credit_limit > self.sent, "credit")
            window = min(batch_max, self.credit_limit - self.sent)
            await self.push(*runs[at : at + window])
            at += window

    async def notify(self, *notices: worker_pb2.RunNotice) -> None:
        """Sends notices between heartbeats."""
        message = worker_pb2.RunNotices(notices=notices)
        await self.send(run_service_pb2.WorkResponse(notices=message))

    async def drain(self, reconnect_delay: float = 0.0) -> None:
        """Asks the worker to move to another server."""
        message = worker_pb2.ServerDrain(
            reason=worker_pb2.SERVER_DRAIN_REASON_REBALANCE,
            reconnect_delay=to_duration(reconnect_delay),
            close_after=to_duration(30),
        )
        await self.send(run_service_pb2.WorkResponse(server_drain=message))

    def end(self, refusal: Refusal | None = None) -> None:
        """Ends the call, with OK unless a refusal is given."""
        if not self._end.done():
            self._end.set_result(refusal)

    def reset(self) -> None:
        """Breaks the stream."""
        self.end(Refusal(code=grpc.StatusCode.UNAVAILABLE))

    async def send_verdict(
        self, run: worker_pb2.Assignment, verdict: worker_pb2.Verdict.ValueType
    ) -> None:
        """Answers a completion that the script had left unanswered."""
        answer = worker_pb2.AttemptVerdict(run=run.run, attempt=run.attempt, verdict=verdict)
        message = worker_pb2.Verdicts(verdicts=[answer])
        await self.send(run_service_pb2.WorkResponse(verdicts=message))

    def completions_of(self, run: worker_pb2.Assignment) -> list[worker_pb2.Completion]:
        """Completions of this run, in the order they came."""
        return [c for c in self.completions if c.run == run.run]

    def beats_naming(self, run: worker_pb2.Assignment) -> list[Beat]:
        """Heartbeats that list this run."""
        return [b for b in self.beats if any(h.run == run.run for h in b.message.runs)]

    async def serve(self, requests: AsyncIterator[run_service_pb2.WorkRequest]) -> None:
        """Reads until the stream ends, one way or the other."""
        reading = asyncio.create_task(self._read(requests))
        try:
            waits: set[asyncio.Future[Any]] = {reading, self._end}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            self.ended = True
            await self._server.changed()
        if self._end.done():
            refusal = self._end.result()
            if refusal is not None:
                await refusal.abort(self._context)

    async def _read(self, requests: AsyncIterator[run_service_pb2.WorkRequest]) -> None:
        async for request in requests:
            await self._on_request(request)
            await self._server.changed()
        self.half_closed = True
        await self._server.changed()
        if self.goodbye is None and not self._server.end_on_half_close:
            await self._end

    async def _on_request(self, request: run_service_pb2.WorkRequest) -> None:
        self.requests.append(request)
        self._check_credit(request)
        self.received_batch_seq = max(self.received_batch_seq, request.received_batch_seq)
        event = request.WhichOneof("event")
        now = asyncio.get_running_loop().time()
        if event == "hello":
            self.hello = request.hello
            self._server.sessions.append(self)
            await self._server.on_hello(self)
        elif event == "heartbeat":
            self.beats.append(Beat(now, request.heartbeat))
            if self.answer_heartbeats:
                await self.acknowledge(request.heartbeat.seq)
        elif event == "completions":
            self.completion_messages += 1
            self.completions += request.completions.completions
            self.completed_at += [now] * len(request.completions.completions)
            await self._judge(request.completions.completions)
        elif event == "releases":
            self.releases += request.releases.releases
            await self._judge(request.releases.releases)
        elif event == "drain":
            self.drained = True
            ack = worker_pb2.DrainAck(last_batch_seq=self.batch_seq)
            await self.send(run_service_pb2.WorkResponse(drain_ack=ack))
        elif event == "goodbye":
            self.goodbye = request.goodbye

    async def acknowledge(self, seq: int, *, not_renewed: Iterable[run_pb2.RunKey] = ()) -> None:
        """Answers a heartbeat."""
        ack = worker_pb2.HeartbeatAck(seq=seq, notices=self.notices, not_renewed=not_renewed)
        await self.send(run_service_pb2.WorkResponse(heartbeat_ack=ack))

    def _check_credit(self, request: run_service_pb2.WorkRequest) -> None:
        if request.credit_limit and request.credit_limit < self.credit_limit:
            self.over_credit.append(f"fell from {self.credit_limit} to {request.credit_limit}")
        if request.credit_limit:
            self.credit_limit = request.credit_limit
        window = self.hello.slots + self._server.prefetch
        if self.credit_limit > self.sent + window:
            self.over_credit.append(f"{self.credit_limit} with {self.sent} sent")

    async def _judge(
        self, messages: Iterable[worker_pb2.Completion] | Iterable[worker_pb2.Release]
    ) -> None:
        verdicts = [
            verdict
            for message in messages
            if (verdict := self._server.verdict_of(message)) is not None
        ]
        if verdicts:
            answer = worker_pb2.Verdicts(verdicts=verdicts)
            await self.send(run_service_pb2.WorkResponse(verdicts=answer))


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
async def serving(server: FakeServer | None = None) -> AsyncIterator[FakeServer]:
    """A fake server on a free port of the loopback interface."""
    fake = server or FakeServer()  # type: ignore[abstract]
    grpc_server = grpc.aio.server()
    run_service_pb2_grpc.add_RunServiceServicer_to_server(fake, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    fake.address = f"127.0.0.1:{port}"
    await grpc_server.start()
    try:
        yield fake
    finally:
        for session in fake.sessions:
            session.end()
        await grpc_server.stop(grace=0)
