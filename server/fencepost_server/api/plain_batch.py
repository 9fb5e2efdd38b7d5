"""BatchEnqueueRuns as it is served: plain batches the short way, all others as messages."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc.aio
from fencepost.v1 import run_service_pb2

from fencepost_server.api.trace_context import read_trace_context
from fencepost_server.api.wire_plain import PlainBatch, notes_of, read_plain, write_plain
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.plain_enqueue import PlainEnqueues

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Request: TypeAlias = run_service_pb2.BatchEnqueueRunsRequest
Response: TypeAlias = run_service_pb2.BatchEnqueueRunsResponse


class PlainBatchCalls:
    """Serves BatchEnqueueRuns; `otherwise` serves what is not plain."""

    def __init__(
        self,
        *,
        enqueues: PlainEnqueues,
        otherwise: Callable[[Request, Context], Awaitable[Response]],
    ) -> None:
        self._enqueues = enqueues
        self._otherwise = otherwise

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """In place of the method that is registered already."""
        handler: Any = grpc.unary_unary_rpc_method_handler(
            self._call, request_deserializer=_read, response_serializer=_write
        )
        server.add_registered_method_handlers(
            "fencepost.v1.RunService", {"BatchEnqueueRuns": handler}
        )

    async def _call(self, request: PlainBatch | Request, context: Context) -> bytes | Response:
        if isinstance(request, PlainBatch):
            origin = Origin(
                tenant=request.tenant,
                now=self._enqueues.now(),
                trace_context=read_trace_context(context),
            )
            made = await self._enqueues.enqueue(origin, request.runs, notes=notes_of)
            if made is not None:
                return write_plain(made, request.runs)
            request = Request.FromString(request.raw)
        return await self._otherwise(request, context)


def _read(raw: bytes) -> PlainBatch | Request:
    return read_plain(raw) or Request.FromString(raw)


def _write(response: bytes | Response) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()
