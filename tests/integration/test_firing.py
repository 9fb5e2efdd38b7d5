"""Fires: every due instant becomes one run, at its time, whoever and how many try to fire it."""

import asyncio

import asyncpg
import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, to_datetime
from fencepost_server.domain.schedule import MisfireAction
from fencepost_server.engine.firing import Scheduler
from fencepost_server.errors import StorageUnavailable
from fencepost_server.policy.cron import CronRule
from fencepost_server.store.statements import load

from tests.factories import NOON, cron, every, job_spec, once
from tests.integration.world import World, build

FIRING = load("firing")


async def test_every_due_job_fires_once_and_the_others_do_not(world: World) -> None:
    due = await world.add_jobs([f"due{i}" for i in range(150)], job_spec(every()), NOON)
    later = await world.add_job("later", job_spec(every()), next_run_at=NOON + SECOND)
    unscheduled = await world.add_job("manual")
    assert await world.scheduler.fire_due() == 150
    assert await world.scheduler.fire_due() == 0
    assert all([await world.runs_of(job) == [(0, "queued", "schedule")] for job in due])
    assert await world.runs_of(later) == []
    assert await world.runs_of(unscheduled) == []


async def test_a_full_partition_is_emptied_in_batches(world: World) -> None:
    jobs = await world.add_jobs([f"job{i}" for i in range(900)], job_spec(every()), NOON)
    await world.query("UPDATE fencepost.job_schedules SET partition_id = 7")
    assert await world.scheduler.fire_due() == len(jobs)
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == len(jobs)


async def test_two_schedulers_make_each_run_key_once(database_url: str) -> None:
    async with build(database_url) as one, build(database_url, day_tables=False) as two:
        fast = await one.add_jobs([f"f{i}" for i in range(200)], job_spec(every(5 * SECOND)), NOON)
        slow = await one.add_jobs([f"c{i}" for i in range(200)], job_spec(cron()), NOON)
        for second in range(0, 61, 5):
            await one.move_to(NOON + second * SECOND)
            await two.move_to(NOON + second * SECOND)
            await asyncio.gather(
                one.scheduler.fire_due(),
                two.scheduler.fire_due(),
                one.scheduler.fire_due(),
                two.scheduler.fire_due(),
            )
            # What one had locked the other skipped; nobody may be left behind.
            await one.scheduler.fire_due()
        rows = await one.query(
            "SELECT job_id, count(*) AS n, count(DISTINCT scheduled_at) AS keys "
            "FROM fencepost.run_queue GROUP BY job_id"
        )
        made = {str(row["job_id"]): (row["n"], row["keys"]) for row in rows}
        assert made == dict.fromkeys(fast, (13, 13)) | dict.fromkeys(slow, (2, 2))
        counts = await one.query("SELECT DISTINCT fire_count FROM fencepost.job_schedules")
        assert sorted(row["fire_count"] for row in counts) == [2, 13]


async def test_an_owner_whose_snapshot_is_older_than_its_lock_changes_nothing(
    world: World,
) -> None:
    # Two fires are due, so the row that the slow owner gets to lock is due again.
    job = await world.add_job("a", job_spec(every(10 * SECOND)), next_run_at=NOON)
    await world.move(15 * SECOND)
    slow = await asyncpg.connect(world.dsn)
    values = {"partitions": list(range(256)), "after": to_datetime(0), "batch_max": 10}
    values |= {"now": to_datetime(world.now), "parked_before": to_datetime(0)}
    values |= {"parked_until": to_datetime(world.now)}
    values |= {"tzdata": "2026a", "withheld": []}
    arguments = FIRING["fire_due"].arguments(values)
    # The slow owner stops after its snapshot and before its lock, at an advisory lock.
    text = FIRING["fire_due"].text.replace(
        "unnest($1::smallint[])",
        "unnest((SELECT $1::smallint[] FROM pg_advisory_xact_lock(99)))",
    )
    assert text != FIRING["fire_due"].text
    try:
        await world.query("SELECT pg_advisory_lock(99)")
        firing_slowly = asyncio.create_task(slow.fetchrow(text, *arguments))
        await _until_waiting_for_advisory_lock(world)
        assert await world.scheduler.fire_due() == 1
        await world.query("SELECT pg_advisory_unlock(99)")
        row = await firing_slowly
    finally:
        await slow.close()
    assert row is not None
    assert row["fired"] == 0
    assert await world.runs_of(job) == [(0, "queued", "schedule")]
    assert await world.next_of(job) == 10


