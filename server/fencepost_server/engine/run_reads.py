"""Reads of runs: one, a page, its attempts, or one until it has ended. Changes nothing,
except `cancel`, which asks a run to stop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fencepost_server.clock import DAY, MILLISECOND, SECOND, Duration, Instant, monotonic
from fencepost_server.domain.names import JobName, RunName
from fencepost_server.domain.run import AttemptOutcome, RunKey, RunState
from fencepost_server.engine.cancel import cancel_run
from fencepost_server.engine.end_waits import EndWaits
from fencepost_server.engine.job_access import job_not_found
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import RunNotFound
from fencepost_server.store import run_lists
from fencepost_server.store import runs as store
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.runs import AttemptRecord, RunQuery, RunRecord

# How long one page of a list is looked for; then it ends where it has looked.
LIST_TIME_MAX: Duration = 100 * MILLISECOND
# How far back a list looks into history when its filter does not say.
HISTORY_LOOK: Duration = 7 * DAY
_WAIT_FIRST: Duration = 50 * MILLISECOND
_WAIT_MAX: Duration = 500 * MILLISECOND
_ATTEMPT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """Runs newest first, where the next page begins, and since when history was looked at
    (None: everything kept was)."""

    runs: Sequence[RunRecord]
    after: RunKey | None
    searched_since: Instant | None


class RunReads:
    """What the reading half of RunService asks."""

    def __init__(
        self,
        *,
        database: Database,
        catalogue: Catalogue,
        wake: Wake,
        waits: EndWaits | None = None,
    ) -> None:
        """`waits` hears of ends that this process commits; without it waiting only looks."""
        self._database = database
        self._catalogue = catalogue
        self._wake = wake
        self._waits = EndWaits() if waits is None else waits

    def now(self) -> Instant:
        """The database clock's instant."""
        return self._database.clock.now()

    async def get(self, name: RunName, *, full: bool) -> RunRecord:
        """A run in any state. Raises TenantNotFound or RunNotFound."""
        key = await self.key_of(name)
        return await self._read(name, key, full=full)

    async def key_of(self, name: RunName) -> RunKey:
        """The run key that a name stands for, whether or not there is such a run.

        Raises TenantNotFound, or RunNotFound when there is no such job.
        """
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        async with self._database.requests.connection() as connection:
            job_id = await store.find_job(connection, tenant_id, name)
        if job_id is None:
            raise run_not_found(name)
        return RunKey(job_id, name.scheduled_at)

    async def list(
        self,
        parent: JobName,
        query: RunQuery,
        *,
        after: RunKey | None,
        searched_since: Instant | None,
        page_size: int,
        full: bool,
    ) -> ListPage:
        """One page; `after` and `searched_since` are those of the page before.

        `parent` without a job: all of the tenant's. Raises TenantNotFound, or JobNotFound if it
        is the parent that does not exist; a job of the filter need not.
        """
        tenant_id = await self._catalogue.tenant_id(parent.tenant)
        job_id = None
        if query.job is not None:
            name = RunName(tenant=parent.tenant, job=query.job, scheduled_at=0)
            async with self._database.requests.connection() as connection:
                job_id = await store.find_job(connection, tenant_id, name)
            if job_id is None and parent.job:
                raise job_not_found(parent)
            if job_id is None:
                # Deleted jobs may have had the name.
                query = query.of_jobs_once_named(query.job)
        if after is None and query.scheduled_from is None and query.wants_history:
            searched_since = self._look_from(query)
        history_from = store.EVER if query.scheduled_from is None else query.scheduled_from
        async with self._database.requests.transaction() as connection:
            page = await run_lists.page(
                connection,
                query,
                tenant_id=tenant_id,
                job_id=job_id,
                after=after,
                history_from=history_from if searched_since is None else searched_since,
                now=self.now(),
                page_size=page_size,
                time_max=LIST_TIME_MAX,
            )
            # In the same snapshot, so that what is shown is what matched.
            found = await store.read(connection, page.keys, full=full)
        return ListPage(
            runs=[found[key] for key in page.keys if key in found],
            after=page.after,
            searched_since=searched_since,
        )

    def _look_from(self, query: RunQuery) -> Instant:
        now = self.now()
        newest = now if query.scheduled_before is None else min(now, query.scheduled_before)
        # Whole seconds, so that what is told is what was done.
        return (newest - HISTORY_LOOK) // SECOND * SECOND

    async def attempts(
        self, name: RunName, *, before: int | None, page_size: int
    ) -> tuple[RunKey, Sequence[AttemptRecord], int | None]:
        """The run's key with a page of attempts, newest first, and the number before which
        the next page begins.

        Raises TenantNotFound or RunNotFound.
        """
        run = await self.get(name, full=False)
        async with self._database.requests.connection() as connection:
            recorded = await store.attempts(
                connection, run, before=before or _ATTEMPT_MAX, limit=page_size + 1
            )
        if before is None:
            newest = _newest_attempt(run)
            if newest is not None and all(each.attempt < newest.attempt for each in recorded):
                recorded.insert(0, newest)
        if len(recorded) > page_size:
            return run.key, recorded[:page_size], recorded[page_size - 1].attempt
        return run.key, recorded, None

    async def wait(
        self, name: RunName, *, wait: Duration, full: bool, leaving: asyncio.Event
    ) -> RunRecord:
        """The run once it has ended, or as it is after `wait`, or when the server leaves.

        Looks at once when this process has changed the run, and again and again, less often as
        time passes, for what other servers do; holds no connection meanwhile.
        Raises TenantNotFound or RunNotFound.
        """
        until = monotonic() + wait
        key = await self.key_of(name)
        woken = asyncio.Event()
        with self._waits.waiting(key, woken):
            run = await self._read(name, key, full=full)
            state: RunState | None = run.state if run.state.is_live else None
            pause = _WAIT_FIRST
            looked = False
            while state is not None and not leaving.is_set() and monotonic() < until:
                try:
                    async with asyncio.timeout(min(pause, until - monotonic()) / SECOND):
                        await woken.wait()
                except TimeoutError:
                    pause = min(2 * pause, _WAIT_MAX)
                woken.clear()
                async with self._database.requests.connection() as connection:
                    state = await store.live_state(connection, key)
                looked = True
        return await self._read(name, key, full=full) if looked else run

    def wake_waiting(self) -> None:
        """All who wait look once more: the process leaves."""
        self._waits.wake_all()

    async def cancel(
        self, name: RunName, *, reason: str, grace: Duration | None, now: Instant
    ) -> RunRecord:
        """Asks a run to stop; one that has ended stays as it is.

        `grace` None: the run's own. Raises TenantNotFound or RunNotFound.
        """
        key = await self.key_of(name)
        async with self._database.requests.transaction() as connection:
            effects = await cancel_run(connection, key=key, reason=reason, grace=grace, now=now)
        if effects is not None:
            self._wake.ends(effects.serial_jobs)
            self._wake.attempts(effects.affected)
            self._waits.ended([key])
        return await self._read(name, key, full=True)

    async def _read(self, name: RunName, key: RunKey, *, full: bool) -> RunRecord:
        async with self._database.requests.connection() as connection:
            found = await store.read(connection, [key], full=full)
        if key not in found:
            raise run_not_found(name)
        return found[key]


def run_not_found(name: RunName) -> RunNotFound:
    """The one text for a run that this caller cannot see."""
    return RunNotFound(f"{name} does not exist", resource=str(name), name=str(name))


def _newest_attempt(run: RunRecord) -> AttemptRecord | None:
    """The attempt that has no record of its own: still open, or a success at the first try."""
    if run.attempt == 0:
        return None
    if run.attempt_open:
        outcome = None
    elif run.state is RunState.SUCCEEDED:
        outcome = AttemptOutcome.SUCCEEDED
    else:
        return None
    return AttemptRecord(
        attempt=run.attempt,
        worker_id=run.worker_id,
        outcome=outcome,
        claimed_at=run.claimed_at,
        ended_at=run.ended_at,
        timings=run.timings,
    )
