"""The scheduler's loop: fires what is due in the owned partitions, then sleeps until the next.

One statement locks, advances and inserts; Python only computes next fires, once per
distinct (schedule, instant), and hands rows that need thought to `settle`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import structlog

from fencepost_server.clock import (
    DAY,
    MILLISECOND,
    MINUTE,
    SECOND,
    Clock,
    Duration,
    Instant,
    monotonic,
)
from fencepost_server.cluster.ownership import Ownership
from fencepost_server.domain.run import Lane
from fencepost_server.domain.schedule import CronSpec, spec_from_json
from fencepost_server.engine.governor import PARKED_MAX, Outages
from fencepost_server.engine.settle import settle
from fencepost_server.engine.tzdata import TzdataFollower
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import FencepostError, StorageUnavailable
from fencepost_server.policy.cron import CronRule, compile_cron
from fencepost_server.policy.zone_source import ZoneSource, pinned
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

_SQL = load("firing")
_log = structlog.get_logger("firing")

# A pass over many partitions takes few rows of each; a full one gets its own statements.
_SHARED_BATCH = 64
_SETTLE_BATCH = 200
# The bound of due scans trails the last complete pass by this much, because a creation may
# commit late; a pass without the bound runs every minute.
_BOUND_LAG: Duration = 30 * SECOND
_UNBOUNDED_EVERY: Duration = MINUTE
_RULES_MAX = 50_000


class Scheduler:
    """Fires the partitions this process owns. Run `run` until it is cancelled."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        ownership: Ownership,
        wake: Wake,
        batch_max: int,
        concurrency: int,
        parks: bool = False,
        zones: ZoneSource | None = None,
    ) -> None:
        """`batch_max` jobs per transaction, `concurrency` transactions side by side.

        `parks`: what fell due in an outage waits for the governor. `zones` is other zone data
        than the pinned one.
        """
        self._database = database
        self._clock = clock
        self._ownership = ownership
        self._wake = wake
        self._batch_max = batch_max
        self._concurrency = concurrency
        self._outages = Outages(database=database) if parks else None
        self._woken = asyncio.Event()
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True
        self._zones = zones if zones is not None else pinned()
        self._tzdata = TzdataFollower(database, clock, self._zones)
        self._rules: dict[int, CronRule] = {}
        # Rules whose zone another server knows newer data of.
        self._withheld: list[int] = []
        self._bound: Instant = 0
        self._unbounded_at: Instant | None = None

    def wake(self) -> None:
        """Something may be due earlier than known."""
        self._woken.set()

    async def run(self, *, poll: Duration, contended: Duration) -> None:
        """Fire until cancelled. `poll` is the longest sleep, `contended` the one after a pass
        that found due jobs and could lock none."""
        while True:
            try:
                pause = await self._pass(poll, contended)
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
                pause = SECOND
            if pause > 0:
                await self._sleep(pause)

    async def prepare(self) -> None:
        """Agree with other servers on time zone data, before the first fire and every minute."""
        self._withheld = await self._tzdata.follow()

    async def fire_due(self) -> int:
        """One pass over everything that is due now; the number of runs made."""
        now = self._clock.now()
        await self._parked_before(now)
        due = await self._due_partitions(now)
        return await self._fire(sorted(due)) if due else 0

    async def _pass(self, poll: Duration, contended: Duration) -> Duration:
        """One look and what it finds; returns how long to sleep."""
        self._woken.clear()
        if not self.is_trusted():
            return poll
        partitions = sorted(self._ownership.partitions())
        if not partitions:
            return poll
        # The first pass is one too.
        if self._unbounded_at is None or monotonic() - self._unbounded_at >= _UNBOUNDED_EVERY:
            await self.prepare()
            self._bound = 0
            self._unbounded_at = monotonic()
        now = self._clock.now()
        await self._parked_before(now)
        earliest = await self._earliest(partitions)
        due = [partition for partition, at in earliest.items() if at <= now]
        if due:
            fired = await self._fire(due)
            return 0 if fired else contended
        self._bound = max(self._bound, now - _BOUND_LAG)
        following = min(earliest.values(), default=now + poll)
        # One millisecond of grace, so that the statement's now is not a hair before the fire.
        return max(MILLISECOND, min(poll, following - now + MILLISECOND))

    async def _sleep(self, pause: Duration) -> None:
        try:
            async with asyncio.timeout(pause / SECOND):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def _earliest(self, partitions: Sequence[int]) -> Mapping[int, Instant]:
        rows = await self._database.hot.fetch(
            _SQL["next_due"], partitions=partitions, after=self._bound, withheld=self._withheld
        )
        return {row["partition_id"]: row["next_run_at"] for row in rows}

    async def _due_partitions(self, now: Instant) -> Collection[int]:
        earliest = await self._earliest(sorted(self._ownership.partitions()))
        return [partition for partition, at in earliest.items() if at <= now]

    async def _fire(self, due: Sequence[int]) -> int:
        """Fires everything due in these partitions: a shared batch first, then what is full."""
        fired, full = await self._fire_batch(due, _SHARED_BATCH)
        pending = deque(full)
        counts = [0] * self._concurrency

        async def work(place: int) -> None:
            while pending:
                partition = pending.popleft()
                made, still_full = await self._fire_batch([partition], self._batch_max)
                counts[place] += made
                pending.extend(still_full)

        try:
            async with asyncio.TaskGroup() as group:
                for place in range(min(self._concurrency, len(pending))):
                    group.create_task(work(place))
        except ExceptionGroup as errors:
            away, others = errors.split(StorageUnavailable)
            if away is not None and others is None:
                raise StorageUnavailable from away
            raise
        return fired + sum(counts)

    async def _fire_batch(self, partitions: Sequence[int], batch_max: int) -> tuple[int, list[int]]:
        """One statement, and another when next fires had to be computed first.

        Returns the fires decided and the partitions that may have more.
        """
        now = self._clock.now()
        row = await self._database.hot.fetch_one(
            _SQL["fire_due"],
            partitions=partitions,
            after=self._bound,
            now=now,
            batch_max=batch_max,
            tzdata=self._zones.version,
            withheld=self._withheld,
            parked_before=await self._parked_before(now),
            parked_until=now + PARKED_MAX,
        )
        assert row is not None
        decided: int = row["fired"]
        if row["lanes"]:
            self._wake.lanes(Lane(*lane) for lane in row["lanes"])
        learned = False
        if row["unknown_schedules"]:
            learned = await self._remember(row["unknown_schedules"], row["unknown_instants"])
        if row["thoughtful"]:
            decided += await self._settle([str(job_id) for job_id in row["thoughtful"]])
        again = set(row["full_partitions"])
        if learned:
            again.update(partitions)
        # Where nothing moved, trying again at once would spin.
        return decided, sorted(again) if decided or learned else []

    async def _settle(self, job_ids: Sequence[str]) -> int:
        """Decides these jobs in batches; one that cannot be decided does not hold up others."""
        decided = 0
        batches = deque(
            job_ids[start : start + _SETTLE_BATCH]
            for start in range(0, len(job_ids), _SETTLE_BATCH)
        )
        while batches:
            batch = batches.popleft()
            try:
                decided += await self._settle_batch(batch)
            except StorageUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - logged; the rest must go on
                if len(batch) == 1:
                    _log.exception("job_not_settled", job_id=batch[0], error=repr(error))
                else:
                    middle = len(batch) // 2
                    batches.extendleft([batch[middle:], batch[:middle]])
        return decided

    async def _settle_batch(self, job_ids: Sequence[str]) -> int:
        now = self._clock.now()
        parked_before = await self._parked_before(now)
        async with self._database.requests.transaction() as connection:
            settled = await settle(
                connection, job_ids=job_ids, now=now, wait=False, parked_before=parked_before
            )
        settled.announce(self._wake)
        return len(settled.locked)

    async def _parked_before(self, now: Instant) -> Instant:
        """Fires due before this are parked; asking says that this process fires."""
        return 0 if self._outages is None else await self._outages.parked_before(now)

    async def _remember(self, schedules: Sequence[int], instants: Sequence[Instant]) -> bool:
        """Computes next fires and puts them into the memo that the statement joins."""
        rules = await self._load_rules(schedules)
        pairs = [(s, at) for s, at in zip(schedules, instants, strict=True) if s in rules]
        await self._database.hot.execute(
            _SQL["remember_fires"],
            schedule_ids=[schedule for schedule, _ in pairs],
            scheduled_ats=[at for _, at in pairs],
            next_ats=[rules[schedule].next_after(at) for schedule, at in pairs],
            tzdata=self._zones.version,
        )
        return bool(pairs)

    async def _load_rules(self, schedules: Iterable[int]) -> Mapping[int, CronRule]:
        missing = {schedule for schedule in schedules if schedule not in self._rules}
        if missing:
            if len(self._rules) + len(missing) > _RULES_MAX:
                self._rules.clear()
            rows = await self._database.requests.fetch(
                _SQL["schedule_rules"], schedule_ids=sorted(missing | set(schedules))
            )
            for row in rows:
                try:
                    spec = spec_from_json(row["rule"])
                    assert isinstance(spec, CronSpec), "only cron rules are interned"
                    rule = compile_cron(spec, zones=self._zones)
                except (FencepostError, KeyError, ValueError) as error:
                    # Its jobs stay due; those of other rules must fire.
                    _log.error("rule_refused", schedule_id=row["schedule_id"], error=repr(error))
                    continue
                self._rules[row["schedule_id"]] = rule
        return self._rules

    async def forget_old_fires(self) -> None:
        """Keep the memo small: entries of instants long fired."""
        await self._database.requests.execute(_SQL["forget_fires"], before=self._clock.now() - DAY)
