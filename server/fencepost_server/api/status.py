"""The edge where errors become what a caller sees: a google.rpc.Status, or a Problem.

Servicers and everything below raise; nothing but this interceptor catches.
"""

import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
from fencepost.v1 import failure_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from fencepost_server.errors import FencepostError, InternalError, cut_text

DOMAIN = "fencepost.dev"
DETAILS_BYTES_MAX = 3072
METADATA_PAIRS_MAX = 16
_SHORT_VALUE_BYTES = 64
_BINARY_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}

_log = logging.getLogger(__name__)


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls that raise with a status; a bug is logged and told as INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of whatever kind the method is."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            factory = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            behaviour = _wrapped(handler.stream_stream or handler.unary_stream, method)
        else:
            factory = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            behaviour = _wrapped(handler.stream_unary or handler.unary_unary, method)
        return factory(
            behaviour,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def to_status(error: FencepostError) -> status_pb2.Status:
    """Code and message with exactly one ErrorInfo, and details where the error has them."""
    status = status_pb2.Status(code=int(error.code), message=error.message)
    _add(
        status,
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_metadata(error)),
    )
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=cut_text(error.field, 256), description=cut_text(error.message, 512)
        )
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_ms is not None:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if error.resource:
        _add(
            status,
            error_details_pb2.ResourceInfo(
                resource_type=_resource_type(error.resource),
                resource_name=cut_text(error.resource, 256),
            ),
        )
    request_id = error.metadata.get("requestId", "") if isinstance(error, InternalError) else ""
    if request_id:
        _add(status, error_details_pb2.RequestInfo(request_id=request_id))
    return status


def to_problem(error: FencepostError) -> failure_pb2.Problem:
    """The same inside an OK answer."""
    return failure_pb2.Problem(
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        metadata=_metadata(error),
        retryable=error.retryable,
    )


def to_trailers(error: FencepostError) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata that carries the details, at most 3 KiB of them."""
    return ((_BINARY_KEY, to_status(error).SerializeToString()),)


def as_internal(error: BaseException, method: str) -> InternalError:
    """The answer to a bug: logged with its traceback under the id that the caller is told."""
    request_id = str(uuid.uuid4())
    _log.error("%s failed, request id %s", method, request_id, exc_info=error)
    return InternalError(
        f"a bug of the server; its log has the details under request id {request_id}",
        requestId=request_id,
    )


def _wrapped(behaviour: Any, method: str) -> Any:
    """Streams of answers are generators, or coroutines that write by themselves."""
    if inspect.isasyncgenfunction(behaviour):
        return _generator(behaviour, method)
    return _coroutine(behaviour, method)


def _coroutine(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001 - the edge: answered, and logged if a bug
            await _end(error, context, method)

    return call


def _generator(behaviour: Any, method: str) -> Any:
    async def call(
        request: Any, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 - the edge: answered, and logged if a bug
            await _end(error, context, method)

    return call


async def _end(
    error: Exception, context: "grpc.aio.ServicerContext[Any, Any]", method: str
) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    known = error if isinstance(error, FencepostError) else as_internal(error, method)
    trailers = (*(context.trailing_metadata() or ()), *to_trailers(known))
    await context.abort(_CODES[int(known.code)], known.message, trailers)


def _metadata(error: FencepostError) -> dict[str, str]:
    pairs = list(error.metadata.items())[:METADATA_PAIRS_MAX]
    if sum(len(key) + len(value.encode()) for key, value in pairs) > DETAILS_BYTES_MAX // 3:
        pairs = [(key, cut_text(value, _SHORT_VALUE_BYTES)) for key, value in pairs]
    return dict(pairs)


def _resource_type(name: str) -> str:
    """The collection that the last resource of a name belongs to, such as "jobs"."""
    parts = name.split("/")
    return parts[-2] if len(parts) > 1 else ""


def _add(status: status_pb2.Status, detail: Any) -> None:
    packed = status.details.add()
    packed.Pack(detail)
    if status.ByteSize() > DETAILS_BYTES_MAX:
        del status.details[-1]