async def _until_waiting_for_advisory_lock(world: World) -> None:
    async with asyncio.timeout(10):
        while True:
            if await world.value(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            ):
                return


async def test_an_interval_goes_on_from_its_own_instants_however_late_it_is(world: World) -> None:
    job = await world.add_job(spec=job_spec(every(10 * SECOND)), next_run_at=NOON)
    for seconds in (3, 14, 27):
        await world.move_to(NOON + seconds * SECOND)
        await world.scheduler.fire_due()
    assert [at for at, _, _ in await world.runs_of(job)] == [0, 10, 20]
    assert await world.next_of(job) == 30


async def test_a_late_fire_is_available_now_and_keeps_its_nominal_instant(world: World) -> None:
    job = await world.add_job(spec=job_spec(every(HOUR)), next_run_at=NOON)
    await world.move(90 * SECOND)
    await world.scheduler.fire_due()
    assert await world.runs_of(job) == [(0, "queued", "catch_up")]
    available_at = await world.value("SELECT available_at FROM fencepost.run_queue")
    assert available_at == to_datetime(world.now)


async def test_a_once_job_fires_once_and_is_finished(world: World) -> None:
    job = await world.add_job(spec=job_spec(once(NOON)), next_run_at=NOON)
    assert await world.scheduler.fire_due() == 1
    assert await world.next_of(job) is None
    await world.move(DAY)
    assert await world.scheduler.fire_due() == 0
    assert await world.runs_of(job) == [(0, "queued", "schedule")]


@pytest.mark.parametrize("late", [0, 26 * HOUR], ids=["on time", "26 h late"])
async def test_nothing_fires_at_or_after_end_at(world: World, late: int) -> None:
    ending = every(MINUTE, end_at=NOON + 2 * MINUTE, misfire=MisfireAction.CATCH_UP)
    job = await world.add_job(spec=job_spec(ending), next_run_at=NOON)
    for minutes in range(4):
        await world.move_to(NOON + minutes * MINUTE + late)
        await world.scheduler.fire_due()
    assert [at for at, _, _ in await world.runs_of(job)] == [0, 60]
    assert await world.next_of(job) is None


@pytest.mark.parametrize("late", [0, 26 * HOUR], ids=["on time", "26 h late"])
async def test_max_fires_ends_the_schedule(world: World, late: int) -> None:
    three = every(MINUTE, max_fires=3, misfire=MisfireAction.CATCH_UP)
    job = await world.add_job(spec=job_spec(three), next_run_at=NOON)
    for minutes in range(5):
        await world.move_to(NOON + minutes * MINUTE + late)
        await world.scheduler.fire_due()
    assert len(await world.runs_of(job)) == 3
    assert await world.next_of(job) is None


