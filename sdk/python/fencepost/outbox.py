"""Ends of attempts that no final verdict has answered yet: kept, sent, sent again, never dropped.

The engine puts them in, the pump takes them out in batches, verdicts settle them.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable

from fencepost.held import Held
from fencepost.run_key import RunId

AttemptId = tuple[RunId, int]

_MAX_DOUBLINGS = 3


class _Place(enum.Enum):
    READY = enum.auto()
    SENT = enum.auto()
    LATER = enum.auto()
    SETTLED = enum.auto()


# An enum's members are slow to look up, and this is done several times per run.
_READY, _SENT, _LATER, _SETTLED = _Place


class Entry:
    """One completion or release on its way."""

    __slots__ = (
        "body",
        "code",
        "held",
        "id",
        "is_release",
        "place",
        "resend_at",
        "session",
        "tries",
    )

    def __init__(self, held: Held, body: bytes, is_release: bool, code: str) -> None:
        self.held = held
        self.id: AttemptId = (held.id, held.attempt)
        self.body = body
        """See `completions`."""
        self.is_release = is_release
        self.code = code
        """Of a failure."""
        self.place = _READY
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
        self._unanswered: Counter[int] = Counter()
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
        return self._unanswered[session]

    def put(self, held: Held, body: bytes, *, is_release: bool = False, code: str = "") -> None:
        """Adds the end of an attempt; an earlier entry of the same attempt is replaced."""
        entry = Entry(held, body, is_release, code)
        if self._entries.setdefault(entry.id, entry) is not entry:
            self.settle(entry.id)
            self._entries[entry.id] = entry
        self._bytes += len(body)
        self._make_ready(entry)

    def take(self, *, session: int, now: float, max_entries: int, max_bytes: int) -> list[Entry]:
        """The next entries to send, marked as sent on this session now. Empty: none."""
        batch: list[Entry] = []
        size = 0
        ready = self._ready
        while ready and len(batch) < max_entries:
            entry = ready[0]
            if entry.place is not _READY:
                ready.popleft()
                continue
            if batch and size + len(entry.body) > max_bytes:
                break
            ready.popleft()
            size += len(entry.body)
            entry.place = _SENT
            entry.session = session
            entry.resend_at = now + self._resend_after * 2 ** min(entry.tries, _MAX_DOUBLINGS)
            entry.tries += 1
            batch.append(entry)
        self.ready_count -= len(batch)
        self.ready_bytes -= size
        self._unanswered[session] += len(batch)
        return batch

    def settle(self, attempt: AttemptId) -> Entry | None:
        """A final verdict came: forget the entry. None: it was not here any more."""
        entry = self._entries.pop(attempt, None)
        if entry is None:
            return None
        self._bytes -= len(entry.body)
        self._leave_place(entry)
        entry.place = _SETTLED
        return entry

    def defer(self, attempt: AttemptId) -> Entry | None:
        """The server said RETRY: hold the entry until `resume`."""
        entry = self._entries.get(attempt)
        if entry is None or entry.place is not _SENT:
            return None
        self._leave_place(entry)
        entry.place = _LATER
        return entry

    def resume(self, entry: Entry) -> None:
        """The wait of a deferred entry is over."""
        if entry.place is _LATER:
            self._make_ready(entry)

    def requeue_overdue(self, now: float) -> None:
        """Makes ready again what has waited too long for its verdict."""
        self._requeue(entry for entry in self._sent() if entry.resend_at <= now)

    def requeue_session(self, session: int) -> None:
        """Makes ready again what was sent on a session that has ended."""
        self._requeue(entry for entry in self._sent() if entry.session == session)
        del self._unanswered[session]

    def remaining(self) -> list[Entry]:
        """Everything without a final verdict."""
        return list(self._entries.values())

    def _sent(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if entry.place is _SENT]

    def _requeue(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._leave_place(entry)
            self._make_ready(entry)

    def _make_ready(self, entry: Entry) -> None:
        entry.place = _READY
        self._ready.append(entry)
        self.ready_count += 1
        self.ready_bytes += len(entry.body)

    def _leave_place(self, entry: Entry) -> None:
        if entry.place is _SENT:
            self._unanswered[entry.session] -= 1
        elif entry.place is _READY:
            self.ready_count -= 1
            self.ready_bytes -= len(entry.body)
