"""Cancelling: what waits ends at once, what runs is asked first, and the first commit wins."""

import asyncio

import pytest
from fencepost_server.clock import DAY, SECOND
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.cancel import cancel_job_runs, cancel_run
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.verdicts import Held, LeaseLostReason, Verdict
from fencepost_server.engine.wake import Affected
from fencepost_server.policy.outcome import Failed, Snoozed

from tests.factories import JOB_ID, NOON, job_spec, plain_retry
from tests.integration.world import World


async def _cancel(world: World, key: RunKey, grace: int | None = None) -> bool:
    async with world.database.requests.transaction() as connection:
        effects = await cancel_run(connection, key=key, reason="wrong", grace=grace, now=world.now)
    return effects is not None


async def test_a_queued_run_is_cancelled_at_once(world: World) -> None:
    [key] = await world.enqueue(await world.add_job())
    assert await _cancel(world, key)
    row = await world.ended(key)
    assert (row["state"], row["cancel_cause"], row["cancel_reason"]) == (
        "cancelled",
        "requested",
        "wrong",
    )
    assert row["attempt"] == 0
    assert not await _cancel(world, key)


async def test_a_blocked_run_is_cancelled_at_once(world: World) -> None:
    [key] = await world.enqueue(await world.add_job())
    await world.query("UPDATE fencepost.run_queue SET state = 'blocked'")
    assert await _cancel(world, key)
    assert (await world.ended(key))["state"] == "cancelled"


async def test_a_run_due_next_month_is_cancelled_into_the_strays(world: World) -> None:
    [key] = await world.enqueue(await world.add_job(), at=NOON + 40 * DAY)
    assert await _cancel(world, key)
    assert (await world.ended(key, "job_runs_stray"))["state"] == "cancelled"


@pytest.mark.parametrize("ending", [Failed(code="X", reported=True), Snoozed(delay=SECOND)])
async def test_a_run_in_backoff_is_cancelled_and_its_reported_attempt_stays_reported(
    world: World, ending: Failed | Snoozed
) -> None:
    run = await world.started(job_spec(retry=plain_retry()))
    await world.report(run, ending)
    assert await _cancel(world, run.key)
    assert (await world.ended(run.key))["state"] == "cancelled"
    # The worker that lost the answer and sends again must not hear that it was refused.
    assert (await world.report(run, ending)).verdict is Verdict.ALREADY_APPLIED
    assert len(await world.attempts_of(run.key)) == 1


async def test_cancelling_a_run_with_a_lost_lease_closes_its_attempt(world: World) -> None:
    run = await world.started()
    await world.pass_time(31 * SECOND)
    await world.reaper.reap()
    assert await _cancel(world, run.key)
    assert await world.attempts_of(run.key) == [(1, "lease_expired", False)]
    assert (await world.report(run)).verdict is Verdict.RUN_TERMINAL
    [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1)])
    assert renewal.notice is not None
    assert renewal.notice.lost is LeaseLostReason.RUN_TERMINAL


