"""Arithmetic of one lease on the worker's monotonic clock: only durations, never instants."""

from __future__ import annotations

from fencepost.durations import duration_seconds
from fencepost.v1 import job_pb2, worker_pb2

_DEFAULT_TTL = 30.0
_HEARTBEATS_PER_LEASE = 3
_ACK_SHARE = 4


class Lease:
    """The right to a run, with an end that heartbeats move on."""

    __slots__ = ("deadline", "stop_at", "stops", "ttl")

    def __init__(self, *, ttl: float, deadline: float, stops: bool) -> None:
        self.ttl = ttl
        self.stops = stops
        self.deadline = deadline
        """Monotonic seconds: from here on another worker may have the run."""
        self.stop_at = deadline if stops else float("inf")
        """When the handler is to be stopped for it."""

    @classmethod
    def received(cls, assignment: worker_pb2.Assignment, received_at: float) -> Lease:
        """The lease an assignment came with."""
        ttl = duration_seconds(assignment.lease_ttl) or _DEFAULT_TTL
        remaining = (
            duration_seconds(assignment.lease_remaining)
            if assignment.HasField("lease_remaining")
            else ttl
        )
        action = assignment.lease_uncertain_action
        return cls(
            ttl=ttl,
            deadline=received_at + remaining - ttl / 6,
            stops=action != job_pb2.LEASE_UNCERTAIN_ACTION_CONTINUE,
        )

    def renew(self, sent_at: float) -> None:
        """A heartbeat sent at this moment was confirmed."""
        self.deadline = max(self.deadline, sent_at + self.ttl - self.ttl / 6)
        if self.stops:
            self.stop_at = self.deadline


def heartbeat_interval(welcome: float, shortest_ttl: float) -> float:
    """Seconds between heartbeats: the server's pace, or a third of the shortest lease held."""
    return min(welcome, shortest_ttl / _HEARTBEATS_PER_LEASE)


def ack_timeout(welcome: float, shortest_ttl: float) -> float:
    """Seconds until an unanswered heartbeat means that the session is dead."""
    return min(welcome, shortest_ttl / _ACK_SHARE)


def lost_reason(lost: worker_pb2.LeaseLost) -> str:
    """Why a lease is lost, without prefix; reasons of a newer server read RUN_TERMINAL."""
    if lost.reason not in worker_pb2.LeaseLostReason.values():
        return "RUN_TERMINAL"
    return worker_pb2.LeaseLostReason.Name(lost.reason).removeprefix("LEASE_LOST_REASON_")
