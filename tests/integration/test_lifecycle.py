"""What a report does to a run: the table of verdicts row by row, and every way an attempt ends."""

import asyncio
import dataclasses
from typing import Any

import asyncpg
import pytest
from fencepost_server.clock import DAY, MINUTE, SECOND, Instant, from_datetime, to_datetime
from fencepost_server.domain.job import RetryPolicy
from fencepost_server.domain.run import LOST_LEASE_WAIT_MAX, RunKey, RunState
from fencepost_server.engine.cancel import cancel_run
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.lifecycle import Held, LeaseLostReason, Report, Verdict
from fencepost_server.policy.outcome import Cancelled, Failed, Released, Snoozed

from tests.factories import JOB_ID, NOON, job_spec, plain_retry
from tests.integration.world import World


def _failed(code: str = "BOOM", **fields: Any) -> Failed:
    return Failed(code=code, reported=True, **fields)


async def _lose_lease(world: World) -> None:
    """The newest attempts lose their leases, and what waits for the next claim is due."""
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 1
    await world.pass_time(LOST_LEASE_WAIT_MAX)


async def _cancel(world: World, key: RunKey, **options: Any) -> bool:
    values: dict[str, Any] = {"reason": "", "grace": None} | options
    async with world.database.requests.transaction() as connection:
        return await cancel_run(connection, key=key, now=world.now, **values)


# Verdicts ------------------------------------------------------------------------------------


async def test_a_success_is_applied_and_moves_the_run_to_history(world: World) -> None:
    run = await world.started()
    judged = await world.report(run, result=b"r", timings=b"t", progress=b"p")
    assert (judged.verdict, judged.run_state) == (Verdict.APPLIED, RunState.SUCCEEDED)
    row = await world.ended(run.key)
    assert (row["state"], row["attempt"], row["forced"]) == ("succeeded", 1, False)
    assert (row["result"], row["timings"], row["progress"]) == (b"r", b"t", b"p")
    assert str(row["worker_id"]) == world.worker_id
    assert await world.attempts_of(run.key) == []


@pytest.mark.parametrize("again", [None, _failed(), Released(), Cancelled()])
async def test_a_second_report_of_an_attempt_is_already_applied_whatever_it_says(
    world: World, again: Any
) -> None:
    run = await world.started()
    await world.report(run, result=b"first")
    judged = await world.report(run, again, result=b"second")
    assert (judged.verdict, judged.run_state) == (Verdict.ALREADY_APPLIED, RunState.SUCCEEDED)
    assert (await world.ended(run.key))["result"] == b"first"


async def test_a_report_after_a_stored_failure_is_already_applied(world: World) -> None:
    run = await world.started()
    await world.report(run, _failed())
    judged = await world.report(run)
    assert (judged.verdict, judged.run_state) == (Verdict.ALREADY_APPLIED, RunState.RETRYING)
    assert (await world.live(run.key))["failure_count"] == 1


@pytest.mark.parametrize("ending", [None, _failed(final=True), Released(), Snoozed(delay=SECOND)])
async def test_a_stale_attempt_changes_nothing(world: World, ending: Any) -> None:
    first = await world.started()
    await _lose_lease(world)
    [second] = await world.claim()
    before = dict(await world.live(first.key))
    judged = await world.report(first, ending, failure=b"f", progress=b"p")
    assert judged.verdict is Verdict.STALE_ATTEMPT
    assert judged.current_attempt == second.attempt == 2
    assert dict(await world.live(first.key)) == before


@pytest.mark.parametrize("endings", [(None, None), (_failed("A"), _failed("B"))])
@pytest.mark.parametrize("stale_first", [True, False])
async def test_a_stale_report_in_the_same_tick_as_the_current_one_stays_stale(
    world: World, endings: tuple[Any, Any], stale_first: bool
) -> None:
    first = await world.started(job_spec(retry=plain_retry()))
    await _lose_lease(world)
    [second] = await world.claim()
    reports = [
        Report(key=first.key, attempt=1, ending=endings[0], failure_code="STALE"),
        Report(key=second.key, attempt=2, ending=endings[1], failure_code="CURRENT"),
    ]
    verdicts = [Verdict.STALE_ATTEMPT, Verdict.APPLIED]
    if not stale_first:
        reports.reverse()
        verdicts.reverse()
    assert [judged.verdict for judged in await world.lifecycle.report(reports)] == verdicts
    if endings[1] is not None:
        assert (await world.live(first.key))["failure_code"] == "CURRENT"


