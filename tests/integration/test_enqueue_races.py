"""Callers that make runs of the same jobs at the same instant, and a deletion in between."""

import asyncio
import random

import pytest
from fencepost_server.clock import HOUR, SECOND, Instant
from fencepost_server.domain.names import JobName
from fencepost_server.engine.enqueue import Enqueued
from fencepost_server.engine.jobs import Jobs
from fencepost_server.errors import JobNotFound, StorageUnavailable

from tests.integration.enqueue_calls import (
    REPLACE,
    Producer,
    application,
    enqueue_in,
    entry,
    until_blocked,
)
from tests.integration.gated_engine import NAME, engines
from tests.integration.interleavings import Actor, Interleavings, Stage
from tests.integration.world import World

_DELETED = JobName(tenant="default", job="report")


@pytest.fixture
async def producer(world: World) -> Producer:
    await world.add_job("report")
    return Producer(world=world)


@pytest.mark.parametrize("at", [0, HOUR, HOUR + SECOND - 2])
async def test_five_calls_in_one_microsecond_make_five_runs(
    producer: Producer, world: World, at: Instant
) -> None:
    runs = await asyncio.gather(
        *(producer.one("report", at=world.now + at if at else None) for _ in range(5))
    )
    assert len({run.key for run in runs}) == 5
    assert all(run.key.scheduled_at % SECOND for run in runs)
    assert all(run.key.scheduled_at > world.now + at for run in runs if at < HOUR + 1)


async def test_a_batch_takes_consecutive_places_and_leaves_whole_seconds_out(
    producer: Producer, world: World
) -> None:
    at = world.now + HOUR - 3
    answers = await producer.batch([entry("report", at=at) for _ in range(6)])
    base = world.now + HOUR
    assert [each.key.scheduled_at - base for each in answers if isinstance(each, Enqueued)] == [
        -3, -2, -1, 1, 2, 3,
    ]  # fmt: skip


async def test_batches_in_opposite_orders_at_one_instant_do_not_deadlock(
    producer: Producer, world: World
) -> None:
    jobs = [f"job-{n}" for n in range(12)]
    for job in jobs:
        await world.add_job(job)
    dice = random.Random(7)
    instants = [world.now + HOUR, world.now + HOUR + 5 * SECOND]

    async def call() -> list[Enqueued]:
        entries = [entry(job, at=at) for job in jobs for at in instants for _ in range(4)]
        entries += [entry(job, f"{job}-{n}", REPLACE) for job in jobs for n in range(3)]
        dice.shuffle(entries)
        answers = await producer.batch(entries)
        assert all(isinstance(each, Enqueued) for each in answers), answers
        return [each for each in answers if isinstance(each, Enqueued)]

    before = await _deadlocks(world)
    answers = [each for some in await asyncio.gather(*(call() for _ in range(16))) for each in some]
    keys = [each.key for each in answers if not each.existing]
    assert len(keys) == len(set(keys))
    assert await _deadlocks(world) == before
    # Each later caller replaces the waiting runs of the one before.
    live = await world.value("SELECT count(*) FROM fencepost.run_queue")
    assert live == 16 * len(jobs) * 2 * 4 + len(jobs) * 3


