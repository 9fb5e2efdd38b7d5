"""What a report does to a run: the table of verdicts row by row, locks, strays and bugs."""

import asyncio
from typing import Any

import asyncpg
import pytest
from fencepost_server.clock import DAY, SECOND, to_datetime
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine.verdicts import Held, Report, Verdict
from fencepost_server.policy.outcome import Cancelled, Released, Snoozed

from tests.factories import JOB_ID, NOON, failed, job_spec, plain_retry
from tests.integration.world import World


async def test_a_success_is_applied_and_moves_the_run_to_history(world: World) -> None:
    run = await world.started()
    judged = await world.report(run, result=b"r", timings=b"t", progress=b"p")
    assert (judged.verdict, judged.run_state) == (Verdict.APPLIED, RunState.SUCCEEDED)
    row = await world.ended(run.key)
    assert (row["state"], row["attempt"], row["forced"]) == ("succeeded", 1, False)
    assert (row["result"], row["timings"], row["progress"]) == (b"r", b"t", b"p")
    assert str(row["worker_id"]) == world.worker_id
    assert await world.attempts_of(run.key) == []


@pytest.mark.parametrize("again", [None, failed(), Released(), Cancelled()])
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
    await world.report(run, failed())
    judged = await world.report(run)
    assert (judged.verdict, judged.run_state) == (Verdict.ALREADY_APPLIED, RunState.RETRYING)
    assert (await world.live(run.key))["failure_count"] == 1


@pytest.mark.parametrize("ending", [None, failed(final=True), Released(), Snoozed(delay=SECOND)])
async def test_a_stale_attempt_changes_nothing(world: World, ending: Any) -> None:
    first = await world.started()
    await world.lose_lease()
    [second] = await world.claim()
    before = dict(await world.live(first.key))
    judged = await world.report(first, ending, failure=b"f", progress=b"p")
    assert judged.verdict is Verdict.STALE_ATTEMPT
    assert judged.current_attempt == second.attempt == 2
    assert dict(await world.live(first.key)) == before


@pytest.mark.parametrize("endings", [(None, None), (failed("A"), failed("B"))])
@pytest.mark.parametrize("stale_first", [True, False])
async def test_a_stale_report_in_the_same_tick_as_the_current_one_stays_stale(
    world: World, endings: tuple[Any, Any], stale_first: bool
) -> None:
    first = await world.started(job_spec(retry=plain_retry()))
    await world.lose_lease()
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
    await world.cancel(run.key, grace=0)
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
    stranger = run._replace(key=RunKey(JOB_ID, NOON))
    assert (await world.report(stranger)).verdict is Verdict.NOT_FOUND


async def test_an_attempt_that_was_never_handed_out_is_invalid(world: World) -> None:
    run = await world.started()
    judged = await world.report(run, attempt=2)
    assert (judged.verdict, judged.current_attempt) == (Verdict.INVALID, 1)
    assert (await world.live(run.key))["state"] == "running"


async def test_a_late_success_counts_if_nobody_claimed_the_run_since(world: World) -> None:
    run = await world.started()
    await world.lose_lease()
    assert (await world.live(run.key))["lost_lease_count"] == 1
    assert (await world.report(run)).verdict is Verdict.APPLIED
    assert (await world.ended(run.key))["lost_lease_count"] == 0
    assert await world.attempts_of(run.key) == [(1, "succeeded", True)]


async def test_a_late_failure_takes_the_lost_lease_back_and_counts_as_failure(
    world: World,
) -> None:
    run = await world.started()
    await world.lose_lease()
    assert (await world.report(run, failed())).verdict is Verdict.APPLIED
    row = await world.live(run.key)
    assert (row["failure_count"], row["lost_lease_count"], row["attempt_open"]) == (1, 0, False)
    assert await world.attempts_of(run.key) == [(1, "failed", True)]


async def test_of_duplicates_in_one_tick_the_first_wins(world: World) -> None:
    run = await world.started()
    judged = await world.lifecycle.report(
        [
            Report(key=run.key, attempt=1, ending=None, result=b"1"),
            Report(key=run.key, attempt=1, ending=None, result=b"2"),
            Report(key=run.key, attempt=1, ending=failed()),
        ]
    )
    assert [each.verdict for each in judged] == [
        Verdict.APPLIED,
        Verdict.ALREADY_APPLIED,
        Verdict.ALREADY_APPLIED,
    ]
    assert (await world.ended(run.key))["result"] == b"1"


async def test_rows_that_another_transaction_holds_are_left_for_later(world: World) -> None:
    job = await world.add_job()
    await world.enqueue(job, 2)
    held, free = await world.claim(2)
    async with _locked(world, held.key):
        judged = await world.lifecycle.report(
            [Report(key=run.key, attempt=1, ending=None) for run in (held, free)]
        )
        assert [each.verdict for each in judged] == [Verdict.RETRY, Verdict.APPLIED]
        assert (await world.report(held, failed())).verdict is Verdict.RETRY
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
    moved = run._replace(key=late)
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
        await world.cancel(run.key)
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
    bad = Report(key=poison.key, attempt=1, ending=failed(), failure_code="NUL \0")
    fine = Report(key=good.key, attempt=1, ending=failed(), failure_code="FINE")
    refused, judged = await asyncio.gather(
        world.lifecycle.report([bad]), world.lifecycle.report([fine]), return_exceptions=True
    )
    assert isinstance(refused, Exception)
    assert not isinstance(judged, BaseException)
    assert judged[0].verdict is Verdict.APPLIED
    assert (await world.report(poison)).verdict is Verdict.APPLIED
