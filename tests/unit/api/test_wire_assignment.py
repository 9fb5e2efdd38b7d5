"""What workers get with their runs: assignments made from templates, and batches of them."""

import asyncio
from typing import Any

import pytest
from fencepost.v1 import failure_pb2, payload_pb2, run_pb2, run_service_pb2
from fencepost_server.api.outbox import BATCH_BYTES_MAX, BATCH_RUNS_MAX, Outbox
from fencepost_server.api.wire_assignment import Assignments, write_batch
from fencepost_server.clock import SECOND, Instant
from fencepost_server.domain.job import JobSpec, RetryPolicy, Target
from fencepost_server.domain.run import RunKey, traceparent
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.specs import RunSpec
from google.protobuf.duration_pb2 import Duration

JOB_ID = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
KEY = RunKey(JOB_ID, 1_796_115_600_000_412)


def claimed(**values: Any) -> Claimed:
    spec = JobSpec(
        target=Target(kind="mail.send"),
        labels={"team": "web"},
        retry_policy=RetryPolicy.of(max_failures=7),
    )
    known: dict[str, Any] = {
        "key": KEY,
        "attempt": 1,
        "place": 1,
        "queue_id": 1,
        "kind_id": 1,
        "version": 1,
        "spec": RunSpec(
            tenant="acme",
            job_name="mail",
            spec=spec,
            payload=payload_pb2.Payload(json="1").SerializeToString(),
        ),
        "lease_ttl": 30 * SECOND,
        "lease_until": 100 * SECOND,
        "failure_count": 0,
        "payload": None,
        "labels": None,
        "progress": None,
        "last_failure": None,
    }
    return Claimed(**{**known, **values})


def test_assignments_do_not_leak_into_each_other() -> None:
    assignments = Assignments(size=1)
    special = assignments.write(
        claimed(
            attempt=3,
            failure_count=2,
            payload=payload_pb2.Payload(data=b"x", content_type="a/b").SerializeToString(),
            labels={"a": "b"},
            progress=run_pb2.Progress(percent=5).SerializeToString(),
            last_failure=failure_pb2.Failure(code="X").SerializeToString(),
        ),
        now=80 * SECOND + 1,
    )
    assert (special.payload.data, special.payload.json) == (b"x", "")
    assert dict(special.labels) == {"a": "b"}
    assert (special.failure_count, special.last_failure.code) == (2, "X")
    assert special.lease_remaining == Duration(seconds=19, nanos=999_999_000)
    plain = assignments.write(claimed(), now=200 * SECOND)
    assert plain.payload.json == "1"
    assert dict(plain.labels) == {"team": "web"}
    assert (plain.queue, plain.job) == (
        "tenants/acme/queues/default",
        "tenants/acme/jobs/mail",
    )
    assert (plain.max_failures, plain.failure_count) == (7, 0)
    assert plain.lease_remaining == Duration()
    assert not plain.HasField("progress")
    assert not plain.HasField("last_failure")
    assert plain.start_mode != 0
    other = assignments.write(claimed(version=2), now=0)
    assert other.kind == "mail.send"


def test_the_span_of_an_attempt_is_the_parent_of_its_handler() -> None:
    attempt_3 = Assignments().write(claimed(attempt=3), now=0)
    # The vector of the protocol for this key and attempt.
    assert attempt_3.trace_context.traceparent.split("-")[2] == "9cd564c4432216ab"


@pytest.mark.parametrize(
    "at",
    [
        0,
        1,
        SECOND,
        1_796_115_600 * SECOND,
        *(1_796_115_600 * SECOND + micros for micros in (1, 16, 17, 999, 1000, 268_435, 268_436)),
        1_796_115_600 * SECOND + 999_999,
        -SECOND - 1,
    ],
)
@pytest.mark.parametrize("attempt", [1, 2, 127, 128, 20_000, 2**31 - 1])
def test_keys_and_attempts_are_written_as_protobuf_does(at: Instant, attempt: int) -> None:
    key = RunKey(JOB_ID, at)
    (encoded,) = Assignments().encode([claimed(key=key, attempt=attempt)], now=0)
    read = run_service_pb2.WorkResponse.FromString(write_batch(1, [encoded])).runs.runs[0]
    assert read.run.job_id == JOB_ID
    assert (read.run.scheduled_at.seconds, read.run.scheduled_at.nanos) == (
        at // SECOND,
        at % SECOND * 1000,
    )
    assert read.attempt == attempt
    assert read.trace_context.traceparent == traceparent(key, attempt)
    # Nothing is there twice, and nothing that a parser would not know.
    assert len(read.SerializeToString()) <= len(encoded) <= len(read.SerializeToString()) + 2


