"""The producer's side over a real socket: repeats, errors, batches, polls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
import pytest_asyncio
from fencepost import (
    Client,
    DeadlineExceeded,
    FieldViolation,
    InvalidArgument,
    NewRun,
    NotFound,
    ResourceExhausted,
    Unavailable,
    UniqueKey,
)
from fencepost.retry import CallRetry
from fencepost.status import StatusDetails
from fencepost.v1 import run_pb2
from google.protobuf.duration_pb2 import Duration

from tests.sdk.fake_server import FakeServer, Refusal

UNAVAILABLE = Refusal(code=grpc.StatusCode.UNAVAILABLE)


@pytest_asyncio.fixture
async def client(server: FakeServer) -> AsyncIterator[Client]:
    async with Client(server.address, "acme", retry=CallRetry(base=0.01)) as made:
        yield made


async def test_an_unavailable_server_is_asked_again_with_the_same_request_id(
    server: FakeServer, client: Client
) -> None:
    server.unary_refusals = [UNAVAILABLE, UNAVAILABLE]
    run = await client.enqueue("nightly", {"n": 1}, unique="inv-42", delay=1.5, labels={"a": "b"})
    assert run.name.startswith("tenants/acme/jobs/nightly/runs/")
    assert len(server.enqueued) == 3
    assert len({request.request_id for request in server.enqueued}) == 1
    request = server.enqueued[0]
    assert len(request.request_id) == 36
    assert request.payload.json == '{"n":1}'
    assert request.unique_key.key == "inv-42"
    assert (request.delay.seconds, request.delay.nanos) == (1, 500_000_000)
    assert not request.HasField("priority")


async def test_what_becomes_of_a_held_key_is_said_with_the_call(
    server: FakeServer, client: Client
) -> None:
    await client.enqueue("nightly", unique="a", on_conflict="reject", keep_for=0)
    new = NewRun(job="nightly", unique="b", on_conflict="replace_waiting", keep_for=1.5)
    [first], second = server.enqueued, new.to_request(client.connection)
    assert first.unique_key.on_conflict == run_pb2.UNIQUE_CONFLICT_ACTION_REJECT
    assert first.unique_key.HasField("keep_for")
    assert first.unique_key.keep_for.ToNanoseconds() == 0
    assert second.unique_key == UniqueKey(
        key="b",
        on_conflict=run_pb2.UNIQUE_CONFLICT_ACTION_REPLACE_WAITING,
        keep_for=Duration(seconds=1, nanos=500_000_000),
    )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"on_conflict": "reject"}, "set unique"),
        ({"keep_for": 1}, "set unique"),
        ({"unique": "a", "on_conflict": "REJECT"}, "return_existing, reject, replace_waiting"),
        ({"unique": UniqueKey(key="a"), "keep_for": 1}, "UniqueKey"),
    ],
)
async def test_nonsense_about_keys_is_refused_before_a_call(
    server: FakeServer, client: Client, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        await client.enqueue("nightly", **values)
    assert server.enqueued == []


async def test_another_call_has_another_request_id(server: FakeServer, client: Client) -> None:
    at = datetime(2026, 12, 1, 9, tzinfo=UTC)
    await client.enqueue("nightly", run_at=at, priority=0)
    await client.enqueue("nightly")
    first, second = server.enqueued
    assert first.request_id != second.request_id
    assert first.run_at.seconds == 1796115600
    assert first.HasField("priority")


async def test_a_server_that_stays_away_is_given_up(server: FakeServer, client: Client) -> None:
    server.unary_refusals = [UNAVAILABLE] * 10
    with pytest.raises(Unavailable):
        await client.enqueue("nightly")
    assert len(server.enqueued) == 5


async def test_exhausted_resources_are_waited_for_only_when_the_server_says_so(
    server: FakeServer, client: Client
) -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    waiting = StatusDetails(reason="QUOTA_EXCEEDED", retry_after=0.05)
    server.unary_refusals = [Refusal(code=code, details=waiting)]
    await client.enqueue("nightly")
    assert len(server.enqueued) == 2

    server.unary_refusals = [Refusal(code=code)]
    with pytest.raises(ResourceExhausted) as caught:
        await client.enqueue("nightly")
    assert caught.value.retry_after is None
    assert len(server.enqueued) == 3


async def test_an_error_carries_reason_metadata_and_fields(
    server: FakeServer, client: Client
) -> None:
    violation = FieldViolation(field="unique_key.key", description="at most 256 bytes, got 300")
    details = StatusDetails(
        reason="INVALID_FIELD", metadata={"actualBytes": "300"}, field_violations=(violation,)
    )
    server.unary_refusals = [Refusal(code=grpc.StatusCode.INVALID_ARGUMENT, details=details)]
    with pytest.raises(InvalidArgument, match="INVALID_FIELD: refused by the script") as caught:
        await client.enqueue("nightly")
    assert caught.value.reason == "INVALID_FIELD"
    assert caught.value.metadata == {"actualBytes": "300"}
    assert caught.value.field_violations == (violation,)


async def test_a_reason_nobody_knows_yet_is_handled_by_its_code(
    server: FakeServer, client: Client
) -> None:
    details = StatusDetails(reason="MOON_NOT_FOUND")
    server.unary_refusals = [Refusal(code=grpc.StatusCode.NOT_FOUND, details=details)]
    with pytest.raises(NotFound) as caught:
        await client.wait("tenants/acme/jobs/moon/runs/2026-12-01T09:00:00Z")
    assert caught.value.reason == "MOON_NOT_FOUND"


async def test_many_runs_go_in_batches_and_fail_alone(server: FakeServer, client: Client) -> None:
    jobs = ["nightly"] * 2500
    jobs[1200] = "missing"
    outcomes = await client.enqueue_many(NewRun(job=job, payload=n) for n, job in enumerate(jobs))
    assert server.batches == [1000, 1000, 500]
    assert len(outcomes) == 2500
    refused = outcomes[1200]
    assert isinstance(refused, NotFound)
    assert refused.metadata == {"job": "tenants/acme/jobs/missing"}
    made = outcomes[2499]
    assert isinstance(made, run_pb2.Run)
    assert made.payload.json == "2499"


async def test_large_payloads_make_smaller_batches(server: FakeServer, client: Client) -> None:
    outcomes = await client.enqueue_many(
        NewRun(job="nightly", payload=b"x" * 200_000) for _ in range(40)
    )
    assert len(outcomes) == 40
    assert sum(server.batches) == 40
    assert max(server.batches) <= 15


async def test_waiting_polls_until_the_run_has_ended(server: FakeServer, client: Client) -> None:
    server.waits_before_end = 3
    run = await client.wait(run_pb2.Run(name="tenants/acme/jobs/a/runs/2026-12-01T09:00:00Z"))
    assert run.state == run_pb2.RUN_STATE_SUCCEEDED
    server.waits_before_end = 1000
    with pytest.raises(DeadlineExceeded, match="had not ended after 0 s"):
        await client.wait(run, timeout=0)


async def test_an_instant_without_a_zone_or_a_contradiction_is_refused_before_any_call(
    server: FakeServer, client: Client
) -> None:
    with pytest.raises(ValueError, match="needs a time zone"):
        await client.enqueue("nightly", run_at=datetime(2026, 12, 1))  # noqa: DTZ001
    with pytest.raises(ValueError, match="not both"):
        await client.enqueue("nightly", run_at=datetime(2026, 12, 1, tzinfo=UTC), delay=1)
    with pytest.raises(ValueError, match="0 s or more"):
        await client.enqueue("nightly", delay=-1)
    assert server.enqueued == []
