"""Outages of 30 s to 40 days, for each misfire policy, with exact counts and an exact ledger."""

from collections import Counter
from dataclasses import dataclass

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Duration, to_datetime
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.domain.fire import FireDisposition
from fencepost_server.domain.names import JobName
from fencepost_server.domain.schedule import MisfireAction
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.governor import Governor
from fencepost_server.engine.ledger import FireQuery, Ledger
from fencepost_server.policy.ledger import COUNT_MAX

from tests.factories import NOON, cron, every, job_spec
from tests.integration.world import World

# The first fire is at noon, and the server is away until noon plus the outage.
_STEPS = {"minutely": MINUTE, "tenth": 10 * SECOND}
_MOST = {"minutely": 100, "tenth": 1000}


@dataclass(frozen=True)
class Expected:
    """Of the fires from noon to the end of the outage."""

    on_time: int
    caught_up: int
    skipped: int


def _expected(step: Duration, outage: Duration, action: MisfireAction, most: int) -> Expected:
    """From the words of the policy: late is handled more than 60 s after its instant."""
    fires = outage // step + 1
    late = sum(outage - number * step > MINUTE for number in range(fires))
    caught_up = {
        MisfireAction.RUN_ONCE: min(late, 1),
        MisfireAction.SKIP: 0,
        MisfireAction.CATCH_UP: min(late, most),
    }[action]
    return Expected(on_time=fires - late, caught_up=caught_up, skipped=late - caught_up)


def _scheduler(world: World) -> Scheduler:
    return Scheduler(
        database=world.database,
        clock=world.database.clock,
        ownership=AllPartitions(),
        wake=world.woken,
        batch_max=500,
        concurrency=2,
        parks=True,
    )


@pytest.mark.parametrize("action", list(MisfireAction), ids=lambda action: action.name)
@pytest.mark.parametrize(
    "outage",
    [30 * SECOND, 59 * SECOND, 61 * SECOND, 26 * HOUR, 40 * DAY],
    ids=["30s", "59s", "61s", "26h", "40d"],
)
async def test_an_outage_is_made_up_for_as_the_policy_says(
    world: World, outage: Duration, action: MisfireAction
) -> None:
    for name, schedule in (
        ("minutely", cron(misfire=action, max_catch_up=_MOST["minutely"])),
        ("tenth", every(10 * SECOND, misfire=action, max_catch_up=_MOST["tenth"])),
    ):
        await world.add_job(name, job_spec(schedule), next_run_at=NOON)
    await world.move(outage)
    scheduler = _scheduler(world)
    while await scheduler.fire_due():
        pass

    ledger = Ledger(database=world.database, catalogue=world.catalogue)
    query = FireQuery(since=NOON - 1, until=world.now + 1)
    for name, step in _STEPS.items():
        want = _expected(step, outage, action, _MOST[name])
        rows = await world.query(
            "SELECT q.origin FROM fencepost.run_queue AS q JOIN fencepost.jobs AS j USING (job_id)"
            " WHERE j.name = $1",
            name,
        )
        origins = Counter(row["origin"] for row in rows)
        assert (origins["schedule"], origins["catch_up"]) == (want.on_time, want.caught_up)
        page = await ledger.page(
            JobName(tenant="default", job=name), query, after=None, page_size=5000, now=world.now
        )
        assert page.following is None
        counts: Counter[FireDisposition] = Counter()
        for fire in page.fires:
            counts[fire.disposition] += fire.count
        assert counts[FireDisposition.FIRED] == want.on_time
        assert counts[FireDisposition.CAUGHT_UP] == want.caught_up
        # One stretch, and 40 days hold more fires than are counted.
        assert counts[FireDisposition.SKIPPED] == min(want.skipped, COUNT_MAX)
        assert counts[FireDisposition.PENDING] == 0
        next_run_at = await world.value(
            "SELECT next_run_at FROM fencepost.job_schedules JOIN fencepost.jobs USING (job_id)"
            " WHERE name = $1",
            name,
        )
        assert next_run_at == to_datetime(NOON + (outage // step + 1) * step)


@pytest.mark.parametrize("outage", [30 * SECOND, 59 * SECOND, 61 * SECOND, 26 * HOUR, 40 * DAY])
async def test_many_jobs_come_back_at_the_rate_of_their_tenant(
    world: World, outage: Duration
) -> None:
    names = [f"job-{number}" for number in range(120)]
    await world.add_jobs(names, job_spec(every(100 * DAY)), next_run_at=NOON)
    await world.move(outage)
    while await _scheduler(world).fire_due():
        pass
    governor = Governor(
        database=world.database, clock=world.database.clock, wake=world.woken, rate=50.0
    )
    taken = []
    for _ in range(4):
        await governor.release()
        taken.append(len(await world.claim(1000)))
        await world.move(SECOND)
    # The first of each second is there when it begins.
    assert taken == [1, 50, 50, 19]
    [fires] = await world.query("SELECT sum(fire_count) AS total FROM fencepost.job_schedules")
    assert fires["total"] == 120
