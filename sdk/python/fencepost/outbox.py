"""Ends of attempts that no final verdict has answered yet: kept, sent, sent again, never dropped.

The engine puts them in, the pump takes them out in batches, verdicts settle them.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from fencepost.held import Held
from fencepost.run_key import RunId
from fencepost.v1 import worker_pb2

AttemptId = tuple[RunId, int]
Message = worker_pb2.Completion | worker_pb2.Release

_MAX_DOUBLINGS = 3


class _Place(enum.Enum):
    READY = enum.auto()
    SENT = enum.auto()
    LATER = enum.auto()
    SETTLED = enum.auto()


class Entry:
    """One completion or release on its way."""

    __slots__ = ("held", "id", "message", "place", "resend_at", "session", "size", "tries")

    def __init__(self, held: Held, message: Message) -> None:
        self.held = held
        self.id: AttemptId = (held.id, held.attempt)
        self.message = message
        self.size = message.ByteSize() + 8
        self.place = _Place.READY
        self.session = 0
        """Number of the session it was last sent on."""
        self.tries = 0
        self.resend_at = 0.0


class Outbox:
    """Bounded: when full, the worker stops asking for runs."""

    def __init__(self, *, max_entries: int, max_bytes: int, resend_after: float) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._resend_after = resend_after
        self._entries: dict[AttemptId, Entry] = {}
        self._ready: deque[Entry] = deque()
        self._sent: dict[AttemptId, Entry] = {}  # oldest first
        self._unanswered: dict[int, int] = {}
        self._bytes = 0
        self.ready_count = 0
        self.ready_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """No more runs, please."""
        return len(self._entries) >= self._max_entries or self._bytes >= self._max_bytes

    def unanswered(self, session: int) -> int:
        """Entries sent on this session that wait for a verdict."""
        return self._unanswered.get(session, 0)

    def put(self, held: Held, message: Message) -> None:
        """Adds the end of an attempt; an earlier entry of the same attempt is replaced."""
        entry = Entry(held, message)
        if entry.id in self._entries:
            self.settle(entry.id)
        self._entries[entry.id] = entry
        self._bytes += entry.size
        self._make_ready(entry)

    def take(self, *, session: int, now: float, max_entries: int, max_bytes: int) -> list[Entry]:
        """The next entries to send, marked as sent on this session now. Empty: none."""
        batch: list[Entry] = []
        size = 0
        while self._ready and len(batch) < max_entries:
            entry = self._ready[0]
            if entry.place is not _Place.READY:
                self._ready.popleft()
                continue
            if batch and size + entry.size > max_bytes:
                break
            self._ready.popleft()
            self.ready_count -= 1
            self.ready_bytes -= entry.size
            size += entry.size
            self._mark_sent(entry, session, now)
            batch.append(entry)
        return batch

    def settle(self, attempt: AttemptId) -> Entry | None:
        """A final verdict came: forget the entry. None: it was not here any more."""
        entry = self._entries.pop(attempt, None)
        if entry is None:
            return None
        self._bytes -= entry.size
        self._leave_place(entry)
        entry.place = _Place.SETTLED
        return entry

    def defer(self, attempt: AttemptId) -> Entry | None:
        """The server said RETRY: hold the entry until `resume`."""
        entry = self._entries.get(attempt)
        if entry is None or entry.place is not _Place.SENT:
            return None
        self._leave_place(entry)
        entry.place = _Place.LATER
        return entry

    def resume(self, entry: Entry) -> None:
        """The wait of a deferred entry is over."""
        if entry.place is _Place.LATER:
            self._make_ready(entry)

    def requeue_overdue(self, now: float) -> None:
        """Makes ready again what has waited too long for its verdict."""
        self._requeue([e for e in self._sent.values() if e.resend_at <= now])

    def requeue_session(self, session: int) -> None:
        """Makes ready again what was sent on a session that has ended."""
        self._requeue([e for e in self._sent.values() if e.session == session])

    def next_resend_at(self) -> float:
        """When the oldest unanswered entry is due again, monotonic seconds; inf: none."""
        return min((e.resend_at for e in self._sent.values()), default=float("inf"))

    def remaining(self) -> list[Entry]:
        """Everything without a final verdict."""
        return list(self._entries.values())

    def _requeue(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._leave_place(entry)
            self._make_ready(entry)

    def _make_ready(self, entry: Entry) -> None:
        entry.place = _Place.READY
        self._ready.append(entry)
        self.ready_count += 1
        self.ready_bytes += entry.size

    def _mark_sent(self, entry: Entry, session: int, now: float) -> None:
        wait = self._resend_after * 2 ** min(entry.tries, _MAX_DOUBLINGS)
        entry.tries += 1
        entry.place, entry.session, entry.resend_at = _Place.SENT, session, now + wait
        self._sent[entry.id] = entry
        self._unanswered[session] = self._unanswered.get(session, 0) + 1

    def _leave_place(self, entry: Entry) -> None:
        if entry.place is _Place.SENT:
            del self._sent[entry.id]
            left = self._unanswered[entry.session] - 1
            if left:
                self._unanswered[entry.session] = left
            else:
                del self._unanswered[entry.session]
        elif entry.place is _Place.READY:
            self.ready_count -= 1
            self.ready_bytes -= entry.size
