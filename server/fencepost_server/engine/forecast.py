"""How many fires every minute ahead will bring, per distinct time rule and not per job.

The answer is kept for ten minutes; where jobs are many, they are counted beforehand. Working it
out gives way to other work of the loop again and again, and stops at a number of steps: a
forecast must not hold up a fire.
"""

import asyncio
import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from fencepost_server.clock import HOUR, MINUTE, SECOND, Clock, Duration, Instant
from fencepost_server.domain.schedule import CronSpec, spec_from_json
from fencepost_server.engine.forecast_count import COUNT_AGE_MAX, JOBS_LIVE_MAX
from fencepost_server.errors import ServerOverloaded
from fencepost_server.policy.cron import CronRule, compile_cron
from fencepost_server.policy.forecast import FireGroup, fires_by_minute
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

_SQL = load("forecast")

KEPT: Duration = 10 * MINUTE
PEAKS_MAX = 10
SHARES_MAX = 5
GROUPS_MAX = 200_000
STEPS_MAX = 3_000_000
_ANSWERS_MAX = 64
_RULES_BATCH = 1000
_STEPS_AT_ONCE = 500
# Computed beyond what was asked for, so that the answer still serves while it is kept.
_SPARE_MINUTES = KEPT // MINUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rule adds to a minute."""

    rule: str
    jobs: int
    fires: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A busy minute; shares largest first, at most SHARES_MAX."""

    minute_at: Instant
    fires: int
    shares: Sequence[Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Fires of each minute from `start_at`; at most PEAKS_MAX peaks, busiest first."""

    start_at: Instant
    fires_per_minute: Sequence[int]
    peaks: Sequence[Peak]
    computed_at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """An answer, or why there is none (it took as much work), and since when it is kept."""

    since: Instant
    answer: Forecast | None
    refusal: str = ""


