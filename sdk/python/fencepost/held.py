"""A run this worker holds: the assignment, where it is in its life here, and its deadlines."""

from __future__ import annotations

import asyncio

from fencepost.context import Cause, Context
from fencepost.handler import Handler
from fencepost.leases import Lease
from fencepost.run_key import RunId, run_id
from fencepost.v1 import job_pb2, worker_pb2

BUFFERED = worker_pb2.HELD_PHASE_BUFFERED
HANDLING = worker_pb2.HELD_PHASE_HANDLING
COMPLETING = worker_pb2.HELD_PHASE_COMPLETING


class Held:
    """One (run, attempt) from receipt to its final verdict. Owned by the session thread."""

    __slots__ = (
        "_attempt_deadline",
        "_lease",
        "_message",
        "assignment",
        "attempt",
        "context",
        "forced_at",
        "handler",
        "id",
        "lost",
        "needs_confirmation",
        "phase",
        "progress_stored",
        "received_at",
        "reported",
        "started_at",
        "task",
    )

    def __init__(
        self, assignment: worker_pb2.Assignment, handler: Handler, received_at: float
    ) -> None:
        self.assignment = assignment
        self.handler = handler
        self.received_at = received_at
        self.id: RunId = run_id(assignment.run)
        self.attempt = assignment.attempt
        self.phase: worker_pb2.HeldPhase.ValueType = BUFFERED
        """What the worker is doing with it."""
        # Most runs end before anybody asks for these.
        self._lease: Lease | None = None
        self._attempt_deadline = 0.0
        self._message: worker_pb2.HeldRun | None = None
        self.context = Context(assignment, received_at)
        self.needs_confirmation = assignment.start_mode == job_pb2.START_MODE_CONFIRMED
        self.started_at = 0.0
        """0: the handler was not called yet."""
        self.forced_at = float("inf")
        """When a timed-out attempt is reported although its handler still runs."""
        self.lost = False
        """The attempt is over for this worker: drop whatever comes of it."""
        self.reported = False
        """Its end is in the outbox; the handler may still be running."""
        self.progress_stored = 0
        """Version of the progress the server has acknowledged."""
        self.task: asyncio.Task[None] | None = None
        """Its async handler waits in it; set and used in the handlers' loop only."""

    @property
    def lease(self) -> Lease:
        """The right to it, counted from its receipt until a heartbeat is confirmed."""
        if self._lease is None:
            self._lease = Lease.received(self.assignment, self.received_at)
        return self._lease

    @property
    def attempt_deadline(self) -> float:
        """When attempt_timeout is over, monotonic seconds."""
        if not self._attempt_deadline:
            self._attempt_deadline = self.context.deadline
        return self._attempt_deadline

    @property
    def cause(self) -> Cause | None:
        """Why its handler is asked to stop."""
        return self.context.cause

    def new_completion(self) -> worker_pb2.Completion:
        """A completion of this attempt, without its outcome."""
        return worker_pb2.Completion(run=self.assignment.run, attempt=self.attempt)

    def describe(self) -> worker_pb2.HeldRun:
        """Its line in a heartbeat or an inventory, with progress the server does not know."""
        message = self._message
        if message is None:
            message = worker_pb2.HeldRun(run=self.assignment.run, attempt=self.attempt)
            self._message = message
        message.phase = self.phase
        context = self.context
        if context._progress_version > self.progress_stored and context._progress is not None:
            message.progress.CopyFrom(context._progress)
        elif message.HasField("progress"):
            message.ClearField("progress")
        return message

    def next_deadline(self, max_buffer_time: float) -> float:
        """When something is to be done about it, monotonic seconds."""
        phase = self.phase
        if phase == COMPLETING:
            return float("inf")
        if phase == BUFFERED:
            return min(self.received_at + max_buffer_time, self.lease.deadline)
        if self.cause is None:
            return min(self.attempt_deadline, self.lease.stop_at)
        return self.forced_at


def about(held: Held, **more: str) -> dict[str, object]:
    """What a log line about it carries."""
    key = str(held.context.run_key)
    return {"run_key": key, "attempt": held.attempt, "kind": held.assignment.kind, **more}