async def test_a_running_run_is_asked_and_a_second_cancel_can_only_shorten_its_grace(
    world: World,
) -> None:
    run = await world.started(job_spec(cancel_grace=60 * SECOND))
    graces = []
    for grace in (None, 20 * SECOND, 40 * SECOND):
        assert await _cancel(world, run.key, grace)
        [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1)])
        assert renewal.notice is not None
        graces.append(renewal.notice.grace // SECOND)
    assert graces == [60, 20, 20]
    row = await world.live(run.key)
    assert (row["state"], row["cancel_requested"], row["cancel_cause"]) == (
        "running",
        True,
        "requested",
    )


async def test_an_ended_or_unknown_run_cannot_be_cancelled(world: World) -> None:
    run = await world.started()
    await world.report(run)
    assert not await _cancel(world, run.key)
    assert not await _cancel(world, RunKey(JOB_ID, NOON))
    assert (await world.ended(run.key))["state"] == "succeeded"


async def test_cancel_and_completion_at_one_moment_agree_on_the_end(world: World) -> None:
    job = await world.add_job()
    await world.enqueue(job, 60)
    runs = await world.claim(60)

    async def both(run: Claimed) -> tuple[bool, Verdict]:
        cancelled, judged = await asyncio.gather(_cancel(world, run.key), world.report(run))
        return cancelled, judged.verdict

    for answer, run in zip(await asyncio.gather(*map(both, runs)), runs, strict=True):
        cancelled, verdict = answer
        if verdict is Verdict.RETRY:
            assert cancelled
            assert (await world.live(run.key))["cancel_requested"]
            verdict = (await world.report(run)).verdict
        assert verdict is Verdict.APPLIED
        assert (await world.ended(run.key))["state"] == "succeeded"


async def test_cancelling_a_jobs_runs_reaches_all_of_them(world: World) -> None:
    job = await world.add_job()
    other = await world.add_job("other")
    [running] = await world.enqueue(job)
    await world.claim()
    [queued, future] = [
        *await world.enqueue(job, at=NOON + 5),
        *await world.enqueue(job, at=NOON + DAY),
    ]
    [foreign] = await world.enqueue(other)
    async with world.database.requests.transaction() as connection:
        await cancel_job_runs(connection, job_id=job, cause="job_deleted", now=world.now)
    assert (await world.live(running))["cancel_cause"] == "job_deleted"
    assert (await world.ended(queued))["cancel_cause"] == "job_deleted"
    assert (await world.ended(future))["state"] == "cancelled"
    assert (await world.live(foreign))["state"] == "queued"


# Without grace -----------------------------------------------------------------------------------


async def test_a_running_run_without_grace_ends_with_the_cancel(world: World) -> None:
    run = await world.started()
    assert await _cancel(world, run.key, 0)
    row = await world.ended(run.key)
    assert (row["state"], row["forced"], row["cancel_reason"]) == ("cancelled", True, "wrong")
    assert await world.attempts_of(run.key) == [(1, "cancelled", False)]
    assert (await world.report(run)).verdict is Verdict.RUN_TERMINAL
    [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1)])
    assert renewal.notice is not None
    assert renewal.notice.lost is LeaseLostReason.RUN_TERMINAL


async def test_a_job_without_grace_ends_its_runs_with_the_cancel(world: World) -> None:
    run = await world.started(job_spec(cancel_grace=0))
    assert await _cancel(world, run.key)
    assert (await world.ended(run.key))["state"] == "cancelled"


async def test_a_cancel_asked_before_can_be_ended_now_and_keeps_its_first_reason(
    world: World,
) -> None:
    run = await world.started()
    async with world.database.requests.transaction() as connection:
        await cancel_job_runs(
            connection, job_id=run.key.job_id, cause="overlap", reason="first", now=world.now
        )
    assert await _cancel(world, run.key, 0)
    row = await world.ended(run.key)
    assert (row["cancel_cause"], row["cancel_reason"]) == ("overlap", "first")


async def test_a_grace_is_kept_to_the_microsecond(world: World) -> None:
    run = await world.started()
    assert await _cancel(world, run.key, SECOND // 2)
    await world.pass_time(SECOND // 2)
    assert await world.reaper.reap() == 0
    await world.pass_time(1)
    assert await world.reaper.reap() == 1
    assert (await world.ended(run.key))["forced"]


async def test_a_cancel_says_whom_to_tell_and_whose_runs_may_be_free(world: World) -> None:
    job = await world.add_job()
    [running, queued] = await world.enqueue(job, 2)
    [claimed] = await world.claim()
    assert claimed.key == running
    told = []
    for key, grace in ((running, None), (queued, None), (running, 0), (queued, 0)):
        async with world.database.requests.transaction() as connection:
            effects = await cancel_run(connection, key=key, reason="", grace=grace, now=world.now)
        told.append(None if effects is None else (effects.affected, effects.serial_jobs))
    mine = {Affected(world.worker_id, running, 1)}
    # Asked, ended while it waited, ended at once, and not live any more.
    assert told == [(mine, set()), (set(), {job}), (mine, {job}), None]


async def test_what_is_told_of_an_attempt_is_what_its_next_heartbeat_would_hear(
    world: World,
) -> None:
    job = await world.add_job()
    await world.enqueue(job, 4)
    asked, ended, done, untouched = await world.claim(4)
    await _cancel(world, asked.key)
    await _cancel(world, ended.key, 0)
    await world.report(done)
    held = [Held(run.key, 1) for run in (asked, ended, done, untouched)]
    notices = await world.lifecycle.notices(held)
    renewals = await world.lifecycle.heartbeat(held)
    assert notices == [each.notice for each in renewals if each.notice is not None]
    assert [notice.key for notice in notices] == [asked.key, ended.key, done.key]
