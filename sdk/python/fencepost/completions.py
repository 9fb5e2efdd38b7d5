"""Writes ends of attempts as the bytes they travel in, so that sent again they are the same.

A body is a whole `Completions` or `Releases` message of one entry; put one after the other,
bodies are the message of all their entries.
"""

from __future__ import annotations

from collections.abc import Iterable

from fencepost.held import Held
from fencepost.outcome import set_timings
from fencepost.v1 import worker_pb2


def completion_body(completion: worker_pb2.Completion) -> bytes:
    """One completion."""
    return worker_pb2.Completions(completions=[completion]).SerializeToString()


def release_body(release: worker_pb2.Release) -> bytes:
    """One release."""
    return worker_pb2.Releases(releases=[release]).SerializeToString()


def read_completions(bodies: Iterable[bytes]) -> list[worker_pb2.Completion]:
    """The completions in these bodies."""
    return list(worker_pb2.Completions.FromString(b"".join(bodies)).completions)


def read_releases(bodies: Iterable[bytes]) -> list[worker_pb2.Release]:
    """The releases in these bodies."""
    return list(worker_pb2.Releases.FromString(b"".join(bodies)).releases)


class PlainSuccesses:
    """Writes completions of handlers that returned nothing: most are that, and differ little."""

    def __init__(self) -> None:
        self._message = worker_pb2.Completions()
        self._completion = self._message.completions.add()
        self._completion.success.SetInParent()
        self._timings = (-1.0, -1.0)

    def body(self, held: Held, now: float) -> bytes:
        """The completion of this attempt, whose handler has returned now."""
        completion = self._completion
        completion.run.CopyFrom(held.assignment.run)
        completion.attempt = held.attempt
        timings = (held.started_at - held.received_at, now - held.started_at)
        if timings != self._timings:
            self._timings = timings
            set_timings(completion, *timings)
        return self._message.SerializeToString()
