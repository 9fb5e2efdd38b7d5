"""Jobs between messages and the domain: nothing lost on the way, nothing wrong let in."""

from collections.abc import Callable

import pytest
from fencepost.v1 import job_pb2, payload_pb2, schedule_pb2
from fencepost_server.api.wire_job import read_job, write_definition
from fencepost_server.api.wire_payload import read_payload
from fencepost_server.clock import DAY, HOUR, SECOND
from fencepost_server.domain.job import RetryPolicy, RunLimits
from fencepost_server.domain.schedule import IntervalSpec, OnceSpec
from fencepost_server.errors import (
    FencepostError,
    InvalidField,
    PayloadTooLarge,
    QueueNotFound,
)
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

NOW = 1_796_000_000 * SECOND + 250_000


def minimal() -> job_pb2.Job:
    return job_pb2.Job(target=job_pb2.Target(kind="a"))


def full() -> job_pb2.Job:
    return job_pb2.Job(
        display_name="n",
        description="d",
        labels={"a": "b"},
        target=job_pb2.Target(queue="tenants/acme/queues/q", kind="a.b", priority=9),
        retry_policy=job_pb2.RetryPolicy(
            max_failures=1,
            max_lost_leases=1000,
            base=Duration(nanos=100_000_000),
            cap=Duration(seconds=30 * 86_400),
            jitter=job_pb2.BACKOFF_JITTER_PROPORTIONAL,
            non_retryable_codes=["BAD_INPUT"],
        ),
        limits=job_pb2.RunLimits(
            attempt_timeout=Duration(seconds=1),
            queue_timeout=Duration(seconds=30 * 86_400),
            total_timeout=Duration(seconds=90 * 86_400),
            lease_ttl=Duration(seconds=15),
            cancel_grace=Duration(seconds=3600),
            max_in_flight=100_000,
            concurrency_key="k",
            start_mode=job_pb2.START_MODE_CONFIRMED,
            lease_uncertain_action=job_pb2.LEASE_UNCERTAIN_ACTION_CONTINUE,
        ),
        payload=payload_pb2.Payload(data=b"\x00", content_type="a/b", encoding="gzip"),
        schedule=schedule_pb2.Schedule(
            cron=schedule_pb2.CronSpec(
                expressions=["0 3 * * *"],
                time_zone="Europe/Paris",
                dst_gap=schedule_pb2.DST_GAP_POLICY_SKIP,
                dst_fold=schedule_pb2.DST_FOLD_POLICY_BOTH,
            ),
            start_at=Timestamp(seconds=1_800_000_000),
            end_at=Timestamp(seconds=1_900_000_000),
            max_fires=7,
            misfire_policy=schedule_pb2.MisfirePolicy(
                action=schedule_pb2.MISFIRE_ACTION_CATCH_UP,
                threshold=Duration(seconds=5),
                window=Duration(seconds=600),
                max_catch_up=3,
            ),
            overlap_policy=schedule_pb2.OVERLAP_POLICY_QUEUE_ONE,
        ),
    )


def test_everything_that_was_sent_comes_back() -> None:
    definition = read_job(full(), tenant="acme", now=NOW)
    assert write_definition(definition.spec, definition.payload, tenant="acme") == full()


def test_what_comes_back_can_be_sent_again() -> None:
    for job in (minimal(), full()):
        first = read_job(job, tenant="acme", now=NOW)
        written = write_definition(first.spec, first.payload, tenant="acme")
        assert read_job(written, tenant="acme", now=NOW + DAY).same_as(first)


def test_zero_and_absent_mean_the_default() -> None:
    spec = read_job(minimal(), tenant="acme", now=NOW).spec
    assert (spec.target.queue_name, spec.target.priority) == ("default", 0)
    assert (spec.retry_policy, spec.limits) == (RetryPolicy(), RunLimits())
    zeros = minimal()
    zeros.limits.lease_ttl.SetInParent()
    zeros.limits.queue_timeout.SetInParent()
    zeros.retry_policy.SetInParent()
    zeros.payload.SetInParent()
    assert read_job(zeros, tenant="acme", now=NOW).same_as(
        read_job(minimal(), tenant="acme", now=NOW)
    )


def test_output_only_fields_are_ignored() -> None:
    job = minimal()
    job.job_id, job.version, job.fire_count, job.name = "x", 9, 9, "y"
    assert read_job(job, tenant="acme", now=NOW).same_as(
        read_job(minimal(), tenant="acme", now=NOW)
    )


