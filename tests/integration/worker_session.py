"""The worker's side of the Work protocol, spoken by hand."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from fencepost.v1 import run_service_pb2, worker_pb2

from tests.integration.definition_server import Refusal, read_refusal

WAIT_S = 15.0


class WorkerSession:
    """One Work stream from the worker's side; nothing is sent that the test does not say."""

    def __init__(self, call: Any, worker_id: str) -> None:
        self.call = call
        self.worker_id = worker_id
        self.received = 0
        self.last_seq = 0
        self._seq = itertools.count(1)
        self._inbox: asyncio.Queue[run_service_pb2.WorkResponse | None] = asyncio.Queue()
        self._kept: list[run_service_pb2.WorkResponse] = []
        self._error: grpc.aio.AioRpcError | None = None
        self._reader: asyncio.Task[None] | None = None

    def read(self, *, ahead: int = 0) -> None:
        """Begin to take messages from the stream, at most `ahead` (0: any number) of them
        before the test asks for one."""
        if self._reader is None:
            self._inbox = asyncio.Queue(ahead)
            self._reader = asyncio.create_task(self._read())

    async def say(self, **values: Any) -> None:
        """Send one WorkRequest."""
        await self.call.write(run_service_pb2.WorkRequest(**values))

    async def hear(self, event: str) -> Any:
        """The next message of a kind; others are kept for later."""
        for place, message in enumerate(self._kept):
            if message.WhichOneof("event") == event:
                return getattr(self._kept.pop(place), event)
        while True:
            taken = await asyncio.wait_for(self._inbox.get(), WAIT_S)
            if taken is None:
                self._inbox.put_nowait(None)
                raise AssertionError(f"the stream ended without {event}: {self._error!r}")
            if taken.WhichOneof("event") == event:
                return getattr(taken, event)
            self._kept.append(taken)

    async def runs(self, count: int, *, receipt: bool = True) -> list[worker_pb2.Assignment]:
        """At least so many runs, in batches without gaps, each with a receipt."""
        found: list[worker_pb2.Assignment] = []
        while len(found) < count:
            batch = await self.hear("runs")
            assert batch.batch_seq == self.last_seq + 1
            assert 1 <= len(batch.runs) <= 128
            assert len(batch.runs) == 1 or batch.ByteSize() <= 256 * 1024 + 16
            self.last_seq = batch.batch_seq
            self.received += len(batch.runs)
            found += batch.runs
            if receipt:
                await self.say(received_batch_seq=self.last_seq)
        return found

    async def beat(
        self, runs: Sequence[worker_pb2.HeldRun] = (), **values: Any
    ) -> worker_pb2.HeartbeatAck:
        """One heartbeat and its answer. Everything sent before it has then been taken."""
        seq = next(self._seq)
        await self.say(heartbeat=worker_pb2.Heartbeat(seq=seq, runs=runs), **values)
        ack: worker_pb2.HeartbeatAck = await self.hear("heartbeat_ack")
        assert ack.seq == seq
        return ack

    async def complete(
        self, *completions: worker_pb2.Completion
    ) -> list[worker_pb2.AttemptVerdict]:
        """Completions of one message and their verdicts."""
        await self.say(completions=worker_pb2.Completions(completions=completions))
        return await self.verdicts(len(completions))

    async def verdicts(self, count: int) -> list[worker_pb2.AttemptVerdict]:
        """At least so many verdicts."""
        found: list[worker_pb2.AttemptVerdict] = []
        while len(found) < count:
            found += (await self.hear("verdicts")).verdicts
        return found

    async def break_off(self) -> None:
        """The connection is gone, without a word."""
        self.call.cancel()
        await self.call.code()

    async def ended(self) -> grpc.StatusCode:
        """The status that the server ended the call with."""
        self.read()
        assert self._reader is not None
        done, _ = await asyncio.wait({self._reader}, timeout=WAIT_S)
        assert done, "the server did not end the stream"
        code: grpc.StatusCode = await self.call.code()
        return code

    async def refused(self) -> Refusal:
        """What the server ended the call with, which must be a refusal."""
        code = await self.ended()
        assert self._error is not None, f"the stream ended with {code}"
        return read_refusal(self._error)

    def kept(self, event: str) -> int:
        """How many messages of a kind arrived and were not asked for."""
        while not self._inbox.empty():
            taken = self._inbox.get_nowait()
            if taken is None:
                self._inbox.put_nowait(None)
                break
            self._kept.append(taken)
        return sum(each.WhichOneof("event") == event for each in self._kept)

    async def close(self) -> None:
        """Leave nothing behind."""
        self.call.cancel()
        while self._reader is not None and not self._reader.done():
            # A reader that may not read ahead waits for somebody to take what it has.
            while not self._inbox.empty():
                self._inbox.get_nowait()
            await asyncio.wait({self._reader}, timeout=0.02)

    async def _read(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                await self._inbox.put(message)
        except grpc.aio.AioRpcError as error:
            self._error = error
        except asyncio.CancelledError:
            # The call was cancelled by this side; the reader itself never is.
            if not self.call.cancelled():
                raise
        if not self._inbox.full():
            self._inbox.put_nowait(None)
