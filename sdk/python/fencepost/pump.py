"""Brings the outbox, credit and receipts onto the wire in as few messages as possible.

Sends at once when nothing is unanswered; else when a batch is full or has waited 10 ms.
"""

from __future__ import annotations

import asyncio

from fencepost.outbox import Entry, Outbox
from fencepost.session import Session
from fencepost.timings import Timings
from fencepost.v1 import run_service_pb2

MAX_ENTRIES = 100
MAX_BYTES = 256 * 1024


class Pump:
    """Writes to one session at a time: the worker's current one."""

    def __init__(
        self, outbox: Outbox, *, loop: asyncio.AbstractEventLoop, timings: Timings
    ) -> None:
        self._outbox = outbox
        self._loop = loop
        self._timings = timings
        self._session: Session | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._resend_timer: asyncio.TimerHandle | None = None

    def use(self, session: Session) -> None:
        """From now on everything goes to this session; what waits goes at once."""
        self._session = session
        self.flush()

    def nudge(self) -> None:
        """Something may be ready to go: send it now, or soon in company."""
        session, outbox = self._session, self._outbox
        if session is None or not session.live:
            return
        ready = outbox.ready_count
        if ready and (
            outbox.unanswered(session.number) == 0
            or ready >= MAX_ENTRIES
            or outbox.ready_bytes >= MAX_BYTES
        ):
            self.flush()
        elif (ready or session.untold) and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(self._timings.flush_after, self.flush)

    def flush(self) -> None:
        """Sends all that is ready."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        session = self._session
        if session is None or not session.live:
            return
        while True:
            entries = self._outbox.take(
                session=session.number,
                now=self._loop.time(),
                max_entries=MAX_ENTRIES,
                max_bytes=MAX_BYTES,
            )
            if not entries:
                break
            _send(session, entries)
        if session.untold:
            session.send(run_service_pb2.WorkRequest())
        self._watch_for_verdicts()

    def stop(self) -> None:
        """No more timers."""
        for timer in (self._flush_timer, self._resend_timer):
            if timer is not None:
                timer.cancel()

    def _watch_for_verdicts(self) -> None:
        if self._resend_timer is None and len(self._outbox):
            pace = self._timings.resend_after / 5
            self._resend_timer = self._loop.call_later(pace, self._resend)

    def _resend(self) -> None:
        self._resend_timer = None
        session = self._session
        if session is not None and session.live:
            self._outbox.requeue_overdue(self._loop.time())
            self.nudge()
        self._watch_for_verdicts()


def _send(session: Session, entries: list[Entry]) -> None:
    completions = b"".join([entry.body for entry in entries if not entry.is_release])
    releases = b"".join([entry.body for entry in entries if entry.is_release])
    if completions:
        request = run_service_pb2.WorkRequest()
        request.completions.MergeFromString(completions)
        session.send(request)
    if releases:
        request = run_service_pb2.WorkRequest()
        request.releases.MergeFromString(releases)
        session.send(request)
