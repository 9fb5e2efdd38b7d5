"""One Work call on a connection of its own, driven from threads of the blocking gRPC API.

The blocking API is used on purpose: it needs no event loop, so neither the user's loop nor
a second gRPC loop in the same process can get in its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc

from fencepost.connection import Connection
from fencepost.errors import FencepostError, Unavailable, error_of_call
from fencepost.v1 import run_service_pb2, run_service_pb2_grpc

OnResponse = Callable[[run_service_pb2.WorkResponse], None]
OnEnd = Callable[[FencepostError | None], None]


class Stream:
    """Opens at once; callbacks come in the given loop, the last one is `on_end`."""

    def __init__(
        self,
        connection: Connection,
        *,
        loop: asyncio.AbstractEventLoop,
        on_response: OnResponse,
        on_end: OnEnd,
    ) -> None:
        self._loop = loop
        self._on_response = on_response
        self._on_end = on_end
        self._outgoing: SimpleQueue[run_service_pb2.WorkRequest | None] = SimpleQueue()
        self._channel = connection.open_session_channel()
        stub = run_service_pb2_grpc.RunServiceStub(self._channel)
        self._call = stub.Work(self._requests(), metadata=connection.metadata)
        threading.Thread(target=self._read, name="fencepost-read", daemon=True).start()

    def send(self, request: run_service_pb2.WorkRequest) -> None:
        """Hands a message to the writer; order is kept. Never blocks."""
        self._outgoing.put(request)

    def half_close(self) -> None:
        """No more messages from here; the server may still speak."""
        self._outgoing.put(None)

    def abandon(self) -> None:
        """Ends the call without waiting for anybody."""
        self._call.cancel()
        self._outgoing.put(None)

    def _requests(self) -> Iterator[run_service_pb2.WorkRequest]:
        yield from iter(self._outgoing.get, None)

    def _read(self) -> None:
        error: FencepostError | None = None
        try:
            for response in self._call:
                self._post(self._on_response, response)
        except grpc.RpcError as failure:
            error = _error_of(failure)
        self._outgoing.put(None)  # frees gRPC's writing thread
        self._channel.close()
        self._post(self._on_end, error)

    def _post(self, callback: Callable[..., None], argument: object) -> None:
        # The loop may be gone when the last words of an abandoned stream arrive.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, argument)


def _error_of(failure: grpc.RpcError) -> FencepostError:
    if isinstance(failure, grpc.Call):
        code = failure.code()
        if code is grpc.StatusCode.CANCELLED:
            code = grpc.StatusCode.UNAVAILABLE  # a leaving server; our own cancels nobody reads
        return error_of_call(code, failure.details(), failure.trailing_metadata())
    return Unavailable(str(failure))
