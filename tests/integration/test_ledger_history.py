"""Whatever happens to a job, its ledger holds every nominal fire exactly once."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Instant, from_datetime
from fencepost_server.domain.fire import Fire, FireDisposition
from fencepost_server.domain.job import JobSpec
from fencepost_server.domain.names import JobName
from fencepost_server.domain.schedule import (
    CronSpec,
    DstFoldPolicy,
    DstGapPolicy,
    IntervalSpec,
    MisfireAction,
    MisfirePolicy,
    OverlapPolicy,
    Schedule,
    SkipReason,
)
from fencepost_server.engine.backfill import BackfillAsked, Operations
from fencepost_server.engine.backfill_steps import BackfillSteps
from fencepost_server.engine.definition import Definition
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.job_update import JobUpdate
from fencepost_server.engine.jobs import Jobs
from fencepost_server.engine.ledger import FireQuery, Ledger
from fencepost_server.policy.cron import CronRule
from fencepost_server.policy.schedule import bounded_rule, cron_rule, first_fire

from tests.factories import job_spec
from tests.integration.world import World, build

NAME = JobName(tenant="default", job="report")
SEED = "default/report"
# Days before clocks change in Europe, one way and the other.
SPRING = from_datetime(datetime(2027, 3, 26, 11, tzinfo=UTC))
AUTUMN = from_datetime(datetime(2027, 10, 29, 11, tzinfo=UTC))
_CRONS = ("*/20 * * * *", "30 2 * * *", "*/15 1-3 * * *", "0 */2 * * *", "H 3 * * *")


@dataclass
class History:
    """A job, what happens to it, and what its fires have to be."""

    world: World
    chance: random.Random
    jobs: Jobs = field(init=False)
    operations: Operations = field(init=False)
    epochs: list[tuple[Instant, Schedule]] = field(default_factory=list)
    made_at: Instant = 0

    def __post_init__(self) -> None:
        database, catalogue = self.world.database, self.world.catalogue
        self.jobs = Jobs(database=database, catalogue=catalogue, wake=self.world.woken)
        self.operations = Operations(database=database, catalogue=catalogue)

    def schedule(self) -> Schedule:
        pick = self.chance.choice
        spec: CronSpec | IntervalSpec = CronSpec(
            expressions=(pick(_CRONS),),
            time_zone=pick(("UTC", "Europe/Paris", "Europe/London")),
            dst_gap=pick(list(DstGapPolicy)),
            dst_fold=pick(list(DstFoldPolicy)),
        )
        if self.chance.random() < 0.3:
            spec = IntervalSpec(every=pick((10 * MINUTE, HOUR)), anchor=self.made_at or None)
        return Schedule(
            spec=spec,
            misfire=MisfirePolicy(
                action=pick(list(MisfireAction)),
                max_catch_up=pick((1, 5, 100)),
                window=pick((None, None, 5 * HOUR)),
            ),
            overlap=pick(list(OverlapPolicy)),
        )

    async def begin(self) -> None:
        self.made_at = self.world.now
        schedule = self.schedule()
        await self.world.add_job(
            "report",
            job_spec(schedule),
            next_run_at=first_fire(schedule, now=self.world.now, seed=SEED),
        )
        self.epochs.append((self.world.now, schedule))

    async def happen(self) -> None:
        """One thing after a while."""
        await self.world.move(self.chance.choice((20 * SECOND, 25 * MINUTE, 5 * HOUR, 2 * DAY)))
        await self.chance.choice(
            (
                self.fire,
                self.fire,
                self.fire,
                self.pause,
                self.resume,
                self.edit,
                self.finish,
                self.backfill,
                self.backfill,
            )
        )()

    async def fire(self) -> None:
        while await self.world.scheduler.fire_due():
            pass

    async def pause(self) -> None:
        await self.jobs.pause(NAME, reason="", now=self.world.now)

    async def resume(self) -> None:
        await self.jobs.resume(NAME, now=self.world.now)

    async def edit(self) -> None:
        schedule = self.schedule()

        def change(stored: object) -> Definition:
            return Definition(spec=job_spec(schedule), payload=None)

        await self.jobs.update(
            Origin(tenant="default", now=self.world.now, trace_context=None),
            JobUpdate(name=NAME, change=change),
            encode=lambda job, created: b"",
        )
        self.epochs.append((self.world.now, schedule))

    async def finish(self) -> None:
        """Some runs succeed, and the next of those that waited are free."""
        for run in await self.world.claim(self.chance.randint(1, 20)):
            await self.world.report(run)
        await self.world.promoter.sweep()

    async def backfill(self) -> None:
        job = await self.jobs.get(NAME)
        until = min(self.world.now, job.next_run_at or self.world.now)
        if until <= self.made_at + HOUR:
            return
        await self.operations.backfill(
            BackfillAsked(
                name=NAME,
                since=self.chance.randrange(self.made_at, until - MINUTE),
                until=until,
                rate=1000,
                max_runs=10_000,
                allows_overlap=True,
                reason="",
                dry_run=False,
                request=None,
            ),
            now=self.world.now,
            encode=lambda made: b"",
        )
        steps = BackfillSteps(
            database=self.world.database, clock=self.world.database.clock, wake=self.world.woken
        )
        while await steps.step():
            await self.world.move(SECOND)

    # What has to be ------------------------------------------------------------------------

    def nominal(self) -> Counter[Instant]:
        """The fires of all rules while they were in force."""
        found: Counter[Instant] = Counter()
        for since, until, schedule in self._in_force():
            rule = bounded_rule(schedule, anchor=self.made_at, seed=SEED)
            at = rule.next_after(since)
            while at is not None and at <= until:
                found[at] += 1
                at = rule.next_after(at)
        return found

    def suppressed(self) -> Counter[tuple[Instant, SkipReason]]:
        """What clock changes ruled out, found by looking at every fire."""
        found: Counter[tuple[Instant, SkipReason]] = Counter()
        for since, until, schedule in self._in_force():
            if not isinstance(schedule.spec, CronSpec):
                continue
            rule: CronRule = cron_rule(schedule.spec, seed=SEED)
            for one in rule.planned_between(since, until + 1):
                if one.skip_reason is not None:
                    found[one.at, one.skip_reason] += 1
        return found

    def _in_force(self) -> Iterator[tuple[Instant, Instant, Schedule]]:
        ends = [at for at, _ in self.epochs[1:]] + [self.world.now]
        for (since, schedule), until in zip(self.epochs, ends, strict=True):
            yield since, until, schedule


async def _ledger(history: History, page_size: int) -> list[Fire]:
    ledger = Ledger(database=history.world.database, catalogue=history.world.catalogue)
    query = FireQuery(since=history.made_at - DAY, until=history.world.now + 1)
    fires: list[Fire] = []
    place = None
    while True:
        page = await ledger.page(
            NAME, query, after=place, page_size=page_size, now=history.world.now
        )
        fires += page.fires
        if page.following is None:
            return fires
        assert place is None or page.following < place, "pages go on"
        place = page.following


@pytest.mark.parametrize("seed", range(12))
async def test_every_nominal_fire_is_in_one_entry(database_url: str, seed: int) -> None:
    chance = random.Random(seed)
    async with build(database_url, at=SPRING if seed % 2 else AUTUMN) as world:
        history = History(world=world, chance=chance)
        await history.begin()
        for _ in range(14):
            await history.happen()
        fires = await _ledger(history, page_size=chance.choice((1, 7, 1000)))

    order = [
        (fire.last, fire.reason not in (SkipReason.DST_GAP, SkipReason.DST_FOLD)) for fire in fires
    ]
    assert order == sorted(order, reverse=True)
    nominal = history.nominal()
    seen: Counter[Instant] = Counter()
    suppressed: Counter[tuple[Instant, SkipReason]] = Counter()
    for fire in fires:
        if fire.reason in (SkipReason.DST_GAP, SkipReason.DST_FOLD):
            suppressed[fire.first, fire.reason] += fire.count
            continue
        if fire.disposition is FireDisposition.BACKFILLED and fire.first not in nominal:
            continue  # Of the newest rule, where an older one was in force.
        within = [at for at in nominal if fire.first <= at <= fire.last]
        assert len(within) == fire.count, fire
        seen.update(within)
    assert seen == nominal
    expected = history.suppressed()
    assert sum(suppressed.values()) == sum(expected.values())
    assert {at for at, _ in suppressed} <= {at for at, _ in expected}


async def test_the_spec_of_the_job_is_what_the_history_changes(world: World) -> None:
    history = History(world=world, chance=random.Random(1))
    await history.begin()
    await history.edit()
    job = await history.jobs.get(NAME)
    assert job.spec == replace(JobSpec.from_json(job.spec.to_json()))
    assert job.spec.schedule == history.epochs[-1][1]
