"""Failures, snoozes, releases and cancels: what the run does next and what is counted."""

from typing import Any

import pytest
from fencepost_server.clock import MINUTE, SECOND, Instant, from_datetime
from fencepost_server.domain.job import RetryPolicy
from fencepost_server.domain.run import RunState
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.verdicts import Report
from fencepost_server.policy.outcome import Cancelled, Failed, Released, Snoozed

from tests.factories import failed, job_spec, plain_retry
from tests.integration.world import World


async def test_failures_wait_longer_each_time_until_the_budget_is_used(world: World) -> None:
    await world.started(job_spec(retry=plain_retry(max_failures=4)))
    [run] = await _live_claims(world)
    waits = []
    for failures in (1, 2, 3):
        judged = await world.report(run, failed(), failure=b"failure", failure_code="BOOM")
        assert judged.run_state is RunState.RETRYING
        row = await world.live(run.key)
        assert (row["failure_count"], row["attempt"], row["lease_until"]) == (
            failures,
            failures,
            None,
        )
        waits.append(_micros(row["available_at"]) - world.now)
        await world.pass_time(waits[-1] - 1)
        assert await world.claim() == []
        await world.pass_time(1)
        [run] = await world.claim()
    assert waits == [20 * SECOND, 40 * SECOND, 80 * SECOND]
    judged = await world.report(run, failed(), failure=b"last words", failure_code="BOOM")
    assert judged.run_state is RunState.DEAD
    row = await world.ended(run.key, "dead_letters")
    assert (row["dead_reason"], row["attempt"], row["failure_count"]) == ("max_failures", 4, 4)
    assert (row["last_failure"], row["failure_code"], row["forced"]) == (
        b"last words",
        "BOOM",
        False,
    )
    assert await world.attempts_of(run.key) == [(n, "failed", False) for n in (1, 2, 3, 4)]


async def _live_claims(world: World) -> list[Claimed]:
    """The run that `started` has claimed, put back and claimed again as its first attempt."""
    await world.query(
        "UPDATE fencepost.run_queue SET state = 'queued', attempt = 0, attempt_open = false, "
        "lease_until = NULL"
    )
    return await world.claim()


async def test_full_jitter_stays_in_its_range_and_differs_between_runs(world: World) -> None:
    job = await world.add_job(spec=job_spec(retry=RetryPolicy()))
    await world.enqueue(job, 30)
    runs = await world.claim(30)
    reports = [Report(key=run.key, attempt=1, ending=failed()) for run in runs]
    await world.lifecycle.report(reports)
    rows = await world.query("SELECT available_at FROM fencepost.run_queue")
    waits = {_micros(row["available_at"]) - world.now for row in rows}
    assert len(waits) == 30
    assert min(waits) >= 0
    assert 10 * SECOND < max(waits) < 20 * SECOND


async def test_a_failure_may_name_its_own_delay(world: World) -> None:
    run = await world.started()
    await world.report(run, failed(retry_after=7 * MINUTE))
    assert _micros((await world.live(run.key))["available_at"]) == world.now + 7 * MINUTE


@pytest.mark.parametrize("failed", [failed(final=True), failed("BAD_INPUT")])
async def test_what_is_not_retryable_is_dead_at_once(world: World, failed: Failed) -> None:
    run = await world.started(job_spec(retry=plain_retry(non_retryable_codes=("BAD_INPUT",))))
    judged = await world.report(run, failed)
    assert judged.run_state is RunState.DEAD
    assert (await world.ended(run.key, "dead_letters"))["dead_reason"] == "not_retryable"


async def test_a_success_after_failures_is_recorded_with_its_attempts(world: World) -> None:
    run = await world.started(job_spec(retry=plain_retry()))
    await world.report(run, failed())
    await world.pass_time(20 * SECOND)
    [again] = await world.claim()
    assert (again.attempt, again.failure_count) == (2, 1)
    await world.report(again)
    assert await world.attempts_of(run.key) == [(1, "failed", False), (2, "succeeded", False)]


# Other endings -------------------------------------------------------------------------------


async def test_a_snooze_costs_no_budget_and_waits_as_long_as_it_says(world: World) -> None:
    run = await world.started()
    judged = await world.report(run, Snoozed(delay=90 * SECOND), progress=b"half")
    assert judged.run_state is RunState.RETRYING
    row = await world.live(run.key)
    assert (row["snooze_count"], row["failure_count"], row["progress"]) == (1, 0, b"half")
    assert _micros(row["available_at"]) == world.now + 90 * SECOND


async def test_a_release_puts_the_run_back_at_once_and_for_free(world: World) -> None:
    run = await world.started()
    judged = await world.report(run, Released())
    assert judged.run_state is RunState.QUEUED
    row = await world.live(run.key)
    assert (row["failure_count"], row["lost_lease_count"], row["attempt_open"]) == (0, 0, False)
    [again] = await world.claim()
    assert again.attempt == 2


async def test_a_handler_that_obeys_a_cancel_ends_the_run_unforced(world: World) -> None:
    run = await world.started()
    await world.cancel(run.key, reason="wrong month")
    judged = await world.report(run, Cancelled())
    assert judged.run_state is RunState.CANCELLED
    row = await world.ended(run.key)
    assert (row["cancel_cause"], row["cancel_reason"], row["forced"]) == (
        "requested",
        "wrong month",
        False,
    )


@pytest.mark.parametrize("ending", [failed(), Snoozed(delay=SECOND), Released()])
async def test_a_cancelled_run_is_never_retried(world: World, ending: Any) -> None:
    run = await world.started()
    await world.cancel(run.key)
    assert (await world.report(run, ending)).run_state is RunState.CANCELLED


async def test_a_success_wins_over_a_cancel_that_was_only_requested(world: World) -> None:
    run = await world.started()
    await world.cancel(run.key)
    assert (await world.report(run)).run_state is RunState.SUCCEEDED


async def test_a_hint_follows_each_end_that_makes_a_run_ready(world: World) -> None:
    run = await world.started(job_spec(retry=plain_retry()))
    world.woken.lane_hints.clear()
    await world.report(run, Snoozed(delay=5 * SECOND))
    await world.pass_time(5 * SECOND)
    [again] = await world.claim()
    await world.report(again, Released())
    [(first, at), (second, now)] = world.woken.lane_hints
    assert first == second
    assert (at, now) == (world.now, 0)


def _micros(at: Any) -> Instant:
    return from_datetime(at)
