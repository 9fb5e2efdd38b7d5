"""One worker session: credits, receipts, heartbeats, completions and drains of one stream.

The stream is a way to talk, never the lease: when it breaks, only what the worker cannot
have received is taken back (protocol S15).
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
from fencepost.v1 import run_service_pb2, worker_pb2

from fencepost_server.api.in_flight import InFlight
from fencepost_server.api.inventory import read_inventory
from fencepost_server.api.limits import CREDIT_WINDOW_MAX
from fencepost_server.api.outbox import WRITE_WAIT_MAX, Outbox
from fencepost_server.api.settlement import Settlement
from fencepost_server.api.wire_assignment import Assignments
from fencepost_server.api.wire_reports import accepted, read_completions, write_verdicts
from fencepost_server.api.wire_worker import (
    Fenced,
    Read,
    read_release,
    write_notice,
    write_run_key,
)
from fencepost_server.clock import SECOND, Clock, Duration, monotonic
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.dealing import Subscription
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.notices import NoticeBoard
from fencepost_server.engine.verdicts import (
    Judged,
    Notice,
    PlainSuccess,
    Renewal,
    Report,
    Verdict,
    attempt_of,
)
from fencepost_server.engine.workers import WorkerMark, WorkerRegistry
from fencepost_server.errors import (
    FencepostError,
    ProtocolViolation,
    ServerDraining,
    SessionExpired,
)
from fencepost_server.policy.outcome import Released

_log = structlog.get_logger("session")

SILENT_AFTER: Duration = 15 * SECOND
EXPIRED_AFTER: Duration = 30 * SECOND
RECEIPT_LAG_MAX: Duration = 2 * SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """Who is on the other side, as its Hello said."""

    session_id: str
    worker_id: str
    mark: WorkerMark
    subscriptions: Mapping[int, Subscription]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What every session of a server shares."""

    clock: Clock
    lifecycle: Lifecycle
    dispatcher: Dispatcher
    workers: WorkerRegistry
    assignments: Assignments
    settle: Settlement
    notices: NoticeBoard