async def test_after_a_forced_end_a_report_is_refused_as_terminal(world: World) -> None:
    run = await world.started()
    await _cancel(world, run.key, grace=0)
    await world.pass_time(SECOND)
    await world.reaper.reap()
    judged = await world.report(run)
    assert (judged.verdict, judged.run_state) == (Verdict.RUN_TERMINAL, RunState.CANCELLED)


async def test_after_the_last_lost_lease_a_report_is_refused_as_terminal(world: World) -> None:
    run = await world.started(job_spec(retry=plain_retry(max_lost_leases=1)))
    await world.pass_time(31 * SECOND)
    await world.reaper.reap()
    assert (await world.report(run)).verdict is Verdict.RUN_TERMINAL


async def test_a_report_of_an_unknown_run_is_not_found(world: World) -> None:
    run = await world.started()
    stranger = dataclasses.replace(run, key=RunKey(JOB_ID, NOON))
    assert (await world.report(stranger)).verdict is Verdict.NOT_FOUND


async def test_an_attempt_that_was_never_handed_out_is_invalid(world: World) -> None:
    run = await world.started()
    judged = await world.report(run, attempt=2)
    assert (judged.verdict, judged.current_attempt) == (Verdict.INVALID, 1)
    assert (await world.live(run.key))["state"] == "running"


async def test_a_late_success_counts_if_nobody_claimed_the_run_since(world: World) -> None:
    run = await world.started()
    await _lose_lease(world)
    assert (await world.live(run.key))["lost_lease_count"] == 1
    assert (await world.report(run)).verdict is Verdict.APPLIED
    assert (await world.ended(run.key))["lost_lease_count"] == 0
    assert await world.attempts_of(run.key) == [(1, "succeeded", True)]


async def test_a_late_failure_takes_the_lost_lease_back_and_counts_as_failure(
    world: World,
) -> None:
    run = await world.started()
    await _lose_lease(world)
    assert (await world.report(run, _failed())).verdict is Verdict.APPLIED
    row = await world.live(run.key)
    assert (row["failure_count"], row["lost_lease_count"], row["attempt_open"]) == (1, 0, False)
    assert await world.attempts_of(run.key) == [(1, "failed", True)]


async def test_of_duplicates_in_one_tick_the_first_wins(world: World) -> None:
    run = await world.started()
    judged = await world.lifecycle.report(
        [
            Report(key=run.key, attempt=1, ending=None, result=b"1"),
            Report(key=run.key, attempt=1, ending=None, result=b"2"),
            Report(key=run.key, attempt=1, ending=_failed()),
        ]
    )
    assert [each.verdict for each in judged] == [
        Verdict.APPLIED,
        Verdict.ALREADY_APPLIED,
        Verdict.ALREADY_APPLIED,
    ]
    assert (await world.ended(run.key))["result"] == b"1"


# Failures ------------------------------------------------------------------------------------


async def test_failures_wait_longer_each_time_until_the_budget_is_used(world: World) -> None:
    await world.started(job_spec(retry=plain_retry(max_failures=4)))
    [run] = await _live_claims(world)
    waits = []
    for failures in (1, 2, 3):
        judged = await world.report(run, _failed(), failure=b"failure", failure_code="BOOM")
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
    judged = await world.report(run, _failed(), failure=b"last words", failure_code="BOOM")
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
    reports = [Report(key=run.key, attempt=1, ending=_failed()) for run in runs]
    await world.lifecycle.report(reports)
    rows = await world.query("SELECT available_at FROM fencepost.run_queue")
    waits = {_micros(row["available_at"]) - world.now for row in rows}
    assert len(waits) == 30
    assert min(waits) >= 0
    assert 10 * SECOND < max(waits) < 20 * SECOND


