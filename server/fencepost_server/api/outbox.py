"""The writing side of one session: one writer, control messages before runs.

Runs that wait too long to be written are dropped here and given back, so that a slow
reader holds no leases; what was written waits for its receipt.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fencepost.v1 import run_service_pb2, worker_pb2

from fencepost_server.clock import SECOND, Duration, monotonic
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.claims import Claimed

BATCH_RUNS_MAX = 128
BATCH_BYTES_MAX = 256 * 1024
# A worker that reads nothing is read from no further once so many answers wait for it.
CONTROL_MAX = 1000
# A batch that could not be written for this long is dropped (protocol S11).
WRITE_WAIT_MAX: Duration = 2 * SECOND


@dataclass(slots=True)
class Batch:
    """Runs on their way to the worker; `seq` is given when the write begins."""

    runs: list[tuple[RunKey, int]]
    message: run_service_pb2.WorkResponse
    queued_at: int
    seq: int = 0
    written_at: int = 0


class Outbox:
    """Everything a session has to say, and what became of its batches."""

    def __init__(self) -> None:
        self._control: deque[run_service_pb2.WorkResponse] = deque()
        self._batches: deque[Batch] = deque()
        self._unreceipted: deque[Batch] = deque()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._room = asyncio.Event()
        self._room.set()
        self.last_seq = 0

    def say(self, message: run_service_pb2.WorkResponse) -> None:
        """Queue a control message."""
        self._control.append(message)
        if len(self._control) >= CONTROL_MAX:
            self._room.clear()
        self._wake()

    def deal(
        self, runs: Sequence[Claimed], fill: Callable[[worker_pb2.Assignment, Claimed], None]
    ) -> None:
        """Queue runs, in batches of bounded number and size; `fill` writes an assignment.

        Written into their batch at once, because to copy a message costs as much as to make it.
        """
        now = monotonic()
        message = run_service_pb2.WorkResponse()
        keys: list[tuple[RunKey, int]] = []
        size = 0
        for run in runs:
            assignment = message.runs.runs.add()
            fill(assignment, run)
            bytes_more = assignment.ByteSize()
            if keys and (len(keys) >= BATCH_RUNS_MAX or size + bytes_more > BATCH_BYTES_MAX):
                following = run_service_pb2.WorkResponse()
                following.runs.runs.append(assignment)
                del message.runs.runs[-1]
                self._queue(message, keys, now)
                message, keys, size = following, [], 0
            keys.append((run.key, run.attempt))
            size += bytes_more
        if keys:
            self._queue(message, keys, now)

    def receive_receipt(self, seq: int) -> int:
        """All batches up to `seq` are in the worker's memory; returns how many runs these are."""
        received = 0
        while self._unreceipted and self._unreceipted[0].seq <= seq:
            received += len(self._unreceipted.popleft().runs)
        return received

    def receipt_lag(self) -> Duration:
        """How long the oldest written batch has waited for its receipt."""
        return monotonic() - self._unreceipted[0].written_at if self._unreceipted else 0

    def drop_unwritten(self, *, older_than: Duration = 0) -> list[tuple[RunKey, int]]:
        """Forget batches whose write never began and return their runs."""
        limit = monotonic() - older_than
        dropped: list[tuple[RunKey, int]] = []
        while self._batches and self._batches[0].queued_at <= limit:
            dropped.extend(self._batches.popleft().runs)
        return dropped

    def take_unreceipted(self) -> list[tuple[RunKey, int]]:
        """Runs that were written, or begun to be, without a receipt."""
        runs = [run for batch in self._unreceipted for run in batch.runs]
        self._unreceipted.clear()
        return runs

    async def write_to(
        self, write: Callable[[run_service_pb2.WorkResponse], Awaitable[None]]
    ) -> None:
        """Write until cancelled. Only one of these may run: two writes at once break a stream."""
        while True:
            if self._control:
                message = self._control.popleft()
                if len(self._control) < CONTROL_MAX:
                    self._room.set()
                await write(message)
            elif self._batches:
                batch = self._batches.popleft()
                self.last_seq += 1
                batch.seq = self.last_seq
                batch.written_at = monotonic()
                batch.message.runs.batch_seq = batch.seq
                self._unreceipted.append(batch)
                await write(batch.message)
            else:
                self._idle.set()
                self._ready.clear()
                await self._ready.wait()

    async def room(self) -> None:
        """Until there is room for more answers."""
        await self._room.wait()

    async def flushed(self) -> None:
        """Until everything queued so far is written."""
        await self._idle.wait()

    def _queue(
        self, message: run_service_pb2.WorkResponse, runs: list[tuple[RunKey, int]], now: int
    ) -> None:
        self._batches.append(Batch(runs=runs, message=message, queued_at=now))
        self._wake()

    def _wake(self) -> None:
        self._idle.clear()
        self._ready.set()
