"""Tenants, queues and workers between messages and the store."""

from collections.abc import Mapping, Sequence

from fencepost.v1 import admin_pb2, run_service_pb2, worker_pb2

from fencepost_server.api import validate
from fencepost_server.api.wire_job import (
    DISPLAY_NAME_CHARS_MAX,
    REASON_BYTES_MAX,
    read_retry_policy,
    write_retry_policy,
)
from fencepost_server.api.wire_schedule import not_served
from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.domain.names import format_queue, format_tenant, format_worker
from fencepost_server.store.admin import (
    QueueRecord,
    QueueSettings,
    TenantRecord,
    TenantSettings,
    WorkerRecord,
)
from fencepost_server.store.queue_stats import QueueNumbers

CAP_MAX = 2**31 - 1
# A claim in a quarter of an hour, and more than one database can claim.
RATE_MIN = 0.001
RATE_MAX = 1_000_000.0
WEIGHT_MAX = 1000
_LISTENING = frozenset(("ready", "polling"))
TENANT_FIELDS = frozenset(
    (
        "display_name",
        "labels",
        "max_jobs",
        "max_live_runs",
        "max_in_flight",
        "max_creates_per_second",
        "weight",
        "default_retry_policy",
    )
)
QUEUE_FIELDS = frozenset(
    (
        "labels",
        "paused",
        "pause_reason",
        "max_in_flight",
        "max_in_flight_per_key",
        "rate_limit",
        "default_limits",
    )
)


def read_tenant(message: admin_pb2.Tenant, *, field: str = "tenant") -> TenantSettings:
    """Raises InvalidField, or NotImplementedYet for a setting this version does not serve."""
    unserved = (
        ("max_jobs", message.max_jobs != 0),
        ("max_live_runs", message.max_live_runs != 0),
        ("max_creates_per_second", message.max_creates_per_second != 0),
    )
    for name, is_set in unserved:
        if is_set:
            raise not_served(f"{field}.{name}")
    weight = validate.optional_integer(
        message.weight, field=f"{field}.weight", minimum=1, maximum=WEIGHT_MAX
    )
    return TenantSettings(
        display_name=validate.text(
            message.display_name, field=f"{field}.display_name", chars_max=DISPLAY_NAME_CHARS_MAX
        ),
        labels=validate.labels(message.labels, field=f"{field}.labels"),
        max_in_flight=validate.optional_integer(
            message.max_in_flight, field=f"{field}.max_in_flight", minimum=0, maximum=CAP_MAX
        ),
        weight=weight or 1,
        default_retry_policy=read_retry_policy(
            message.default_retry_policy, field=f"{field}.default_retry_policy"
        ),
    )


def read_queue(message: admin_pb2.Queue, *, field: str = "queue") -> QueueSettings:
    """Raises InvalidField, or NotImplementedYet for a setting this version does not serve."""
    if message.HasField("default_limits"):
        raise not_served(f"{field}.default_limits")
    reason = validate.text(
        message.pause_reason, field=f"{field}.pause_reason", bytes_max=REASON_BYTES_MAX
    )
    return QueueSettings(
        labels=validate.labels(message.labels, field=f"{field}.labels"),
        paused=message.paused,
        # A reason without a pause would be a lie in every list.
        pause_reason=reason if message.paused else "",
        max_in_flight=validate.optional_integer(
            message.max_in_flight, field=f"{field}.max_in_flight", minimum=0, maximum=CAP_MAX
        ),
        max_in_flight_per_key=validate.optional_integer(
            message.max_in_flight_per_key,
            field=f"{field}.max_in_flight_per_key",
            minimum=0,
            maximum=CAP_MAX,
        ),
        rate_limit=_read_rate(message.rate_limit, field=f"{field}.rate_limit"),
    )


def _read_rate(rate: float, *, field: str) -> float | None:
    if rate == 0:
        return None
    if not RATE_MIN <= rate <= RATE_MAX:
        raise validate.refused(
            field, rate, f"0 for no limit, or {RATE_MIN:g} to {RATE_MAX:.0f} claims per second"
        )
    return rate


