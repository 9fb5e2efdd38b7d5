"""Operations and backfills between messages and the engine."""

from collections.abc import Sequence
from typing import cast

from fencepost.v1 import failure_pb2, job_service_pb2, operation_pb2

from fencepost_server.api import validate
from fencepost_server.api.filters import Condition, Op, enum_names, parse
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.wire_fire import write_fire
from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.clock import Instant
from fencepost_server.domain.names import format_operation, parse_job
from fencepost_server.domain.operation import OperationAction, OperationState
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.backfill import Backfill, BackfillAsked
from fencepost_server.policy.backfill import (
    RATE_DEFAULT,
    RATE_MAX,
    RATE_MIN,
    RUNS_DEFAULT,
    RUNS_MAX,
)
from fencepost_server.store.operations import OperationRecord

REASON_BYTES_MAX = 256
_FIELDS = {
    "state": enum_names({each.name: int(each) for each in OperationState}),
    "action": enum_names({each.name: int(each) for each in OperationAction}),
}


def read_backfill(request: job_service_pb2.BackfillJobRequest, *, now: Instant) -> BackfillAsked:
    """What is asked for, defaults filled in. Raises InvalidField."""
    name = parse_job(request.name, field="name")
    for field in ("since", "until"):
        if not request.HasField(field):
            raise validate.missing(field, "an instant of the past")
    since = validate.instant(request.since, field="since", round_up=True)
    until = validate.instant(request.until, field="until", round_up=True)
    if until > now:
        raise validate.refused(
            "until", request.until.ToJsonString(), "an instant that is not in the future"
        )
    if since >= until:
        raise validate.refused("since", request.since.ToJsonString(), "an instant before `until`")
    overlap = validate.choice(request.overlap_policy, OverlapPolicy, field="overlap_policy")
    if overlap not in (None, OverlapPolicy.QUEUE_ALL, OverlapPolicy.ALLOW):
        raise validate.refused("overlap_policy", overlap.name, "QUEUE_ALL or ALLOW")
    rate = request.rate or RATE_DEFAULT
    # Written so that NaN is refused too.
    if not RATE_MIN <= rate <= RATE_MAX:
        raise validate.refused("rate", request.rate, f"{RATE_MIN} to {RATE_MAX:.0f} runs a second")
    max_runs = validate.optional_integer(
        request.max_runs, field="max_runs", minimum=1, maximum=RUNS_MAX
    )
    return BackfillAsked(
        name=name,
        since=since,
        until=until,
        rate=rate,
        max_runs=max_runs or RUNS_DEFAULT,
        allows_overlap=overlap is OverlapPolicy.ALLOW,
        reason=validate.text(request.reason, field="reason", bytes_max=REASON_BYTES_MAX),
        dry_run=request.dry_run,
        request=read_request(request),
    )


def write_backfill(
    backfill: Backfill, *, tenant: str, job: str
) -> job_service_pb2.BackfillJobResponse:
    """The answer; `job` is the part of run names that means the job."""
    message = job_service_pb2.BackfillJobResponse(
        matched=backfill.matched,
        samples=[write_fire(fire, tenant=tenant, job=job) for fire in backfill.samples],
    )
    if backfill.operation is not None:
        message.operation.CopyFrom(write_operation(backfill.operation, tenant=tenant))
    return message


def write_operation(record: OperationRecord, *, tenant: str) -> operation_pb2.Operation:
    """The message."""
    message = operation_pb2.Operation(
        name=format_operation(tenant, record.operation_id),
        action=cast("operation_pb2.OperationAction.ValueType", int(record.action)),
        state=cast("operation_pb2.OperationState.ValueType", int(record.state)),
        filter=record.filter,
        reason=record.reason,
        creator=record.creator,
        rate=record.rate,
        stop_when_failing=record.stop_when_failing,
        matched=record.matched,
        changed=record.changed,
        unchanged=record.unchanged,
        failed=record.failed,
        changed_ended=record.changed_ended,
        changed_dead=record.changed_dead,
        problems=[
            failure_pb2.Problem(code=each.code, reason=each.reason, message=each.message)
            for each in record.problems
        ],
        stop_cause=cast("operation_pb2.StopCause.ValueType", int(record.stop_cause or 0)),
        created_at=to_timestamp(record.created_at),
    )
    if record.ended_at is not None:
        message.ended_at.CopyFrom(to_timestamp(record.ended_at))
    return message


def read_operation_filter(
    text: str,
) -> tuple[Sequence[OperationState] | None, Sequence[OperationAction] | None]:
    """The states and the actions that a filter asks for; None: all. Raises FilterNotSupported."""
    states, actions = set(OperationState), set(OperationAction)
    conditions = parse(text, _FIELDS)
    for condition in conditions:
        if condition.field == "state":
            states &= {each for each in OperationState if _fits(condition, int(each))}
        else:
            actions &= {each for each in OperationAction if _fits(condition, int(each))}
    asked = {condition.field for condition in conditions}
    return (
        sorted(states) if "state" in asked else None,
        sorted(actions) if "action" in asked else None,
    )


def _fits(condition: Condition, number: int) -> bool:
    return (number in condition.values) is (condition.op is Op.EQ)
