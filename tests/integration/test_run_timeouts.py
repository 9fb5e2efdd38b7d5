"""Waiting runs that are out of time, to the microsecond: never claimed, or between attempts."""

import asyncio
from typing import Any

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, from_datetime
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.verdicts import Held, LeaseLostReason, Verdict
from fencepost_server.engine.wake import Affected
from fencepost_server.policy.outcome import Ending, Released, Snoozed

from tests.factories import NOON, every, failed, job_spec, plain_retry
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


# Never claimed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["queue_timeout", "total_timeout"])
async def test_a_run_that_nobody_claims_is_skipped_at_the_microsecond(
    world: World, limit: str
) -> None:
    limits: dict[str, Any] = {limit: MINUTE}
    key = await _fired(world, **limits)
    await world.pass_time(MINUTE - 1)
    assert await world.reaper.expire() == 0
    await world.pass_time(1)
    assert await world.claim() == []
    assert await world.reaper.expire() == 1
    row = await world.ended(key)
    assert (row["state"], row["skip_reason"], row["attempt"]) == ("skipped", "expired", 0)
    assert (row["forced"], row["failure_code"]) == (False, None)
    assert from_datetime(row["ended_at"]) == NOON + MINUTE
    assert await world.attempts_of(key) == []
    assert await world.reaper.expire() == 0


async def test_the_last_microsecond_is_enough_for_a_claim(world: World) -> None:
    await _fired(world, queue_timeout=MINUTE, total_timeout=MINUTE)
    await world.pass_time(MINUTE - 1)
    assert len(await world.claim()) == 1
    # A claimed run does not wait any more: only total_timeout still counts.
    await world.pass_time(1)
    assert await world.reaper.expire() == 0


async def test_a_run_without_timeouts_waits_for_ever(world: World) -> None:
    await _fired(world)
    await world.move(300 * DAY)
    await world.keeper.tick()
    assert await world.reaper.expire() == 0
    assert len(await world.claim()) == 1


async def test_a_blocked_run_waits_for_no_worker_but_is_over_in_the_end(world: World) -> None:
    spec = job_spec(
        every(MINUTE, overlap=OverlapPolicy.QUEUE_ONE),
        queue_timeout=30 * SECOND,
        total_timeout=10 * MINUTE,
        lease_ttl=600 * SECOND,
    )
    job_id = await world.add_job("report", spec, next_run_at=NOON)
    await world.scheduler.fire_due()
    [run] = await world.claim()
    await world.pass_time(MINUTE)
    await world.scheduler.fire_due()
    blocked = RunKey(job_id, NOON + MINUTE)
    await world.pass_time(5 * MINUTE)
    assert await world.reaper.expire() == 0
    assert (await world.live(blocked))["state"] == "blocked"
    # Freed after five minutes: only now it waits for a worker.
    await world.report(run)
    assert await world.promoter.promote([job_id]) == 1
    await world.pass_time(30 * SECOND - 1)
    assert await world.reaper.expire() == 0
    await world.pass_time(1)
    assert await world.reaper.expire() == 1
    assert (await world.ended(blocked))["skip_reason"] == "expired"


async def test_total_timeout_ends_blocked_runs_too(world: World) -> None:
    spec = job_spec(
        every(MINUTE, overlap=OverlapPolicy.QUEUE_ONE), total_timeout=5 * MINUTE, lease_ttl=HOUR
    )
    job_id = await world.add_job("report", spec, next_run_at=NOON)
    await world.scheduler.fire_due()
    await world.claim()
    await world.pass_time(MINUTE)
    await world.scheduler.fire_due()
    await world.pass_time(5 * MINUTE)
    assert await world.reaper.expire() == 1
    row = await world.ended(RunKey(job_id, NOON + MINUTE))
    assert (row["state"], row["skip_reason"]) == ("skipped", "expired")


async def test_the_end_of_a_waiting_run_frees_the_next_of_its_job(world: World) -> None:
    spec = job_spec(every(MINUTE, overlap=OverlapPolicy.QUEUE_ONE), queue_timeout=90 * SECOND)
    job_id = await world.add_job("report", spec, next_run_at=NOON)
    await world.scheduler.fire_due()
    await world.pass_time(MINUTE)
    await world.scheduler.fire_due()
    told: set[str] = set()
    world.lifecycle.serial_ended.append(told.update)
    await world.pass_time(30 * SECOND)
    assert await world.reaper.expire() == 1
    assert told == {job_id}
    assert await world.promoter.promote([job_id]) == 1
    assert len(await world.claim()) == 1


async def test_many_runs_expire_in_batches_and_two_reapers_end_each_once(
    database_url: str,
) -> None:
    async with build(database_url) as one, build(database_url, day_tables=False) as two:
        spec = job_spec(every(DAY), queue_timeout=MINUTE)
        await one.add_jobs([f"job-{n}" for n in range(1200)], spec, NOON)
        while await one.scheduler.fire_due():
            pass
        await one.pass_time(MINUTE)
        await two.move_to(one.now)
        taken = await asyncio.gather(one.reaper.expire(), two.reaper.expire())
        assert sum(taken) + await one.reaper.expire() == 1200
        assert await one.value("SELECT count(*) FROM fencepost.job_runs") == 1200
        assert await one.value("SELECT count(*) FROM fencepost.run_queue") == 0


# Between attempts --------------------------------------------------------------------------------


