"""Valid messages by default; a test overrides what it is about."""

from __future__ import annotations

import itertools

from fencepost.durations import to_duration
from fencepost.v1 import job_pb2, payload_pb2, run_pb2, worker_pb2

JOB_ID = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
_instants = itertools.count(1_764_579_600)


def a_key(*, seconds: int | None = None, nanos: int = 0, job_id: str = JOB_ID) -> run_pb2.RunKey:
    """A run key; without seconds, one that no test has used before."""
    key = run_pb2.RunKey(job_id=job_id)
    key.scheduled_at.seconds = next(_instants) if seconds is None else seconds
    key.scheduled_at.nanos = nanos
    return key


def an_assignment(
    kind: str = "echo",
    *,
    key: run_pb2.RunKey | None = None,
    attempt: int = 1,
    json: str | None = None,
    payload: payload_pb2.Payload | None = None,
    lease_ttl: float = 30.0,
    lease_remaining: float | None = None,
    attempt_timeout: float = 3600.0,
    cancel_grace: float = 30.0,
    start_mode: job_pb2.StartMode.ValueType = job_pb2.START_MODE_ON_DELIVERY,
    lease_uncertain_action: job_pb2.LeaseUncertainAction.ValueType = (
        job_pb2.LEASE_UNCERTAIN_ACTION_STOP
    ),
    progress: run_pb2.Progress | None = None,
) -> worker_pb2.Assignment:
    """A claimed run of the job "nightly"."""
    if json is not None:
        payload = payload_pb2.Payload(json=json)
    return worker_pb2.Assignment(
        run=key if key is not None else a_key(),
        attempt=attempt,
        queue="tenants/default/queues/default",
        kind=kind,
        job="tenants/default/jobs/nightly",
        payload=payload,
        lease_remaining=to_duration(lease_ttl if lease_remaining is None else lease_remaining),
        lease_ttl=to_duration(lease_ttl),
        attempt_timeout=to_duration(attempt_timeout),
        cancel_grace=to_duration(cancel_grace),
        start_mode=start_mode,
        lease_uncertain_action=lease_uncertain_action,
        max_failures=5,
        progress=progress,
    )


def a_lost_lease(
    assignment: worker_pb2.Assignment,
    reason: worker_pb2.LeaseLostReason.ValueType = worker_pb2.LEASE_LOST_REASON_SUPERSEDED,
) -> worker_pb2.RunNotice:
    """The notice that this attempt is over for the worker."""
    return worker_pb2.RunNotice(
        run=assignment.run,
        attempt=assignment.attempt,
        lease_lost=worker_pb2.LeaseLost(reason=reason),
    )


def a_cancel(assignment: worker_pb2.Assignment) -> worker_pb2.RunNotice:
    """The notice that somebody wants this run to stop."""
    return worker_pb2.RunNotice(
        run=assignment.run,
        attempt=assignment.attempt,
        cancel_requested=worker_pb2.CancelRequested(
            reason="changed my mind", grace_remaining=to_duration(30)
        ),
    )
