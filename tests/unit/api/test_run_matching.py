"""A watcher's filter tests one run as a list does: every field, negation, absent values."""

from typing import Any

import pytest
from fencepost.v1 import failure_pb2
from fencepost_server.api.filters import LABELS_FIELD
from fencepost_server.api.run_filter import FIELDS, read_filter
from fencepost_server.api.run_matching import VALUES, matches
from fencepost_server.domain.run import CancelCause, DeadReason, RunState
from fencepost_server.domain.schedule import SkipReason

from tests.unit.api.test_wire_run import AT, JOB_ID, record

WORKER = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e43"
FAILED: dict[str, Any] = {
    "state": RunState.DEAD,
    "dead_reason": DeadReason.MAX_FAILURES,
    "last_failure": failure_pb2.Failure(code="SMTP").SerializeToString(),
    "worker_id": WORKER,
    "ended_at": AT + 5_000_000,
}


def test_every_field_of_the_filter_can_be_tested() -> None:
    in_the_query = {"state", "scheduled_at", "created_at", "ended_at", LABELS_FIELD}
    assert set(FIELDS) - in_the_query <= set(VALUES)


@pytest.mark.parametrize(
    ("text", "values", "fits"),
    [
        ("", {}, True),
        ("state:QUEUED", {}, True),
        ("state:RUNNING,DEAD", {}, False),
        ("state!=QUEUED", {}, False),
        ("job:mail", {}, True),
        ("job:mail", {"job_is_deleted": True}, False),
        (f"job:{JOB_ID}", {"job_is_deleted": True}, True),
        ("job:ma*", {}, True),
        ("job!=mail", {}, False),
        ("queue:default", {}, True),
        ("queue:tenants/acme/queues/other", {}, False),
        ("kind:mail.*", {}, True),
        ("kind!=mail.send", {}, False),
        ("origin:SCHEDULE", {}, True),
        (f"worker:{WORKER}", FAILED, True),
        (f"worker:{WORKER}", {}, False),
        (f"worker!={WORKER}", {}, True),
        ("last_failure.code:SMTP", FAILED, True),
        ("last_failure.code:SMTP", {}, False),
        ("dead_reason:MAX_FAILURES", FAILED, True),
        ("dead_reason:MAX_FAILURES", {}, False),
        (
            "skip_reason:EXPIRED",
            {"state": RunState.SKIPPED, "skip_reason": SkipReason.EXPIRED},
            True,
        ),
        (
            "cancel_cause:REQUESTED",
            {"state": RunState.CANCELLED, "cancel_cause": CancelCause.REQUESTED},
            True,
        ),
        ("unique_key:a", {"unique_key": "a"}, True),
        ("unique_key:a", {}, False),
        ("labels.team:web", {}, True),
        ("labels.team!=web", {}, False),
        ("labels.none!=web", {}, True),
        ("labels:team", {}, True),
        ("labels:none", {}, False),
        ("scheduled_at>=2026-12-01T09:00:00Z", {}, True),
        ("scheduled_at>2026-12-01T09:00:00Z", {}, False),
        ("scheduled_at=2026-12-01T09:00:00Z", {}, True),
        ("created_at<2026-12-01T09:00:00Z", {}, False),
        ("ended_at>2026-12-01T09:00:00Z", FAILED, True),
        ("ended_at>2026-12-01T09:00:00Z", {}, False),
        ("state:DEAD AND kind:mail.send AND labels.team:web", FAILED, True),
        ("state:DEAD AND kind:sms.send", FAILED, False),
    ],
)
def test_a_run_is_tested_as_in_a_list(text: str, values: dict[str, Any], fits: bool) -> None:
    assert matches(read_filter(text, job=None), record(**values)) is fits