@pytest.mark.parametrize(
    ("once", "at"),
    [
        (schedule_pb2.OnceSpec(), 1_796_000_000),
        (schedule_pb2.OnceSpec(delay=Duration()), 1_796_000_001),
        (schedule_pb2.OnceSpec(delay=Duration(seconds=5, nanos=1)), 1_796_000_006),
        (schedule_pb2.OnceSpec(at=Timestamp(seconds=7, nanos=1)), 8),
        (schedule_pb2.OnceSpec(delay=Duration(seconds=366 * 86_400)), 1_796_000_000 + 366 * 86_400),
    ],
)
def test_one_offs_are_whole_seconds(once: schedule_pb2.OnceSpec, at: int) -> None:
    job = minimal()
    job.schedule.once.CopyFrom(once)
    schedule = read_job(job, tenant="acme", now=NOW).spec.schedule
    assert schedule is not None
    assert schedule.spec == OnceSpec(at=at * SECOND)


def test_anchors_are_rounded_up() -> None:
    job = minimal()
    job.schedule.interval.every.seconds = 3600
    job.schedule.interval.anchor.nanos = 1
    schedule = read_job(job, tenant="acme", now=NOW).spec.schedule
    assert schedule is not None
    assert schedule.spec == IntervalSpec(every=HOUR, anchor=SECOND)


def _with(change: Callable[[job_pb2.Job], object]) -> job_pb2.Job:
    job = full()
    change(job)
    return job


def _set(message: object, **values: object) -> None:
    for name, value in values.items():
        setattr(message, name, value)