def write_tenant(record: TenantRecord) -> admin_pb2.Tenant:
    """The tenant as stored."""
    settings = record.settings
    message = admin_pb2.Tenant(
        name=format_tenant(record.name),
        display_name=settings.display_name,
        labels=settings.labels,
        max_in_flight=settings.max_in_flight or 0,
        weight=settings.weight,
        created_at=to_timestamp(record.created_at),
        updated_at=to_timestamp(record.updated_at),
        etag=tenant_etag(record),
    )
    if settings.default_retry_policy.explicit:
        message.default_retry_policy.CopyFrom(write_retry_policy(settings.default_retry_policy))
    return message


def write_queue(
    record: QueueRecord, *, tenant: str, stats: admin_pb2.QueueStats | None = None
) -> admin_pb2.Queue:
    """The queue as stored, and what was counted of it."""
    settings = record.settings
    return admin_pb2.Queue(
        name=format_queue(tenant, record.name),
        labels=settings.labels,
        paused=settings.paused,
        pause_reason=settings.pause_reason,
        max_in_flight=settings.max_in_flight or 0,
        max_in_flight_per_key=settings.max_in_flight_per_key or 0,
        rate_limit=settings.rate_limit or 0,
        stats=stats,
        created_at=to_timestamp(record.created_at),
        updated_at=to_timestamp(record.updated_at),
        etag=queue_etag(record),
    )


def write_stats(numbers: QueueNumbers, listening: Sequence[WorkerRecord]) -> admin_pb2.QueueStats:
    """Numbers of a queue, and of the workers that listen on it."""
    waited = 0 if numbers.oldest_at is None else numbers.measured_at - numbers.oldest_at
    message = admin_pb2.QueueStats(
        ready_runs=numbers.ready,
        delayed_runs=numbers.delayed,
        retrying_runs=numbers.retrying,
        blocked_runs=numbers.blocked,
        running_runs=numbers.running,
        dead_runs=numbers.dead,
        workers=len(listening),
        free_credits=sum(worker.free_credits for worker in listening),
        measured_at=to_timestamp(numbers.measured_at),
    )
    # A run that becomes due later has not waited at all.
    message.oldest_ready_age.FromMicroseconds(max(0, waited))
    return message


def listeners(workers: Sequence[WorkerRecord]) -> Mapping[str, list[WorkerRecord]]:
    """The workers that take runs, by the full names of their queues."""
    found: dict[str, list[WorkerRecord]] = {}
    for worker in workers:
        if worker.state in _LISTENING and worker.subscriptions:
            stored = run_service_pb2.ClaimRunsRequest.FromString(worker.subscriptions)
            for subscription in stored.subscriptions:
                found.setdefault(subscription.queue, []).append(worker)
    return found


def tenant_etag(record: TenantRecord) -> str:
    """Changes with every change."""
    return f"{record.tenant_id}-{record.revision}"


def queue_etag(record: QueueRecord) -> str:
    """Changes with every change."""
    return f"{record.queue_id}-{record.revision}"


def write_worker(record: WorkerRecord, *, tenant: str | None) -> admin_pb2.Worker:
    """The worker as last heard from; with `tenant` only its subscriptions of that tenant.

    What it listens to is stored as a ClaimRunsRequest with nothing else set.
    """
    message = admin_pb2.Worker(
        name=format_worker(record.worker_id),
        display_name=record.display_name,
        state=admin_pb2.WorkerState.Value(f"WORKER_STATE_{record.state.upper()}"),
        slots=record.slots,
        held_runs=record.held_runs,
        free_credits=record.free_credits,
        session_id=record.session_id,
        server_id=record.server_id,
        first_seen_at=to_timestamp(record.first_seen_at),
        last_heartbeat_at=to_timestamp(record.last_heartbeat_at),
        labels=record.labels,
    )
    if record.sdk is not None:
        message.sdk.CopyFrom(worker_pb2.SdkInfo.FromString(record.sdk))
    for subscription in read_subscriptions(record.subscriptions):
        if tenant is None or subscription.queue.startswith(f"{format_tenant(tenant)}/"):
            message.subscriptions.append(subscription)
    return message


def pack_subscriptions(subscriptions: list[worker_pb2.QueueSubscription]) -> bytes:
    """The stored form of what a worker listens to."""
    return run_service_pb2.ClaimRunsRequest(subscriptions=subscriptions).SerializeToString()


def read_subscriptions(stored: bytes | None) -> list[worker_pb2.QueueSubscription]:
    """The reverse of `pack_subscriptions`."""
    return list(run_service_pb2.ClaimRunsRequest.FromString(stored or b"").subscriptions)