async def test_each_wait_for_a_worker_has_its_own_queue_timeout(world: World) -> None:
    run = await _claimed(world, queue_timeout=MINUTE)
    await world.pass_time(20 * SECOND)
    await world.report(run, failed(), failure=b"boom", failure_code="BOOM")
    # 20 s of backoff and a minute for the next claim.
    await world.pass_time(80 * SECOND - 1)
    assert await world.reaper.expire() == 0
    await world.pass_time(1)
    assert await world.claim() == []
    assert await world.reaper.expire() == 1
    row = await world.ended(run.key, "dead_letters")
    assert (row["dead_reason"], row["attempt"], row["failure_count"]) == ("queue_timeout", 1, 1)
    # What the handler said is kept; nobody was working, so nothing was forced.
    assert (row["last_failure"], row["failure_code"], row["forced"]) == (b"boom", "BOOM", False)
    assert await world.attempts_of(run.key) == [(1, "failed", False)]
    again = await world.report(run, failed())
    assert (again.verdict, again.run_state) == (Verdict.ALREADY_APPLIED, RunState.DEAD)


async def test_a_run_that_never_failed_is_told_what_it_died_of(world: World) -> None:
    waited = await _claimed(world, "waited", queue_timeout=MINUTE)
    lasted = await _claimed(world, "lasted", total_timeout=MINUTE)
    for run in (waited, lasted):
        assert (await world.report(run, Released())).run_state is RunState.QUEUED
    await world.pass_time(MINUTE)
    assert await world.reaper.expire() == 2
    for run, code in ((waited, "QUEUE_TIMEOUT"), (lasted, "TOTAL_TIMEOUT")):
        row = await world.ended(run.key, "dead_letters")
        assert row["dead_reason"] == code.lower()
        assert (row["failure_code"], row["last_failure"]) == (code, TIMEOUT_FAILURES[code])


@pytest.mark.parametrize(
    ("queue_timeout", "reason"),
    [(29, "queue_timeout"), (30, "queue_timeout"), (31, "total_timeout")],
)
async def test_the_time_that_is_over_first_is_the_reason(
    world: World, queue_timeout: int, reason: str
) -> None:
    run = await _claimed(world, queue_timeout=queue_timeout * SECOND, total_timeout=MINUTE)
    await world.pass_time(10 * SECOND)
    await world.report(run, Released(delay=20 * SECOND))
    # Nobody looked for an hour.
    await world.pass_time(HOUR)
    assert await world.reaper.expire() == 1
    assert (await world.ended(run.key, "dead_letters"))["dead_reason"] == reason


async def test_total_timeout_counts_all_attempts_together(world: World) -> None:
    run = await _claimed(world, total_timeout=5 * MINUTE)
    for _ in range(3):
        await world.report(run, Snoozed(delay=MINUTE))
        await world.pass_time(MINUTE)
        [run] = await world.claim()
    await world.report(run, Snoozed(delay=MINUTE))
    await world.pass_time(2 * MINUTE)
    assert await world.reaper.expire() == 1
    row = await world.ended(run.key, "dead_letters")
    assert (row["dead_reason"], row["attempt"], row["snooze_count"]) == ("total_timeout", 4, 4)


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        (failed(retry_after=MINUTE), "failed"),
        (Snoozed(delay=MINUTE), "snoozed"),
        (Released(delay=MINUTE), "released"),
    ],
)
async def test_a_run_that_could_never_be_claimed_again_is_dead_at_once(
    world: World, ending: Ending, outcome: str
) -> None:
    run = await _claimed(world, total_timeout=MINUTE)
    judged = await world.report(run, ending)
    assert (judged.verdict, judged.run_state) == (Verdict.APPLIED, RunState.DEAD)
    row = await world.ended(run.key, "dead_letters")
    assert (row["dead_reason"], row["forced"]) == ("total_timeout", False)
    assert await world.attempts_of(run.key) == [(1, outcome, False)]
    # The worker did not hear the verdict and sends again.
    assert (await world.report(run, ending)).verdict is Verdict.ALREADY_APPLIED


async def test_a_lost_attempt_is_closed_when_the_time_is_over(world: World) -> None:
    run = await _claimed(world, total_timeout=MINUTE)
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 1
    await world.pass_time(29 * SECOND)
    assert await world.claim() == []
    assert await world.reaper.expire() == 1
    row = await world.ended(run.key, "dead_letters")
    assert (row["dead_reason"], row["forced"], row["lost_lease_count"]) == (
        "total_timeout",
        True,
        1,
    )
    assert await world.attempts_of(run.key) == [(1, "lease_expired", False)]
    assert world.woken.affected == {Affected(world.worker_id, run.key, 1)}
    late = await world.report(run)
    assert (late.verdict, late.run_state) == (Verdict.RUN_TERMINAL, RunState.DEAD)
    [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1)])
    assert renewal.notice is not None
    assert renewal.notice.lost is LeaseLostReason.RUN_TERMINAL


async def test_a_lost_attempt_that_reports_in_time_goes_on(world: World) -> None:
    run = await _claimed(world, queue_timeout=MINUTE)
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 1
    await world.pass_time(2 * MINUTE - 1)
    # Out of time already, but nobody has looked: the first commit wins.
    await world.lifecycle.heartbeat([Held(run.key, 1)])
    assert await world.reaper.expire() == 0
    assert (await world.report(run)).run_state is RunState.SUCCEEDED
