"""Builds the request of `fencepost run`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from fencepost.v1.payload_pb2 import Payload
from fencepost.v1.run_pb2 import UniqueConflictAction, UniqueKey
from fencepost.v1.run_service_pb2 import EnqueueRunRequest

from fencepost_server.cli.choices import OnConflict
from fencepost_server.cli.connection import new_request_id
from fencepost_server.cli.failure import usage
from fencepost_server.cli.values import parse_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueFlags:
    """The flags about a unique key, as typed."""

    key: str | None
    on_conflict: OnConflict | None
    keep_for: str | None


def build_request(
    *,
    job: str,
    payload: str | None,
    at: datetime | None,
    delay: timedelta | None,
    unique: UniqueFlags,
    concurrency_key: str | None,
    priority: int | None,
    labels: Mapping[str, str],
) -> EnqueueRunRequest:
    """The request to send. Raises CliError for flags that do not go together."""
    if at is not None and delay is not None:
        raise usage("--at and --delay do not go together", why="a run is due at one instant")
    request = EnqueueRunRequest(
        job=job,
        labels=labels,
        priority=priority,
        concurrency_key=concurrency_key,
        request_id=new_request_id(),
    )
    if payload is not None:
        request.payload.CopyFrom(Payload(json=payload))
    if unique.key is not None:
        request.unique_key.CopyFrom(_unique_key(unique, unique.key))
    elif unique.on_conflict is not None or unique.keep_for is not None:
        raise usage(
            "--on-conflict and --keep-for are about a unique key",
            why="there is none",
            hint="say which: --unique-key KEY",
        )
    if at is not None:
        request.run_at.FromDatetime(at.astimezone(UTC))
    elif delay is not None:
        request.delay.FromTimedelta(delay)
    return request


def _unique_key(flags: UniqueFlags, key: str) -> UniqueKey:
    message = UniqueKey(key=key)
    if flags.on_conflict is not None:
        name = flags.on_conflict.upper().replace("-", "_")
        message.on_conflict = UniqueConflictAction.Value(f"UNIQUE_CONFLICT_ACTION_{name}")
    if flags.keep_for is not None:
        message.keep_for.FromTimedelta(parse_duration("--keep-for", flags.keep_for))
    return message
