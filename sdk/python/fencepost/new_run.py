"""One ad-hoc run to be made, and the request that asks for it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from fencepost.connection import Connection
from fencepost.durations import Seconds, to_duration, to_timestamp
from fencepost.payload import encode_payload
from fencepost.v1 import run_pb2, run_service_pb2

UniqueKey = run_pb2.UniqueKey
OnConflict = Literal["return_existing", "reject", "replace_waiting"]
_ACTIONS: dict[str, run_pb2.UniqueConflictAction.ValueType] = {
    "return_existing": run_pb2.UNIQUE_CONFLICT_ACTION_RETURN_EXISTING,
    "reject": run_pb2.UNIQUE_CONFLICT_ACTION_REJECT,
    "replace_waiting": run_pb2.UNIQUE_CONFLICT_ACTION_REPLACE_WAITING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """See Client.enqueue for what each field means."""

    job: str
    payload: object = None
    run_at: datetime | None = None
    delay: Seconds | None = None
    priority: int | None = None
    labels: Mapping[str, str] | None = None
    unique: str | UniqueKey | None = None
    concurrency_key: str | None = None
    on_conflict: OnConflict | None = None
    keep_for: Seconds | None = None

    def to_request(self, connection: Connection) -> run_service_pb2.EnqueueRunRequest:
        """With a fresh request id. ValueError for what no server would take."""
        request = run_service_pb2.EnqueueRunRequest()
        self.write_request(request, connection, request_id=str(uuid.uuid4()))
        return request

    def write_request(
        self,
        request: run_service_pb2.EnqueueRunRequest,
        connection: Connection,
        *,
        request_id: str,
    ) -> None:
        """Fills an empty one. ValueError for what no server would take."""
        if self.run_at is not None and self.delay is not None:
            raise ValueError("a run takes run_at or delay, not both")
        request.job = connection.job_name(self.job)
        request.request_id = request_id
        payload = encode_payload(self.payload)
        if payload is not None:
            request.payload.CopyFrom(payload)
        if self.priority is not None:
            request.priority = self.priority
        if self.labels:
            request.labels.update(self.labels)
        if self.concurrency_key is not None:
            request.concurrency_key = self.concurrency_key
        if self.run_at is not None:
            request.run_at.CopyFrom(to_timestamp(self.run_at))
        if self.delay is not None:
            request.delay.CopyFrom(to_duration(self.delay))
        self._write_unique(request)

    def _write_unique(self, request: run_service_pb2.EnqueueRunRequest) -> None:
        has_more = self.on_conflict is not None or self.keep_for is not None
        if isinstance(self.unique, UniqueKey):
            if has_more:
                raise ValueError("a UniqueKey says itself what on_conflict and keep_for are")
            request.unique_key.CopyFrom(self.unique)
        elif self.unique is not None:
            request.unique_key.key = self.unique
            if self.on_conflict is not None:
                if self.on_conflict not in _ACTIONS:
                    raise ValueError(
                        f"on_conflict: got {self.on_conflict!r}, want {', '.join(_ACTIONS)}"
                    )
                request.unique_key.on_conflict = _ACTIONS[self.on_conflict]
            if self.keep_for is not None:
                request.unique_key.keep_for.CopyFrom(to_duration(self.keep_for))
        elif has_more:
            raise ValueError("on_conflict and keep_for are about a unique key: set unique")
