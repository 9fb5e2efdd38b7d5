"""What the server's verdicts do to the outbox and to the runs held for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from fencepost.completions import completion_body
from fencepost.durations import duration_seconds
from fencepost.events import event
from fencepost.held import about
from fencepost.outbox import Entry, Outbox
from fencepost.outcome import refuse
from fencepost.pump import Pump
from fencepost.roster import Roster
from fencepost.run_key import run_id
from fencepost.stats import Stats
from fencepost.v1 import worker_pb2

_MIN_RETRY = 0.1
_APPLIED = worker_pb2.VERDICT_APPLIED
_INVALID = worker_pb2.VERDICT_INVALID
# All others, those of a newer server among them, mean: nothing was written, try again.
_FINAL = frozenset(
    {
        _APPLIED,
        worker_pb2.VERDICT_ALREADY_APPLIED,
        worker_pb2.VERDICT_STALE_ATTEMPT,
        worker_pb2.VERDICT_RUN_TERMINAL,
        worker_pb2.VERDICT_NOT_FOUND,
        _INVALID,
    }
)
_TOO_LARGE = "RESULT_TOO_LARGE"
_UNACCEPTABLE = "INVALID_COMPLETION"


class Verdicts:
    """Final ones end the worker's hold on a run; RETRY puts the answer off."""

    def __init__(
        self,
        *,
        outbox: Outbox,
        roster: Roster,
        pump: Pump,
        stats: Stats,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._outbox = outbox
        self._roster = roster
        self._pump = pump
        self._stats = stats
        self._loop = loop

    def apply(self, verdicts: Iterable[worker_pb2.AttemptVerdict]) -> None:
        """Those on entries that are gone already are ignored."""
        outbox, roster = self._outbox, self._roster
        applied = 0
        for verdict in verdicts:
            attempt = (run_id(verdict.run), verdict.attempt)
            value = verdict.verdict
            if value not in _FINAL:
                self._defer(outbox.defer(attempt), verdict)
                continue
            entry = outbox.settle(attempt)
            if entry is None:
                continue
            if value == _APPLIED:
                applied += 1
                roster.remove(entry.held)
            else:
                self._refused(entry, verdict)
        if applied:
            self._stats.verdicts["APPLIED"] += applied

    def _defer(self, entry: Entry | None, verdict: worker_pb2.AttemptVerdict) -> None:
        self._stats.verdicts["RETRY"] += 1
        if entry is not None:
            delay = max(duration_seconds(verdict.retry_after), _MIN_RETRY)
            self._loop.call_later(delay, self._resume, entry)

    def _resume(self, entry: Entry) -> None:
        self._outbox.resume(entry)
        self._pump.nudge()

    def _refused(self, entry: Entry, verdict: worker_pb2.AttemptVerdict) -> None:
        name = worker_pb2.Verdict.Name(verdict.verdict).removeprefix("VERDICT_")
        self._stats.verdicts[name] += 1
        told = about(entry.held, verdict=name, reason=verdict.reason, text=verdict.message)
        replacement = _replacement(entry, verdict)
        if replacement is not None:
            event(logging.ERROR, "completion.refused", **told)
            body = completion_body(replacement)
            self._outbox.put(entry.held, body, code=replacement.failure.code)
            return
        event(logging.INFO, "completion.dropped", **told)
        self._roster.remove(entry.held)


def _replacement(entry: Entry, verdict: worker_pb2.AttemptVerdict) -> worker_pb2.Completion | None:
    """What to send in place of a completion that is not acceptable as sent."""
    if verdict.verdict != _INVALID or verdict.reason == "UNKNOWN_ATTEMPT" or entry.is_release:
        return None
    if entry.code in (_TOO_LARGE, _UNACCEPTABLE):
        return None  # refused twice: the lease will run out
    completion = entry.held.new_completion()
    code = _TOO_LARGE if verdict.reason == "PAYLOAD_TOO_LARGE" else _UNACCEPTABLE
    refuse(completion, code, f"{verdict.reason}: {verdict.message}")
    return completion
