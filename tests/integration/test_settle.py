"""Fires that need thought: missed ones, those that meet a live run, and paused jobs."""

from typing import Any

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND
from fencepost_server.domain.schedule import MisfireAction, OverlapPolicy

from tests.factories import NOON, cron, every, job_spec
from tests.integration.world import World

H = 3600
OUTAGE = 26 * HOUR


async def _late_job(world: World, **schedule: Any) -> str:
    """An hourly job whose scheduler was away from noon until 14:00 of the next day."""
    job = await world.add_job(spec=job_spec(every(HOUR, **schedule)), next_run_at=NOON)
    await world.move_to(NOON + OUTAGE + 30 * MINUTE)
    assert await world.scheduler.fire_due() > 0
    assert await world.scheduler.fire_due() == 0
    assert await world.next_of(job) == 27 * H
    return job


async def test_after_an_outage_run_once_runs_the_newest_and_names_it_as_stand_in(
    world: World,
) -> None:
    job = await _late_job(world, misfire=MisfireAction.RUN_ONCE)
    assert await world.runs_of(job) == [(26 * H, "queued", "catch_up")]
    assert await world.skips_of(job) == [(0, 25 * H, "misfire", 26 * H)]


async def test_after_an_outage_skip_runs_nothing(world: World) -> None:
    job = await _late_job(world, misfire=MisfireAction.SKIP)
    assert await world.runs_of(job) == []
    assert await world.skips_of(job) == [(0, 26 * H, "misfire", None)]


async def test_after_an_outage_catch_up_runs_the_newest_up_to_its_cap(world: World) -> None:
    job = await _late_job(world, misfire=MisfireAction.CATCH_UP, max_catch_up=3)
    assert await world.runs_of(job) == [(h * H, "queued", "catch_up") for h in (24, 25, 26)]
    assert await world.skips_of(job) == [(0, 23 * H, "misfire", None)]


async def test_after_an_outage_nothing_older_than_the_window_is_caught_up(world: World) -> None:
    job = await _late_job(world, misfire=MisfireAction.CATCH_UP, window=2 * HOUR)
    assert [at for at, _, _ in await world.runs_of(job)] == [25 * H, 26 * H]
    assert await world.skips_of(job) == [(0, 24 * H, "misfire", None)]


