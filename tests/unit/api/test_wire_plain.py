"""Plain batches as bytes mean what they mean as messages, and what is not plain is not read."""

import random
from typing import Any

import pytest
from fencepost.v1 import payload_pb2, run_pb2, run_service_pb2
from fencepost_server.api.wire_plain import PlainBatch, notes_of, read_plain, write_plain
from fencepost_server.api.wire_run import read_enqueue, read_remembered, write_enqueued
from fencepost_server.clock import SECOND, Instant
from fencepost_server.domain.job import JobSpec, RunLimits, Target
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import RunKey, RunOrigin, RunState
from fencepost_server.engine.enqueue import Enqueued, UniqueKey
from fencepost_server.engine.plain_enqueue import PlainMade, PlainRuns
from fencepost_server.errors import FencepostError
from fencepost_server.store.runs import RunRecord
from google.protobuf.message import DecodeError

JOB_ID = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
JOB = "tenants/acme/jobs/mail"
AT: Instant = 1_796_115_600_000_000
# Plain runs are due now, so their instants need not be written beyond the year 3058.
LAST_AT: Instant = (1 << 35) * SECOND - 1

Request = run_service_pb2.BatchEnqueueRunsRequest


def json(text: str) -> payload_pb2.Payload:
    return payload_pb2.Payload(json=text)


def key(text: str, **values: Any) -> run_pb2.UniqueKey:
    return run_pb2.UniqueKey(key=text, **values)


def entry(**values: Any) -> run_service_pb2.EnqueueRunRequest:
    return run_service_pb2.EnqueueRunRequest(**{"job": JOB, **values})


def batch(*entries: run_service_pb2.EnqueueRunRequest) -> Request:
    return Request(parent="tenants/acme", requests=entries)


def expect_same(found: PlainBatch, message: Request) -> None:
    """Every column says what the entries say when they are read one by one."""
    entries = [read_enqueue(each, now=AT, tenant="acme") for each in message.requests]
    runs = found.runs
    numbers = runs.numbers or [1] * len(entries)
    assert found.tenant == "acme"
    assert [runs.jobs[number - 1] for number in numbers] == [each.job.job for each in entries]
    assert runs.payloads == [each.payload for each in entries]
    uniques = [None if each is None else UniqueKey(key=each) for each in runs.unique_keys]
    assert (uniques or [None] * len(entries)) == [each.unique for each in entries]
    requests = [each.request for each in entries if each.request]
    assert list(runs.request_ids) == [each.request_id for each in requests]
    assert list(runs.body_hashes) == [each.body_hash for each in requests]
    for each in entries:
        assert (each.due_at, each.priority, each.concurrency_key) == (None, None, None)
        assert not each.labels


_PLAIN = {
    "nothing but a job": [entry()],
    "a payload": [entry(payload=json('{"a": 1}')), entry()],
    "payloads of all sizes": [
        entry(payload=json("x" * size)) for size in (0, 1, 125, 126, 127, 128, 9999)
    ],
    "other letters": [entry(payload=json('"größer"'), unique_key=key("schlüssel"))],
    "keys": [entry(unique_key=key("a")), entry(), entry(unique_key=key("b" * 125))],
    "request ids": [entry(request_id="a"), entry(request_id="b" * 36, payload=json("1"))],
    "several jobs": [
        entry(unique_key=key("a"), request_id="1"),
        entry(job="tenants/acme/jobs/sms", unique_key=key("a"), request_id="2"),
        entry(job=f"tenants/acme/jobs/{JOB_ID}", request_id="3"),
        entry(request_id="4"),
    ],
    "a thousand": [entry(request_id=str(n), payload=json(str(n))) for n in range(1000)],
}  # fmt: skip


@pytest.mark.parametrize("entries", _PLAIN.values(), ids=_PLAIN)
def test_a_plain_batch_says_what_its_entries_say(entries: list[Any]) -> None:
    message = batch(*entries)
    found = read_plain(message.SerializeToString())
    assert found is not None
    assert found.raw == message.SerializeToString()
    expect_same(found, message)


