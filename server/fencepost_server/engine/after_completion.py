"""Next fires of intervals that count from the end of a run: they are set once it has ended.

That a job waits for an end is stored, so nothing is lost with a process: the end of such a run
gives a hint, and a sweep looks at whoever still waits.
"""

from collections.abc import Sequence

from fencepost_server.clock import Clock, Instant
from fencepost_server.domain.job import LAST_INSTANT, JobSpec
from fencepost_server.engine.wake import Wake
from fencepost_server.policy.schedule import after_completion
from fencepost_server.store.database import Connection, Database
from fencepost_server.store.statements import load

_SQL, _SETTLE = load("completion"), load("settle")

_BATCH = 500
# Jobs that one sweep looks at; the next one goes on behind them.
_SWEEP_MAX = 10_000
_FIRST_ID = "00000000-0000-0000-0000-000000000000"


class CompletionFollower:
    """Called by the promoter, for hints and for sweeps."""

    def __init__(self, *, database: Database, clock: Clock, wake: Wake) -> None:
        self._database = database
        self._clock = clock
        self._wake = wake
        self._after = _FIRST_ID

    async def sweep(self) -> int:
        """Look at jobs that wait for an end; the number whose next fire was set."""
        found = 0
        for _ in range(_SWEEP_MAX // _BATCH):
            rows = await self._database.hot.fetch(
                _SQL["jobs_awaiting_ends"], after=self._after, jobs_max=_BATCH
            )
            ready = [str(row["job_id"]) for row in rows if not row["is_live"]]
            if ready:
                found += await self.follow(ready)
            if len(rows) < _BATCH:
                self._after = _FIRST_ID
                break
            self._after = str(rows[-1]["job_id"])
        return found

    async def follow(self, job_ids: Sequence[str]) -> int:
        """Set the next fires of those of these jobs whose awaited run has ended."""
        async with self._database.hot.transaction() as connection:
            locked = await connection.fetch(
                _SETTLE["lock_free_schedules"], job_ids=sorted(set(job_ids))
            )
            rows = {str(row["job_id"]): row for row in locked if row["awaits_end"]}
            ends = await read_ends(
                connection, {job: row["last_scheduled_at"] for job, row in rows.items()}
            )
            nexts: dict[str, Instant | None] = {}
            for job_id, ended_at in ends.items():
                schedule = JobSpec.from_json(rows[job_id]["spec"]).schedule
                assert schedule is not None, "a job that waits for an end has a schedule"
                found = after_completion(schedule, counted_from=ended_at, after=ended_at)
                nexts[job_id] = None if found is None or found > LAST_INSTANT else found
            if nexts:
                await connection.execute(
                    _SQL["follow_ends"],
                    job_ids=sorted(nexts),
                    next_run_ats=[nexts[job] for job in sorted(nexts)],
                )
        if nexts:
            self._wake.jobs({rows[job]["partition_id"] for job in nexts})
        return len(nexts)


async def read_ends(connection: Connection, fires: dict[str, Instant]) -> dict[str, Instant]:
    """When the runs of these fires of locked jobs ended, read in a statement after the locks.

    Jobs whose run is live are left out; a fire without a run, or whose run nobody remembers,
    counts as its own end.
    """
    if not fires:
        return {}
    rows = await connection.fetch(
        _SQL["read_ends"], job_ids=list(fires), scheduled_ats=list(fires.values())
    )
    return {
        str(row["job_id"]): max(row["ended_at"] or row["scheduled_at"], row["scheduled_at"])
        for row in rows
        if not row["is_live"]
    }