async def test_caught_up_fires_queue_behind_each_other_under_skip(world: World) -> None:
    job = await _late_job(
        world, misfire=MisfireAction.CATCH_UP, max_catch_up=3, overlap=OverlapPolicy.SKIP
    )
    assert await world.runs_of(job) == [
        (24 * H, "queued", "catch_up"),
        (25 * H, "blocked", "catch_up"),
        (26 * H, "blocked", "catch_up"),
    ]
    order = []
    for _ in range(3):
        [run] = await world.claim(5)
        order.append((run.key.scheduled_at - NOON) // HOUR)
        await world.report(run)
        await world.promoter.sweep()
    assert order == [24, 25, 26]


async def test_a_year_of_missed_seconds_is_one_row_and_one_run(world: World) -> None:
    job = await world.add_job(spec=job_spec(cron("* * * * *")), next_run_at=NOON)
    await world.move(400 * DAY + 30 * SECOND)
    await world.scheduler.fire_due()
    runs = await world.runs_of(job)
    # The newest misfire, and the fire that is within its threshold.
    assert [(state, origin) for _, state, origin in runs] == [
        ("queued", "catch_up"),
        ("queued", "schedule"),
    ]
    [skipped] = await world.skips_of(job)
    assert skipped == (0, runs[0][0] - 60, "misfire", runs[0][0])


async def _overlapping(world: World, overlap: OverlapPolicy) -> str:
    """A job that fires every minute and whose first run is never finished."""
    job = await world.add_job(spec=job_spec(every(overlap=overlap)), next_run_at=NOON)
    await world.scheduler.fire_due()
    assert len(await world.claim(5)) == 1
    return job


async def _minutes(world: World, first: int, last: int) -> None:
    for minute in range(first, last + 1):
        await world.move_to(NOON + minute * MINUTE)
        await world.scheduler.fire_due()


async def test_overlap_skip_skips_while_a_run_is_live_and_keeps_one_row(world: World) -> None:
    job = await _overlapping(world, OverlapPolicy.SKIP)
    await _minutes(world, 1, 30)
    assert await world.runs_of(job) == [(0, "running", "schedule")]
    assert await world.skips_of(job) == [(60, 1800, "overlap", None)]


async def test_a_stretch_of_overlaps_ends_where_a_fire_ran(world: World) -> None:
    job = await _overlapping(world, OverlapPolicy.SKIP)
    await _minutes(world, 1, 2)
    await world.query("DELETE FROM fencepost.run_queue")
    # Two fires are decided at once: the first runs, the second meets it.
    await world.move_to(NOON + 4 * MINUTE)
    await world.settle([job])
    assert await world.runs_of(job) == [(180, "queued", "schedule")]
    assert await world.skips_of(job) == [(60, 120, "overlap", None), (240, 240, "overlap", None)]


async def test_a_stretch_of_overlaps_does_not_go_on_over_an_outage(world: World) -> None:
    job = await _overlapping(world, OverlapPolicy.SKIP)
    await _minutes(world, 1, 2)
    await world.query("DELETE FROM fencepost.run_queue")
    await world.move_to(NOON + HOUR)
    await world.settle([job])
    assert await world.runs_of(job) == [(3480, "queued", "catch_up")]
    assert await world.skips_of(job) == [
        (60, 120, "overlap", None),
        (180, 3420, "misfire", 3480),
        (3540, 3600, "overlap", None),
    ]


async def test_many_overlapping_fires_decided_at_once_are_one_row(world: World) -> None:
    spec = job_spec(every(SECOND, overlap=OverlapPolicy.SKIP, threshold=HOUR))
    job = await world.add_job(spec=spec, next_run_at=NOON)
    await world.scheduler.fire_due()
    await world.move(30 * MINUTE)
    await world.settle([job])
    assert await world.runs_of(job) == [(0, "queued", "schedule")]
    skips = await world.skips_of(job)
    assert (skips[0][0], skips[-1][1]) == (1, 1800)
    assert len(skips) == 1


async def test_overlap_queue_one_lets_one_fire_wait(world: World) -> None:
    job = await _overlapping(world, OverlapPolicy.QUEUE_ONE)
    await _minutes(world, 1, 5)
    assert await world.runs_of(job) == [
        (0, "running", "schedule"),
        (60, "blocked", "schedule"),
    ]
    assert await world.skips_of(job) == [(120, 300, "overlap", None)]


async def test_overlap_queue_all_lets_every_fire_wait(world: World) -> None:
    job = await _overlapping(world, OverlapPolicy.QUEUE_ALL)
    await _minutes(world, 1, 5)
    assert [state for _, state, _ in await world.runs_of(job)] == ["running"] + ["blocked"] * 5
    assert await world.skips_of(job) == []


async def test_overlap_allow_lets_every_fire_run(world: World) -> None:
    job = await _overlapping(world, OverlapPolicy.ALLOW)
    await _minutes(world, 1, 3)
    assert [state for _, state, _ in await world.runs_of(job)] == ["running"] + ["queued"] * 3


async def test_overlap_cancel_previous_asks_the_running_one_and_ends_the_waiting_one(
    world: World,
) -> None:
    job = await _overlapping(world, OverlapPolicy.CANCEL_PREVIOUS)
    [adhoc] = await world.enqueue(job)
    await _minutes(world, 1, 2)
    assert [r for r in await world.runs_of(job) if r[2] == "schedule"] == [
        (0, "running", "schedule"),
        (120, "blocked", "schedule"),
    ]
    rows = await world.query(
        "SELECT state, cancel_requested, cancel_cause, origin FROM fencepost.run_queue "
        "ORDER BY scheduled_at"
    )
    assert (rows[0]["cancel_requested"], rows[0]["cancel_cause"]) == (True, "overlap")
    assert not (await world.live(adhoc))["cancel_requested"]
    [superseded] = await world.query("SELECT state, cancel_cause FROM fencepost.job_runs")
    assert (superseded["state"], superseded["cancel_cause"]) == ("cancelled", "overlap")


@pytest.mark.parametrize("overlap", list(OverlapPolicy))
async def test_a_run_delayed_into_next_month_silences_nothing(
    world: World, overlap: OverlapPolicy
) -> None:
    job = await world.add_job(spec=job_spec(every(overlap=overlap)), next_run_at=NOON)
    await world.enqueue(job, at=NOON + 30 * DAY)
    await world.scheduler.fire_due()
    assert (await world.runs_of(job))[0] == (0, "queued", "schedule")
    assert await world.skips_of(job) == []


async def test_resuming_lets_the_misfire_policy_pick_and_skips_the_rest_as_paused(
    world: World,
) -> None:
    job = await world.add_job(spec=job_spec(every()), next_run_at=NOON, paused=True)
    await world.move(3 * DAY + 30 * SECOND)
    assert await world.scheduler.fire_due() == 0
    await world.settle([job], resuming=True)
    newest = 3 * DAY // SECOND
    assert await world.runs_of(job) == [
        (newest - 60, "queued", "catch_up"),
        (newest, "queued", "schedule"),
    ]
    assert await world.skips_of(job) == [(0, newest - 120, "paused", newest - 60)]
    assert await world.next_of(job) == newest + 60


async def test_settling_leaves_a_paused_job_alone(world: World) -> None:
    job = await world.add_job(spec=job_spec(every()), next_run_at=NOON, paused=True)
    await world.move(HOUR)
    settled = await world.settle([job])
    assert settled.made == []
    assert await world.next_of(job) == 0


async def test_deleting_a_paused_job_records_what_was_pending(world: World) -> None:
    job = await world.add_job(spec=job_spec(every()), next_run_at=NOON, paused=True)
    await world.move(HOUR + 30 * SECOND)
    settled = await world.settle([job], deleting=True)
    assert settled.made == []
    assert await world.skips_of(job) == [(0, 3600, "paused", None)]
    assert await world.next_of(job) == 3660


async def test_deleting_an_active_job_fires_what_was_due_by_then(world: World) -> None:
    job = await world.add_job(spec=job_spec(every(HOUR)), next_run_at=NOON)
    await world.move(10 * SECOND)
    settled = await world.settle([job], deleting=True)
    assert [run.scheduled_at for run in settled.made] == [NOON]
    assert await world.skips_of(job) == []


async def test_settling_without_waiting_leaves_out_jobs_that_are_locked(world: World) -> None:
    jobs = await world.add_jobs(["a", "b"], job_spec(every()), NOON)
    async with world.raw.transaction():
        await world.query(
            "SELECT FROM fencepost.job_schedules WHERE job_id = $1::uuid FOR UPDATE", jobs[0]
        )
        settled = await world.settle(jobs, wait=False)
    assert settled.locked == {jobs[1]}
    assert [run.job_id for run in settled.made] == [jobs[1]]


async def test_a_fire_meeting_backfill_only_waits_for_it(world: World) -> None:
    spec = job_spec(every(overlap=OverlapPolicy.SKIP))
    job = await world.add_job(spec=spec, next_run_at=NOON)
    await world.enqueue(job, at=NOON - HOUR)
    await world.query("UPDATE fencepost.run_queue SET origin = 'backfill'")
    await world.scheduler.fire_due()
    assert (await world.runs_of(job))[-1] == (0, "blocked", "schedule")
    [backfill] = await world.claim()
    await world.report(backfill)
    await world.promoter.sweep()
    assert await world.runs_of(job) == [(0, "queued", "schedule")]