_NOT_PLAIN = {
    "no entry": [],
    "too many": [entry()] * 1001,
    "no job": [run_service_pb2.EnqueueRunRequest(payload=json("1"))],
    "a job that is no name": [entry(job="tenants/acme/jobs/A B")],
    "another tenant": [entry(job="tenants/other/jobs/mail")],
    "too many jobs": [entry(job=f"{JOB}{n}") for n in range(65)],
    "priority": [entry(priority=0)],
    "labels": [entry(labels={"a": "b"})],
    "concurrency key": [entry(concurrency_key="")],
    "run_at": [entry(run_at={"seconds": 1})],
    "delay": [entry(delay={})],
    "data": [entry(payload=payload_pb2.Payload(data=b"a", content_type="text/plain"))],
    "encoding": [entry(payload=payload_pb2.Payload(json="1", encoding="gzip"))],
    "an empty payload": [entry(payload=payload_pb2.Payload())],
    "an empty key": [entry(unique_key=key(""))],
    "a long key": [entry(unique_key=key("k" * 126))],
    "a key with NUL": [entry(unique_key=key("a\x00"))],
    "on_conflict": [entry(unique_key=key("a", on_conflict=1))],
    "keep_for": [entry(unique_key=key("a", keep_for={"seconds": 86400}))],
    "one key twice": [entry(unique_key=key("a")), entry(unique_key=key("a"))],
    "one request id twice": [entry(request_id="a"), entry(request_id="a")],
    "request ids of some": [entry(request_id="a"), entry()],
    "a long request id": [entry(request_id="a" * 37)],
    "a request id of other letters": [entry(request_id="ä")],
    "a request id that does not print": [entry(request_id="a\n")],
    "a large payload": [entry(payload=json("x" * 20_000))],
}


@pytest.mark.parametrize("entries", _NOT_PLAIN.values(), ids=_NOT_PLAIN)
def test_whatever_is_more_is_read_as_a_message(entries: list[Any]) -> None:
    assert read_plain(batch(*entries).SerializeToString()) is None


_HEAD = b"\n\x0ctenants/acme"
_JOB = b"\n\x16" + JOB.encode()
_WRITTEN_OTHERWISE = {
    "nothing": b"",
    "no entries": _HEAD,
    "an empty entry": _HEAD + b"\x12\x00",
    "a long length": b"\n\x8c\x00tenants/acme\x12\x18" + _JOB,
    "an unknown field": _HEAD + b"\x12\x18" + _JOB + b"\x18\x01",
    "another order": b"\x12\x18" + _JOB + _HEAD,
    "an unknown field of a run": _HEAD + b"\x12\x1a" + _JOB + b"\x50\x01",
    "a field twice": _HEAD + b"\x12\x30" + _JOB + _JOB,
    "not UTF-8": _HEAD + b"\x12\x1d" + _JOB + b"\x12\x03\n\x01\xff",
    "a long length of a payload": _HEAD + b"\x12\x1e" + _JOB + b"\x12\x83\x00\n\x011",
    "more than an entry": _HEAD + b"\x12\x19" + _JOB,
}


@pytest.mark.parametrize("raw", _WRITTEN_OTHERWISE.values(), ids=_WRITTEN_OTHERWISE)
def test_bytes_that_are_written_otherwise_are_read_as_a_message(raw: bytes) -> None:
    assert read_plain(_HEAD + b"\x12\x18" + _JOB) is not None
    assert read_plain(raw) is None


def test_a_batch_that_is_cut_or_damaged_is_never_read_as_something_else() -> None:
    """A field that changes its meaning unseen would make a run that nobody asked for."""
    whole = batch(
        entry(payload=json('{"a": 1}'), unique_key=key("a"), request_id="1"),
        entry(payload=json("ä" * 100), request_id="2"),
        entry(job="tenants/acme/jobs/sms", unique_key=key("b"), request_id="3"),
    ).SerializeToString()
    assert read_plain(whole) is not None
    damage = random.Random(5)
    read = 0
    for number in range(6_000):
        raw = bytearray(whole)
        if number < len(whole):
            raw = raw[:number]
        else:
            for _ in range(damage.randint(1, 2)):
                raw[damage.randrange(len(raw))] = damage.randrange(256)
        found = read_plain(bytes(raw))
        if found is None:
            continue
        read += 1
        try:
            message = Request.FromString(bytes(raw))
            expect_same(found, message)
        except (FencepostError, DecodeError) as error:
            pytest.fail(f"{bytes(raw)!r} is refused as a message: {error}")
    assert read > 100, "hardly a damaged batch was read: the test says nothing"


