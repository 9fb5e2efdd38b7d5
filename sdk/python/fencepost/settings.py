"""What a worker was configured with, and the Hello that follows from it."""

from __future__ import annotations

import platform
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from fencepost.connection import Connection
from fencepost.handler import Handler
from fencepost.timings import Timings
from fencepost.v1 import worker_pb2

MAX_KINDS = 512
MAX_QUEUES = 64
MAX_SLOTS = 5000
_REVISION = 1

UNKNOWN_KIND = Handler(
    kind="",
    function=lambda: None,
    is_async=False,
    input_type=None,
    input_at=None,
    context_at=None,
)
"""Stands for the handler that this worker does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """See Worker for what each means."""

    queues: tuple[str, ...]
    slots: int
    prefetch: int
    grace: float
    display_name: str = ""
    build_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    outbox_max_entries: int = 10_000
    outbox_max_bytes: int = 64 * 1024 * 1024
    timings: Timings = field(default_factory=Timings)
    worker_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def __post_init__(self) -> None:
        if not 1 <= len(self.queues) <= MAX_QUEUES:
            raise ValueError(f"queues must name 1 to {MAX_QUEUES}, got {len(self.queues)}")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots must be 1 to {MAX_SLOTS}, got {self.slots}")
        if self.prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more, got {self.prefetch}")
        if self.grace < 0:
            raise ValueError(f"grace must be 0 s or more, got {self.grace}")

    def make_hello(
        self, connection: Connection, handlers: Mapping[str, Handler], previous_session_id: str
    ) -> worker_pb2.Hello:
        """A Hello without its inventory."""
        kinds = sorted(handlers) if len(handlers) <= MAX_KINDS else []
        subscriptions = [
            worker_pb2.QueueSubscription(queue=connection.queue_name(queue), kinds=kinds)
            for queue in self.queues
        ]
        return worker_pb2.Hello(
            worker_id=self.worker_id,
            display_name=self.display_name or socket.gethostname()[:128],
            min_revision=_REVISION,
            max_revision=_REVISION,
            sdk=worker_pb2.SdkInfo(
                name="fencepost-python",
                version=_version(),
                language_version=platform.python_version(),
                host=socket.gethostname()[:128],
                build_id=self.build_id[:128],
            ),
            subscriptions=subscriptions,
            slots=self.slots,
            previous_session_id=previous_session_id,
            labels=dict(self.labels),
        )


def _version() -> str:
    try:
        return version("fencepost")
    except PackageNotFoundError:
        return ""
