"""What the reaper takes back, and when it must not: after heartbeats could not be stored."""

import asyncio

import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND, from_datetime
from fencepost_server.domain.run import LOST_LEASE_WAIT_MAX
from fencepost_server.engine.cancel import cancel_run
from fencepost_server.engine.verdicts import Held, Verdict
from fencepost_server.errors import StorageUnavailable

from tests.factories import job_spec, plain_retry
from tests.integration.world import TIMEOUT_FAILURE, World, build


async def test_a_lost_lease_is_taken_back_and_waits_at_most_two_seconds(world: World) -> None:
    job = await world.add_job()
    await world.enqueue(job, 20)
    runs = await world.claim(20)
    await world.pass_time(30 * SECOND)
    assert await world.reaper.reap() == 0
    await world.pass_time(1)
    assert await world.reaper.reap() == 20
    waits = set()
    for run in runs:
        row = await world.live(run.key)
        assert (row["state"], row["attempt"], row["attempt_open"]) == ("retrying", 1, True)
        assert (row["lost_lease_count"], row["failure_count"]) == (1, 0)
        waits.add(from_datetime(row["available_at"]) - world.now)
    assert 0 <= min(waits) < max(waits) < LOST_LEASE_WAIT_MAX


async def test_a_run_that_is_renewed_is_never_taken_back(world: World) -> None:
    run = await world.started()
    for _ in range(30):
        await world.pass_time(10 * SECOND)
        await world.lifecycle.heartbeat([Held(run.key, 1)])
        assert await world.reaper.reap() == 0
    assert (await world.live(run.key))["attempt"] == 1


async def test_a_run_that_kills_every_worker_ends_in_the_dead_letters(world: World) -> None:
    run = await world.started(job_spec(retry=plain_retry(max_lost_leases=3)))
    for _ in range(2):
        await world.pass_time(31 * SECOND)
        assert await world.reaper.reap() == 1
        await world.pass_time(2 * SECOND)
        assert len(await world.claim()) == 1
    await world.pass_time(31 * SECOND)
    await world.reaper.reap()
    row = await world.ended(run.key, "dead_letters")
    assert (row["dead_reason"], row["lost_lease_count"], row["attempt"], row["forced"]) == (
        "max_lost_leases",
        3,
        3,
        True,
    )
    assert await world.attempts_of(run.key) == [(n, "lease_expired", False) for n in (1, 2, 3)]


@pytest.mark.parametrize("lease", [30, 120])
async def test_after_a_gap_in_heartbeats_no_lease_is_lost_for_the_longest_lease(
    world: World, lease: int
) -> None:
    await world.started(job_spec(lease_ttl=lease * SECOND), name="long")
    await world.started(name="short")
    await world.move(10 * MINUTE)
    await world.keeper.tick()
    await world.pass_time(lease * SECOND - 1)
    assert await world.reaper.reap() == 0
    await world.pass_time(2)
    assert await world.reaper.reap() == 2


async def test_the_reaper_waits_for_the_first_tick_after_a_gap(world: World) -> None:
    run = await world.started()
    await world.move(10 * MINUTE)
    # The database is back, and the reaper looks before any lease keeper has.
    assert await world.reaper.reap() == 0
    await world.keeper.tick()
    assert await world.reaper.reap() == 0
    await world.lifecycle.heartbeat([Held(run.key, 1)])
    assert (await world.live(run.key))["state"] == "running"


async def test_a_short_gap_is_no_reason_to_pause(world: World) -> None:
    await world.started()
    for _ in range(4):
        await world.move(10 * SECOND)
        await world.keeper.tick()
    assert await world.reaper.reap() == 1


async def test_a_server_that_could_not_store_heartbeats_makes_all_reapers_pause(
    world: World,
) -> None:
    await world.started()
    await world.pass_time(29 * SECOND)
    world.lifecycle.heartbeats_failed = True
    await world.keeper.tick()
    assert not world.lifecycle.heartbeats_failed
    await world.pass_time(29 * SECOND)
    assert await world.reaper.reap() == 0
    await world.pass_time(2 * SECOND)
    assert await world.reaper.reap() == 1


async def test_heartbeats_that_fail_are_remembered_for_the_lease_keeper(database_url: str) -> None:
    async with build(database_url) as world:
        run = await world.started()
        await world.lifecycle.heartbeat([Held(run.key, 1)])
        await world.raw.execute(
            "ALTER FUNCTION fencepost.clock_agrees RENAME TO agrees_not; "
            "CREATE FUNCTION fencepost.clock_agrees(timestamptz) RETURNS boolean LANGUAGE plpgsql "
            "VOLATILE AS $$ BEGIN RAISE EXCEPTION SQLSTATE '57P03'; END $$"
        )
        with pytest.raises(StorageUnavailable):
            await world.lifecycle.heartbeat([Held(run.key, 1)])
        assert world.lifecycle.heartbeats_failed