class Session:
    """The state of one stream after its Hello. A `Subscriber` of the dispatcher."""

    def __init__(self, info: SessionInfo, parts: SessionParts) -> None:
        self.info = info
        self.outbox = Outbox()
        self._parts = parts
        self._credit_limit = 0
        self._sent = 0
        self._received = 0
        self._held = 0
        self._heard_at = monotonic()
        self._opened_at = monotonic()
        self._in_flight = InFlight(info.subscriptions)
        self._takes_runs = True
        self._left = False
        self._is_newest = True
        self._close_at: int | None = None
        self._group: asyncio.TaskGroup | None = None
        # Done, with an error or without, when `look` has nothing to do any more.
        self._over: asyncio.Future[None] | None = None

    # Subscriber ---------------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        """UUID of the worker process."""
        return self.info.worker_id

    @property
    def subscriptions(self) -> Mapping[int, Subscription]:
        """By queue_id."""
        return self.info.subscriptions

    def credit(self, queue_id: int) -> int:
        """How many runs of this queue the session may be sent now."""
        if not self._takes_runs or monotonic() - self._heard_at > SILENT_AFTER:
            return 0
        if self.outbox.receipt_lag() > RECEIPT_LAG_MAX:
            return 0
        free = min(self._credit_limit, self._received + CREDIT_WINDOW_MAX) - self._sent
        return self._in_flight.free(queue_id, free)

    def deliver(self, runs: Sequence[Claimed]) -> None:
        """Send claimed runs; a session that has ended meanwhile gives them back."""
        if not self._takes_runs:
            self._parts.settle.undelivered([(run.key, run.attempt) for run in runs])
            return
        self._sent += len(runs)
        self._in_flight.took(runs)
        now = self._parts.clock.now()
        self.outbox.deal(runs, self._parts.assignments.encode(runs, now=now))

    def tell(self, notices: Sequence[Notice]) -> None:
        """Say early what the next heartbeat would be answered with."""
        message = worker_pb2.RunNotices(notices=map(write_notice, notices))
        self.outbox.say(run_service_pb2.WorkResponse(notices=message))

    @property
    def age(self) -> Duration:
        """Since it was opened."""
        return monotonic() - self._opened_at

    def mark(self, state: str) -> WorkerMark:
        """What the fleet's table says of this worker now."""
        free = max(0, self._credit_limit - self._sent) if self._takes_runs else 0
        return replace(self.info.mark, state=state, held_runs=self._held, free_credits=free)

    def stop_taking(self) -> None:
        """No more runs; what was not yet written goes back."""
        if not self._takes_runs:
            return
        self._takes_runs = False
        self._parts.dispatcher.unsubscribe(self)
        self._give_back(self.outbox.drop_unwritten())

    def drain(
        self,
        reason: "worker_pb2.ServerDrainReason.ValueType",
        *,
        delay: Duration,
        close_after: Duration,
    ) -> None:
        """Ask the worker to move; the stream still takes heartbeats and completions."""
        self.stop_taking()
        self._is_newest &= reason != worker_pb2.SERVER_DRAIN_REASON_REPLACED
        if self._close_at is None:
            self._close_at = monotonic() + close_after
        drain = worker_pb2.ServerDrain(reason=reason)
        drain.reconnect_delay.FromMicroseconds(delay)
        drain.close_after.FromMicroseconds(close_after)
        self.outbox.say(run_service_pb2.WorkResponse(server_drain=drain))

    async def handle(self, requests: Any) -> None:
        """Take messages until the worker leaves or the stream breaks.

        Raises ProtocolViolation for a broken session rule, SessionExpired after silence,
        ServerDraining when a drained worker has not left in time.
        """
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._over = asyncio.get_running_loop().create_future()
            watch = group.create_task(_result(self._over))
            try:
                async for request in requests:
                    self._heard_at = monotonic()
                    self.take_counters(request)
                    event = request.WhichOneof("event")
                    if event == "goodbye":
                        await self._goodbye(request.goodbye)
                        break
                    self._take_event(event, request)
                    await self.outbox.room()
            finally:
                watch.cancel()
        self._group = None

    def look(self) -> None:
        """Twice a second: end what is silent or drained too long, take back runs nobody reads."""
        if self._over is None or self._over.done():
            return
        now = monotonic()
        if now - self._heard_at > EXPIRED_AFTER:
            self._over.set_exception(SessionExpired("nothing was heard of the worker for 30 s"))
        elif self._close_at is not None and now > self._close_at:
            self._over.set_exception(
                ServerDraining("the session was drained and its time to close is over")
            )
        else:
            self._give_back(self.outbox.drop_unwritten(older_than=WRITE_WAIT_MAX))

    def end(self) -> None:
        """The stream is over, however: settle what the worker cannot have (protocol S15)."""
        self.stop_taking()
        if not self._left:
            self._parts.settle.unreceipted(self.outbox.take_unreceipted())
        if self._is_newest:
            self._parts.workers.left(self.mark("disconnected"))

    def take_counters(self, request: run_service_pb2.WorkRequest) -> None:
        """Receipts and credit of a message; any message may carry them."""
        if request.received_batch_seq:
            received = self.outbox.receive_receipt(request.received_batch_seq)
            if received:
                # The window moves on, and a lag that held runs back may be over.
                self._received += received
                self._parts.dispatcher.credit_raised()
        limit = request.credit_limit
        if limit:
            if limit < self._credit_limit:
                raise ProtocolViolation(
                    f"credit_limit: {limit} is lower than {self._credit_limit} before; it never "
                    "decreases within a session",
                    field="credit_limit",
                    rule="S4",
                )
            if limit > self._credit_limit:
                self._credit_limit = limit
                self._parts.dispatcher.credit_raised()

    def _take_event(self, event: str | None, request: run_service_pb2.WorkRequest) -> None:
        match event:
            case "heartbeat":
                self._held = len(request.heartbeat.runs)
                self._start(self._heartbeat(request.heartbeat))
            case "completions":
                self._start(self._complete(request.completions.completions))
            case "releases":
                self._start(self._release(request.releases.releases))
            case "drain":
                self.stop_taking()
                ack = worker_pb2.DrainAck(last_batch_seq=self.outbox.last_seq)
                self.outbox.say(run_service_pb2.WorkResponse(drain_ack=ack))
                self._mark()
            case "hello":
                raise ProtocolViolation("hello: only the first message is a Hello", rule="S1")
            case _:
                pass  # Credits and receipts alone, or an event of a later revision.

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Store without holding up the reader, or heartbeats would wait behind completions.

        What waits is bounded by the tickers, which refuse more than they can hold.
        """
        assert self._group is not None
        self._group.create_task(work)

    async def _heartbeat(self, heartbeat: worker_pb2.Heartbeat) -> None:
        ack = worker_pb2.HeartbeatAck(seq=heartbeat.seq)
        held, unknown = read_inventory(heartbeat.runs)
        ack.notices.extend(unknown)
        if self._in_flight.is_bounded and heartbeat.complete_inventory:
            self._in_flight.keep((each.key, each.attempt) for each in held)
            self._parts.dispatcher.credit_raised()
        renewals: Sequence[Renewal]
        try:
            renewals = await self._parts.lifecycle.heartbeat(held)
        except FencepostError as error:
            _log.info("heartbeat_put_off", runs=len(held), error=error.message)
            renewals = [Renewal(not_renewed=True)] * len(held)
        for each, renewal in zip(held, renewals, strict=True):
            if renewal.not_renewed:
                write_run_key(each.key, ack.not_renewed.add())
            elif renewal.notice is not None:
                ack.notices.append(write_notice(renewal.notice))
                if renewal.notice.lost is not None:
                    self._in_flight.ended((each.key, each.attempt))
        self.outbox.say(run_service_pb2.WorkResponse(heartbeat_ack=ack))
        self._mark()

    def _mark(self) -> None:
        """Tell the fleet's table, unless a newer session of the worker speaks for it."""
        if self._is_newest:
            self._parts.workers.seen(self.mark("ready" if self._takes_runs else "draining"))

    async def _complete(self, completions: Sequence[worker_pb2.Completion]) -> None:
        await self._report(completions, read_completions(completions))

    async def _release(self, releases: Sequence[worker_pb2.Release]) -> None:
        await self._report(releases, [read_release(each) for each in releases])

    async def _report(
        self,
        messages: Sequence[Fenced],
        read: Sequence[Read | PlainSuccess],
    ) -> None:
        """Verdicts for entries of one message, after the commit of those that could be read."""
        message = run_service_pb2.WorkResponse()
        told, reports = accepted(messages, read, message.verdicts)
        judged: Sequence[Judged]
        try:
            judged = await self._parts.lifecycle.report(reports)
        except FencepostError as error:
            _log.info("reports_put_off", reports=len(reports), error=error.message)
            judged = [Judged(Verdict.RETRY)] * len(reports)
        write_verdicts(told, reports, judged, message.verdicts)
        if messages:
            self.outbox.say(message)
        if self._in_flight.is_bounded:
            for report, answer in zip(reports, judged, strict=True):
                if answer.verdict is not Verdict.RETRY:
                    self._in_flight.ended(attempt_of(report))
            self._parts.dispatcher.credit_raised()

    async def _goodbye(self, goodbye: worker_pb2.Goodbye) -> None:
        """The worker says what it leaves; anything else it was sent, it has dealt with."""
        self.stop_taking()
        held, _ = read_inventory(goodbye.abandoned)
        reports = [
            Report(key=run.key, attempt=run.attempt, ending=Released(), progress=run.progress)
            for run in held
        ]
        await self._parts.settle.store(reports)
        named = {(run.key, run.attempt) for run in held}
        unreceipted = self.outbox.take_unreceipted()
        self._parts.settle.unreceipted([run for run in unreceipted if run not in named])
        self._left = True

    def _give_back(self, runs: Sequence[tuple[RunKey, int]]) -> None:
        self._sent -= len(runs)
        for run in runs:
            self._in_flight.ended(run)
        self._parts.settle.undelivered(runs)


async def _result(future: "asyncio.Future[None]") -> None:
    await future
