"""How attempts end here: as a completion or a release in the outbox, told once for each.

The engine says what happened to a run; the outbox keeps what is to be told to the server.
"""

from __future__ import annotations

import enum
import logging

from fencepost.completions import PlainSuccesses, completion_body, release_body
from fencepost.context import Cause
from fencepost.durations import duration_seconds, to_duration
from fencepost.events import enabled, event
from fencepost.held import COMPLETING, Held, about
from fencepost.outbox import Outbox
from fencepost.outcome import set_timeout, set_timings
from fencepost.roster import Roster
from fencepost.stats import Stats
from fencepost.v1 import worker_pb2


class Plain(enum.Enum):
    """What handlers end with that needs no message to tell it."""

    RETURNED = enum.auto()
    """It returned nothing."""
    STOPPED = enum.auto()
    """It obeyed a cancel."""


Ending = worker_pb2.Completion | Plain
"""What a handler ended with."""

# An enum's members are slow to look up, and this is done for every run.
_RETURNED, _STOPPED, _TIMEOUT = Plain.RETURNED, Plain.STOPPED, Cause.TIMEOUT


class Endings:
    """All methods are for the session thread."""

    def __init__(self, *, outbox: Outbox, roster: Roster, stats: Stats) -> None:
        self._outbox = outbox
        self._roster = roster
        self._stats = stats
        self._successes = PlainSuccesses()

    def handler_ended(self, held: Held, ending: Ending, now: float) -> None:
        """Its handler has ended, whichever way."""
        if held.lost or held.reported:
            self._stats.outcomes["lost" if held.lost else "late"] += 1
            return
        context = held.context
        cause = context.cause
        has_news = context._progress_version > held.progress_stored
        if ending is _RETURNED and cause is not _TIMEOUT and not has_news:
            self._note(held, "success")
            self._outbox.put(held, self._successes.body(held, now))
            return
        if ending is _STOPPED and cause is Cause.LEASE_UNCERTAIN:
            self.release(held, worker_pb2.RELEASE_REASON_SHUTDOWN)
            return
        if ending is _STOPPED and cause is Cause.SHUTDOWN:
            self._stats.outcomes["abandoned"] += 1
            return  # stays held; the Goodbye lists it
        completion = _timed_out(held) if cause is _TIMEOUT else _completion(held, ending)
        set_timings(completion, held.started_at - held.received_at, now - held.started_at)
        if has_news and context._progress is not None:
            completion.progress.CopyFrom(context._progress)
        self._complete(held, completion)

    def overran(self, held: Held) -> None:
        """The attempt's time and the grace are over, and its handler does not stop."""
        self._complete(held, _timed_out(held))

    def cancelled_unstarted(self, held: Held) -> None:
        """Somebody cancelled the run, and its handler was not called yet."""
        self._roster.unbuffer(held)
        completion = held.new_completion()
        completion.cancelled.message = "cancelled before the handler was called"
        self._complete(held, completion)

    def release(
        self, held: Held, reason: worker_pb2.ReleaseReason.ValueType, delay: float = 0.0
    ) -> None:
        """The run is given back, unhandled or interrupted."""
        self._roster.unbuffer(held)
        release = worker_pb2.Release(run=held.assignment.run, attempt=held.attempt, reason=reason)
        if delay:
            release.delay.CopyFrom(to_duration(delay))
        self._note(held, "released")
        self._outbox.put(held, release_body(release), is_release=True)

    def _complete(self, held: Held, completion: worker_pb2.Completion) -> None:
        code = completion.failure.code
        self._note(held, completion.WhichOneof("outcome") or "", code)
        self._outbox.put(held, completion_body(completion), code=code)

    def _note(self, held: Held, outcome: str, code: str = "") -> None:
        held.phase = COMPLETING
        held.reported = True
        self._stats.outcomes[outcome] += 1
        if enabled(logging.INFO):
            event(logging.INFO, "attempt.ended", **about(held, outcome=outcome, code=code))


def _completion(held: Held, ending: Ending) -> worker_pb2.Completion:
    if not isinstance(ending, Plain):
        return ending
    completion = held.new_completion()
    if ending is _RETURNED:
        completion.success.SetInParent()
    else:
        completion.cancelled.message = "the handler obeyed the cancel"
    return completion


def _timed_out(held: Held) -> worker_pb2.Completion:
    completion = held.new_completion()
    set_timeout(completion, duration_seconds(held.assignment.attempt_timeout))
    return completion
