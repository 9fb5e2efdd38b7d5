"""One Work call from the server's side: what came in, and what a test lets it answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from fencepost.durations import to_duration
from fencepost.status import TRAILER, StatusDetails, encode_status
from fencepost.v1 import run_pb2, run_service_pb2, worker_pb2

if TYPE_CHECKING:
    from tests.sdk.fake_server import FakeServer


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
