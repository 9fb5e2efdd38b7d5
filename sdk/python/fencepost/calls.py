"""One unary call with its deadline, its credentials and its repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from fencepost.connection import Connection
from fencepost.errors import error_of_call
from fencepost.retry import CallRetry

Response = TypeVar("Response")


async def call(
    method: Callable[..., Awaitable[Response]],
    request: object,
    *,
    connection: Connection,
    retry: CallRetry,
    timeout: float,
    before_repeat: Callable[[], None] | None = None,
) -> Response:
    """The response; `timeout` in seconds bounds each try. Raises a FencepostError.

    The same request is sent again, so the ids in it make repeats harmless.
    """
    failures = 0
    while True:
        try:
            metadata = grpc.aio.Metadata(*connection.metadata)
            return await method(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            failures += 1
            error = error_of_call(failure.code(), failure.details(), failure.trailing_metadata())
            wait = retry.wait(error, failures)
            if wait is None:
                raise error from failure
        await asyncio.sleep(wait)
        if before_repeat is not None:
            before_repeat()
