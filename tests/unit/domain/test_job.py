"""Definitions keep what was set apart from defaults, and job ids carry their partition."""

import hashlib
import uuid

import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND
from fencepost_server.domain.job import (
    BackoffJitter,
    JobSpec,
    JobState,
    LeaseUncertainAction,
    RetryPolicy,
    RunLimits,
    StartMode,
    Target,
    job_state,
    make_job_id,
    partition_of,
    partition_of_id,
)
from fencepost_server.domain.schedule import CronSpec, Schedule

FULL_SPEC = JobSpec(
    display_name="Nightly",
    description="All invoices",
    labels={"team": "billing", "env": "prod"},
    target=Target(queue_name="q", kind="invoice.send", priority=3),
    schedule=Schedule(spec=CronSpec(expressions=("0 3 * * *",), time_zone="Europe/Paris")),
    retry_policy=RetryPolicy.of(
        max_failures=7,
        base=2 * SECOND,
        jitter=BackoffJitter.NONE,
        non_retryable_codes=("BAD_INPUT",),
    ),
    limits=RunLimits.of(
        attempt_timeout=5 * MINUTE,
        max_in_flight=2,
        concurrency_key="k",
        start_mode=StartMode.CONFIRMED,
        lease_uncertain_action=LeaseUncertainAction.CONTINUE,
    ),
)


@pytest.mark.parametrize("spec", [FULL_SPEC, JobSpec(target=Target(kind="a"))])
def test_a_spec_survives_json(spec: JobSpec) -> None:
    assert JobSpec.from_json(spec.to_json()) == spec


def test_json_says_only_what_was_set() -> None:
    assert JobSpec(target=Target(kind="a")).to_json() == {
        "target": {"queue_name": "default", "kind": "a", "priority": 0}
    }


def test_the_order_of_labels_does_not_make_another_document() -> None:
    turned = JobSpec(target=Target(kind="a"), labels={"b": "2", "a": "1"})
    assert list(turned.to_json()["labels"]) == ["a", "b"]


def test_a_default_that_was_set_is_told_from_one_that_was_not() -> None:
    chosen = RetryPolicy.of(max_failures=5)
    assert chosen.max_failures == RetryPolicy().max_failures
    assert chosen != RetryPolicy()
    below = RetryPolicy.of(max_failures=9, cap=2 * HOUR)
    assert chosen.over(below) == RetryPolicy.of(max_failures=5, cap=2 * HOUR)
    assert RetryPolicy().over(below) == below


@pytest.mark.parametrize(
    ("paused", "has_schedule", "next_run_at", "state"),
    [
        (True, True, None, JobState.PAUSED),
        (True, False, None, JobState.PAUSED),
        (False, True, None, JobState.FINISHED),
        (False, True, 5, JobState.ACTIVE),
        (False, False, None, JobState.ACTIVE),
    ],
)
def test_the_state_follows_from_what_is_stored(
    paused: bool, has_schedule: bool, next_run_at: int | None, state: JobState
) -> None:
    assert job_state(paused=paused, has_schedule=has_schedule, next_run_at=next_run_at) is state


def test_the_partition_is_the_first_byte_of_the_hash_of_the_name() -> None:
    wanted = hashlib.sha256(b"acme/nightly").digest()[0]
    assert partition_of(tenant="acme", job_name="nightly") == wanted


@pytest.mark.parametrize("entropy", [bytes(9), b"\xff" * 9])
def test_a_job_id_is_a_uuid_of_version_7_with_time_and_partition(entropy: bytes) -> None:
    now = 1_796_000_000_123_456
    job_id = make_job_id(now=now, partition_id=0xAB, entropy=entropy)
    parsed = uuid.UUID(job_id)
    assert str(parsed) == job_id
    assert parsed.version == 7
    assert parsed.variant == uuid.RFC_4122
    assert parsed.int >> 80 == now // 1000
    assert partition_of_id(job_id) == 0xAB


def test_job_ids_rise_with_time() -> None:
    ids = [
        make_job_id(now=now, partition_id=255 - now % 256, entropy=bytes([255 - now % 7]) * 9)
        for now in range(1_000_000, 9_000_000, 1_000)
    ]
    assert ids == sorted(ids)