class Forecasts:
    """Answers from the stored jobs; one is computed at a time."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        steps_max: int = STEPS_MAX,
        jobs_live_max: int = JOBS_LIVE_MAX,
    ) -> None:
        self._pool = database.requests
        self._clock = clock
        self._steps_max = steps_max
        self._jobs_live_max = jobs_live_max
        self._lock = asyncio.Lock()
        self._kept: OrderedDict[tuple[int | None, int], _Kept] = OrderedDict()

    async def get(self, *, tenant_id: int | None, hours: int) -> Forecast:
        """The next `hours` of one tenant, or of all with None.

        At most ten minutes old, and of many jobs as old as their last count besides. Raises
        ServerOverloaded when the rules are too many to count, or jobs are not counted yet.
        """
        key = (tenant_id, hours)
        async with self._lock:
            now = self._clock.now()
            kept = self._kept.get(key)
            if kept is None or not 0 <= now - kept.since <= KEPT:
                try:
                    kept = _Kept(since=now, answer=await self._compute(tenant_id, hours, now))
                except _TooMuch as error:
                    kept = _Kept(since=now, answer=None, refusal=error.message)
                self._kept[key] = kept
                while len(self._kept) > _ANSWERS_MAX:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        if kept.answer is None:
            raise ServerOverloaded(kept.refusal)
        return _cut(kept.answer, now=now, hours=hours)

    async def _compute(self, tenant_id: int | None, hours: int, now: Instant) -> Forecast:
        count_id, counted_at = await self._last_count(now)
        start = counted_at // MINUTE * MINUTE
        # What will be cut off: up to now, and up to when the answer is served last.
        spare = (now - start) // MINUTE + _SPARE_MINUTES
        minutes = hours * HOUR // MINUTE + spare
        until = start + minutes * MINUTE
        groups = await self._groups(tenant_id, count_id, start, until)
        steps = _Steps(limit=self._steps_max)
        fires = [0] * minutes
        for group in groups:
            for minute, count in fires_by_minute(group, start, until):
                fires[minute] += count * group.jobs
                await steps.taken()
        busiest = heapq.nsmallest(
            # The spare minutes may be among the busiest.
            PEAKS_MAX + spare,
            (minute for minute in range(minutes) if fires[minute]),
            key=lambda minute: (-fires[minute], minute),
        )
        shares = {minute: _Shares() for minute in busiest}
        # Only now is it known of which minutes the rules matter, so it is counted again.
        for group in groups:
            for minute, count in fires_by_minute(group, start, until):
                if count and minute in shares:
                    shares[minute].add(group, count)
                await steps.taken()
        peaks = [
            Peak(
                minute_at=start + minute * MINUTE,
                fires=fires[minute],
                shares=shares[minute].largest(),
            )
            for minute in busiest
        ]
        return Forecast(start_at=start, fires_per_minute=fires, peaks=peaks, computed_at=counted_at)

    async def _last_count(self, now: Instant) -> tuple[int | None, Instant]:
        """The count to use and when it was made; None: jobs are few enough to be counted now."""
        row = await self._pool.fetch_one(_SQL["jobs_estimated"])
        if row is None or row["jobs"] <= self._jobs_live_max:
            return None, now
        row = await self._pool.fetch_one(_SQL["last_count"])
        if row is None or row["counted_at"] is None or now - row["counted_at"] > COUNT_AGE_MAX:
            raise ServerOverloaded(
                "forecast: so many jobs are counted beforehand by a server with the role "
                "scheduler, and that is not done yet; try again in a minute"
            )
        return row["count_id"], row["counted_at"]

    async def _groups(
        self, tenant_id: int | None, count_id: int | None, start: Instant, until: Instant
    ) -> Sequence[FireGroup]:
        async with self._pool.transaction() as connection:
            await connection.execute(_SQL["memory_for_groups"])
            if count_id is None:
                rows = await connection.fetch(
                    _SQL["fire_groups"],
                    tenant_id=tenant_id,
                    start_at=start,
                    until_at=until,
                    groups_max=GROUPS_MAX + 1,
                )
            else:
                rows = await connection.fetch(
                    _SQL["counted_groups"],
                    tenant_id=tenant_id,
                    count_id=count_id,
                    until_at=until,
                    groups_max=GROUPS_MAX + 1,
                )
        if len(rows) > GROUPS_MAX:
            raise _too_much(f"more than {GROUPS_MAX} groups of jobs that fire alike")
        rules = await self._rules({row["schedule_id"] for row in rows} - {None})
        return [
            FireGroup(
                jobs=row["jobs"],
                first_at=row["first_at"],
                rule=None if row["schedule_id"] is None else rules[row["schedule_id"]],
                every=None if row["every_s"] is None else row["every_s"] * SECOND,
                end_at=row["end_at"],
                fires_left=row["fires_left"],
            )
            for row in rows
        ]

    async def _rules(self, schedule_ids: Iterable[int]) -> dict[int, CronRule]:
        rules: dict[int, CronRule] = {}
        ids = iter(sorted(schedule_ids))
        while batch := list(islice(ids, _RULES_BATCH)):
            for row in await self._pool.fetch(_SQL["rules"], schedule_ids=batch):
                spec = spec_from_json(row["rule"])
                assert isinstance(spec, CronSpec), "only cron rules are interned"
                rules[row["schedule_id"]] = compile_cron(spec)
        return rules


class _Steps:
    """Counts work: gives way every so often, and ends what is too much."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._count = 0

    async def taken(self) -> None:
        """One more step. Raises ServerOverloaded beyond the limit."""
        self._count += 1
        if self._count % _STEPS_AT_ONCE == 0:
            await asyncio.sleep(0)
        if self._count > self._limit:
            raise _too_much(f"more than {self._limit} fires of different rules to count")


class _Shares:
    """Adds up what the rules bring to one minute."""

    def __init__(self) -> None:
        self._fires: Counter[str] = Counter()
        self._jobs: Counter[str] = Counter()
        # A group may bring several fires to a minute, one after the other.
        self._last: FireGroup | None = None

    def add(self, group: FireGroup, count: int) -> None:
        self._fires[group.text] += count * group.jobs
        if group is not self._last:
            self._jobs[group.text] += group.jobs
            self._last = group

    def largest(self) -> list[Share]:
        best = heapq.nsmallest(SHARES_MAX, self._fires, key=lambda rule: (-self._fires[rule], rule))
        return [Share(rule=rule, jobs=self._jobs[rule], fires=self._fires[rule]) for rule in best]


def _cut(kept: Forecast, *, now: Instant, hours: int) -> Forecast:
    """The part of a kept answer that begins with the minute of `now`."""
    start = now // MINUTE * MINUTE
    passed = (start - kept.start_at) // MINUTE
    minutes = hours * HOUR // MINUTE
    until = start + minutes * MINUTE
    return Forecast(
        start_at=start,
        fires_per_minute=kept.fires_per_minute[passed : passed + minutes],
        peaks=[peak for peak in kept.peaks if start <= peak.minute_at < until][:PEAKS_MAX],
        computed_at=kept.computed_at,
    )


class _TooMuch(ServerOverloaded):
    """What was asked for takes too much work, and would again."""


def _too_much(why: str) -> _TooMuch:
    return _TooMuch(f"forecast: {why}; ask for fewer hours, or for one tenant")
