"""What a run is while it is parked after an outage: to cancels, bounds, and fires of its job."""

from datetime import timedelta

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, to_datetime
from fencepost_server.domain.run import RunKey
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.cancel import cancel_job_runs
from fencepost_server.engine.governor import PARKED_MAX
from fencepost_server.policy.outcome import Failed

from tests.factories import NOON, every, job_spec
from tests.integration.governed import late_jobs, parked, server_of
from tests.integration.world import World, build


async def test_bounds_that_count_from_the_release_do_so(world: World) -> None:
    await world.add_job(
        spec=job_spec(every(DAY), queue_timeout=MINUTE, total_timeout=HOUR),
        next_run_at=NOON - 2 * HOUR,
    )
    server = server_of(world, 1.0)
    await server.fire()
    bounds = "SELECT available_at, wait_until, total_until FROM fencepost.run_queue"
    [row] = await world.query(bounds)
    assert row["available_at"] == to_datetime(NOON + PARKED_MAX)
    await world.move(10 * MINUTE)
    await server.governor.release()
    [row] = await world.query(bounds)
    assert row["available_at"] == to_datetime(NOON + 10 * MINUTE)
    assert row["wait_until"] == to_datetime(NOON + 11 * MINUTE)
    assert row["total_until"] == to_datetime(NOON + 70 * MINUTE)


async def test_a_parked_run_can_be_cancelled_and_its_job_deleted(world: World) -> None:
    first, second = [
        await world.add_job(name, job_spec(every(HOUR)), next_run_at=NOON - 30 * MINUTE)
        for name in ("first", "second")
    ]
    server = server_of(world, 1.0)
    await server.fire()
    assert await parked(world) == 2
    key = RunKey(first, NOON - 30 * MINUTE)
    assert await world.cancel(key)
    assert await world.runs_of(first) == []
    async with world.database.requests.transaction() as connection:
        await cancel_job_runs(connection, job_id=second, cause="job_deleted", now=world.now)
    assert await parked(world) == 0
    assert await server.governor.release() == 0


@pytest.mark.parametrize(
    ("policy", "runs", "skips"),
    [
        (OverlapPolicy.SKIP, [(-1800, "queued", "catch_up")], 1),
        (
            OverlapPolicy.QUEUE_ONE,
            [(-1800, "queued", "catch_up"), (1800, "blocked", "schedule")],
            0,
        ),
        (
            OverlapPolicy.QUEUE_ALL,
            [(-1800, "queued", "catch_up"), (1800, "blocked", "schedule")],
            0,
        ),
        (OverlapPolicy.CANCEL_PREVIOUS, [(1800, "blocked", "schedule")], 0),
        (
            OverlapPolicy.ALLOW,
            [(-1800, "queued", "catch_up"), (1800, "queued", "schedule")],
            0,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, OverlapPolicy) else None,
)
async def test_a_regular_fire_gives_its_place_to_a_parked_run_of_its_job(
    world: World, policy: OverlapPolicy, runs: list[tuple[int, str, str]], skips: int
) -> None:
    rule = every(HOUR, overlap=policy)
    job_id = await world.add_job(
        spec=job_spec(rule, queue_timeout=MINUTE, total_timeout=HOUR),
        next_run_at=NOON - 30 * MINUTE,
    )
    await late_jobs(world, 3, late=2 * HOUR)
    server = server_of(world, 0.001)
    await server.fire()
    assert await parked(world) == 4
    while world.now < NOON + 30 * MINUTE:
        await world.move(9 * SECOND)
        await server.scheduler._parked_before(world.now)
    await server.fire()
    assert await world.runs_of(job_id) == runs
    assert await world.value("SELECT count(*) FROM fencepost.fire_skips") == skips
    # The others wait on; under ALLOW nothing stands in anybody's way.
    assert await parked(world) == (4 if policy is OverlapPolicy.ALLOW else 3)
    if policy not in (OverlapPolicy.ALLOW, OverlapPolicy.CANCEL_PREVIOUS):
        [row] = await world.query(
            "SELECT available_at, wait_until, total_until FROM fencepost.run_queue"
            " WHERE state = 'queued' AND NOT parked"
        )
        now = to_datetime(world.now)
        assert list(row.values()) == [now, now + timedelta(minutes=1), now + timedelta(hours=1)]
        [claimed] = await world.claim(10)
        assert claimed.key == RunKey(job_id, NOON - 30 * MINUTE)


async def test_late_fires_free_no_parked_run(world: World) -> None:
    await world.add_job(
        spec=job_spec(every(HOUR, overlap=OverlapPolicy.SKIP)), next_run_at=NOON - 30 * MINUTE
    )
    server = server_of(world, 1.0)
    await server.fire()
    # Nobody fires for an hour.
    await world.move(HOUR)
    await server.fire()
    assert await parked(world) == 1


async def test_a_run_that_was_claimed_after_too_long_a_time_keeps_its_backoff(
    database_url: str,
) -> None:
    # Its own database, because it makes tables of other days.
    async with build(database_url) as world:
        await late_jobs(world, 1, late=HOUR)
        server = server_of(world, 1.0)
        await server.fire()
        # The servers that would release it are gone, and another one takes runs.
        await world.move(PARKED_MAX)
        await world.retention.ensure_day_tables()
        [claimed] = await world.claim(10)
        assert await parked(world) == 1
        await world.report(claimed, Failed(code="X", retry_after=HOUR))
        [before] = await world.query("SELECT state, available_at FROM fencepost.run_queue")
        assert before["available_at"] == to_datetime(world.now + HOUR)
        # It waits as long as the fires of the seven days are not decided.
        assert await server.governor.release() == 0
        await world.move(5 * SECOND)
        assert await server.governor.release() == 1
        assert await parked(world) == 0
        assert await world.query("SELECT state, available_at FROM fencepost.run_queue") == [before]
