"""Runs and attempts as messages, and requests to make runs, with every field checked."""

from typing import cast

from fencepost.v1 import failure_pb2, job_pb2, run_pb2, run_service_pb2, schedule_pb2

from fencepost_server.api import validate
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.wire_job import CONCURRENCY_KEY_BYTES_MAX
from fencepost_server.api.wire_payload import read_payload
from fencepost_server.api.wire_worker import write_run_key
from fencepost_server.clock import DAY, SECOND, Duration, Instant
from fencepost_server.domain.job import RetryPolicy, RunLimits
from fencepost_server.domain.names import (
    format_job,
    format_queue,
    format_run,
    format_worker,
    parse_job,
    parse_run,
)
from fencepost_server.domain.run import AttemptOutcome, RunKey, RunState, span_id, traceparent
from fencepost_server.engine.enqueue import (
    KEEP_FOR_DEFAULT,
    Enqueued,
    EnqueueEntry,
    UniqueConflict,
    UniqueKey,
)
from fencepost_server.errors import InvalidField
from fencepost_server.store.runs import AttemptRecord, RunRecord

AHEAD_MAX: Duration = 366 * DAY
UNIQUE_KEY_BYTES_MAX = 256
KEEP_FOR_MAX: Duration = 30 * DAY
LEASE_EXPIRED_TEXT = "the lease ran out and nobody renewed it"


def read_enqueue(
    request: run_service_pb2.EnqueueRunRequest, *, now: Instant, tenant: str | None = None
) -> EnqueueEntry:
    """A run to make; `tenant`: the one that all jobs of a batch are in.

    Raises InvalidField or PayloadTooLarge.
    """
    job = parse_job(request.job, field="job")
    if tenant is not None and job.tenant != tenant:
        raise InvalidField(
            f"job: got {request.job!r}, want a job of tenants/{tenant} as in parent",
            field="job",
            value=request.job,
            allowed=f"tenants/{tenant}/jobs/{{job}}",
        )
    priority = key = unique = None
    if request.HasField("unique_key"):
        unique = _read_unique(request.unique_key)
    if request.HasField("priority"):
        priority = validate.priority(request.priority, field="priority")
    if request.HasField("concurrency_key"):
        key = validate.text(
            request.concurrency_key, field="concurrency_key", bytes_max=CONCURRENCY_KEY_BYTES_MAX
        )
    payload = None
    if request.HasField("payload"):
        payload = read_payload(request.payload, field="payload")
    return EnqueueEntry(
        job=job,
        due_at=_due_at(request, now),
        payload=payload,
        priority=priority,
        labels=validate.labels(request.labels, field="labels"),
        concurrency_key=key,
        unique=unique,
        request=read_request(request),
    )


def _read_unique(message: run_pb2.UniqueKey) -> UniqueKey:
    if not message.key:
        raise validate.missing("unique_key.key", f"1 to {UNIQUE_KEY_BYTES_MAX} bytes")
    keep_for = KEEP_FOR_DEFAULT
    if message.HasField("keep_for"):
        keep_for = validate.duration(
            message.keep_for,
            field="unique_key.keep_for",
            minimum=0,
            maximum=KEEP_FOR_MAX,
            round_up=True,
        )
    conflict = validate.choice(message.on_conflict, UniqueConflict, field="unique_key.on_conflict")
    return UniqueKey(
        key=validate.text(message.key, field="unique_key.key", bytes_max=UNIQUE_KEY_BYTES_MAX),
        conflict=conflict or UniqueConflict.RETURN_EXISTING,
        keep_for=keep_for,
    )


def _due_at(request: run_service_pb2.EnqueueRunRequest, now: Instant) -> Instant | None:
    when = request.WhichOneof("when")
    if when == "delay":
        # Finer digits are cut off, as those of run_at are.
        cut = type(request.delay)(
            seconds=request.delay.seconds, nanos=_cut_nanos(request.delay.nanos)
        )
        return now + validate.duration(cut, field="delay", minimum=0, maximum=AHEAD_MAX)
    if when is None:
        return None
    sent = request.run_at
    cut_at = type(sent)(seconds=sent.seconds, nanos=_cut_nanos(sent.nanos))
    at = validate.instant(cut_at, field="run_at")
    if at > now + AHEAD_MAX:
        raise validate.refused(
            "run_at", sent.ToJsonString(), f"at most {validate.duration_text(AHEAD_MAX)} ahead"
        )
    return at


