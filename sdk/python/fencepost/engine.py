"""The worker's core in the session thread: what becomes of each run it receives.

Sessions tell it what they hear, the runner what handlers ended with; it decides, and the
outbox and the pump carry its answers. User code never runs in this thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from fencepost.connection import Connection
from fencepost.context import Cause
from fencepost.deadlines import Deadlines
from fencepost.durations import duration_seconds
from fencepost.endings import Endings
from fencepost.events import event
from fencepost.handler import Handler
from fencepost.held import BUFFERED, COMPLETING, Held, about
from fencepost.leases import lost_reason
from fencepost.link import Link
from fencepost.outbox import Outbox
from fencepost.pump import Pump
from fencepost.roster import Roster
from fencepost.run_key import run_id
from fencepost.runner import Around, End, Runner
from fencepost.session import Session
from fencepost.settings import UNKNOWN_KIND, WorkerSettings
from fencepost.stats import Stats
from fencepost.v1 import run_service_pb2, worker_pb2
from fencepost.verdicts import Verdicts

_UNKNOWN_KIND_DELAY = 5.0


class Engine:
    """One per running worker; every method but `report` belongs to the session thread."""

    def __init__(
        self,
        *,
        connection: Connection,
        settings: WorkerSettings,
        handlers: dict[str, Handler],
        around: Sequence[Around],
        user_loop: asyncio.AbstractEventLoop,
        stats: Stats,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.connection = connection
        self.settings = settings
        self.stats = stats
        self.leaving = False
        self.changed = asyncio.Event()
        """Set whenever a handler ends, a verdict or an answer to the drain comes."""
        self.stop_requested = asyncio.Event()
        self.grace = settings.grace
        """Seconds handlers have left once the worker is leaving."""
        self._handlers = handlers
        self._ends: deque[End] = deque()
        self._collecting = False
        timings = settings.timings
        self.roster = Roster(slots=settings.slots, prefetch=settings.prefetch)
        self.outbox = Outbox(
            max_entries=settings.outbox_max_entries,
            max_bytes=settings.outbox_max_bytes,
            resend_after=timings.resend_after,
        )
        self.endings = Endings(outbox=self.outbox, roster=self.roster, stats=stats)
        self.runner = Runner(
            loop=user_loop, slots=settings.slots, around=around, report=self.report
        )
        self.pump = Pump(self.outbox, loop=self.loop, timings=timings)
        self._verdicts = Verdicts(
            outbox=self.outbox, roster=self.roster, pump=self.pump, stats=stats, loop=self.loop
        )
        self.deadlines = Deadlines(
            loop=self.loop,
            roster=self.roster,
            on_due=self._on_due,
            on_short_lease=self._on_short_lease,
        )
        self.link = Link(
            open_session=lambda: Session(
                connection, loop=self.loop, listener=self, timings=timings
            ),
            make_hello=lambda previous: settings.make_hello(connection, handlers, previous),
            on_session=self._on_session,
            timings=timings,
        )

    def report(self, ends: list[End]) -> None:
        """Handlers have ended. From any thread."""
        self._ends.extend(ends)
        if not self._collecting:
            self._collecting = True
            # After the farewell nobody listens any more, and the server knows.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._collect)

    def stop(self, grace: float) -> None:
        """The worker is to leave, its handlers have `grace` seconds; a shorter one wins."""
        self.grace = min(self.grace, grace)
        self.stop_requested.set()
        self.changed.set()

    def cancel(self, held: Held, cause: Cause) -> None:
        """Asks a started handler to stop, once."""
        if held.context._cancel(cause):
            self.runner.cancel(held)

    def keep_going(self) -> None:
        """Starts what may start and tells the server what is new."""
        starting = self.roster.start(self.loop.time())
        if starting:
            self.runner.start(starting)
        self.offer_credit()
        self.stats.held = len(self.roster)
        self.stats.active = self.roster.active
        self.stats.unacknowledged = len(self.outbox)
        self.pump.nudge()

    def offer_credit(self) -> None:
        """Raises the ceiling by what is free, unless nothing more may come."""
        session = self.link.current
        if session is not None and not self.leaving and not self.outbox.full:
            session.offer_credit(self.roster.free)

    # What sessions tell.

    def inventory(self) -> Iterable[Held]:
        """Everything held."""
        return self.roster

    def on_runs(self, session: Session, runs: Collection[worker_pb2.Assignment]) -> None:
        """A batch came in."""
        now = self.loop.time()
        self.stats.received += len(runs)
        accepted = [
            held for assignment in runs if (held := self._accept(assignment, now)) is not None
        ]
        self.deadlines.watch(accepted)
        unconfirmed = [held for held in accepted if held.needs_confirmation]
        if unconfirmed and session.live and not session.retiring:
            session.beat_early(unconfirmed)
        self.keep_going()

    def on_renewed(
        self, runs: list[tuple[Held, int]], sent_at: float, *, confirmed: bool = False
    ) -> None:
        """These leases are good for their full length from `sent_at`."""
        for held, version in runs:
            held.lease.renew(sent_at)
            held.progress_stored = max(held.progress_stored, version)
            if confirmed and held.needs_confirmation:
                self.roster.confirm(held)
        if confirmed:
            self.keep_going()

    def on_notices(self, notices: Iterable[worker_pb2.RunNotice]) -> None:
        """Leases lost and cancels requested; for runs not held, or completing, ignored."""
        for notice in notices:
            held = self.roster.get(run_id(notice.run))
            if held is None or held.attempt != notice.attempt or held.phase == COMPLETING:
                continue
            which = notice.WhichOneof("notice")
            if which == "lease_lost":
                self._lose(held, lost_reason(notice.lease_lost))
            elif which == "cancel_requested":
                self._on_cancel_requested(held)
        self.keep_going()

    def on_verdicts(self, verdicts: Iterable[worker_pb2.AttemptVerdict]) -> None:
        """The server has stored, or refused, ends of attempts."""
        self._verdicts.apply(verdicts)
        self.link.settle_retired(self.outbox.unanswered)
        self.changed.set()
        self.keep_going()

    def on_drain_ack(self) -> None:
        """No batch follows any more."""
        self.changed.set()

    def on_worker_stop(self, reason: str) -> None:
        """An operator asks the process to leave."""
        event(logging.INFO, "worker.stop_requested", reason=reason)
        self.stop_requested.set()

    def on_round_trip(self, seconds: float) -> None:
        """A heartbeat was answered."""
        self.stats.heartbeat_round_trip = seconds

    def on_session_end(self, session: Session) -> None:
        """What this session left unanswered goes out again on the next."""
        self.outbox.requeue_session(session.number)
        self.changed.set()
        self.pump.nudge()

    def _on_session(self, session: Session) -> None:
        welcome = session.welcome
        assert welcome is not None
        self.stats.sessions += 1
        if welcome.limits.max_result_bytes:
            self.runner.max_result_bytes = welcome.limits.max_result_bytes
        if welcome.limits.max_held_runs:
            self.roster.max_held = welcome.limits.max_held_runs
        self.deadlines.max_buffer_time = duration_seconds(welcome.max_buffer_time) or 5.0
        event(
            logging.INFO,
            "session.opened",
            session_id=welcome.session_id,
            server_id=welcome.server_id,
        )
        session.begin()
        if self.leaving:
            self.send_drain()
        self.offer_credit()
        self.pump.use(session)

    def send_drain(self) -> None:
        """Asks the server for no more runs."""
        session = self.link.current
        if session is not None and session.live:
            drain = worker_pb2.WorkerDrain(reason="the worker is leaving")
            session.send(run_service_pb2.WorkRequest(drain=drain))

    # What becomes of runs.

    def _accept(self, assignment: worker_pb2.Assignment, now: float) -> Held | None:
        handler = self._handlers.get(assignment.kind, UNKNOWN_KIND)
        held = Held(assignment, handler, now)
        old = self.roster.get(held.id)
        if old is not None:
            if held.attempt <= old.attempt:
                self.stats.ignored += 1
                return None
            self._lose(old, "SUPERSEDED")
        if handler is UNKNOWN_KIND:
            self.roster.keep(held)
            self._release_unstarted(
                held, worker_pb2.RELEASE_REASON_UNSUPPORTED_KIND, _UNKNOWN_KIND_DELAY
            )
            return None
        if self.leaving:
            self.roster.keep(held)
            self._release_unstarted(held, worker_pb2.RELEASE_REASON_NOT_STARTED)
            return None
        self.roster.buffer(held)
        return held

    def _release_unstarted(
        self, held: Held, reason: worker_pb2.ReleaseReason.ValueType, delay: float = 0.0
    ) -> None:
        held.phase = COMPLETING  # it was never buffered, so no place is to be freed
        self.endings.release(held, reason, delay)

    def _lose(self, held: Held, reason: str) -> None:
        self.stats.lease_losses[reason] += 1
        event(logging.INFO, "lease.lost", **about(held, reason=reason))
        self.roster.unbuffer(held)
        self.roster.remove(held)
        held.lost = True
        if held.started_at:
            self.cancel(held, Cause.LEASE_LOST)

    def _on_cancel_requested(self, held: Held) -> None:
        if held.started_at:
            self.cancel(held, Cause.CANCELLED)
        else:
            self.endings.cancelled_unstarted(held)

    def _on_short_lease(self, lease_ttl: float) -> None:
        session = self.link.current
        if session is not None and session.live:
            session.hurry(lease_ttl)

    def _on_due(self, held: Held, now: float) -> None:
        if held.phase == BUFFERED:
            self.endings.release(held, worker_pb2.RELEASE_REASON_NOT_STARTED)
        elif now >= held.forced_at:
            # The handler does not stop: its slot stays taken, the failure is told now.
            self.endings.overran(held)
        elif now >= held.attempt_deadline:
            held.forced_at = now + (
                duration_seconds(held.assignment.cancel_grace)
                if held.assignment.HasField("cancel_grace")
                else 30.0
            )
            self.cancel(held, Cause.TIMEOUT)
        else:
            self.stats.lease_losses["LEASE_UNCERTAIN"] += 1
            event(logging.WARNING, "lease.uncertain", **about(held))
            self.cancel(held, Cause.LEASE_UNCERTAIN)
        self.keep_going()

    def _collect(self) -> None:
        self._collecting = False
        now = self.loop.time()
        count = 0
        while self._ends:
            held, ending = self._ends.popleft()
            self.endings.handler_ended(held, ending, now)
            count += 1
        self.roster.ended(count)
        self.changed.set()
        self.keep_going()