async def _deadlocks(world: World) -> int:
    await world.query("SELECT pg_stat_clear_snapshot()")
    return int(
        await world.value(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
    )


async def test_transactions_that_stay_open_hold_up_nobody_at_the_same_instant(
    producer: Producer, world: World
) -> None:
    await world.add_job("mail")
    at = world.now + HOUR
    async with (
        application(world.dsn, lock_timeout="1ms") as one,
        application(world.dsn, lock_timeout="1ms") as two,
    ):
        when = await world.value("SELECT fencepost.clock() + interval '1 hour'")
        async with one.transaction(), two.transaction():
            runs = [
                await enqueue_in(connection, job, run_at=when)
                for connection, job in [(one, "report"), (two, "mail"), (one, "mail"),
                                        (two, "report"), (one, "report")]
            ]  # fmt: skip
            batch = await producer.batch([entry(job, at=at) for job in ("mail", "report")] * 50)
            single = await producer.one("mail", at=at)
    made = [key for key, _ in runs] + [single.key]
    made += [each.key for each in batch if isinstance(each, Enqueued)]
    assert len(made) == len(set(made)) == 106
    assert single.key.scheduled_at == at + 51
    assert all(at < key.scheduled_at < at + SECOND for key in made)


async def test_a_batch_goes_round_places_that_an_open_transaction_holds(
    producer: Producer, world: World
) -> None:
    async with application(world.dsn) as other, other.transaction():
        held, _ = await enqueue_in(other)
        answers = await producer.batch([entry("report")] * 3)
        keys = {each.key for each in answers if isinstance(each, Enqueued)}
    assert len(keys | {held}) == 4


async def test_many_runs_of_one_instant_in_one_transaction(world: World) -> None:
    await world.add_job("report")
    async with application(world.dsn) as connection:
        rows = await connection.fetch(
            "SELECT e.scheduled_at FROM generate_series(1, 1200) AS g CROSS JOIN LATERAL "
            "fencepost.enqueue('report', run_at => fencepost.clock() + g * interval '0' "
            "+ interval '1 hour') AS e"
        )
    assert len({row["scheduled_at"] for row in rows}) == 1200


async def test_repeats_burn_no_numbers(producer: Producer, world: World) -> None:
    sequences = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'fencepost'"
    before = sorted(map(tuple, await world.query(sequences)))
    for _ in range(3):
        await producer.batch([entry("report", "a"), entry("report", "b"), entry("report")])
    assert before
    assert sorted(map(tuple, await world.query(sequences))) == before


# Deletion ------------------------------------------------------------------------------------


def _jobs(world: World) -> Jobs:
    return Jobs(database=world.database, catalogue=world.catalogue, wake=world.woken)


async def _delete(world: World) -> None:
    await _jobs(world).delete(
        _DELETED, etag="", allow_missing=False, cancel_runs=True, now=world.now
    )


async def test_a_deletion_waits_for_runs_that_are_being_made(
    producer: Producer, world: World
) -> None:
    async with application(world.dsn) as other:
        transaction = other.transaction()
        await transaction.start()
        key, _ = await enqueue_in(other)
        deleting = asyncio.create_task(_delete(world))
        await until_blocked(world.raw, other, deleting)
        await transaction.commit()
        await deleting
    assert (await world.ended(key))["cancel_cause"] == "job_deleted"
    assert isinstance(await producer.refused("report"), JobNotFound)


async def test_an_enqueue_waits_for_a_deletion_and_finds_no_job(
    producer: Producer, world: World
) -> None:
    job_id = await world.value("SELECT job_id FROM fencepost.jobs")
    for commits in (False, True):
        async with application(world.dsn) as other:
            transaction = other.transaction()
            await transaction.start()
            await other.execute("SELECT fencepost.lock_out_enqueues($1)", job_id)
            await other.execute(
                "UPDATE fencepost.jobs SET deleted_at = created_at WHERE job_id = $1", job_id
            )
            calls = [
                asyncio.create_task(producer.batch([entry("report"), entry(str(job_id))])),
            ]
            await until_blocked(world.raw, other, calls[0])
            await (transaction.commit() if commits else transaction.rollback())
            (answers,) = await asyncio.gather(*calls)
        assert [isinstance(each, JobNotFound) for each in answers] == [commits, commits]
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 2


async def test_a_deletion_gives_up_on_a_transaction_that_goes_on(
    producer: Producer, world: World
) -> None:
    await world.query("ALTER FUNCTION fencepost.lock_out_enqueues SET lock_timeout = '20ms'")
    try:
        async with application(world.dsn) as other, other.transaction():
            await enqueue_in(other)
            with pytest.raises(StorageUnavailable, match="enqueues runs of this job"):
                await _delete(world)
        await _delete(world)
    finally:
        await world.query("ALTER FUNCTION fencepost.lock_out_enqueues SET lock_timeout = '5s'")
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 0


async def test_deletions_of_other_jobs_wait_for_nobody(producer: Producer, world: World) -> None:
    await world.add_job("mail")
    async with application(world.dsn) as other, other.transaction():
        await enqueue_in(other, "mail")
        await _delete(world)
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 1


async def test_no_order_of_deletion_and_enqueues_leaves_a_run_of_a_deleted_job(
    world: World,
) -> None:
    job: list[str] = []

    async def prepare() -> None:
        await world.query("TRUNCATE fencepost.run_queue, fencepost.job_runs, fencepost.run_keys")
        await world.query("UPDATE fencepost.jobs SET deleted_at = created_at")
        job.append(await world.add_job(NAME.job))

    async def observe() -> None:
        gone = await world.value(
            "SELECT count(*) FROM fencepost.run_queue q JOIN fencepost.jobs j USING (job_id) "
            "WHERE j.deleted_at IS NOT NULL"
        )
        assert gone == 0, "a deleted job has a live run"

    async def finish(answers: object) -> None:
        await observe()
        assert isinstance(answers, dict)
        made = sum(isinstance(answers[name], bytes) for name in ("one", "two"))
        ended = await world.value(
            "SELECT count(*) FROM fencepost.job_runs WHERE cancel_cause = 'job_deleted'"
        )
        assert ended == made

    async with engines(world, 3) as (first, second, third):
        orders = await Interleavings(monitor=world.raw).explore(
            [
                Actor(name="one", gate=first.gate, body=first.enqueue),
                Actor(name="two", gate=second.gate, body=second.enqueue),
                Actor(name="delete", gate=third.gate, body=third.delete),
            ],
            Stage(prepare=prepare, observe=observe, finish=finish),
        )
    assert orders > 20