def _cut_nanos(nanos: int) -> int:
    return nanos - nanos % 1000 if nanos >= 0 else nanos


def write_enqueued(made: Enqueued) -> bytes:
    """The answer to EnqueueRun. Of a run whose history is gone only the identity is known."""
    if made.record is not None:
        run = write_run(made.record, full=False)
    else:
        tenant = made.job.tenant
        run = run_pb2.Run(
            name=format_run(tenant, made.key.job_id, made.key.scheduled_at),
            unique_key=made.unique_key,
        )
        write_run_key(made.key, run.key)
    return run_service_pb2.EnqueueRunResponse(run=run, existing=made.existing).SerializeToString()


def write_remembered(tenant: str, key: RunKey) -> bytes:
    """What a request id is remembered by, for `read_remembered`."""
    run = run_pb2.Run(name=format_run(tenant, key.job_id, key.scheduled_at))
    return run_service_pb2.EnqueueRunResponse(run=run).SerializeToString()


def read_remembered(note: bytes) -> tuple[RunKey, bool]:
    """The run that a request id is remembered by, and whether it was there before.

    Notes hold the run's name, with the id of its job; those of an earlier version are whole
    answers.
    """
    answer = run_service_pb2.EnqueueRunResponse.FromString(note)
    if answer.run.HasField("key"):
        key = answer.run.key
        at = key.scheduled_at
        return RunKey(key.job_id, at.seconds * SECOND + at.nanos // 1000), answer.existing
    name = parse_run(answer.run.name, field="run.name")
    return RunKey(name.job, name.scheduled_at), answer.existing


def write_run(record: RunRecord, *, full: bool) -> run_pb2.Run:
    """The run; BASIC leaves out payloads, checkpoint, stack trace, details and policies."""
    job = record.key.job_id if record.job_is_deleted else record.job_name
    live = record.state.is_live
    message = run_pb2.Run(
        name=format_run(record.tenant, job, record.key.scheduled_at),
        job=format_job(record.tenant, record.job_name),
        job_version=record.version,
        origin=cast("run_pb2.RunOrigin.ValueType", int(record.origin)),
        state=cast("run_pb2.RunState.ValueType", int(record.state)),
        skip_reason=cast("schedule_pb2.SkipReason.ValueType", int(record.skip_reason or 0)),
        dead_reason=cast("run_pb2.DeadReason.ValueType", int(record.dead_reason or 0)),
        queue=format_queue(record.tenant, record.queue_name),
        kind=record.kind,
        priority=record.priority,
        concurrency_key=record.concurrency_key,
        unique_key=record.unique_key,
        attempt=record.attempt,
        failure_count=record.failure_count,
        lost_lease_count=record.lost_lease_count,
        snooze_count=record.snooze_count,
        replay_count=record.replay_count,
        labels=record.labels,
        worker="" if record.worker_id is None else format_worker(record.worker_id),
    )
    write_run_key(record.key, message.key)
    if record.cancel_requested or record.state is RunState.CANCELLED:
        message.cancel_cause = cast("run_pb2.CancelCause.ValueType", int(record.cancel_cause or 0))
        message.cancel_reason = record.cancel_reason
        message.cancel_requested = record.cancel_requested and live
    if record.state is RunState.BLOCKED and record.blocked_by is not None:
        message.blocked_by = format_run(record.tenant, job, record.blocked_by)
    message.trace_context.traceparent = traceparent(record.key, 0)
    if record.trace_context is not None:
        message.trace_context.baggage = record.trace_context.get("baggage", "")
    for field, at in (
        ("created_at", record.created_at),
        ("available_at", record.available_at),
        ("first_claimed_at", record.first_claimed_at),
        ("claimed_at", record.claimed_at),
        ("lease_until", record.lease_until if record.state is RunState.RUNNING else None),
        ("ended_at", record.ended_at),
        ("discarded_at", record.discarded_at),
    ):
        if at is not None:
            instant = getattr(message, field)
            instant.seconds, instant.nanos = at // SECOND, at % SECOND * 1000
    _write_outcome(record, message, full=full)
    if full:
        _write_definition(record, message)
    return message


def _write_outcome(record: RunRecord, message: run_pb2.Run, *, full: bool) -> None:
    if record.progress is not None:
        message.progress.ParseFromString(record.progress)
        if not full:
            message.progress.ClearField("checkpoint")
    if record.last_failure is not None:
        message.last_failure.ParseFromString(record.last_failure)
        if not full:
            message.last_failure.ClearField("stack_trace")
            message.last_failure.ClearField("details")


def _write_definition(record: RunRecord, message: run_pb2.Run) -> None:
    if record.payload is not None:
        message.payload.ParseFromString(record.payload)
    if record.result is not None:
        message.result.ParseFromString(record.result)
    policy = RetryPolicy() if record.spec is None else record.spec.retry_policy
    limits = RunLimits() if record.spec is None else record.spec.limits
    message.retry_policy.CopyFrom(_policy(policy))
    message.limits.CopyFrom(_limits(limits, record.concurrency_key))


def _policy(policy: RetryPolicy) -> job_pb2.RetryPolicy:
    message = job_pb2.RetryPolicy(
        max_failures=policy.max_failures,
        max_lost_leases=policy.max_lost_leases,
        jitter=cast("job_pb2.BackoffJitter.ValueType", int(policy.jitter)),
        non_retryable_codes=policy.non_retryable_codes,
    )
    message.base.FromMicroseconds(policy.base)
    message.cap.FromMicroseconds(policy.cap)
    return message


def _limits(limits: RunLimits, concurrency_key: str) -> job_pb2.RunLimits:
    message = job_pb2.RunLimits(
        max_in_flight=limits.max_in_flight or 0,
        concurrency_key=concurrency_key,
        start_mode=cast("job_pb2.StartMode.ValueType", int(limits.start_mode)),
        lease_uncertain_action=cast(
            "job_pb2.LeaseUncertainAction.ValueType", int(limits.lease_uncertain_action)
        ),
    )
    message.attempt_timeout.FromMicroseconds(limits.attempt_timeout)
    message.lease_ttl.FromMicroseconds(limits.lease_ttl)
    message.cancel_grace.FromMicroseconds(limits.cancel_grace)
    if limits.queue_timeout is not None:
        message.queue_timeout.FromMicroseconds(limits.queue_timeout)
    if limits.total_timeout is not None:
        message.total_timeout.FromMicroseconds(limits.total_timeout)
    return message


def write_attempt(key: RunKey, record: AttemptRecord) -> run_pb2.Attempt:
    """One claim of a run and what became of it."""
    message = run_pb2.Attempt(
        attempt=record.attempt,
        worker="" if record.worker_id is None else format_worker(record.worker_id),
        outcome=cast("run_pb2.AttemptOutcome.ValueType", int(record.outcome or 0)),
        late=record.late,
        span_id=span_id(key, record.attempt),
    )
    if record.failure is not None:
        message.failure.ParseFromString(record.failure)
    elif record.outcome is AttemptOutcome.LEASE_EXPIRED:
        message.failure.code = AttemptOutcome.LEASE_EXPIRED.name
        message.failure.message = LEASE_EXPIRED_TEXT
        message.failure.origin = failure_pb2.FAILURE_ORIGIN_LEASE_EXPIRED
    if record.timings is not None:
        message.timings.ParseFromString(record.timings)
    for instant, at in (
        (message.claimed_at, record.claimed_at),
        (message.ended_at, record.ended_at),
    ):
        if at is not None:
            instant.seconds, instant.nanos = at // SECOND, at % SECOND * 1000
    return message