def test_neighbours_of_other_jobs_and_seconds_keep_their_own() -> None:
    other = claimed(key=RunKey(JOB_ID.replace("0197", "0198"), KEY.scheduled_at + SECOND))
    runs = [claimed(), other, claimed(lease_until=50 * SECOND), claimed(version=2), other]
    assignments = Assignments()
    together = assignments.encode(runs, now=SECOND)
    assert together == [assignments.encode([run], now=SECOND)[0] for run in runs]
    assert len(set(together)) == 3


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 300_000])
@pytest.mark.parametrize("batch_seq", [1, 127, 128, 2**33])
def test_batches_of_any_size_are_read_as_they_were_written(size: int, batch_seq: int) -> None:
    payload = payload_pb2.Payload(data=b"x" * size, content_type="a/b")
    runs = [claimed(payload=payload.SerializeToString()), claimed()]
    encoded = Assignments().encode(runs, now=0)
    batch = run_service_pb2.WorkResponse.FromString(write_batch(batch_seq, encoded)).runs
    assert batch.batch_seq == batch_seq
    assert [run.payload.data for run in batch.runs] == [b"x" * size, b""]
    assert [run.payload.json for run in batch.runs] == ["", "1"]


async def _written(outbox: Outbox) -> list[run_service_pb2.WorkResponse]:
    """Everything that waits, until there is no more to write."""
    messages: list[run_service_pb2.WorkResponse] = []

    async def write(message: run_service_pb2.WorkResponse | bytes) -> None:
        assert isinstance(message, bytes)
        messages.append(run_service_pb2.WorkResponse.FromString(message))

    writing = asyncio.create_task(outbox.write_to(write))
    await asyncio.sleep(0)
    await outbox.flushed()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    return messages


async def test_batches_are_bounded_in_number() -> None:
    runs = [claimed(key=RunKey(JOB_ID, at)) for at in range(1, 2 * BATCH_RUNS_MAX + 2)]
    outbox = Outbox()
    outbox.deal(runs, Assignments().encode(runs, now=0))
    batches = [message.runs for message in await _written(outbox)]
    assert [len(batch.runs) for batch in batches] == [BATCH_RUNS_MAX, BATCH_RUNS_MAX, 1]
    assert [batch.batch_seq for batch in batches] == [1, 2, 3]
    sent = [run.run.scheduled_at.nanos // 1000 for batch in batches for run in batch.runs]
    assert sent == [run.key.scheduled_at for run in runs]
    assert outbox.receive_receipt(2) == 2 * BATCH_RUNS_MAX
    assert outbox.take_unreceipted() == [(runs[-1].key, 1)]


async def test_batches_are_bounded_in_size_and_a_larger_run_travels_alone() -> None:
    def of(size: int, at: int) -> Claimed:
        payload = payload_pb2.Payload(data=b"x" * size, content_type="a/b")
        return claimed(key=RunKey(JOB_ID, at), payload=payload.SerializeToString())

    third = BATCH_BYTES_MAX // 3
    runs = [of(third, 1), of(third, 2), of(third, 3), of(BATCH_BYTES_MAX, 4), of(1, 5), of(1, 6)]
    outbox = Outbox()
    outbox.deal(runs, Assignments().encode(runs, now=0))
    assert [len(message.runs.runs) for message in await _written(outbox)] == [2, 1, 1, 2]


def test_what_was_never_written_is_given_back_whole() -> None:
    runs = [claimed(key=RunKey(JOB_ID, at)) for at in range(1, BATCH_RUNS_MAX + 3)]
    outbox = Outbox()
    outbox.deal(runs, Assignments().encode(runs, now=0))
    assert outbox.drop_unwritten() == [(run.key, 1) for run in runs]
    assert outbox.take_unreceipted() == []
