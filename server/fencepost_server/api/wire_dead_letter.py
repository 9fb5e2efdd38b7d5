"""Dead letters and what is decided about them, between messages and the engine."""

from typing import cast

from fencepost.v1 import failure_pb2, run_pb2, run_service_pb2

from fencepost_server.api import validate
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.wire_job import REASON_BYTES_MAX
from fencepost_server.api.wire_payload import read_payload
from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.domain.names import format_job, parse_run
from fencepost_server.engine.dead_letters import DeadLetterGroup, ReplayAsked
from fencepost_server.engine.replay import ReplayOptions
from fencepost_server.errors import cut_text

GROUPS_DEFAULT, GROUPS_MAX = 20, 100
_SAMPLE_BYTES_MAX = 256


def read_replay(request: run_service_pb2.ReplayRunRequest) -> ReplayAsked:
    """What is asked for. Raises InvalidField or PayloadTooLarge."""
    payload = None
    if request.HasField("payload"):
        payload = read_payload(request.payload, field="payload")
        if payload is None:
            raise validate.missing("payload", "json or data in it; leave it out to keep the run's")
    return ReplayAsked(
        name=parse_run(request.name, field="name"),
        options=ReplayOptions(payload=payload, use_newest_version=request.use_newest_version),
        reason=validate.text(request.reason, field="reason", bytes_max=REASON_BYTES_MAX),
        request=read_request(request),
    )


def read_groups_max(request: run_service_pb2.ListDeadLetterGroupsRequest) -> int:
    """How many groups to show. Raises InvalidField."""
    if request.page_size < 0:
        raise validate.refused(
            "page_size", request.page_size, f"1 to {GROUPS_MAX}, or 0 for {GROUPS_DEFAULT}"
        )
    return min(request.page_size, GROUPS_MAX) or GROUPS_DEFAULT


def write_group(group: DeadLetterGroup) -> run_service_pb2.DeadLetterGroup:
    """The message."""
    failure = failure_pb2.Failure()
    if group.last_failure is not None:
        failure.ParseFromString(group.last_failure)
    return run_service_pb2.DeadLetterGroup(
        job=format_job(group.sample.tenant, group.job),
        kind=group.kind,
        failure_code=group.failure_code,
        dead_reason=cast("run_pb2.DeadReason.ValueType", int(group.dead_reason)),
        count=group.count,
        oldest_ended_at=to_timestamp(group.oldest_at),
        newest_ended_at=to_timestamp(group.newest_at),
        sample_run=str(group.sample),
        sample_message=cut_text(failure.message, _SAMPLE_BYTES_MAX),
    )