# Answers -------------------------------------------------------------------------------------


def record(**values: Any) -> RunRecord:
    known: dict[str, Any] = {
        "key": RunKey(JOB_ID, AT + 1),
        "tenant": "acme",
        "job_name": "mail",
        "job_is_deleted": False,
        "version": 2,
        "spec": JobSpec(target=Target(kind="mail.send"), limits=RunLimits.of(max_in_flight=3)),
        "state": RunState.QUEUED,
        "origin": RunOrigin.ENQUEUE,
        "queue_name": "default",
        "kind": "mail.send",
        "priority": 3,
        "created_at": AT,
        "available_at": AT,
        "labels": {"team": "web"},
        "concurrency_key": "customer",
    }
    return RunRecord(**{**known, **values})


@pytest.mark.parametrize("tenant", ["acme", "t" * 63])
@pytest.mark.parametrize("trace", [None, {"traceparent": "00-", "baggage": "a=b"}])
def test_an_answer_says_what_single_answers_say(tenant: str, trace: Any) -> None:
    records = [
        record(tenant=tenant, trace_context=trace),
        record(tenant=tenant, job_name="s" * 63, labels={}, key=RunKey(JOB_ID[::-1], AT + 1)),
    ]
    ats = [AT - 2, AT - 2, AT - 1, AT + 1, AT + 999_999, AT + 4_000_000_001, AT + 5]
    numbers = [1, 2, 1, 1, 2, 1, 2]
    keys = [None, "a", "ä" * 10, "k" * 125, None, "b", None]
    runs = PlainRuns(
        jobs=["mail", "s" * 63],
        numbers=numbers,
        payloads=[None] * 7,
        unique_keys=keys,
        request_ids=[],
        body_hashes=[],
    )
    notes = notes_of(ats)
    raw = write_plain(PlainMade(ats=ats, notes=notes, records=records), runs)
    outcomes = run_service_pb2.BatchEnqueueRunsResponse.FromString(raw).outcomes
    assert len(outcomes) == 7
    for outcome, at, number, unique in zip(outcomes, ats, numbers, keys, strict=True):
        of = records[number - 1]
        alone = record(
            tenant=tenant,
            trace_context=of.trace_context,
            job_name=of.job_name,
            labels=of.labels,
            key=RunKey(of.key.job_id, at),
            unique_key=unique or "",
        )
        written = write_enqueued(
            Enqueued(
                key=alone.key,
                job=JobName(tenant=tenant, job=of.job_name),
                record=alone,
                existing=False,
            )
        )
        assert outcome.response == run_service_pb2.EnqueueRunResponse.FromString(written)
        assert outcome.response.run.labels == of.labels


def test_one_job_without_keys_needs_no_columns_for_them() -> None:
    ats = [AT + 1, AT + 2]
    runs = PlainRuns(
        jobs=["mail"],
        numbers=[],
        payloads=[None, None],
        unique_keys=[],
        request_ids=[],
        body_hashes=[],
    )
    raw = write_plain(PlainMade(ats=ats, notes=notes_of(ats), records=[record()]), runs)
    outcomes = run_service_pb2.BatchEnqueueRunsResponse.FromString(raw).outcomes
    assert [each.response.run.key.scheduled_at.ToMicroseconds() for each in outcomes] == ats
    assert not any(each.response.existing or each.response.run.unique_key for each in outcomes)


@pytest.mark.parametrize("at", [AT + 1, AT - 1, SECOND + 999_999, LAST_AT])
def test_what_is_remembered_of_a_run_is_its_key(at: Instant) -> None:
    head = b"\x0a\x28\x12\x26\x0a\x24" + JOB_ID.encode()
    (note,) = notes_of([at])
    assert read_remembered(head + note) == (RunKey(JOB_ID, at), False)
