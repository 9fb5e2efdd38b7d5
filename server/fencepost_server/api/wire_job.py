"""Jobs between messages and the domain, with every field checked on its way in."""

from typing import Any, cast

from fencepost.v1 import job_pb2, payload_pb2

from fencepost_server.api import validate
from fencepost_server.api.wire_payload import read_payload
from fencepost_server.api.wire_schedule import read_schedule, write_schedule
from fencepost_server.api.wire_time import to_duration, to_timestamp
from fencepost_server.clock import DAY, HOUR, MILLISECOND, MINUTE, SECOND, Instant
from fencepost_server.domain.job import (
    BackoffJitter,
    JobSpec,
    LeaseUncertainAction,
    RetryPolicy,
    RunLimits,
    StartMode,
    Target,
)
from fencepost_server.domain.names import format_job, format_queue, parse_queue
from fencepost_server.engine.definition import Definition
from fencepost_server.errors import InvalidField
from fencepost_server.policy.concurrency_key import FORMS, template_problem
from fencepost_server.store.catalogue import queue_not_found
from fencepost_server.store.jobs import JobRecord

# Fields of a job that UpdateJob changes; together they are a version.
DEFINITION_FIELDS = frozenset(
    (
        "display_name",
        "description",
        "labels",
        "target",
        "schedule",
        "payload",
        "retry_policy",
        "limits",
    )
)
DISPLAY_NAME_CHARS_MAX = 128
DESCRIPTION_BYTES_MAX = 4096
REASON_BYTES_MAX = 256
CONCURRENCY_KEY_BYTES_MAX = 128
CODES_MAX = 64
FAILURES_MAX = 1000
IN_FLIGHT_MAX = 100_000
BASE_MIN, BASE_MAX = 100 * MILLISECOND, DAY
CAP_MAX = 30 * DAY
ATTEMPT_TIMEOUT_MIN, ATTEMPT_TIMEOUT_MAX = SECOND, 7 * DAY
QUEUE_TIMEOUT_MIN, QUEUE_TIMEOUT_MAX = SECOND, 30 * DAY
TOTAL_TIMEOUT_MIN, TOTAL_TIMEOUT_MAX = SECOND, 90 * DAY
LEASE_TTL_MIN, LEASE_TTL_MAX = 15 * SECOND, 10 * MINUTE
CANCEL_GRACE_MAX = HOUR
_LIMIT_DURATIONS = (
    "attempt_timeout",
    "queue_timeout",
    "total_timeout",
    "lease_ttl",
    "cancel_grace",
)


def read_job(message: job_pb2.Job, *, tenant: str, now: Instant, field: str = "job") -> Definition:
    """All that a caller decides about a job of `tenant`; output-only fields are ignored.

    Raises InvalidField, InvalidSchedule, PayloadTooLarge or QueueNotFound.
    """
    schedule = None
    if message.HasField("schedule"):
        schedule = read_schedule(message.schedule, now=now, field=f"{field}.schedule")
    spec = JobSpec(
        display_name=validate.text(
            message.display_name, field=f"{field}.display_name", chars_max=DISPLAY_NAME_CHARS_MAX
        ),
        description=validate.text(
            message.description, field=f"{field}.description", bytes_max=DESCRIPTION_BYTES_MAX
        ),
        labels=validate.labels(message.labels, field=f"{field}.labels"),
        target=read_target(message, tenant=tenant, field=f"{field}.target"),
        schedule=schedule,
        retry_policy=read_retry_policy(message.retry_policy, field=f"{field}.retry_policy"),
        limits=read_limits(message.limits, field=f"{field}.limits"),
    )
    return Definition(
        spec=spec,
        payload=read_payload(message.payload, field=f"{field}.payload"),
        paused=message.paused,
        pause_reason=validate.text(
            message.pause_reason, field=f"{field}.pause_reason", bytes_max=REASON_BYTES_MAX
        ),
    )


def read_target(message: job_pb2.Job, *, tenant: str, field: str) -> Target:
    """Where runs go. Raises InvalidField, or QueueNotFound for a queue of another tenant."""
    if not message.HasField("target"):
        raise validate.missing(f"{field}.kind", "1 to 128 of [A-Za-z0-9._-]")
    target = message.target
    kind = validate.kind(target.kind, field=f"{field}.kind")
    priority = validate.priority(target.priority, field=f"{field}.priority")
    if not target.queue:
        return Target(kind=kind, priority=priority)
    queue = parse_queue(target.queue, field=f"{field}.queue")
    if queue.tenant != tenant:
        raise queue_not_found(queue.tenant, queue.queue_name)
    return Target(queue_name=queue.queue_name, kind=kind, priority=priority)


def read_retry_policy(message: job_pb2.RetryPolicy, *, field: str) -> RetryPolicy:
    """The policy, which knows what was set. Raises InvalidField."""
    if len(message.non_retryable_codes) > CODES_MAX:
        count = len(message.non_retryable_codes)
        raise validate.refused(
            f"{field}.non_retryable_codes", f"{count} codes", f"at most {CODES_MAX} codes"
        )
    codes = tuple(
        validate.failure_code(code, field=f"{field}.non_retryable_codes[{index}]")
        for index, code in enumerate(message.non_retryable_codes)
    )
    policy = RetryPolicy.of(
        **_set_only(
            max_failures=validate.optional_integer(
                message.max_failures,
                field=f"{field}.max_failures",
                minimum=1,
                maximum=FAILURES_MAX,
            ),
            max_lost_leases=validate.optional_integer(
                message.max_lost_leases,
                field=f"{field}.max_lost_leases",
                minimum=1,
                maximum=FAILURES_MAX,
            ),
            base=validate.optional_duration(
                message.base, field=f"{field}.base", minimum=BASE_MIN, maximum=BASE_MAX
            ),
            cap=validate.optional_duration(
                message.cap, field=f"{field}.cap", minimum=BASE_MIN, maximum=CAP_MAX
            ),
            jitter=validate.choice(message.jitter, BackoffJitter, field=f"{field}.jitter"),
            non_retryable_codes=codes or None,
        )
    )
    if policy.cap < policy.base:
        raise validate.refused(
            f"{field}.cap",
            validate.duration_text(policy.cap),
            f"{validate.duration_text(policy.base)} (base) to {validate.duration_text(CAP_MAX)}",
        )
    return policy