async def test_a_next_fire_is_computed_once_for_all_jobs_of_a_rule(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    next_after = CronRule.next_after

    def counted(rule: CronRule, at: int) -> int | None:
        asked.append(at)
        return next_after(rule, at)

    monkeypatch.setattr(CronRule, "next_after", counted)
    await world.add_jobs([f"job{i}" for i in range(300)], job_spec(cron("*/5 * * * *")), NOON)
    assert await world.scheduler.fire_due() == 300
    await world.move(5 * MINUTE)
    assert await world.scheduler.fire_due() == 300
    assert asked == [NOON, NOON + 5 * MINUTE]
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 600


async def test_cron_fires_follow_the_zone_over_a_clock_change(world: World) -> None:
    # Berlin leaves summer time on 25 October 2026: nine o'clock moves from 07:00 to 08:00 UTC.
    first = NOON - 38 * DAY - 5 * HOUR
    await world.move_to(first)
    daily = job_spec(cron("0 9 * * *", "Europe/Berlin"))
    job = await world.add_job(spec=daily, next_run_at=first)
    for hours in range(0, 73, 1):
        await world.move_to(first + hours * HOUR)
        await world.scheduler.fire_due()
    fires = [(at * SECOND + NOON - first) // HOUR for at, _, _ in await world.runs_of(job)]
    assert fires == [0, 25, 49]


async def test_fires_computed_with_other_time_zone_data_are_forgotten(world: World) -> None:
    await world.scheduler.prepare()
    await world.add_job(spec=job_spec(cron()), next_run_at=NOON)
    await world.scheduler.fire_due()
    await world.scheduler.prepare()
    assert await world.value("SELECT count(*) FROM fencepost.schedule_fires") == 1
    await world.query("UPDATE fencepost.shard_state SET tzdata_version = '1999a'")
    await world.scheduler.prepare()
    assert await world.value("SELECT count(*) FROM fencepost.schedule_fires") == 0


async def test_the_memo_forgets_instants_of_the_day_before(world: World) -> None:
    await world.add_job(spec=job_spec(cron()), next_run_at=NOON)
    await world.scheduler.fire_due()
    await world.move(DAY + SECOND)
    await world.scheduler.fire_due()
    await world.scheduler.forget_old_fires()
    oldest = await world.value("SELECT min(scheduled_at) FROM fencepost.schedule_fires")
    assert oldest is None or oldest >= to_datetime(world.now - DAY)


@pytest.mark.parametrize("skew", [-1.5, 1.5])
async def test_a_process_whose_clock_disagrees_fires_and_claims_nothing(
    world: World, skew: float
) -> None:
    job = await world.add_job(spec=job_spec(every()), next_run_at=NOON - 2 * SECOND)
    await world.enqueue(job, at=NOON - 2 * SECOND)
    clock = world.database.clock
    clock.at += int(skew * SECOND)  # type: ignore[attr-defined]
    assert await world.scheduler.fire_due() == 0
    assert await world.claim() == []
    assert await world.claim(capped=True) == []
    clock.at -= int(skew * SECOND)  # type: ignore[attr-defined]
    assert await world.scheduler.fire_due() == 1


async def test_a_job_that_cannot_be_decided_does_not_hold_up_others(world: World) -> None:
    late = job_spec(every(MINUTE, misfire=MisfireAction.SKIP))
    poison = await world.add_job("poison", late, next_run_at=NOON)
    others = await world.add_jobs([f"job{i}" for i in range(20)], late, NOON)
    await world.query(
        "UPDATE fencepost.job_versions SET spec = '{}' WHERE job_id = $1::uuid", poison
    )
    await world.move(HOUR)
    await world.scheduler.fire_due()
    nexts = {await world.next_of(job) for job in others}
    assert len(nexts) == 1
    assert min(n for n in nexts if n is not None) >= 3540
    assert await world.next_of(poison) == 0


async def test_a_rule_that_no_longer_compiles_does_not_hold_up_others(world: World) -> None:
    poison = await world.add_job("poison", job_spec(cron("1 * * * *")), next_run_at=NOON)
    other = await world.add_job("other", job_spec(cron("* * * * *")), next_run_at=NOON)
    await world.query(
        "UPDATE fencepost.schedules "
        "SET rule = jsonb_set(rule, '{cron,time_zone}', '\"Mars/Base\"') "
        "WHERE rule -> 'cron' -> 'expressions' ->> 0 = '1 * * * *'"
    )
    assert await world.scheduler.fire_due() == 1
    assert await world.runs_of(other) == [(0, "queued", "schedule")]
    assert await world.next_of(poison) == 0


async def test_a_key_that_is_taken_was_fired_already(world: World) -> None:
    taken = await world.add_job("taken", job_spec(every()), next_run_at=NOON)
    other = await world.add_job("other", job_spec(every()), next_run_at=NOON)
    [run] = await world.enqueue(taken)
    await world.query(
        "UPDATE fencepost.run_queue SET scheduled_at = $1, available_at = $1", to_datetime(NOON)
    )
    await world.scheduler.fire_due()
    assert await world.runs_of(taken) == [(0, "queued", "enqueue")]
    assert await world.runs_of(other) == [(0, "queued", "schedule")]
    assert await world.next_of(taken) == 60
    assert run.job_id == taken


async def test_losing_the_database_in_a_full_partition_is_a_storage_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.add_jobs([f"job{i}" for i in range(130)], job_spec(every()), NOON)
    await world.query("UPDATE fencepost.job_schedules SET partition_id = 7")
    fire_batch = Scheduler._fire_batch
    calls = 0

    async def cut_off(scheduler: Scheduler, partitions: list[int], batch_max: int) -> object:
        nonlocal calls
        calls += 1
        if calls > 1:
            await world.raw.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        return await fire_batch(scheduler, partitions, batch_max)

    monkeypatch.setattr(Scheduler, "_fire_batch", cut_off)
    monkeypatch.setattr(world.scheduler, "_batch_max", 64)
    with pytest.raises(StorageUnavailable):
        await world.scheduler.fire_due()
    monkeypatch.undo()
    await _recover(world)
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 130


async def _recover(world: World) -> None:
    """Fires until nothing is due; each broken connection of the pool may fail once."""
    for _ in range(10):
        try:
            if await world.scheduler.fire_due() == 0:
                return
        except StorageUnavailable:
            continue
    raise AssertionError("the scheduler did not recover")
