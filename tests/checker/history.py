"""What happened to each run, read from the record: the steps of its life that others could
see, in the order of their transactions.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import asyncpg

LIVE = frozenset({"queued", "blocked", "running", "retrying"})


class Key(NamedTuple):
    """A run key."""

    job_id: str
    scheduled_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row as it was written into, changed in or taken out of one of the four places."""

    seq: int
    xid: str
    at: datetime
    place: str
    operation: str
    key: Key
    available_at: datetime
    state: str
    attempt: int
    attempt_open: bool = False
    cancel_requested: bool = False
    origin: str = "schedule"
    tenant_id: int = 1
    queue_id: int = 1
    kind_id: int = 1
    priority: int = 0
    failure_count: int = 0
    lost_lease_count: int = 0
    replay_count: int = 0
    worker_id: str | None = None
    concurrency_key: str | None = None
    dead_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`changes` in the order they were made; `steps` of each run without what nobody saw:
    a row that its own transaction took back."""

    changes: Sequence[Change]
    steps: Mapping[Key, Sequence[Change]]

    @classmethod
    def of(cls, changes: Iterable[Change]) -> "History":
        """Sorts and groups."""
        ordered = sorted(changes, key=lambda change: change.seq)
        by_key: dict[Key, list[Change]] = defaultdict(list)
        for change in ordered:
            by_key[change.key].append(change)
        steps = {key: _visible(found) for key, found in by_key.items()}
        return cls(changes=ordered, steps={key: found for key, found in steps.items() if found})

    def claims(self) -> list[Change]:
        """Every step that opened a new attempt, in order."""
        found: list[Change] = []
        for steps in self.steps.values():
            attempt = 0
            for step in steps:
                if step.operation != "delete" and step.state == "running":
                    if step.attempt > attempt:
                        found.append(step)
                    attempt = max(attempt, step.attempt)
        return sorted(found, key=lambda step: step.seq)


async def read_history(database_url: str) -> History:
    """Everything recorded so far."""
    connection = await asyncpg.connect(database_url)
    try:
        rows = await connection.fetch("SELECT * FROM checker.changes ORDER BY seq")
    finally:
        await connection.close()
    return History.of(
        Change(
            key=Key(str(row["job_id"]), row["scheduled_at"]),
            worker_id=None if row["worker_id"] is None else str(row["worker_id"]),
            **{
                name: value
                for name, value in row.items()
                if name not in ("job_id", "scheduled_at", "worker_id")
            },
        )
        for row in rows
    )


def _visible(changes: Sequence[Change]) -> list[Change]:
    """Without rows that were inserted into the queue and taken out again by one transaction
    which put them nowhere else."""
    hidden: set[int] = set()
    for place, change in enumerate(changes):
        if change.place != "run_queue" or change.operation != "insert":
            continue
        own = [later for later in changes[place:] if later.xid == change.xid]
        gone = [
            later for later in own if later.operation == "delete" and later.place == "run_queue"
        ]
        elsewhere = [later for later in own if later.operation == "insert" and later is not change]
        if gone and not elsewhere:
            hidden |= {later.seq for later in own}
    return [change for change in changes if change.seq not in hidden]
