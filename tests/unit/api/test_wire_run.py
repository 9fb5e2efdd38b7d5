"""Runs as messages in both views, requests to make them, and the filter over them."""

from typing import Any

import pytest
from fencepost.v1 import failure_pb2, payload_pb2, run_pb2, run_service_pb2
from fencepost_server.api.run_filter import read_filter
from fencepost_server.api.wire_run import read_enqueue, write_attempt, write_run
from fencepost_server.clock import DAY, SECOND
from fencepost_server.domain.job import JobSpec, RunLimits, Target
from fencepost_server.domain.run import (
    AttemptOutcome,
    CancelCause,
    RunKey,
    RunOrigin,
    RunState,
)
from fencepost_server.errors import FencepostError, FilterNotSupported
from fencepost_server.store.runs import AttemptRecord, RunRecord
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

JOB_ID = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
AT = 1_796_115_600_000_000
KEY = RunKey(JOB_ID, AT)
NOW = AT


def record(**values: Any) -> RunRecord:
    known: dict[str, Any] = {
        "key": KEY,
        "tenant": "acme",
        "job_name": "mail",
        "job_is_deleted": False,
        "version": 2,
        "spec": JobSpec(target=Target(kind="mail.send"), limits=RunLimits.of(max_in_flight=3)),
        "state": RunState.QUEUED,
        "origin": RunOrigin.SCHEDULE,
        "queue_name": "default",
        "kind": "mail.send",
        "priority": 0,
        "created_at": AT,
        "available_at": AT + 1,
        "labels": {"team": "web"},
    }
    return RunRecord(**{**known, **values})


def test_names_follow_the_job() -> None:
    run = write_run(record(), full=False)
    assert run.name == "tenants/acme/jobs/mail/runs/2026-12-01T09:00:00Z"
    assert (run.job, run.queue) == ("tenants/acme/jobs/mail", "tenants/acme/queues/default")
    assert run.available_at == Timestamp(seconds=AT // SECOND, nanos=1000)
    deleted = write_run(record(job_is_deleted=True), full=False)
    assert deleted.name == f"tenants/acme/jobs/{JOB_ID}/runs/2026-12-01T09:00:00Z"
    assert deleted.job == "tenants/acme/jobs/mail"
    blocked = write_run(record(state=RunState.BLOCKED, blocked_by=AT - 60 * SECOND), full=False)
    assert blocked.blocked_by == "tenants/acme/jobs/mail/runs/2026-12-01T08:59:00Z"


def test_basic_leaves_out_what_is_large() -> None:
    full_record = record(
        payload=payload_pb2.Payload(json="1").SerializeToString(),
        result=payload_pb2.Payload(json="2").SerializeToString(),
        progress=run_pb2.Progress(
            percent=5, checkpoint=payload_pb2.Payload(json="3")
        ).SerializeToString(),
        last_failure=failure_pb2.Failure(
            code="X", stack_trace="s", details=payload_pb2.Payload(json="4")
        ).SerializeToString(),
    )
    basic = write_run(full_record, full=False)
    for field in ("payload", "result", "retry_policy", "limits"):
        assert not basic.HasField(field)
    assert basic.progress == run_pb2.Progress(percent=5)
    assert basic.last_failure == failure_pb2.Failure(code="X")
    full = write_run(full_record, full=True)
    assert (full.payload.json, full.result.json) == ("1", "2")
    assert full.progress.checkpoint.json == "3"
    assert full.last_failure.details.json == "4"
    assert full.limits.max_in_flight == 3
    assert full.limits.attempt_timeout == Duration(seconds=3600)
    assert full.retry_policy.base == Duration(seconds=10)
    assert write_run(record(spec=None), full=True).retry_policy.max_failures == 5


def test_leases_and_cancels_belong_to_their_states() -> None:
    lease = {"lease_until": AT + 30 * SECOND, "cancel_cause": CancelCause.REQUESTED}
    running = write_run(
        record(state=RunState.RUNNING, cancel_requested=True, cancel_reason="stop", **lease),
        full=False,
    )
    assert running.HasField("lease_until")
    assert running.cancel_requested
    assert running.cancel_reason == "stop"
    succeeded = write_run(record(state=RunState.SUCCEEDED, **lease), full=False)
    assert not succeeded.HasField("lease_until")
    assert succeeded.cancel_cause == run_pb2.CANCEL_CAUSE_UNSPECIFIED


def test_attempts() -> None:
    lost = write_attempt(
        KEY,
        AttemptRecord(
            attempt=3,
            worker_id=JOB_ID,
            outcome=AttemptOutcome.LEASE_EXPIRED,
            claimed_at=AT,
            ended_at=AT + 1,
        ),
    )
    assert lost.failure.origin == failure_pb2.FAILURE_ORIGIN_LEASE_EXPIRED
    assert lost.span_id == "7782615ec3d10909"
    assert lost.worker == f"workers/{JOB_ID}"


def enqueue(**values: Any) -> run_service_pb2.EnqueueRunRequest:
    return run_service_pb2.EnqueueRunRequest(job="tenants/acme/jobs/mail", **values)


def test_due_instants_are_cut_to_microseconds() -> None:
    at = read_enqueue(enqueue(run_at=Timestamp(seconds=5, nanos=1999)), now=NOW).due_at
    assert at == 5 * SECOND + 1
    delayed = read_enqueue(enqueue(delay=Duration(seconds=5, nanos=1999)), now=NOW).due_at
    assert delayed == NOW + 5 * SECOND + 1
    assert read_enqueue(enqueue(), now=NOW).due_at is None
    furthest = read_enqueue(enqueue(delay=Duration(seconds=366 * 86400)), now=NOW).due_at
    assert furthest == NOW + 366 * DAY


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("run_at", enqueue(run_at=Timestamp(seconds=(NOW + 366 * DAY) // SECOND + 1))),
        ("run_at", enqueue(run_at=Timestamp(seconds=1, nanos=-5))),
        ("delay", enqueue(delay=Duration(seconds=366 * 86400, nanos=1000))),
        ("delay", enqueue(delay=Duration(nanos=-5))),
        ("job", run_service_pb2.EnqueueRunRequest(job="tenants/other/jobs/mail")),
        ("job", run_service_pb2.EnqueueRunRequest()),
    ],
)
def test_bad_requests_name_their_field(
    field: str, request_: run_service_pb2.EnqueueRunRequest
) -> None:
    with pytest.raises(FencepostError) as error:
        read_enqueue(request_, now=NOW, tenant="acme")
    assert error.value.field == field


def test_filters_narrow_states_and_ranges() -> None:
    query = read_filter(
        "state:DEAD,RUNNING state!=DEAD scheduled_at>=1970-01-01T00:00:01Z "
        "scheduled_at<=1970-01-01T00:00:02Z",
        job=None,
    )
    assert query.states == {RunState.RUNNING}
    assert (query.scheduled_from, query.scheduled_before) == (SECOND, 2 * SECOND + 1)
    assert query.is_selective
    assert not query.wants_history
    assert not read_filter("", job=None).is_selective


def test_one_job_in_a_filter_is_the_scope() -> None:
    assert read_filter("job=mail", job=None).job == "mail"
    assert read_filter("job=tenants/acme/jobs/mail", job=None).job == "mail"
    other = read_filter("job=mail", job="sms")
    assert other.job == "sms"
    assert other.conditions[0]["values"] == ["mail"]
    with pytest.raises(FilterNotSupported):
        read_filter(f"job=mail,{JOB_ID}", job=None)
