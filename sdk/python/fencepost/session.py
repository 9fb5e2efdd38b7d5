"""One session: Hello and Welcome, credits, receipts, heartbeats, and its end.

The link opens sessions and replaces them; the engine hears what a session receives.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from fencepost.connection import Connection
from fencepost.durations import duration_seconds
from fencepost.errors import DeadlineExceeded, FencepostError, Unavailable
from fencepost.held import Held
from fencepost.leases import ack_timeout, heartbeat_interval
from fencepost.run_key import RunId, run_id
from fencepost.stream import Stream
from fencepost.timings import Timings
from fencepost.v1 import run_service_pb2, worker_pb2

MAX_BEAT_BYTES = 1024 * 1024
_FAR = 3600.0
_numbers = itertools.count(1)


class Want(enum.Enum):
    """Why a session needs a successor."""

    ENDED = enum.auto()
    UNANSWERED = enum.auto()
    DRAINED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """A session asks to be replaced."""

    want: Want
    delay: float = 0.0
    """Seconds to wait first, as the server asked."""
    error: FencepostError | None = None


@dataclass(frozen=True, slots=True)
class _Beat:
    sent_at: float
    runs: list[tuple[Held, int]]


class Listener(Protocol):
    """Who is told what a session receives."""

    def inventory(self) -> Iterable[Held]: ...
    def on_runs(self, session: Session, runs: Collection[worker_pb2.Assignment]) -> None: ...
    def on_renewed(
        self, runs: list[tuple[Held, int]], sent_at: float, *, confirmed: bool = False
    ) -> None: ...
    def on_notices(self, notices: Iterable[worker_pb2.RunNotice]) -> None: ...
    def on_verdicts(self, verdicts: Iterable[worker_pb2.AttemptVerdict]) -> None: ...
    def on_drain_ack(self) -> None: ...
    def on_worker_stop(self, reason: str) -> None: ...
    def on_round_trip(self, seconds: float) -> None: ...
    def on_session_end(self, session: Session) -> None: ...


class Session:
    """Lives in the session thread's loop from Hello to the end of its stream."""

    def __init__(
        self,
        connection: Connection,
        *,
        loop: asyncio.AbstractEventLoop,
        listener: Listener,
        timings: Timings,
    ) -> None:
        self.number = next(_numbers)
        self.session_id = ""
        self.welcome: worker_pb2.Welcome | None = None
        self.live = False
        """Welcomed, and the stream is up."""
        self.retiring = False
        self.drain_ack: int | None = None
        self.received_batch_seq = 0
        self.succession: asyncio.Future[Succession] = loop.create_future()
        self.ended: asyncio.Future[FencepostError | None] = loop.create_future()
        self._loop = loop
        self._listener = listener
        self._timings = timings
        self._welcomed: asyncio.Future[None] = loop.create_future()
        self._credit_limit = 0
        self._received = 0
        self._told_credit = 0
        self._told_receipt = 0
        self._seq = 0
        self._beats: dict[int, _Beat] = {}
        self._beat_timer: asyncio.TimerHandle | None = None
        self._shortest_ttl = _FAR
        self._stream = Stream(
            connection, loop=loop, on_response=self._on_response, on_end=self._on_end
        )

    async def open(self, hello: worker_pb2.Hello) -> FencepostError | None:
        """Sends Hello and waits for Welcome. None: live; else why not."""
        sent_at = self._loop.time()
        inventory = list(self._listener.inventory())
        _add_inventory(hello, inventory)
        self._stream.send(run_service_pb2.WorkRequest(hello=hello))
        waits: set[asyncio.Future[Any]] = {self._welcomed, self.ended}
        await asyncio.wait(
            waits, timeout=self._timings.open_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if self.welcome is None:
            self._stream.abandon()
            if self.ended.done():
                return self.ended.result() or Unavailable("the session ended before its Welcome")
            return DeadlineExceeded(f"no Welcome within {self._timings.open_timeout:g} s")
        lost = _lost(self.welcome.notices)
        # Progress counts as told only once a heartbeat with it is answered.
        self._listener.on_renewed([(h, 0) for h in inventory if h.id not in lost], sent_at)
        self._listener.on_notices(self.welcome.notices)
        return None

    def begin(self) -> None:
        """Starts the heartbeats; called once the session is the worker's current one."""
        if not self.live:
            return
        self._note_shortest_lease()
        self._set_beat_timer(self._interval())
        waiting = [held for held in self._listener.inventory() if held.needs_confirmation]
        if waiting:
            self.beat_early(waiting)

    def offer_credit(self, free: int) -> None:
        """Raises the ceiling to received + free, if that is higher; never lowers it."""
        self._credit_limit = max(self._credit_limit, self._received + free)

    @property
    def untold(self) -> bool:
        """Credit or a receipt waits to be sent."""
        return (
            self._credit_limit > self._told_credit or self.received_batch_seq > self._told_receipt
        )

    @property
    def open_credit(self) -> int:
        """Runs the server may still send."""
        return self._credit_limit - self._received

    def send(self, request: run_service_pb2.WorkRequest) -> None:
        """Sends a message, with news of credit and receipts on it."""
        if self._credit_limit > self._told_credit:
            request.credit_limit = self._told_credit = self._credit_limit
        if self.received_batch_seq > self._told_receipt:
            request.received_batch_seq = self._told_receipt = self.received_batch_seq
        self._stream.send(request)

    def beat_early(self, runs: list[Held]) -> None:
        """A heartbeat for some runs, outside the pace: START_MODE_CONFIRMED."""
        self._send_beats(runs, complete=False)

    def hurry(self, lease_ttl: float) -> None:
        """A run with this lease came in: the next heartbeat may have to come sooner."""
        if lease_ttl < self._shortest_ttl:
            self._shortest_ttl = lease_ttl
            timer = self._beat_timer
            if timer is not None and timer.when() > self._loop.time() + self._interval():
                self._set_beat_timer(self._interval())

    def retire(self) -> None:
        """A successor has taken over: read on for verdicts, then half-close."""
        self.retiring = True
        self._stop_beats()
        self._loop.call_later(self._timings.handover, self.half_close)
        self._loop.call_later(2 * self._timings.handover, self.abandon)

    def half_close(self) -> None:
        """No more messages from this side."""
        self._stop_beats()
        self._stream.half_close()

    def abandon(self) -> None:
        """Ends the session at once."""
        self.live = False
        self._stop_beats()
        self._stream.abandon()

    def _on_response(self, response: run_service_pb2.WorkResponse) -> None:
        event = response.WhichOneof("event")
        if event == "welcome":
            self._on_welcome(response.welcome)
        elif self.welcome is None:
            return
        elif event == "runs":
            self._on_runs(response.runs)
        elif event == "verdicts":
            self._listener.on_verdicts(response.verdicts.verdicts)
        elif event == "heartbeat_ack":
            self._on_ack(response.heartbeat_ack)
        elif event == "notices":
            self._listener.on_notices(response.notices.notices)
        elif event == "drain_ack":
            self.drain_ack = response.drain_ack.last_batch_seq
            self._listener.on_drain_ack()
        elif event == "server_drain":
            self._on_server_drain(response.server_drain)
        elif event == "worker_stop":
            self._listener.on_worker_stop(response.worker_stop.reason)

    def _on_welcome(self, welcome: worker_pb2.Welcome) -> None:
        if self.welcome is None:
            self.welcome = welcome
            self.session_id = welcome.session_id
            self.live = True
            self._welcomed.set_result(None)

    def _on_runs(self, batch: worker_pb2.RunBatch) -> None:
        self._received += len(batch.runs)
        if batch.batch_seq == self.received_batch_seq + 1:
            self.received_batch_seq = batch.batch_seq
        self._listener.on_runs(self, batch.runs)

    def _on_ack(self, ack: worker_pb2.HeartbeatAck) -> None:
        beat = self._beats.pop(ack.seq, None)
        if beat is not None:
            self._listener.on_round_trip(self._loop.time() - beat.sent_at)
        if beat is not None and beat.runs:
            left_out = _lost(ack.notices) | {run_id(key) for key in ack.not_renewed}
            renewed = [(h, v) for h, v in beat.runs if h.id not in left_out]
            self._listener.on_renewed(renewed, beat.sent_at, confirmed=True)
        if ack.notices:
            self._listener.on_notices(ack.notices)

    def _on_server_drain(self, drain: worker_pb2.ServerDrain) -> None:
        if drain.reason != worker_pb2.SERVER_DRAIN_REASON_REPLACED:
            delay = duration_seconds(drain.reconnect_delay)
            self._want(Succession(want=Want.DRAINED, delay=delay))

    def _on_end(self, error: FencepostError | None) -> None:
        self.live = False
        self._stop_beats()
        if not self.ended.done():
            self.ended.set_result(error)
        self._want(Succession(want=Want.ENDED, error=error))
        self._listener.on_session_end(self)

    def _want(self, succession: Succession) -> None:
        if not self.succession.done():
            self.succession.set_result(succession)

    def _interval(self) -> float:
        assert self.welcome is not None
        pace = duration_seconds(self.welcome.heartbeat_interval) or 10.0
        return heartbeat_interval(pace, self._shortest_ttl)

    def _set_beat_timer(self, delay: float) -> None:
        self._stop_beats()
        self._beat_timer = self._loop.call_later(delay, self._beat)

    def _stop_beats(self) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None

    def _beat(self) -> None:
        self._note_shortest_lease()
        self._send_beats(list(self._listener.inventory()), complete=True)
        self._set_beat_timer(self._interval())

    def _note_shortest_lease(self) -> None:
        leases = (held.lease.ttl for held in self._listener.inventory())
        self._shortest_ttl = min(leases, default=_FAR)

    def _send_beats(self, runs: list[Held], *, complete: bool) -> None:
        parts: list[worker_pb2.Heartbeat] = []
        at = 0
        while at < len(runs) or not parts:
            self._seq += 1
            beat = worker_pb2.Heartbeat(seq=self._seq)
            listed: list[tuple[Held, int]] = []
            size = 0
            while at < len(runs) and size < MAX_BEAT_BYTES:
                # The version first: progress may be told from another thread meanwhile.
                version = runs[at].context._progress_version
                line = runs[at].describe()
                size += line.ByteSize() + 4
                beat.runs.append(line)
                listed.append((runs[at], version))
                at += 1
            self._expect_ack(self._seq, listed)
            parts.append(beat)
        for beat in parts:
            beat.complete_inventory = complete and len(parts) == 1
            self.send(run_service_pb2.WorkRequest(heartbeat=beat))

    def _expect_ack(self, seq: int, runs: list[tuple[Held, int]]) -> None:
        assert self.welcome is not None
        pace = duration_seconds(self.welcome.heartbeat_ack_timeout) or 8.0
        self._beats[seq] = _Beat(self._loop.time(), runs)
        self._loop.call_later(ack_timeout(pace, self._shortest_ttl), self._check_ack, seq)

    def _check_ack(self, seq: int) -> None:
        if seq in self._beats and self.live and not self.retiring:
            self._want(Succession(want=Want.UNANSWERED))


def _add_inventory(hello: worker_pb2.Hello, runs: list[Held]) -> None:
    size = 0
    for held in runs:
        line = hello.inventory.add()
        line.CopyFrom(held.describe())
        size += line.ByteSize() + 4
        if size > MAX_BEAT_BYTES:
            line.ClearField("progress")  # the next heartbeats bring it, in parts


def _lost(notices: Iterable[worker_pb2.RunNotice]) -> set[RunId]:
    return {run_id(notice.run) for notice in notices if notice.HasField("lease_lost")}
