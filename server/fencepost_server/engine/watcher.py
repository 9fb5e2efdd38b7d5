"""What one watcher of runs still has to be told: keys of changed runs, never their states.

The state is read when it is told, so a slow reader hears the newest one; its memory is
bounded, and whoever falls further behind is told that there is a gap.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from fencepost_server.clock import Instant
from fencepost_server.domain.run import RunKey
from fencepost_server.store.runs import RunRecord

# Keys that may wait for one watcher; beyond that they are given up for a gap.
PENDING_MAX = 10_000
# Runs whose last told state one watcher remembers, so that it is not told twice in a row.
_TOLD_MAX = 10_000
# Open transactions that a cursor carries; with more of them a resumption hears more again.
_OPEN_MAX = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the told changes have been read: those of transactions below `end` that are not
    `open`; `low` is the lowest open one, or `end`. Numbers compare within one `epoch` only.
    """

    epoch: int
    low: int
    end: int
    open: tuple[int, ...] = ()

    @classmethod
    def of(cls, snapshot: str, *, epoch: int) -> Self:
        """From the text form of a Postgres snapshot."""
        low, end, under_way = snapshot.split(":")
        return cls(
            epoch=epoch,
            low=int(low),
            end=int(end),
            open=tuple(int(part) for part in under_way.split(",") if part),
        )

    @property
    def snapshot(self) -> str:
        """The text form that Postgres reads."""
        return f"{self.low}:{self.end}:{','.join(map(str, self.open))}"

    def compact(self) -> "Position":
        """The same or an earlier position that names few open transactions."""
        if len(self.open) <= _OPEN_MAX:
            return self
        return Position(epoch=self.epoch, low=self.low, end=self.low)


class Change(NamedTuple):
    """A run that a statement has changed, and when that was stored."""

    key: RunKey
    changed_at: Instant


@dataclass(slots=True)
class _Batch:
    """Changes of one look, by key; once they are told, everything `until` there is."""

    changed_at: dict[RunKey, Instant]
    until: Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What is to be told now: before, everything up to `since` has been, afterwards up to
    `until`."""

    changes: Sequence[Change]
    since: Position
    until: Position
    gap: bool


@dataclass(slots=True, kw_only=True)
class Watcher:
    """One stream's share of the feed. `job_id` None: all jobs of the tenant.

    `woken` is set when there is something to take.
    """

    tenant_id: int
    job_id: str | None
    position: Position
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    _gap: bool = False
    _batches: deque[_Batch] = field(default_factory=deque)
    _places: dict[RunKey, _Batch] = field(default_factory=dict)
    _told: OrderedDict[RunKey, tuple[object, ...]] = field(default_factory=OrderedDict)

    def wants(self, tenant_id: int, job_id: str) -> bool:
        """Whether runs of this job are watched."""
        return tenant_id == self.tenant_id and self.job_id in (None, job_id)

    @property
    def pending(self) -> int:
        """Keys that wait to be told."""
        return len(self._places)

    def offer(self, changes: Iterable[Change], *, until: Position) -> None:
        """Changes that follow all before; a key that waits already is told once."""
        batch = _Batch({}, until)
        for key, changed_at in changes:
            waiting = self._places.get(key)
            if waiting is None:
                batch.changed_at[key] = changed_at
                self._places[key] = batch
            else:
                waiting.changed_at[key] = max(waiting.changed_at[key], changed_at)
        if len(self._places) > PENDING_MAX:
            self.lose(until=until)
        elif batch.changed_at:
            self._batches.append(batch)
            self.woken.set()
        elif self._batches:
            self._batches[-1].until = until
        else:
            self.position = until

    def lose(self, *, until: Position) -> None:
        """Everything up to there that was not told yet never will be."""
        self._batches.clear()
        self._places.clear()
        self._told.clear()
        self._gap = True
        self.position = until
        self.woken.set()

    def take(self, limit: int) -> Taken:
        """The oldest changes, at most `limit`; the caller tells them or puts them back."""
        self.woken.clear()
        since = until = self.position
        gap, self._gap = self._gap, False
        taken: list[Change] = []
        while self._batches and len(taken) < limit:
            batch = self._batches[0]
            for key in list(batch.changed_at)[: limit - len(taken)]:
                taken.append(Change(key, batch.changed_at.pop(key)))
                del self._places[key]
            if not batch.changed_at:
                self._batches.popleft()
                until = batch.until
        if self._batches:
            self.woken.set()
        self.position = until
        return Taken(changes=taken, since=since, until=until, gap=gap)

    def put_back(self, taken: Taken) -> None:
        """They could not be told now."""
        batch = _Batch({}, taken.until)
        for key, changed_at in taken.changes:
            if key not in self._places:
                batch.changed_at[key] = changed_at
                self._places[key] = batch
        if batch.changed_at:
            self._batches.appendleft(batch)
        self._gap |= taken.gap
        self.position = taken.since
        self.woken.set()

    def is_news(self, run: RunRecord) -> bool:
        """Whether the run looks other than when it was seen last; remembers how it looks."""
        looks = (run.state, run.attempt, run.cancel_requested, run.discarded_at is not None)
        known = self._told.pop(run.key, None)
        self._told[run.key] = looks
        if len(self._told) > _TOLD_MAX:
            self._told.popitem(last=False)
        return looks != known
