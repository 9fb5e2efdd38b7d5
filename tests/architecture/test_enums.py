"""One word, one thing: Postgres, the contract and Python spell and number enums alike."""

import re
from enum import IntEnum
from typing import Any

import pytest
from fencepost.v1 import (
    failure_pb2,
    job_pb2,
    operation_pb2,
    run_pb2,
    schedule_pb2,
    worker_pb2,
)
from fencepost_server import errors
from fencepost_server.domain import fire, job, operation, run, schedule
from fencepost_server.engine import verdicts

from tests.architecture.sources import MIGRATIONS

_SHARED: list[tuple[type[IntEnum], Any]] = [
    (run.RunState, run_pb2.RunState),
    (run.RunOrigin, run_pb2.RunOrigin),
    (run.DeadReason, run_pb2.DeadReason),
    (run.CancelCause, run_pb2.CancelCause),
    (run.AttemptOutcome, run_pb2.AttemptOutcome),
    (schedule.SkipReason, schedule_pb2.SkipReason),
    (schedule.MisfireAction, schedule_pb2.MisfireAction),
    (schedule.OverlapPolicy, schedule_pb2.OverlapPolicy),
    (schedule.DstGapPolicy, schedule_pb2.DstGapPolicy),
    (schedule.DstFoldPolicy, schedule_pb2.DstFoldPolicy),
    (job.JobState, job_pb2.JobState),
    (job.BackoffJitter, job_pb2.BackoffJitter),
    (job.StartMode, job_pb2.StartMode),
    (job.LeaseUncertainAction, job_pb2.LeaseUncertainAction),
    (fire.FireDisposition, schedule_pb2.FireDisposition),
    (operation.OperationAction, operation_pb2.OperationAction),
    (operation.OperationState, operation_pb2.OperationState),
    (operation.StopCause, operation_pb2.StopCause),
    (verdicts.Verdict, worker_pb2.Verdict),
    (verdicts.LeaseLostReason, worker_pb2.LeaseLostReason),
]
_STORED = {
    "run_state": run.RunState,
    "run_origin": run.RunOrigin,
    "dead_reason": run.DeadReason,
    "cancel_cause": run.CancelCause,
    "skip_reason": schedule.SkipReason,
    "attempt_outcome": run.AttemptOutcome,
    "misfire_action": schedule.MisfireAction,
    "overlap_policy": schedule.OverlapPolicy,
    "operation_action": operation.OperationAction,
    "operation_state": operation.OperationState,
    "stop_cause": operation.StopCause,
}


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


@pytest.mark.parametrize(
    ("python", "proto"), _SHARED, ids=lambda each: getattr(each, "__name__", "")
)
def test_python_and_the_contract_have_the_same_values(python: type[IntEnum], proto: Any) -> None:
    descriptor = proto.DESCRIPTOR
    prefix = _snake(descriptor.name)
    in_proto = {value.name.removeprefix(f"{prefix}_"): value.number for value in descriptor.values}
    assert in_proto.pop("UNSPECIFIED") == 0
    assert {member.name: int(member) for member in python} == in_proto


def _postgres_enums() -> dict[str, list[str]]:
    text = "\n".join(path.read_text() for path in MIGRATIONS)
    return {
        match[1]: re.findall(r"'(\w+)'", match[2])
        for match in re.finditer(r"CREATE TYPE fencepost\.(\w+) AS ENUM\s*\(([^)]*)\)", text)
    }


def test_every_enum_of_postgres_is_checked() -> None:
    assert _postgres_enums().keys() == _STORED.keys()


@pytest.mark.parametrize("name", _STORED)
def test_postgres_and_python_have_the_same_values_in_the_same_order(name: str) -> None:
    members = sorted(_STORED[name], key=int)
    assert _postgres_enums()[name] == [member.name.lower() for member in members]


def _error_classes() -> list[type[errors.FencepostError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, errors.FencepostError)
        and value is not errors.FencepostError
    ]


@pytest.mark.parametrize("error", _error_classes(), ids=lambda error: error.__name__)
def test_every_error_has_a_reason_of_the_contract(error: type[errors.FencepostError]) -> None:
    reasons = failure_pb2.ErrorReason.keys()
    assert f"ERROR_REASON_{error.reason}" in reasons
    assert error.code in errors.Code
    assert error.__doc__


def test_no_two_errors_share_a_reason() -> None:
    reasons = [error.reason for error in _error_classes()]
    assert len(reasons) == len(set(reasons))
