"""One ad-hoc run to be made, and the request that asks for it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from fencepost.connection import Connection
from fencepost.durations import Seconds, to_duration, to_timestamp
from fencepost.payload import encode_payload
from fencepost.v1 import run_pb2, run_service_pb2

UniqueKey = run_pb2.UniqueKey


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

    def to_request(self, connection: Connection) -> run_service_pb2.EnqueueRunRequest:
        """With a fresh request id. ValueError for what no server would take."""
        if self.run_at is not None and self.delay is not None:
            raise ValueError("a run takes run_at or delay, not both")
        request = run_service_pb2.EnqueueRunRequest(
            job=connection.job_name(self.job),
            payload=encode_payload(self.payload),
            priority=self.priority,
            labels=dict(self.labels or {}),
            concurrency_key=self.concurrency_key,
            request_id=str(uuid.uuid4()),
        )
        if self.run_at is not None:
            request.run_at.CopyFrom(to_timestamp(self.run_at))
        if self.delay is not None:
            request.delay.CopyFrom(to_duration(self.delay))
        if isinstance(self.unique, UniqueKey):
            request.unique_key.CopyFrom(self.unique)
        elif self.unique is not None:
            request.unique_key.key = self.unique
        return request