async def test_an_attempt_far_over_its_timeout_is_failed_by_the_server(world: World) -> None:
    run = await world.started(
        job_spec(retry=plain_retry(), attempt_timeout=60 * SECOND, cancel_grace=10 * SECOND)
    )
    for _ in range(8):
        await world.pass_time(10 * SECOND)
        await world.lifecycle.heartbeat([Held(run.key, 1)])
        assert await world.reaper.reap() == 0
    await world.pass_time(1)
    assert await world.reaper.reap() == 1
    row = await world.live(run.key)
    assert (row["state"], row["failure_count"], row["attempt_open"]) == ("retrying", 1, False)
    assert (row["failure_code"], row["last_failure"]) == ("TIMEOUT", TIMEOUT_FAILURE)
    assert await world.attempts_of(run.key) == [(1, "timed_out", False)]
    assert (await world.report(run)).verdict is Verdict.ALREADY_APPLIED


async def test_the_last_attempt_over_its_timeout_ends_the_run_by_force(world: World) -> None:
    spec = job_spec(
        retry=plain_retry(max_failures=1),
        attempt_timeout=10 * SECOND,
        cancel_grace=SECOND,
        lease_ttl=HOUR // 2,
    )
    run = await world.started(spec)
    await world.pass_time(22 * SECOND)
    await world.reaper.reap()
    row = await world.ended(run.key, "dead_letters")
    assert (row["dead_reason"], row["forced"]) == ("max_failures", True)
    assert (await world.report(run)).verdict is Verdict.RUN_TERMINAL


async def test_timeouts_and_cancels_wait_out_a_gap_in_heartbeats_too(world: World) -> None:
    spec = job_spec(attempt_timeout=10 * SECOND, cancel_grace=SECOND)
    timed_out = await world.started(spec, name="timed out")
    cancelled = await world.started(spec, name="cancelled")
    async with world.database.requests.transaction() as connection:
        await cancel_run(connection, key=cancelled.key, reason="", grace=None, now=world.now)
    await world.move(10 * MINUTE)
    await world.keeper.tick()
    # Both ended during the outage, and their worker can say so only now.
    assert await world.reaper.reap() == 0
    assert (await world.report(timed_out)).verdict is Verdict.APPLIED
    assert (await world.report(cancelled)).verdict is Verdict.APPLIED


async def test_a_cancel_is_forced_when_its_grace_is_over(world: World) -> None:
    run = await world.started(job_spec(cancel_grace=15 * SECOND))
    async with world.database.requests.transaction() as connection:
        await cancel_run(connection, key=run.key, reason="x", grace=None, now=world.now)
    await world.pass_time(15 * SECOND)
    assert await world.reaper.reap() == 0
    await world.pass_time(1)
    assert await world.reaper.reap() == 1
    row = await world.ended(run.key)
    assert (row["state"], row["forced"], row["cancel_reason"]) == ("cancelled", True, "x")


async def test_a_cancelled_run_whose_lease_is_lost_ends_cancelled(world: World) -> None:
    run = await world.started(job_spec(cancel_grace=5 * MINUTE))
    async with world.database.requests.transaction() as connection:
        await cancel_run(connection, key=run.key, reason="", grace=None, now=world.now)
    await world.pass_time(31 * SECOND)
    await world.reaper.reap()
    assert (await world.ended(run.key))["state"] == "cancelled"
    assert await world.attempts_of(run.key) == [(1, "lease_expired", False)]


@pytest.mark.parametrize("lease", [5, 30])
async def test_a_run_that_was_never_received_goes_back_without_budget(
    world: World, lease: int
) -> None:
    run = await world.started(job_spec(lease_ttl=lease * SECOND))
    await world.pass_time(SECOND)
    await world.lifecycle.cut_leases([(run.key, 1)], fuse=5 * SECOND)
    await world.pass_time(min(lease - 1, 5) * SECOND)
    assert await world.reaper.reap() == 0
    await world.pass_time(1)
    assert await world.reaper.reap() == 1
    row = await world.live(run.key)
    assert (row["state"], row["lost_lease_count"], row["attempt_open"]) == ("queued", 0, False)
    assert await world.attempts_of(run.key) == [(1, "undelivered", False)]


async def test_a_heartbeat_says_that_a_cut_run_was_received_after_all(world: World) -> None:
    run = await world.started()
    await world.lifecycle.cut_leases([(run.key, 1)], fuse=5 * SECOND)
    await world.lifecycle.heartbeat([Held(run.key, 1)])
    await world.pass_time(29 * SECOND)
    assert await world.reaper.reap() == 0
    await world.pass_time(2 * SECOND)
    assert await world.reaper.reap() == 1
    assert (await world.live(run.key))["lost_lease_count"] == 1


async def test_a_cut_of_a_stale_attempt_changes_nothing(world: World) -> None:
    run = await world.started()
    await world.lifecycle.cut_leases([(run.key, 2)], fuse=0)
    await world.pass_time(SECOND)
    assert await world.reaper.reap() == 0


async def test_two_reapers_take_each_run_back_once(database_url: str) -> None:
    async with build(database_url) as one, build(database_url, day_tables=False) as two:
        job = await one.add_job()
        await one.enqueue(job, 300)
        assert len(await one.claim(300)) == 300
        await one.pass_time(31 * SECOND)
        await two.move_to(one.now)
        taken = await asyncio.gather(one.reaper.reap(), two.reaper.reap(), one.reaper.reap())
        assert sum(taken) + await one.reaper.reap() == 300
        counts = await one.query("SELECT DISTINCT lost_lease_count FROM fencepost.run_queue")
        assert [row[0] for row in counts] == [1]