def read_limits(message: job_pb2.RunLimits, *, field: str) -> RunLimits:
    """The limits, which know what was set. Raises InvalidField."""
    key = validate.text(
        message.concurrency_key,
        field=f"{field}.concurrency_key",
        bytes_max=CONCURRENCY_KEY_BYTES_MAX,
    )
    if (problem := template_problem(key)) is not None:
        raise InvalidField(
            f"{field}.concurrency_key: {problem}; want {FORMS}",
            field=f"{field}.concurrency_key",
            value=key,
            allowed=FORMS,
        )
    return RunLimits.of(
        **_set_only(
            attempt_timeout=validate.optional_duration(
                message.attempt_timeout,
                field=f"{field}.attempt_timeout",
                minimum=ATTEMPT_TIMEOUT_MIN,
                maximum=ATTEMPT_TIMEOUT_MAX,
            ),
            queue_timeout=validate.optional_duration(
                message.queue_timeout,
                field=f"{field}.queue_timeout",
                minimum=QUEUE_TIMEOUT_MIN,
                maximum=QUEUE_TIMEOUT_MAX,
            ),
            total_timeout=validate.optional_duration(
                message.total_timeout,
                field=f"{field}.total_timeout",
                minimum=TOTAL_TIMEOUT_MIN,
                maximum=TOTAL_TIMEOUT_MAX,
            ),
            lease_ttl=validate.optional_duration(
                message.lease_ttl,
                field=f"{field}.lease_ttl",
                minimum=LEASE_TTL_MIN,
                maximum=LEASE_TTL_MAX,
            ),
            cancel_grace=validate.optional_duration(
                message.cancel_grace,
                field=f"{field}.cancel_grace",
                minimum=0,
                maximum=CANCEL_GRACE_MAX,
            ),
            max_in_flight=validate.optional_integer(
                message.max_in_flight,
                field=f"{field}.max_in_flight",
                minimum=1,
                maximum=IN_FLIGHT_MAX,
            ),
            concurrency_key=key or None,
            start_mode=validate.choice(message.start_mode, StartMode, field=f"{field}.start_mode"),
            lease_uncertain_action=validate.choice(
                message.lease_uncertain_action,
                LeaseUncertainAction,
                field=f"{field}.lease_uncertain_action",
            ),
        )
    )


def write_job(record: JobRecord, *, tenant: str) -> job_pb2.Job:
    """The job as stored; its payload only if the record has it."""
    message = write_definition(record.spec, record.payload, tenant=tenant)
    message.name = format_job(tenant, record.name)
    message.job_id = record.job_id
    message.version = record.version
    message.paused = record.paused
    message.pause_reason = record.pause_reason
    message.state = cast("job_pb2.JobState.ValueType", int(record.state))
    message.fire_count = record.fire_count
    message.created_at.CopyFrom(to_timestamp(record.created_at))
    message.updated_at.CopyFrom(to_timestamp(record.updated_at))
    message.etag = record.etag
    if record.next_run_at is not None:
        message.next_run_at.CopyFrom(to_timestamp(record.next_run_at))
    if record.last_scheduled_at is not None:
        message.last_scheduled_at.CopyFrom(to_timestamp(record.last_scheduled_at))
    if record.trace_context is not None:
        message.trace_context.CopyFrom(payload_pb2.TraceContext(**record.trace_context))
    return message


def write_definition(spec: JobSpec, payload: bytes | None, *, tenant: str) -> job_pb2.Job:
    """The fields that a version of the definition consists of."""
    message = job_pb2.Job(
        display_name=spec.display_name,
        description=spec.description,
        labels=spec.labels,
        target=job_pb2.Target(
            queue=format_queue(tenant, spec.target.queue_name),
            kind=spec.target.kind,
            priority=spec.target.priority,
        ),
    )
    if spec.schedule is not None:
        message.schedule.CopyFrom(write_schedule(spec.schedule))
    if payload is not None:
        message.payload.ParseFromString(payload)
    if spec.retry_policy.explicit:
        message.retry_policy.CopyFrom(write_retry_policy(spec.retry_policy))
    if spec.limits.explicit:
        message.limits.CopyFrom(write_limits(spec.limits))
    return message


def write_retry_policy(policy: RetryPolicy) -> job_pb2.RetryPolicy:
    """What was set of the policy."""
    values = {name: getattr(policy, name) for name in policy.explicit}
    return job_pb2.RetryPolicy(**_durations(values, "base", "cap"))


def write_limits(limits: RunLimits) -> job_pb2.RunLimits:
    """What was set of the limits."""
    values = {name: getattr(limits, name) for name in limits.explicit}
    return job_pb2.RunLimits(**_durations(values, *_LIMIT_DURATIONS))


def _durations(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: to_duration(value) if name in names else value for name, value in values.items()}


def _set_only(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