async def test_a_failure_may_name_its_own_delay(world: World) -> None:
    run = await world.started()
    await world.report(run, _failed(retry_after=7 * MINUTE))
    assert _micros((await world.live(run.key))["available_at"]) == world.now + 7 * MINUTE


@pytest.mark.parametrize("failed", [_failed(final=True), _failed("BAD_INPUT")])
async def test_what_is_not_retryable_is_dead_at_once(world: World, failed: Failed) -> None:
    run = await world.started(job_spec(retry=plain_retry(non_retryable_codes=("BAD_INPUT",))))
    judged = await world.report(run, failed)
    assert judged.run_state is RunState.DEAD
    assert (await world.ended(run.key, "dead_letters"))["dead_reason"] == "not_retryable"


async def test_a_success_after_failures_is_recorded_with_its_attempts(world: World) -> None:
    run = await world.started(job_spec(retry=plain_retry()))
    await world.report(run, _failed())
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
    await _cancel(world, run.key, reason="wrong month")
    judged = await world.report(run, Cancelled())
    assert judged.run_state is RunState.CANCELLED
    row = await world.ended(run.key)
    assert (row["cancel_cause"], row["cancel_reason"], row["forced"]) == (
        "requested",
        "wrong month",
        False,
    )


@pytest.mark.parametrize("ending", [_failed(), Snoozed(delay=SECOND), Released()])
async def test_a_cancelled_run_is_never_retried(world: World, ending: Any) -> None:
    run = await world.started()
    await _cancel(world, run.key)
    assert (await world.report(run, ending)).run_state is RunState.CANCELLED


async def test_a_success_wins_over_a_cancel_that_was_only_requested(world: World) -> None:
    run = await world.started()
    await _cancel(world, run.key)
    assert (await world.report(run)).run_state is RunState.SUCCEEDED


# Heartbeats ----------------------------------------------------------------------------------


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
    await _lose_lease(world)
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
    await _lose_lease(world)
    await world.claim()
    assert await _notice(world, run.key, 1) == (LeaseLostReason.SUPERSEDED, 2)


async def test_the_holder_of_a_run_that_was_ended_by_force_is_told_so(world: World) -> None:
    run = await world.started()
    await _cancel(world, run.key, grace=0)
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
    await world.report(run, _failed())
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
    await _cancel(world, run.key, reason="enough", grace=20 * SECOND)
    for left in (20, 14, 8):
        [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1)])
        assert renewal.notice is not None
        assert renewal.notice.lost is None
        assert (renewal.notice.cancel_reason, renewal.notice.grace) == ("enough", left * SECOND)
        await world.pass_time(6 * SECOND)


async def test_a_run_held_twice_in_one_tick_is_renewed_once_for_both(world: World) -> None:
    run = await world.started()
    await _lose_lease(world)
    renewals = await world.lifecycle.heartbeat([Held(run.key, 1), Held(run.key, 1)])
    assert [each.notice for each in renewals] == [None, None]
    assert (await world.live(run.key))["lost_lease_count"] == 0


# Locks, strays and bugs ----------------------------------------------------------------------


async def test_rows_that_another_transaction_holds_are_left_for_later(world: World) -> None:
    job = await world.add_job()
    await world.enqueue(job, 2)
    held, free = await world.claim(2)
    async with _locked(world, held.key):
        judged = await world.lifecycle.report(
            [Report(key=run.key, attempt=1, ending=None) for run in (held, free)]
        )
        assert [each.verdict for each in judged] == [Verdict.RETRY, Verdict.APPLIED]
        assert (await world.report(held, _failed())).verdict is Verdict.RETRY
        [renewal] = await world.lifecycle.heartbeat([Held(held.key, 1)])
        assert renewal.not_renewed
    assert (await world.report(held)).verdict is Verdict.APPLIED


