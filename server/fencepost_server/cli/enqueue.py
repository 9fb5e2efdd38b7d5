"""Builds the request of `fencepost run`."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from fencepost.v1.payload_pb2 import Payload
from fencepost.v1.run_pb2 import UniqueKey
from fencepost.v1.run_service_pb2 import EnqueueRunRequest

from fencepost_server.cli.connection import new_request_id
from fencepost_server.cli.failure import usage


def build_request(
    *,
    job: str,
    payload: str | None,
    at: datetime | None,
    delay: timedelta | None,
    unique_key: str | None,
    priority: int | None,
    labels: Mapping[str, str],
) -> EnqueueRunRequest:
    """The request to send. Raises CliError for flags that do not go together."""
    if at is not None and delay is not None:
        raise usage("--at and --delay do not go together", why="a run is due at one instant")
    request = EnqueueRunRequest(
        job=job, labels=labels, priority=priority, request_id=new_request_id()
    )
    if payload is not None:
        request.payload.CopyFrom(Payload(json=payload))
    if unique_key is not None:
        request.unique_key.CopyFrom(UniqueKey(key=unique_key))
    if at is not None:
        request.run_at.FromDatetime(at.astimezone(UTC))
    elif delay is not None:
        request.delay.FromTimedelta(delay)
    return request
