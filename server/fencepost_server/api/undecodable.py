"""Answers requests that are no protobuf messages, such as text that is not UTF-8, as bad input.

gRPC by itself would call them UNKNOWN, a bug of the server.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from fencepost_server.errors import InvalidField

_OURS = "/fencepost."


class UndecodableInterceptor(grpc.aio.ServerInterceptor):
    """Hands what cannot be read to the handler's place as an error; inside `StatusInterceptor`."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handlers of our own services."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }
        factory, behaviour = kinds[handler.request_streaming, handler.response_streaming]
        return factory(
            (_of_stream if handler.request_streaming else _of_one)(behaviour),
            request_deserializer=_reading(handler.request_deserializer),
            response_serializer=_written(handler.response_serializer),
        )


def _reading(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The message, or the refusal in its place."""

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError as error:
            return InvalidField(
                f"request: cannot be read ({error}), want a message of this method with text that "
                "is valid UTF-8",
                field="request",
                value=f"{len(raw)} bytes",
                allowed="a message of this method with text that is valid UTF-8",
            )

    return read


def _written(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Hot paths hand in what is serialized already."""

    def write(response: Any) -> bytes:
        return response if isinstance(response, bytes) else serialize(response)

    return write


def _of_one(behaviour: Any) -> Any:
    if inspect.isasyncgenfunction(behaviour):
        return _stream_of_one(behaviour)

    async def call(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        if isinstance(request, InvalidField):
            raise request
        return await behaviour(request, context)

    return call


def _stream_of_one(behaviour: Any) -> Any:
    async def call(
        request: Any, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[Any]:
        if isinstance(request, InvalidField):
            raise request
        async with aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    return call


def _of_stream(behaviour: Any) -> Any:
    async def call(requests: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        return await behaviour(_checked(requests), context)

    return call


async def _checked(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, InvalidField):
            raise request
        yield request