class _locked:
    """Holds one run's row in a transaction of another connection."""

    def __init__(self, world: World, key: RunKey) -> None:
        self._world, self._key = world, key

    async def __aenter__(self) -> None:
        self._connection = await asyncpg.connect(self._world.dsn)
        await self._connection.execute("BEGIN")
        await self._connection.execute(
            "SELECT FROM fencepost.run_queue WHERE job_id = $1::uuid AND scheduled_at = $2 "
            "FOR UPDATE",
            self._key.job_id,
            to_datetime(self._key.scheduled_at),
        )

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()


@pytest.mark.parametrize("ending", [None, Cancelled()])
async def test_an_end_whose_day_has_no_table_is_a_stray(world: World, ending: Any) -> None:
    run = await world.started()
    late = RunKey(run.key.job_id, run.key.scheduled_at - 90 * DAY)
    await world.query(
        "UPDATE fencepost.run_queue SET scheduled_at = $1", to_datetime(late.scheduled_at)
    )
    moved = dataclasses.replace(run, key=late)
    assert (await world.report(moved, ending)).verdict is Verdict.APPLIED
    assert (await world.ended(late, "job_runs_stray"))["attempt"] == 1
    assert (await world.report(moved, ending)).verdict is Verdict.ALREADY_APPLIED


@pytest.mark.parametrize("ending", [None, Cancelled()])
async def test_a_key_that_is_in_history_already_does_not_hold_up_the_others(
    world: World, ending: Any
) -> None:
    job = await world.add_job()
    await world.enqueue(job, 5)
    runs = await world.claim(5)
    twice = runs[2]
    await world.report(twice)
    await _put_back_what_ended(world)
    judged = await world.lifecycle.report(
        [Report(key=run.key, attempt=run.attempt, ending=ending) for run in runs]
    )
    verdicts = {run.key: each.verdict for run, each in zip(runs, judged, strict=True)}
    assert verdicts.pop(twice.key) is Verdict.ALREADY_APPLIED
    assert set(verdicts.values()) == {Verdict.APPLIED}
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 1


async def _put_back_what_ended(world: World) -> None:
    """The bug to be survived: a run is in history and live at once."""
    await world.query(
        "INSERT INTO fencepost.run_queue (job_id, scheduled_at, available_at, created_at, "
        "tenant_id, queue_id, kind_id, version, attempt, attempt_open, lease_until, state, "
        "origin, priority, lease_s, cancel_grace_s, attempt_timeout_s) "
        "SELECT job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, "
        "version, 1, true, $1, 'running', origin, priority, 30, 30, 3600 FROM fencepost.job_runs",
        to_datetime(world.now + 30 * SECOND),
    )


async def test_a_lost_lease_whose_key_is_in_history_does_not_hold_up_the_reaper(
    world: World,
) -> None:
    spec = job_spec(retry=plain_retry(max_lost_leases=1))
    job = await world.add_job(spec=spec)
    await world.enqueue(job, 3)
    runs = await world.claim(3)
    for run in runs:
        await _cancel(world, run.key)
    await world.report(runs[1])
    await _put_back_what_ended(world)
    await world.query("UPDATE fencepost.run_queue SET cancel_requested = true")
    await world.pass_time(40 * SECOND)
    assert await world.reaper.reap() == 2
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 1


async def test_text_that_postgres_refuses_does_not_hold_up_other_callers(world: World) -> None:
    job = await world.add_job()
    await world.enqueue(job, 2)
    poison, good = await world.claim(2)
    bad = Report(key=poison.key, attempt=1, ending=_failed(), failure_code="NUL \0")
    fine = Report(key=good.key, attempt=1, ending=_failed(), failure_code="FINE")
    refused, judged = await asyncio.gather(
        world.lifecycle.report([bad]), world.lifecycle.report([fine]), return_exceptions=True
    )
    assert isinstance(refused, Exception)
    assert not isinstance(judged, BaseException)
    assert judged[0].verdict is Verdict.APPLIED
    assert (await world.report(poison)).verdict is Verdict.APPLIED


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
