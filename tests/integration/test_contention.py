"""Many engines on the same few jobs: claimers, completers, reapers and cancellers beside fires,
enqueues, promotions and retention, without one deadlock and with a history that keeps every
invariant. FENCEPOST_CONTENTION_SECONDS makes it long (`make contention`: ten minutes).
"""

import asyncio
import logging
import os
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields

import pytest
from fencepost_server.clock import SECOND
from fencepost_server.domain.job import RetryPolicy
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import RunKey
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.enqueue import EnqueueEntry, Enqueues
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.verdicts import Held, Report
from fencepost_server.policy.outcome import Ending, Failed, Released, Snoozed

from tests.checker import invariants
from tests.checker.history import read_history
from tests.checker.invariants import Budgets
from tests.checker.recorder import record
from tests.factories import every, job_spec
from tests.integration.world import World, build

SECONDS = int(os.environ.get("FENCEPOST_CONTENTION_SECONDS", "15"))
ENGINES, CLAIMERS_EACH, REAPERS, CANCELLERS = 8, 2, 4, 2
POLICIES = (OverlapPolicy.ALLOW, OverlapPolicy.SKIP, OverlapPolicy.QUEUE_ALL, OverlapPolicy.ALLOW)
JOBS = 12
RETRY = RetryPolicy.of(max_failures=3, max_lost_leases=3, base=SECOND // 10, cap=SECOND)

_log = logging.getLogger(__name__)
pytestmark = pytest.mark.timeout(SECONDS + 240)


@dataclass(slots=True)
class Counts:
    """What was done; if something never was, the test has shown nothing of it."""

    claimed: int = 0
    ended: int = 0
    failed: int = 0
    renewed: int = 0
    reaped: int = 0
    cancelled: int = 0
    fired: int = 0
    enqueued: int = 0
    abandoned: int = 0


@dataclass(slots=True, kw_only=True)
class Scenario:
    """What all actors share; they go on until `until` by the monotonic clock."""

    counts: Counts
    jobs: list[str]
    until: float
    live: dict[RunKey, None]

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until


async def test_neither_deadlock_nor_breach_under_contention(database_url: str) -> None:
    await record(database_url)
    async with AsyncExitStack() as stack:
        worlds = [
            await stack.enter_async_context(build(database_url, at=None)) for _ in range(ENGINES)
        ]
        # The template's last heartbeat is old, and after a gap reapers would pause for a lease.
        await worlds[0].raw.execute("UPDATE fencepost.shard_state SET no_reap_until = '-infinity'")
        jobs = await _jobs(worlds[0])
        scenario = Scenario(counts=Counts(), jobs=jobs, until=time.monotonic() + SECONDS, live={})
        async with asyncio.TaskGroup() as group:
            for number, world in enumerate(worlds):
                for _ in range(CLAIMERS_EACH):
                    group.create_task(_work(world, scenario))
                if number < REAPERS:
                    group.create_task(_reap(world, scenario))
                if number < CANCELLERS:
                    group.create_task(_cancel(world, scenario))
                group.create_task(_make(world, scenario))
        await _finish(worlds[0], jobs)
        deadlocks = await worlds[0].value(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
    history = await read_history(database_url)
    _log.info("%s s, %s runs: %s", SECONDS, len(history.steps), scenario.counts)
    assert deadlocks == 0
    assert invariants.always(history) == []
    assert invariants.all_ended(history) == []
    budgets = {job: Budgets(max_failures=3, max_lost_leases=3) for job in jobs}
    assert invariants.budgets_end_runs(history, budgets) == []
    serial = [job for place, job in enumerate(jobs) if POLICIES[place % 4] != OverlapPolicy.ALLOW]
    assert invariants.fires_do_not_overlap(history, serial) == []
    never = [each.name for each in fields(Counts) if getattr(scenario.counts, each.name) == 0]
    assert never == []


async def _jobs(world: World) -> list[str]:
    """Jobs that fire every second, whose leases are short enough to be lost."""
    made: list[str] = []
    for number in range(JOBS):
        spec = job_spec(every(SECOND, overlap=POLICIES[number % len(POLICIES)]), retry=RETRY)
        first = (world.now // SECOND + 2) * SECOND
        made.append(await world.add_job(f"job-{number}", spec, next_run_at=first))
    await world.raw.execute("UPDATE fencepost.job_schedules SET lease_s = 1, cancel_grace_s = 0")
    return made


async def _work(world: World, scenario: Scenario) -> None:
    """Claims a few runs and tells their ends, one in twelve never; each word twice at times."""
    dice = random.Random(id(world))
    counts = scenario.counts
    while scenario.goes_on:
        runs = await world.claim(dice.randint(1, 8))
        counts.claimed += len(runs)
        scenario.live.update(dict.fromkeys(run.key for run in runs))
        if not runs:
            # No event tells an idle claimer of this kind; it comes back by its own pace.
            await asyncio.sleep(0.01)
            continue
        if dice.random() < 0.5:
            renewals = await world.lifecycle.heartbeat([Held(r.key, r.attempt) for r in runs])
            counts.renewed += sum(renewal.notice is None for renewal in renewals)
        told = [run for run in runs if dice.random() > 1 / 12]
        counts.abandoned += len(runs) - len(told)
        reports = [_report(dice, run) for run in told]
        if dice.random() < 0.2:
            reports += reports
        dice.shuffle(reports)
        verdicts = await world.lifecycle.report(reports)
        counts.ended += len(verdicts)
        counts.failed += sum(isinstance(report.ending, Failed) for report in reports)


def _report(dice: random.Random, run: Claimed) -> Report:
    ending: Ending | None = None
    match dice.randrange(10):
        case 0 | 1:
            ending = Failed(code="BROKEN", reported=True)
        case 2:
            ending = Released()
        case 3:
            ending = Snoozed(delay=SECOND // 5)
    return Report(key=run.key, attempt=run.attempt, ending=ending)


async def _reap(world: World, scenario: Scenario) -> None:
    while scenario.goes_on:
        await world.keeper.tick()
        scenario.counts.reaped += await world.reaper.reap()
        await asyncio.sleep(0.05)


async def _cancel(world: World, scenario: Scenario) -> None:
    """Cancels runs that are being worked on, and now and then one that has ended."""
    while scenario.goes_on:
        for key in list(scenario.live)[-5:]:
            scenario.counts.cancelled += await world.cancel(key)
        while len(scenario.live) > 1000:
            del scenario.live[next(iter(scenario.live))]
        await asyncio.sleep(0.03)


async def _make(world: World, scenario: Scenario) -> None:
    """Fires, frees waiting runs, enqueues, and keeps house."""
    enqueues = Enqueues(
        database=world.database, catalogue=world.catalogue, specs=world.specs, wake=world.woken
    )
    while scenario.goes_on:
        scenario.counts.fired += await world.scheduler.fire_due()
        await world.promoter.sweep()
        names = [JobName(tenant="default", job=job) for job in scenario.jobs]
        random.shuffle(names)
        made = await enqueues.enqueue(
            Origin(tenant="default", now=world.now),
            [EnqueueEntry(job=name) for name in names],
            encode=lambda run: str(run.key).encode(),
        )
        scenario.counts.enqueued += sum(isinstance(each, bytes) for each in made)
        await world.retention.keep()
        await asyncio.sleep(0.1)


async def _finish(world: World, jobs: list[str]) -> None:
    """No more fires; everything that is left comes to its end."""
    await world.raw.execute("UPDATE fencepost.job_schedules SET paused = true")
    deadline = time.monotonic() + 120
    while await world.value("SELECT EXISTS (SELECT FROM fencepost.run_queue)"):
        assert time.monotonic() < deadline, await world.query(
            "SELECT state::text, count(*) FROM fencepost.run_queue GROUP BY 1"
        )
        await world.keeper.tick()
        await world.reaper.reap()
        await world.promoter.sweep()
        runs = await world.claim(100)
        await world.lifecycle.report(
            [Report(key=run.key, attempt=run.attempt, ending=None) for run in runs]
        )
        await asyncio.sleep(0.05)
