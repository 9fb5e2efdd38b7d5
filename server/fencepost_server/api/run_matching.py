"""Tests one run against a filter of runs in memory, as the list statements do in the database."""

from collections.abc import Callable, Mapping
from typing import Any

from fencepost.v1 import failure_pb2

from fencepost_server.clock import Instant
from fencepost_server.domain.names import is_uuid
from fencepost_server.store.runs import RunQuery, RunRecord


def matches(query: RunQuery, run: RunRecord) -> bool:
    """Whether a list with this query would show the run."""
    return (
        run.state in query.states
        and _is_of_job(query.job, run)
        and _is_within(run.key.scheduled_at, query.scheduled_from, query.scheduled_before)
        and _is_within(run.created_at, query.created_from, query.created_before)
        and _is_within(run.ended_at, query.ended_from, query.ended_before)
        and all(_holds(wanted, run) for wanted in query.conditions)
    )


def _is_of_job(job: str | None, run: RunRecord) -> bool:
    if job is None:
        return True
    if is_uuid(job):
        return run.key.job_id == job
    # A name means the job that exists now, as in a list.
    return run.job_name == job and not run.job_is_deleted


def _is_within(at: Instant | None, low: Instant | None, high: Instant | None) -> bool:
    if low is None and high is None:
        return True
    return at is not None and (low is None or at >= low) and (high is None or at < high)


def _failure_code(run: RunRecord) -> str | None:
    if run.last_failure is None:
        return None
    return failure_pb2.Failure.FromString(run.last_failure).code


def _spelled(value: Any) -> str | None:
    return None if value is None else str(value.name.lower())


VALUES: Mapping[str, Callable[[RunRecord], str | None]] = {
    "job": lambda run: run.job_name,
    "job_id": lambda run: run.key.job_id,
    "origin": lambda run: _spelled(run.origin),
    "queue": lambda run: run.queue_name,
    "kind": lambda run: run.kind,
    "worker": lambda run: run.worker_id,
    "last_failure.code": _failure_code,
    "skip_reason": lambda run: _spelled(run.skip_reason),
    "dead_reason": lambda run: _spelled(run.dead_reason),
    "cancel_cause": lambda run: _spelled(run.cancel_cause),
    "unique_key": lambda run: run.unique_key or None,
}


def _holds(wanted: Mapping[str, Any], run: RunRecord) -> bool:
    if wanted["field"] == "labels":
        value = run.labels.get(wanted["key"])
    else:
        value = VALUES[wanted["field"]](run)
    if wanted["has_key"]:
        found = value is not None
    else:
        found = value is not None and (
            value in wanted["values"] or value.startswith(tuple(wanted["prefixes"]))
        )
    return found is not wanted["negated"]