@pytest.mark.parametrize(
    ("change", "field", "error"),
    [
        (lambda j: j.ClearField("target"), "job.target.kind", InvalidField),
        (lambda j: _set(j.target, kind=""), "job.target.kind", InvalidField),
        (lambda j: _set(j.target, kind="a b"), "job.target.kind", InvalidField),
        (lambda j: _set(j.target, priority=10), "job.target.priority", InvalidField),
        (lambda j: _set(j.target, queue="q"), "job.target.queue", InvalidField),
        (lambda j: _set(j.target, queue="tenants/other/queues/q"), "", QueueNotFound),
        (lambda j: _set(j, display_name="x" * 129), "job.display_name", InvalidField),
        (lambda j: _set(j, description="x" * 4097), "job.description", InvalidField),
        (lambda j: _set(j, description="\x00"), "job.description", InvalidField),
        (lambda j: _set(j, pause_reason="x" * 257), "job.pause_reason", InvalidField),
        (lambda j: j.labels.update({"k" * 64: ""}), "job.labels (key)", InvalidField),
        (
            lambda j: _set(j.retry_policy, max_failures=1001),
            "job.retry_policy.max_failures",
            InvalidField,
        ),
        (
            lambda j: _set(j.retry_policy, max_lost_leases=-1),
            "job.retry_policy.max_lost_leases",
            InvalidField,
        ),
        (
            lambda j: j.retry_policy.base.FromMilliseconds(99),
            "job.retry_policy.base",
            InvalidField,
        ),
        (
            lambda j: j.retry_policy.cap.FromSeconds(31 * 86_400),
            "job.retry_policy.cap",
            InvalidField,
        ),
        (lambda j: j.retry_policy.cap.FromMilliseconds(100), "", None),
        (
            lambda j: (j.retry_policy.base.FromSeconds(20), j.retry_policy.cap.FromSeconds(10)),
            "job.retry_policy.cap",
            InvalidField,
        ),
        (lambda j: _set(j.retry_policy, jitter=9), "job.retry_policy.jitter", InvalidField),
        (
            lambda j: j.retry_policy.non_retryable_codes.append("lower"),
            "job.retry_policy.non_retryable_codes[1]",
            InvalidField,
        ),
        (
            lambda j: j.retry_policy.non_retryable_codes.extend(["A"] * 64),
            "job.retry_policy.non_retryable_codes",
            InvalidField,
        ),
        (lambda j: j.limits.lease_ttl.FromSeconds(14), "job.limits.lease_ttl", InvalidField),
        (lambda j: j.limits.lease_ttl.FromSeconds(601), "job.limits.lease_ttl", InvalidField),
        (
            lambda j: j.limits.attempt_timeout.FromSeconds(8 * 86_400),
            "job.limits.attempt_timeout",
            InvalidField,
        ),
        (lambda j: j.limits.cancel_grace.FromSeconds(-1), "job.limits.cancel_grace", InvalidField),
        (lambda j: _set(j.limits, max_in_flight=-1), "job.limits.max_in_flight", InvalidField),
        (
            lambda j: _set(j.limits, concurrency_key="ä" * 65),
            "job.limits.concurrency_key",
            InvalidField,
        ),
        (lambda j: _set(j.limits, start_mode=7), "job.limits.start_mode", InvalidField),
        (
            lambda j: j.limits.queue_timeout.FromMilliseconds(999),
            "job.limits.queue_timeout",
            InvalidField,
        ),
        (
            lambda j: j.limits.queue_timeout.FromSeconds(30 * 86_400 + 1),
            "job.limits.queue_timeout",
            InvalidField,
        ),
        (
            lambda j: j.limits.total_timeout.FromSeconds(-1),
            "job.limits.total_timeout",
            InvalidField,
        ),
        (
            lambda j: j.limits.total_timeout.FromSeconds(90 * 86_400 + 1),
            "job.limits.total_timeout",
            InvalidField,
        ),
        (lambda j: j.limits.total_timeout.FromSeconds(1), "", None),
        (lambda j: j.schedule.jitter.FromSeconds(86_401), "job.schedule.jitter", InvalidField),
        (lambda j: j.schedule.jitter.FromSeconds(-1), "job.schedule.jitter", InvalidField),
        (
            lambda j: j.schedule.exclude_calendars.append("No Name"),
            "job.schedule.exclude_calendars[0]",
            InvalidField,
        ),
        (lambda j: j.schedule.ClearField("cron"), "job.schedule", InvalidField),
        (
            lambda j: j.schedule.interval.SetInParent(),
            "job.schedule.interval.every",
            InvalidField,
        ),
        (lambda j: _set(j.schedule, max_fires=-1), "job.schedule.max_fires", InvalidField),
        (lambda j: _set(j.schedule, overlap_policy=6), "job.schedule.overlap_policy", InvalidField),
        (lambda j: _set(j.schedule.cron, dst_gap=3), "job.schedule.cron.dst_gap", InvalidField),
        (
            lambda j: _set(j.schedule.end_at, nanos=-1),
            "job.schedule.end_at",
            InvalidField,
        ),
        (
            lambda j: _set(j.schedule.misfire_policy, max_catch_up=1001),
            "job.schedule.misfire_policy.max_catch_up",
            InvalidField,
        ),
        (
            lambda j: j.schedule.misfire_policy.threshold.FromSeconds(86_401),
            "job.schedule.misfire_policy.threshold",
            InvalidField,
        ),
        (
            lambda j: j.schedule.once.delay.FromSeconds(367 * 86_400),
            "job.schedule.once.delay",
            InvalidField,
        ),
        (lambda j: _set(j.payload, content_type=""), "job.payload.content_type", InvalidField),
        (lambda j: _set(j.payload, content_type="é"), "job.payload.content_type", InvalidField),
        (lambda j: _set(j.payload, encoding="x" * 64), "job.payload.encoding", InvalidField),
        (lambda j: j.payload.ClearField("data"), "job.payload", InvalidField),
        (lambda j: _set(j.payload, data=b"x" * 262_145), "job.payload.data", PayloadTooLarge),
        (lambda j: _set(j.payload, json="ä" * 131_073), "job.payload.json", PayloadTooLarge),
    ],
)
def test_every_wrong_field_is_named(
    change: Callable[[job_pb2.Job], object], field: str, error: type[FencepostError] | None
) -> None:
    job = _with(change)
    if error is None:
        assert read_job(job, tenant="acme", now=NOW).spec.target.kind == "a.b"
        return
    with pytest.raises(error) as caught:
        read_job(job, tenant="acme", now=NOW)
    assert caught.value.field == field
    assert len(caught.value.message.encode()) <= 1024


def test_a_payload_is_kept_byte_for_byte() -> None:
    sent = payload_pb2.Payload(json='{"a": "\\u0000"}\x00', content_type="ignored")
    stored = read_payload(sent, field="payload")
    assert stored is not None
    kept = payload_pb2.Payload.FromString(stored)
    assert kept.json == sent.json
    assert kept.content_type == ""
    assert read_payload(payload_pb2.Payload(json=""), field="payload") == b"\x0a\x00"
    assert read_payload(payload_pb2.Payload(), field="payload") is None
