"""The scheduler's loop: fires what is due in the owned partitions, then sleeps until the next.

One statement locks, advances and inserts; Python only computes next fires, once per
distinct (schedule, instant), and hands rows that need thought to `settle`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

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
from fencepost_server.engine.governor import PARKED_MAX, Outages
from fencepost_server.engine.next_fires import NextFires
from fencepost_server.engine.settle import settle
from fencepost_server.engine.tzdata import TzdataFollower
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import StorageUnavailable
from fencepost_server.policy.zone_source import ZoneSource, pinned
from fencepost_server.store.database import ConflictError, Database, Row
from fencepost_server.store.statements import load

_SQL = load("firing")
_log = structlog.get_logger("firing")

# From this many due partitions on, statements go side by side from the start.
_SLICE_MIN = 64
_SETTLE_BATCH = 200
# The bound of due scans trails the last complete pass by this much, because a creation may
# commit late; a pass without the bound runs every minute.
_BOUND_LAG: Duration = 30 * SECOND
_UNBOUNDED_EVERY: Duration = MINUTE


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
        self._next_fires = NextFires(database=database, zones=self._zones)
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
        await self._next_fires.learn_expected()
        now = self._clock.now()
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
        """Fires everything due in these partitions; returns the fires decided.

        A statement takes a few rows of each of many partitions: what was made together lies
        together, so that it writes each page once, and not once per partition.
        """
        side_by_side = min(self._concurrency, -(-len(due) // _SLICE_MIN))
        count = max(side_by_side, -(-len(due) // self._batch_max))
        slices = deque(due[place::count] for place in range(count))
        fired = 0
        working = 0

        async def work() -> None:
            nonlocal fired, working
            working += 1
            while slices:
                part = slices.popleft()
                each_max = max(1, self._batch_max // len(part))
                decided, again, is_stuck = await self._fire_batch(part, each_max)
                fired += decided
                if is_stuck and len(part) > 1:
                    # What cannot be decided fills the few places of each: alone it has more.
                    slices.extend([partition] for partition in again)
                elif (
                    working < self._concurrency
                    and len(again) > 1
                    and 2 * decided >= self._batch_max
                ):
                    slices.extend([again[::2], again[1::2]])
                elif again:
                    slices.append(again)
                if working < self._concurrency and len(slices) > 1:
                    group.create_task(work())
            working -= 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(side_by_side):
                    group.create_task(work())
        except ExceptionGroup as errors:
            away, others = errors.split(StorageUnavailable)
            if away is not None and others is None:
                raise StorageUnavailable from away
            raise
        return fired

    async def _fire_batch(
        self, partitions: Sequence[int], batch_max: int
    ) -> tuple[int, list[int], bool]:
        """One statement over up to `batch_max` rows of each partition, and what has to be done
        for those that it could not fire.

        Returns the fires decided, the partitions that may have more, and whether most rows
        could not be decided.
        """
        now = self._clock.now()
        try:
            row = await self._fire_statement(partitions, batch_max, now)
        except ConflictError as error:
            taken = await self._taken(partitions, batch_max, now)
            _log.warning("run_keys_taken", jobs=taken, error=str(error))
            if taken:
                settled = await self._settle(taken)
                return settled, list(partitions) if settled else [], False
            # Whoever held the key is gone.
            row = await self._fire_statement(partitions, batch_max, now)
        decided: int = row["fired"]
        if row["lanes"]:
            self._wake.lanes(Lane(*lane) for lane in row["lanes"])
        learned = False
        if row["unknown_schedules"]:
            learned = await self._next_fires.learn(
                set(zip(row["unknown_schedules"], row["unknown_instants"], strict=True))
            )
        self._next_fires.expect(
            zip(row["upcoming_schedules"], row["upcoming_instants"], strict=True)
        )
        if row["thoughtful"]:
            decided += await self._settle([str(job_id) for job_id in row["thoughtful"]])
        if learned:
            return decided, list(partitions), False
        full = sorted(row["full_partitions"])
        is_stuck = 2 * decided < row["locked"]
        # Where nothing moved, trying again at once would spin.
        if is_stuck and not decided and len(partitions) == 1:
            full = []
        return decided, full, is_stuck

    async def _fire_statement(self, partitions: Sequence[int], batch_max: int, now: Instant) -> Row:
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
        assert row is not None, "fire_due always answers one row"
        return row

    async def _taken(self, partitions: Sequence[int], batch_max: int, now: Instant) -> list[str]:
        rows = await self._database.hot.fetch(
            _SQL["taken_keys"],
            partitions=partitions,
            after=self._bound,
            now=now,
            batch_max=batch_max,
            withheld=self._withheld,
        )
        return [str(row["job_id"]) for row in rows]

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

    async def forget_old_fires(self) -> None:
        """Keep the memo small: entries of instants long fired."""
        await self._next_fires.forget(self._clock.now() - DAY)
