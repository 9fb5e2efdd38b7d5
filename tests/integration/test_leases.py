"""Heartbeats: what they renew and revive, and what the holder of a run is told."""

from typing import Any

from fencepost_server.clock import SECOND, Instant, from_datetime
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.verdicts import Held, LeaseLostReason

from tests.factories import JOB_ID, NOON, failed, job_spec
from tests.integration.world import World


async def test_a_heartbeat_renews_the_lease_and_keeps_progress(world: World) -> None:
    run = await world.started()
    await world.pass_time(20 * SECOND)
    [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1, b"10 %")])
    assert (renewal.notice, renewal.not_renewed) == (None, False)
    row = await world.live(run.key)
    assert _micros(row["lease_until"]) == world.now + 30 * SECOND
    assert row["progress"] == b"10 %"
    await world.lifecycle.heartbeat([Held(run.key, 1)])
    assert (await world.live(run.key))["progress"] == b"10 %"


async def test_a_heartbeat_revives_a_lost_attempt_that_nobody_claimed(world: World) -> None:
    run = await world.started()
    await world.lose_lease()
    [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1)])
    assert renewal.notice is None
    row = await world.live(run.key)
    assert (row["state"], row["lost_lease_count"], row["attempt"]) == ("running", 0, 1)
    assert await world.claim() == []


async def _notice(world: World, key: RunKey, attempt: int) -> tuple[LeaseLostReason | None, int]:
    [renewal] = await world.lifecycle.heartbeat([Held(key, attempt)])
    assert renewal.notice is not None
    return renewal.notice.lost, renewal.notice.current_attempt


async def test_a_superseded_attempt_is_told_which_one_is_current(world: World) -> None:
    run = await world.started()
    await world.lose_lease()
    await world.claim()
    assert await _notice(world, run.key, 1) == (LeaseLostReason.SUPERSEDED, 2)


async def test_the_holder_of_a_run_that_was_ended_by_force_is_told_so(world: World) -> None:
    run = await world.started()
    await world.cancel(run.key, grace=0)
    await world.pass_time(SECOND)
    await world.reaper.reap()
    assert await _notice(world, run.key, 1) == (LeaseLostReason.RUN_TERMINAL, 0)


async def test_the_holder_of_an_attempt_that_timed_out_is_told_so(world: World) -> None:
    run = await world.started(job_spec(attempt_timeout=10 * SECOND, cancel_grace=5 * SECOND))
    await world.pass_time(26 * SECOND)
    await world.reaper.reap()
    assert await _notice(world, run.key, 1) == (LeaseLostReason.ATTEMPT_TIMEOUT, 0)


async def test_the_holder_of_a_reported_attempt_is_told_that_it_is_closed(world: World) -> None:
    run = await world.started()
    await world.report(run, failed())
    assert await _notice(world, run.key, 1) == (LeaseLostReason.ATTEMPT_CLOSED, 0)
    ended = await world.started(name="other")
    await world.report(ended)
    assert await _notice(world, ended.key, 1) == (LeaseLostReason.ATTEMPT_CLOSED, 0)


async def test_the_holder_of_an_unknown_run_or_attempt_is_told_so(world: World) -> None:
    run = await world.started()
    assert await _notice(world, RunKey(JOB_ID, NOON), 1) == (LeaseLostReason.UNKNOWN_RUN, 0)
    assert await _notice(world, run.key, 9) == (LeaseLostReason.UNKNOWN_RUN, 1)


async def test_a_requested_cancel_is_repeated_with_what_is_left_of_its_grace(
    world: World,
) -> None:
    run = await world.started()
    await world.cancel(run.key, reason="enough", grace=20 * SECOND)
    for left in (20, 14, 8):
        [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1)])
        assert renewal.notice is not None
        assert renewal.notice.lost is None
        assert (renewal.notice.cancel_reason, renewal.notice.grace) == ("enough", left * SECOND)
        await world.pass_time(6 * SECOND)


async def test_a_run_held_twice_in_one_tick_is_renewed_once_for_both(world: World) -> None:
    run = await world.started()
    await world.lose_lease()
    renewals = await world.lifecycle.heartbeat([Held(run.key, 1), Held(run.key, 1)])
    assert [each.notice for each in renewals] == [None, None]
    assert (await world.live(run.key))["lost_lease_count"] == 0


def _micros(at: Any) -> Instant:
    return from_datetime(at)
