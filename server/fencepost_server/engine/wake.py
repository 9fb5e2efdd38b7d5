"""Hints that work has come: inside the process at once, to other processes by NOTIFY.

A hint is never the guarantee: schedulers and dispatchers look by themselves every second.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol, Self

from fencepost_server.clock import Instant
from fencepost_server.domain.run import Lane, RunKey
from fencepost_server.store.notify import Notifier

JOBS_CHANNEL = "fencepost_jobs"
LANES_CHANNEL = "fencepost_lanes"
PLACES_CHANNEL = "fencepost_places"
ATTEMPTS_CHANNEL = "fencepost_attempts"


class Affected(NamedTuple):
    """An attempt that somebody other than its worker has ended, or asked to stop."""

    worker_id: str
    key: RunKey
    attempt: int

    def __str__(self) -> str:
        return f"{self.worker_id}:{self.key.job_id}:{self.key.scheduled_at}:{self.attempt}"

    @classmethod
    def of(cls, text: str) -> Self:
        """The reverse of `str`."""
        worker_id, job_id, scheduled_at, attempt = text.split(":")
        return cls(worker_id, RunKey(job_id, int(scheduled_at)), int(attempt))


class Wake(Protocol):
    """Whoever commits something that is due or ready says so here."""

    def jobs(self, partition_ids: Iterable[int]) -> None:
        """Jobs of these partitions were made or changed: their next fire may be earlier."""
        ...

    def lanes(self, lanes: Iterable[Lane], *, at: Instant = 0) -> None:
        """Runs of these lanes are claimable now, or will be `at`."""
        ...

    def ends(self, job_ids: Collection[str]) -> None:
        """Runs of these jobs have ended: others that waited for them may be free."""
        ...

    def attempts(self, affected: Collection[Affected]) -> None:
        """What the workers of these attempts should know of them has changed."""
        ...


class Wakes:
    """Passes hints to the loops of this process and, through a notifier, to the others.

    `jobs_woken()`, `lanes_woken(lanes, at)`, `ends_woken(job_ids)` and
    `attempts_woken(affected)` belong to this process; no lanes: all of them.
    """

    def __init__(self) -> None:
        self.notifier: Notifier | None = None
        self.jobs_woken: list[Callable[[], None]] = []
        self.lanes_woken: list[Callable[[Iterable[Lane], Instant], None]] = []
        # Hears the tenant_ids whose places another process has freed.
        self.places_woken: list[Callable[[Collection[int]], None]] = []
        self.ends_woken: list[Callable[[Collection[str]], None]] = []
        self.attempts_woken: list[Callable[[Collection[Affected]], None]] = []

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

    def ends(self, job_ids: Collection[str]) -> None:
        """See `Wake.ends`. Other processes see it in their next sweep."""
        if job_ids:
            for woken in self.ends_woken:
                woken(job_ids)

    def attempts(self, affected: Collection[Affected]) -> None:
        """See `Wake.attempts`."""
        if not affected:
            return
        for woken in self.attempts_woken:
            woken(affected)
        if self.notifier is not None:
            self.notifier.hint(ATTEMPTS_CHANNEL, {str(each) for each in affected})

    def places(self, tenant_ids: Collection[int]) -> None:
        """Under caps of these tenants places are free: for other processes only."""
        if tenant_ids and self.notifier is not None:
            self.notifier.hint(PLACES_CHANNEL, {str(tenant_id) for tenant_id in tenant_ids})

    def look_everywhere(self) -> None:
        """Settings of queues have changed: every dispatcher looks at once."""
        for woken in self.lanes_woken:
            woken((), 0)
        if self.notifier is not None:
            self.notifier.hint(LANES_CHANNEL, set())

    def heard(self, channel: str, payload: str) -> None:
        """A hint of another process."""
        if channel == JOBS_CHANNEL:
            for jobs_woken in self.jobs_woken:
                jobs_woken()
        elif channel == LANES_CHANNEL:
            lanes = [Lane(*map(int, part.split(":"))) for part in payload.split()]
            for lanes_woken in self.lanes_woken:
                lanes_woken(lanes, 0)
        elif channel == PLACES_CHANNEL:
            tenant_ids = [int(part) for part in payload.split()]
            for places_woken in self.places_woken:
                places_woken(tenant_ids)
        elif channel == ATTEMPTS_CHANNEL:
            # Too many for one hint: their workers hear it with their next heartbeats.
            affected = [Affected.of(part) for part in payload.split()]
            for attempts_woken in self.attempts_woken:
                attempts_woken(affected)
