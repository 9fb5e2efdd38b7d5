"""Attempts that run while their run's time is over: ended by force, after the reaper's pause,
and against whoever wants the run at that moment; and what is seen of it from outside."""

import asyncio
from typing import Any

from fencepost.v1 import job_pb2, job_service_pb2, run_service_pb2, schedule_pb2
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Duration
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.verdicts import Held, LeaseLostReason, Verdict
from fencepost_server.engine.wake import Affected
from google.protobuf.duration_pb2 import Duration as Seconds

from tests.factories import NOON, every, job_spec, plain_retry
from tests.integration.held_database import HandClock
from tests.integration.running_server import running
from tests.integration.world import TIMEOUT_FAILURES, World, build


async def _fired(world: World, name: str = "report", **limits: Any) -> RunKey:
    """The run of a fire at noon, with these limits."""
    spec = job_spec(every(DAY), retry=plain_retry(), **limits)
    job_id = await world.add_job(name, spec, next_run_at=NOON)
    await world.scheduler.fire_due()
    return RunKey(job_id, NOON)


async def _claimed(world: World, name: str = "report", **limits: Any) -> Claimed:
    await _fired(world, name, **limits)
    [run] = await world.claim()
    return run


# Running -----------------------------------------------------------------------------------------


async def _hold(world: World, run: Claimed, duration: Duration) -> None:
    """Time passes while a worker renews its lease."""
    until = world.now + duration
    while world.now < until:
        await world.pass_time(min(9 * SECOND, until - world.now))
        await world.lifecycle.heartbeat([Held(run.key, run.attempt)])


async def test_a_running_attempt_is_ended_when_the_run_is_over(world: World) -> None:
    run = await _claimed(world, total_timeout=MINUTE)
    await _hold(world, run, MINUTE - 1)
    assert await world.reaper.reap() == 0
    await world.pass_time(1)
    assert await world.reaper.reap() == 1
    row = await world.ended(run.key, "dead_letters")
    assert (row["dead_reason"], row["forced"], row["failure_count"]) == ("total_timeout", True, 0)
    assert (row["failure_code"], row["last_failure"]) == (
        "TOTAL_TIMEOUT",
        TIMEOUT_FAILURES["TOTAL_TIMEOUT"],
    )
    assert await world.attempts_of(run.key) == [(1, "timed_out", False)]
    assert world.woken.affected == {Affected(world.worker_id, run.key, 1)}
    [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1)])
    assert renewal.notice is not None
    assert renewal.notice.lost is LeaseLostReason.RUN_TERMINAL
    assert (await world.report(run)).verdict is Verdict.RUN_TERMINAL


async def test_a_lost_lease_of_a_run_that_is_over_is_not_waited_for(world: World) -> None:
    run = await _claimed(world, total_timeout=20 * SECOND)
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 1
    row = await world.ended(run.key, "dead_letters")
    assert (row["dead_reason"], row["lost_lease_count"]) == ("total_timeout", 0)


async def test_a_run_asked_to_stop_is_cancelled_when_its_time_is_over(world: World) -> None:
    run = await _claimed(world, total_timeout=25 * SECOND, cancel_grace=HOUR)
    await world.cancel(run.key, reason="wrong month")
    await world.pass_time(25 * SECOND)
    assert await world.reaper.reap() == 1
    row = await world.ended(run.key)
    assert (row["state"], row["forced"], row["cancel_reason"]) == ("cancelled", True, "wrong month")


async def test_what_never_reached_a_worker_dies_when_the_run_is_over(world: World) -> None:
    run = await _claimed(world, total_timeout=10 * SECOND)
    await world.lifecycle.cut_leases([(run.key, 1)], fuse=5 * SECOND)
    await world.pass_time(11 * SECOND)
    assert await world.reaper.reap() == 1
    assert (await world.ended(run.key, "dead_letters"))["dead_reason"] == "total_timeout"
    assert await world.attempts_of(run.key) == [(1, "undelivered", False)]
    assert (await world.report(run)).verdict is Verdict.RUN_TERMINAL


