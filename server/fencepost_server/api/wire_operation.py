"""Operations, backfills and changes to many runs between messages and the engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from fencepost.v1 import failure_pb2, job_service_pb2, operation_pb2, run_service_pb2

from fencepost_server.api import validate
from fencepost_server.api.filters import Condition, Op, enum_names, parse
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.run_filter import read_filter
from fencepost_server.api.wire_fire import write_fire
from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.clock import Instant
from fencepost_server.domain.names import (
    JobName,
    format_operation,
    format_run,
    parse_job,
    parse_tenant,
)
from fencepost_server.domain.operation import OperationAction, OperationState
from fencepost_server.domain.run import RunState
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.backfill import Backfill, BackfillAsked
from fencepost_server.engine.bulk import Bulk, BulkAsked
from fencepost_server.errors import InvalidField
from fencepost_server.policy import bulk as bulk_policy
from fencepost_server.policy.backfill import (
    RATE_DEFAULT,
    RATE_MAX,
    RATE_MIN,
    RUNS_DEFAULT,
    RUNS_MAX,
)
from fencepost_server.store.operations import OperationRecord
from fencepost_server.store.runs import RunQuery, RunRecord

REASON_BYTES_MAX = 256
_FILTER_BYTES_MAX = 2048
_MAX_RUNS_MAX = 2**62
_ALL_JOBS = "/jobs/-"
_DEAD = frozenset((RunState.DEAD,))
_LIVE = frozenset(state for state in RunState if state.is_live)
# The states in which a run can be changed so.
_CHANGEABLE = {
    OperationAction.CANCEL: _LIVE,
    OperationAction.REPLAY: _DEAD,
    OperationAction.DISCARD: _DEAD,
}
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


def read_parent(parent: str) -> JobName:
    """The tenant, and the job or "" for all of them. Raises InvalidField."""
    if parent.count("/") <= 1 or parent.endswith(_ALL_JOBS):
        tenant = parse_tenant(parent.removesuffix(_ALL_JOBS), field="parent")
        return JobName(tenant=tenant, job="")
    return parse_job(parent, field="parent")


def read_bulk(request: run_service_pb2.BatchUpdateRunsRequest) -> BulkAsked:
    """What is asked for, defaults filled in. Raises InvalidField or FilterNotSupported."""
    parent = read_parent(request.parent)
    action = validate.choice(request.action, OperationAction, field="action")
    if action is None:
        raise validate.missing("action", "CANCEL, REPLAY or DISCARD")
    if action not in _CHANGEABLE:
        raise validate.refused("action", action.name, "CANCEL, REPLAY or DISCARD")
    is_replay = action is OperationAction.REPLAY
    rate = request.rate or bulk_policy.RATE_DEFAULT
    # Written so that NaN is refused too, here and below.
    if not bulk_policy.RATE_MIN <= rate <= bulk_policy.RATE_MAX:
        allowed = f"{bulk_policy.RATE_MIN} to {bulk_policy.RATE_MAX:.0f} runs a second"
        raise validate.refused("rate", request.rate, allowed)
    if not 0 <= request.stop_when_failing <= 1:
        raise validate.refused("stop_when_failing", request.stop_when_failing, "a share, 0 to 1")
    if request.stop_when_failing and not is_replay:
        raise validate.refused(
            "stop_when_failing", request.stop_when_failing, f"nothing with {action.name}"
        )
    if request.use_newest_version and not is_replay:
        raise validate.refused("use_newest_version", True, f"nothing with {action.name}")
    return BulkAsked(
        parent=parent,
        query=_bulk_query(request.filter, parent, action),
        filter=request.filter,
        action=action,
        reason=validate.text(request.reason, field="reason", bytes_max=REASON_BYTES_MAX),
        dry_run=request.dry_run,
        rate=rate,
        stop_when_failing=request.stop_when_failing,
        max_runs=validate.integer(
            request.max_runs, field="max_runs", minimum=0, maximum=_MAX_RUNS_MAX
        ),
        use_newest_version=request.use_newest_version,
        request=read_request(request),
    )


def _bulk_query(text: str, parent: JobName, action: OperationAction) -> RunQuery:
    """The filter's query, over those states alone that the action changes."""
    if not text.strip():
        raise validate.missing("filter", 'such as "kind:mail.send"; "state:DEAD" is every one')
    validate.text(text, field="filter", bytes_max=_FILTER_BYTES_MAX)
    query = read_filter(text, job=parent.job or None)
    states = query.states & _CHANGEABLE[action]
    if not states:
        allowed = ", ".join(state.name for state in sorted(_CHANGEABLE[action]))
        raise InvalidField(
            f"filter: allows no run that {action.name} changes, which are {allowed}",
            field="filter",
            value=text,
            allowed=allowed,
        )
    return replace(query, states=states)


def write_bulk(bulk: Bulk, *, tenant: str) -> run_service_pb2.BatchUpdateRunsResponse:
    """The answer."""
    message = run_service_pb2.BatchUpdateRunsResponse(
        matched=bulk.matched, samples=[_run_name(record) for record in bulk.samples]
    )
    if bulk.operation is not None:
        message.operation.CopyFrom(write_operation(bulk.operation, tenant=tenant))
    return message


def _run_name(record: RunRecord) -> str:
    job = record.key.job_id if record.job_is_deleted else record.job_name
    return format_run(record.tenant, job, record.key.scheduled_at)


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
            failure_pb2.Problem(
                code=each.code,
                reason=each.reason,
                message=each.message,
                metadata=each.metadata,
            )
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
