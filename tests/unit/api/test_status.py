"""What errors look like on the wire: over a real channel, with a servicer that raises."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from fencepost.v1 import failure_pb2
from fencepost_server import errors
from fencepost_server.api.status import StatusInterceptor, to_problem, to_status
from fencepost_server.errors import (
    FencepostError,
    InvalidField,
    JobNotFound,
    ServerOverloaded,
    StorageUnavailable,
)
from google.rpc import error_details_pb2, status_pb2


class Servicer(grpc.GenericRpcHandler):
    """Answers every method by raising `error`, after one message if it streams.

    Without an error a unary call waits for its cancellation.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method == "/t/Unary":
            return grpc.unary_unary_rpc_method_handler(self.unary)
        if handler_call_details.method == "/t/Stream":
            return grpc.stream_stream_rpc_method_handler(self.stream)
        return grpc.unary_stream_rpc_method_handler(self.written)

    async def unary(self, request: bytes, context: Any) -> bytes:
        if self.error is not None:
            raise self.error
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return request

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
            raise self._known_error()

    async def written(self, request: bytes, context: Any) -> None:
        await context.write(request)
        raise self._known_error()

    def _known_error(self) -> Exception:
        assert self.error is not None
        return self.error


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
async def channel(servicer: Servicer) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[StatusInterceptor()])
    server.add_generic_rpc_handlers((servicer,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(grace=None)


async def call(channel: grpc.aio.Channel, method: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(_drain(channel, method), timeout=20)
    return caught.value


async def _drain(channel: Any, method: str) -> None:
    if method == "/t/Unary":
        await channel.unary_unary(method)(b"x")
    elif method == "/t/Stream":
        assert [each async for each in channel.stream_stream(method)(iter([b"x"]))] == []
    else:
        assert [each async for each in channel.unary_stream(method)(b"x")] == []


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(raw, bytes)
    return status_pb2.Status.FromString(raw)


METHODS = ["/t/Unary", "/t/Stream", "/t/Written"]


@pytest.mark.parametrize("method", METHODS)
async def test_a_refusal_travels_with_its_details(
    servicer: Servicer, channel: grpc.aio.Channel, method: str
) -> None:
    servicer.error = InvalidField("job.target.kind: got 'ä'", field="job.target.kind", value="ä")
    seen = await call(channel, method)
    assert seen.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert seen.details() == "job.target.kind: got 'ä'"
    status = status_of(seen)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert [detail.Is(info.DESCRIPTOR) for detail in status.details] == [True, False]
    status.details[0].Unpack(info)
    status.details[1].Unpack(bad)
    assert (info.reason, info.domain) == ("INVALID_FIELD", "fencepost.dev")
    assert dict(info.metadata) == {"value": "ä"}
    assert bad.field_violations[0].field == "job.target.kind"


@pytest.mark.parametrize("method", METHODS)
async def test_a_bug_is_logged_and_told_by_its_id_only(
    servicer: Servicer,
    channel: grpc.aio.Channel,
    method: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    servicer.error = ValueError("secret inside")
    with caplog.at_level(logging.ERROR, logger="fencepost_server.api.status"):
        seen = await call(channel, method)
    assert seen.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in f"{seen.details()}{seen.trailing_metadata()}"
    told = error_details_pb2.RequestInfo()
    assert status_of(seen).details[1].Unpack(told)
    assert told.request_id in caplog.text
    assert method in caplog.text
    assert "ValueError: secret inside" in caplog.text


async def test_a_database_that_is_away_may_be_tried_again(
    servicer: Servicer, channel: grpc.aio.Channel
) -> None:
    servicer.error = StorageUnavailable()
    seen = await call(channel, "/t/Unary")
    assert seen.code() is grpc.StatusCode.UNAVAILABLE
    retry = error_details_pb2.RetryInfo()
    assert status_of(seen).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1000


async def test_a_cancelled_call_is_no_bug(
    servicer: Servicer, channel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        asked = channel.unary_unary("/t/Unary")(b"x")
        await asyncio.wait_for(servicer.entered.wait(), timeout=20)
        asked.cancel()
        await asyncio.wait_for(servicer.cancelled.wait(), timeout=20)
    assert [record for record in caplog.records if record.name.startswith("fencepost")] == []


def test_a_missing_resource_is_named() -> None:
    status = to_status(JobNotFound("gone", resource="tenants/a/jobs/b", name="tenants/a/jobs/b"))
    resource = error_details_pb2.ResourceInfo()
    assert status.details[1].Unpack(resource)
    assert (resource.resource_type, resource.resource_name) == ("jobs", "tenants/a/jobs/b")


def test_the_largest_error_fits_into_trailers() -> None:
    error = InvalidField("ü" * 5000, field="f" * 5000, resource="r/" + "x" * 5000)
    error.metadata = {f"key{index}": "ü" * 4000 for index in range(40)}
    status = to_status(error)
    assert len(status.message.encode()) <= 1024
    assert status.ByteSize() <= 3072
    assert status.details[0].Is(error_details_pb2.ErrorInfo.DESCRIPTOR)


def test_a_problem_says_the_same_as_a_status() -> None:
    problem = to_problem(ServerOverloaded("busy", queue="q"))
    assert problem == failure_pb2.Problem(
        code=8,
        reason="SERVER_OVERLOADED",
        message="busy",
        metadata={"queue": "q"},
        retryable=True,
    )


def test_every_reason_is_one_of_the_contract() -> None:
    known = set(failure_pb2.ErrorReason.keys())
    classes = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, FencepostError) and "reason" in vars(each)
    ]
    assert len(classes) > 10
    assert {f"ERROR_REASON_{each.reason}" for each in classes} <= known
