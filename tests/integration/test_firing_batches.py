"""Batches of fires: bounded, spread over partitions, and never held up by a few jobs."""

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND, to_datetime
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.firing import Scheduler

from tests.factories import NOON, cron, every, job_spec
from tests.integration.world import World

_ALLOWED = job_spec(every(overlap=OverlapPolicy.ALLOW))


async def _take_key(world: World, job: str) -> None:
    """The run of the fire that is due is there already, and nobody has advanced the job."""
    await world.enqueue(job)
    await world.query(
        "UPDATE fencepost.run_queue SET scheduled_at = $1, available_at = $1 WHERE job_id = $2",
        to_datetime(NOON),
        job,
    )


@pytest.mark.parametrize("others", [1, 40])
async def test_a_key_that_is_taken_holds_up_nobody(world: World, others: int) -> None:
    taken = await world.add_job("taken", _ALLOWED, next_run_at=NOON)
    jobs = await world.add_jobs([f"job{i}" for i in range(others)], _ALLOWED, NOON)
    await _take_key(world, taken)
    assert await world.scheduler.fire_due() == others + 1
    assert await world.runs_of(taken) == [(0, "queued", "enqueue")]
    assert await world.next_of(taken) == 60
    assert [await world.runs_of(job) for job in jobs] == [[(0, "queued", "schedule")]] * others


async def test_a_key_that_another_transaction_takes_is_waited_for(world: World) -> None:
    taken = await world.add_job("taken", _ALLOWED, next_run_at=NOON)
    other = await world.add_job("other", _ALLOWED, next_run_at=NOON)
    holder = await asyncpg.connect(world.dsn)
    try:
        async with holder.transaction():
            await holder.execute(
                """
                INSERT INTO fencepost.run_queue
                    (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id,
                     version, state, origin, priority, lease_s, cancel_grace_s, attempt_timeout_s)
                SELECT job_id, next_run_at, next_run_at, next_run_at, tenant_id, queue_id, kind_id,
                       version, 'queued', 'enqueue', priority, lease_s, cancel_grace_s,
                       attempt_timeout_s
                FROM fencepost.job_schedules WHERE job_id = $1
                """,
                taken,
            )
            firing = asyncio.create_task(world.scheduler.fire_due())
            async with asyncio.timeout(10):
                while not await world.value("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                    pass
    finally:
        await holder.close()
    assert await firing == 2
    assert await world.runs_of(taken) == [(0, "queued", "enqueue")]
    assert await world.runs_of(other) == [(0, "queued", "schedule")]


async def test_what_cannot_be_decided_takes_no_places_from_the_rest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Due first in every partition, and each partition gives out two places of four.
    poison = job_spec(cron("59 11 * * *"))
    poisons = await world.add_jobs([f"poison{i}" for i in range(6)], poison, NOON - MINUTE)
    await world.query("UPDATE fencepost.schedules SET rule = jsonb_set(rule, '{cron}', '{}')")
    others = await world.add_jobs([f"job{i}" for i in range(2)], _ALLOWED, NOON)
    await world.query(
        "UPDATE fencepost.job_schedules AS s SET partition_id = 7 + n % 2 "
        "FROM (SELECT job_id, row_number() OVER (ORDER BY next_run_at) AS n "
        "      FROM fencepost.job_schedules) AS o WHERE o.job_id = s.job_id"
    )
    monkeypatch.setattr(world.scheduler, "_batch_max", 4)
    assert await world.scheduler.fire_due() == 2
    assert [await world.runs_of(job) for job in others] == [[(0, "queued", "schedule")]] * 2
    assert [await world.runs_of(job) for job in poisons] == [[]] * 6


@pytest.mark.parametrize("concurrency", [1, 2, 3])
async def test_a_statement_takes_no_more_than_a_batch_whatever_is_due(
    world: World, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    await world.add_jobs([f"job{i}" for i in range(600)], job_spec(every()), NOON)
    fire_batch = Scheduler._fire_batch
    sizes: list[int] = []

    async def counted(scheduler: Scheduler, partitions: Sequence[int], batch_max: int) -> object:
        sizes.append(len(partitions) * batch_max)
        return await fire_batch(scheduler, partitions, batch_max)

    monkeypatch.setattr(Scheduler, "_fire_batch", counted)
    monkeypatch.setattr(world.scheduler, "_batch_max", 50)
    monkeypatch.setattr(world.scheduler, "_concurrency", concurrency)
    assert await world.scheduler.fire_due() == 600
    assert max(sizes) <= 50
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 600
    await world.move(SECOND)
    assert await world.scheduler.fire_due() == 0


async def test_what_follows_the_next_fire_is_computed_before_it_is_due(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await world.add_jobs(["a", "b"], job_spec(cron()), NOON)
    fire_statement = Scheduler._fire_statement
    statements: list[int] = []

    async def counted(scheduler: Scheduler, *arguments: Any) -> object:
        row = await fire_statement(scheduler, *arguments)
        statements.append(row["fired"])
        return row

    monkeypatch.setattr(Scheduler, "_fire_statement", counted)
    for minute in range(4):
        await world.move_to(NOON + minute * MINUTE)
        # One pass that fires, and one that finds nothing more.
        assert await world.scheduler._pass(HOUR, SECOND) == 0
        assert await world.scheduler._pass(HOUR, SECOND) > 0
    # Only the very first fire was not known when it was due.
    assert statements == [0, 2, 2, 2, 2]
    assert [at for at, _, _ in await world.runs_of(jobs[0])] == [0, 60, 120, 180]
