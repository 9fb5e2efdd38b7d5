"""What must hold of one job's runs after every statement, whoever ran it, and in the end."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from fencepost_server.clock import MINUTE, Instant
from fencepost_server.domain.job import partition_of
from fencepost_server.domain.schedule import OverlapPolicy

from tests.integration.world import World

_WHERE_RUNS_ARE = """
    SELECT (extract(epoch FROM r.scheduled_at) * 1000000)::bigint AS at, r.*
    FROM (
        SELECT scheduled_at, state::text, attempt, origin::text, cancel_requested
        FROM fencepost.run_queue
        UNION ALL
        SELECT scheduled_at, state::text, attempt, origin::text, false FROM fencepost.job_runs
        WHERE scheduled_at >= '2026-12-01' AND scheduled_at < '2026-12-02'
        UNION ALL
        SELECT scheduled_at, state::text, attempt, origin::text, false
        FROM fencepost.job_runs_stray
        UNION ALL
        SELECT scheduled_at, state::text, attempt, origin::text, false FROM fencepost.dead_letters
    ) AS r
    ORDER BY r.scheduled_at
"""
_SKIPS = """
    SELECT (extract(epoch FROM first_at) * 1000000)::bigint AS first,
           (extract(epoch FROM last_at) * 1000000)::bigint AS last
    FROM fencepost.fire_skips
"""
_DECIDED_UNTIL = """
    SELECT (extract(epoch FROM last_scheduled_at) * 1000000)::bigint
    FROM fencepost.job_schedules
"""
PARTITION = partition_of(tenant="default", job_name="report")
_ENDED = frozenset({"succeeded", "dead", "cancelled", "skipped"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """A run as it is committed; `at` is its scheduled_at."""

    at: Instant
    state: str
    attempt: int
    origin: str
    cancel_requested: bool

    @property
    def is_live(self) -> bool:
        return self.state not in _ENDED

    @property
    def is_unblocked(self) -> bool:
        return self.is_live and self.state != "blocked"


@dataclass(slots=True, kw_only=True)
class Invariants:
    """Watches the only job of a world; its fires are a minute apart, the first at `first`."""

    world: World
    policy: OverlapPolicy
    first: Instant
    _before: dict[Instant, SeenRun] = field(default_factory=dict)

    def forget(self) -> None:
        """A new order begins."""
        self._before = {}

    async def runs(self) -> list[SeenRun]:
        """All runs of the job, wherever they are, oldest first."""
        return [
            SeenRun(
                at=row["at"],
                state=row["state"],
                attempt=row["attempt"],
                origin=row["origin"],
                cancel_requested=row["cancel_requested"],
            )
            for row in await self.world.query(_WHERE_RUNS_ARE)
        ]

    async def check(self) -> list[SeenRun]:
        """What holds after every statement; the runs."""
        runs = await self.runs()
        keys = [run.at for run in runs]
        assert len(keys) == len(set(keys)), f"a run is in two places: {runs}"
        for run in runs:
            before = self._before.get(run.at, run)
            assert run.attempt >= before.attempt, f"an attempt fell: {before}, {run}"
            assert before.is_live or run == before, f"an ended run changed: {before}, {run}"
        lost = self._before.keys() - set(keys)
        assert not lost, f"runs are gone: {sorted(lost)}"
        self._before = {run.at: run for run in runs}
        self._check_overlap([run for run in runs if run.origin != "enqueue" and run.is_live])
        return runs

    def _check_overlap(self, fired: list[SeenRun]) -> None:
        """`fired` are the live runs that fires made."""
        if self.policy is OverlapPolicy.ALLOW:
            assert all(run.is_unblocked for run in fired), fired
            return
        unblocked = [run for run in fired if run.is_unblocked]
        assert len(unblocked) <= 1, f"runs overlap: {unblocked}"
        waiting = len(fired) - len(unblocked)
        if self.policy is OverlapPolicy.SKIP:
            assert not waiting, f"a run waits: {fired}"
        if self.policy is OverlapPolicy.QUEUE_ONE:
            assert waiting <= 1, f"more than one run waits: {fired}"
        if self.policy is OverlapPolicy.CANCEL_PREVIOUS and fired:
            stopping = all(run.cancel_requested for run in fired[:-1])
            assert stopping, f"an earlier run was not cancelled: {fired}"

    async def check_end(self) -> None:
        """What holds when the loops have gone on: nobody waits for nothing, and every fire
        that was decided, and while the job is active all that are due, has one answer."""
        # The only job's partition: looking for due ones in all of them takes longer.
        while await self.world.scheduler._fire([PARTITION]):
            pass
        await self.world.promoter.sweep()
        runs = await self.check()
        due = [run for run in runs if run.is_live and run.at <= self.world.now]
        assert not due or any(run.is_unblocked for run in due), f"left behind: {due}"
        until: Instant | None = await self.world.value(_DECIDED_UNTIL)
        if not await self.world.value("SELECT paused FROM fencepost.job_schedules"):
            until = self.world.now
        if await self.world.value("SELECT deleted_at IS NOT NULL FROM fencepost.jobs"):
            fired = [run for run in due if run.origin != "enqueue"]
            assert all(run.cancel_requested for run in fired), f"outlive their job: {fired}"
        nominal = [] if until is None else list(range(self.first, until + 1, MINUTE))
        made = [run.at for run in runs if run.origin != "enqueue"]
        skipped = await self._skipped()
        assert sorted([*made, *skipped]) == nominal, f"made {made}, skipped {skipped}"

    async def _skipped(self) -> Iterable[Instant]:
        stretches = await self.world.query(_SKIPS)
        return [at for s in stretches for at in range(s["first"], s["last"] + 1, MINUTE)]