async def test_a_success_that_is_stored_before_anybody_looks_stands(world: World) -> None:
    run = await _claimed(world, total_timeout=10 * SECOND)
    await world.pass_time(20 * SECOND)
    assert (await world.report(run)).run_state is RunState.SUCCEEDED
    assert await world.reaper.reap() == 0


async def test_only_what_a_worker_could_not_report_waits_out_a_gap_in_heartbeats(
    world: World,
) -> None:
    lost = await _claimed(world, "lost", total_timeout=2 * MINUTE)
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 1
    running = await _claimed(world, "running", total_timeout=2 * MINUTE)
    waiting = await _fired(world, "waiting", total_timeout=2 * MINUTE)
    await world.move(10 * MINUTE)
    await world.keeper.tick()
    assert await world.reaper.reap() == 0
    assert await world.reaper.expire() == 1
    assert (await world.ended(waiting))["state"] == "skipped"
    # Both had ended during the gap, and their workers can say so only now.
    for run in (lost, running):
        assert (await world.report(run)).verdict is Verdict.APPLIED
    await world.pass_time(MINUTE)
    assert await world.reaper.reap() == await world.reaper.expire() == 0


async def test_after_the_pause_a_lost_attempt_out_of_time_ends(world: World) -> None:
    run = await _claimed(world, queue_timeout=MINUTE)
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 1
    await world.move(10 * MINUTE)
    await world.keeper.tick()
    await world.pass_time(30 * SECOND - 1)
    assert await world.reaper.expire() == 0
    await world.pass_time(1)
    assert await world.reaper.expire() == 1
    assert (await world.ended(run.key, "dead_letters"))["dead_reason"] == "queue_timeout"


# Against each other ------------------------------------------------------------------------------


async def test_claim_and_expiry_at_one_moment_agree_on_each_run(database_url: str) -> None:
    """The claimer's clock is a microsecond behind: both may take every run."""
    async with build(database_url) as world, build(database_url, day_tables=False) as behind:
        names = [f"job-{n}" for n in range(200)]
        spec = job_spec(every(DAY), queue_timeout=MINUTE)
        await world.add_jobs(names, spec, NOON)
        while await world.scheduler.fire_due():
            pass
        await world.pass_time(MINUTE)
        clock = behind.database.clock
        assert isinstance(clock, HandClock)
        clock.at = world.now - 1
        claimed: list[Claimed] = []

        async def claim() -> None:
            while found := await behind.claim(7):
                claimed.extend(found)

        _, expired = await asyncio.gather(claim(), world.reaper.expire())
        expired += await world.reaper.expire()
        assert len(claimed) + expired == 200
        skipped = await world.query("SELECT job_id, attempt FROM fencepost.job_runs")
        assert [row["attempt"] for row in skipped] == [0] * expired
        assert not {run.key.job_id for run in claimed} & {str(row["job_id"]) for row in skipped}
        for run in claimed:
            assert (await world.report(run)).verdict is Verdict.APPLIED


# Seen from outside -------------------------------------------------------------------------------


async def test_a_fire_that_nobody_served_in_time_says_so(database_url: str) -> None:
    """Nothing happens on this server but time: the fire's disposition changes with its run."""
    async with running(database_url) as server:
        schedule = schedule_pb2.Schedule(
            interval=schedule_pb2.IntervalSpec(every=Seconds(seconds=1)), max_fires=1
        )
        limits = job_pb2.RunLimits(queue_timeout=Seconds(seconds=1))
        job = await server.make_job(schedule=schedule, limits=limits)
        await server.until("SELECT count(*)::int FROM fencepost.job_runs", want=1)
        answer = await server.jobs.ListFires(job_service_pb2.ListFiresRequest(parent=job.name))
        [fire] = answer.fires
        assert fire.disposition == schedule_pb2.FIRE_DISPOSITION_SKIPPED
        assert fire.skip_reason == schedule_pb2.SKIP_REASON_EXPIRED
        listed = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(parent="tenants/default", filter="state:SKIPPED")
        )
        [run] = listed.runs
        assert (run.skip_reason, run.attempt) == (schedule_pb2.SKIP_REASON_EXPIRED, 0)
