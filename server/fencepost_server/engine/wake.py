"""Hints that work has come: inside the process at once, to other processes by NOTIFY.

A hint is never the guarantee: schedulers and dispatchers look by themselves every second.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from fencepost_server.clock import Instant
from fencepost_server.domain.run import Lane
from fencepost_server.store.notify import Notifier

JOBS_CHANNEL = "fencepost_jobs"
LANES_CHANNEL = "fencepost_lanes"


class Wake(Protocol):
    """Whoever commits something that is due or ready says so here."""

    def jobs(self, partition_ids: Iterable[int]) -> None:
        """Jobs of these partitions were made or changed: their next fire may be earlier."""
        ...

    def lanes(self, lanes: Iterable[Lane], *, at: Instant = 0) -> None:
        """Runs of these lanes are claimable now, or will be `at`."""
        ...


class Wakes:
    """Passes hints to the loops of this process and, through a notifier, to the others.

    `jobs_woken()` and `lanes_woken(lanes, at)` belong to this process; no lanes: all of them.
    """

    def __init__(self) -> None:
        self.notifier: Notifier | None = None
        self.jobs_woken: list[Callable[[], None]] = []
        self.lanes_woken: list[Callable[[Iterable[Lane], Instant], None]] = []

    def jobs(self, partition_ids: Iterable[int]) -> None:
        """See `Wake.jobs`."""
        parts = {str(partition) for partition in partition_ids}
        if not parts:
            return
        for woken in self.jobs_woken:
            woken()
        if self.notifier is not None:
            self.notifier.hint(JOBS_CHANNEL, parts)

    def lanes(self, lanes: Iterable[Lane], *, at: Instant = 0) -> None:
        """See `Wake.lanes`. Other processes hear only of what is claimable now."""
        known = set(lanes)
        if not known:
            return
        for woken in self.lanes_woken:
            woken(known, at)
        if self.notifier is not None and not at:
            parts = {f"{lane.queue_id}:{lane.kind_id}:{lane.priority}" for lane in known}
            self.notifier.hint(LANES_CHANNEL, parts)

    def heard(self, channel: str, payload: str) -> None:
        """A hint of another process."""
        if channel == JOBS_CHANNEL:
            for jobs_woken in self.jobs_woken:
                jobs_woken()
        elif channel == LANES_CHANNEL:
            lanes = [Lane(*map(int, part.split(":"))) for part in payload.split()]
            for lanes_woken in self.lanes_woken:
                lanes_woken(lanes, 0)
