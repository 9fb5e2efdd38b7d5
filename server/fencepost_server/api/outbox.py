"""The writing side of one session: one writer, control messages before runs.

Runs that wait too long to be written are dropped here and given back, so that a slow
reader holds no leases; what was written waits for its receipt.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from fencepost.v1 import run_service_pb2

from fencepost_server.api.wire_assignment import write_batch
from fencepost_server.clock import SECOND, Duration, monotonic
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.claims import Claimed

BATCH_RUNS_MAX = 128
BATCH_BYTES_MAX = 256 * 1024
# A worker that reads nothing is read from no further once so many answers wait for it.
CONTROL_MAX = 1000
# Verdicts that wait together are written together, up to so many and one more message's.
VERDICTS_MERGED_MAX = 1000
# A batch that could not be written for this long is dropped (protocol S11).
WRITE_WAIT_MAX: Duration = 2 * SECOND

# A message, or one that is serialized already.
Response: TypeAlias = run_service_pb2.WorkResponse | bytes


class Batch:
    """Runs on their way to the worker; `seq` is given when the write begins."""

    __slots__ = ("assignments", "queued_at", "runs", "seq", "written_at")

    def __init__(
        self, runs: Sequence[Claimed], assignments: Sequence[bytes], queued_at: int
    ) -> None:
        self.runs = runs
        self.assignments = assignments
        self.queued_at = queued_at
        self.seq = 0
        self.written_at = 0


class Outbox:
    """Everything a session has to say, and what became of its batches."""

    def __init__(self) -> None:
        self._control: deque[Response] = deque()
        self._batches: deque[Batch] = deque()
        self._unreceipted: deque[Batch] = deque()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._room = asyncio.Event()
        self._room.set()
        self.last_seq = 0

    def say(self, message: Response) -> None:
        """Queue a control message."""
        self._control.append(message)
        if len(self._control) >= CONTROL_MAX:
            self._room.clear()
        self._wake()

    def deal(self, runs: Sequence[Claimed], assignments: Sequence[bytes]) -> None:
        """Queue runs, in batches of bounded number and size; `assignments` are theirs, encoded."""
        now = monotonic()
        start = size = 0
        for place, assignment in enumerate(assignments):
            size += len(assignment)
            if place - start >= BATCH_RUNS_MAX or (size > BATCH_BYTES_MAX and place > start):
                self._batches.append(Batch(runs[start:place], assignments[start:place], now))
                start, size = place, len(assignment)
        if start < len(runs):
            self._batches.append(Batch(runs[start:], assignments[start:], now))
            self._wake()

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
            dropped += _attempts(self._batches.popleft().runs)
        return dropped

    def take_unreceipted(self) -> list[tuple[RunKey, int]]:
        """Runs that were written, or begun to be, without a receipt."""
        runs = [run for batch in self._unreceipted for run in _attempts(batch.runs)]
        self._unreceipted.clear()
        return runs

    async def write_to(self, write: Callable[[Response], Awaitable[None]]) -> None:
        """Write until cancelled. Only one of these may run: two writes at once break a stream."""
        while True:
            if self._control:
                message = self._next_control()
                if len(self._control) < CONTROL_MAX:
                    self._room.set()
                await write(message)
            elif self._batches:
                batch = self._batches.popleft()
                self.last_seq += 1
                batch.seq = self.last_seq
                batch.written_at = monotonic()
                message = write_batch(batch.seq, batch.assignments)
                # What waits for its receipt needs no second copy.
                batch.assignments = ()
                self._unreceipted.append(batch)
                await write(message)
            else:
                self._idle.set()
                self._ready.clear()
                await self._ready.wait()

    def _next_control(self) -> Response:
        """The next message; verdicts that wait one after the other are one message."""
        message = self._control.popleft()
        if isinstance(message, bytes) or not message.HasField("verdicts"):
            return message
        while self._control and len(message.verdicts.verdicts) < VERDICTS_MERGED_MAX:
            following = self._control[0]
            if isinstance(following, bytes) or not following.HasField("verdicts"):
                break
            message.MergeFrom(following)
            self._control.popleft()
        return message

    async def room(self) -> None:
        """Until there is room for more answers."""
        await self._room.wait()

    async def flushed(self) -> None:
        """Until everything queued so far is written."""
        await self._idle.wait()

    def _wake(self) -> None:
        self._idle.clear()
        self._ready.set()


def _attempts(runs: Iterable[Claimed]) -> list[tuple[RunKey, int]]:
    return [(run.key, run.attempt) for run in runs]
