"""Unique keys of ad-hoc runs: who holds one, for how long, and what the others get."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fencepost_server.clock import DAY, HOUR, SECOND, Instant, to_datetime
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.enqueue import Enqueued
from fencepost_server.errors import FencepostError, UniqueKeyHeld
from fencepost_server.policy.outcome import Snoozed

from tests.integration.enqueue_calls import (
    REJECT,
    REPLACE,
    Producer,
    application,
    end_as_dead,
    enqueue_in,
    entry,
    until_blocked,
)
from tests.integration.world import World


@pytest.fixture
async def producer(world: World) -> Producer:
    await world.add_job("report")
    return Producer(world=world)


async def _holder(world: World, key: str = "order-7") -> Instant | None:
    at = await world.value(
        "SELECT (extract(epoch FROM scheduled_at) * 1000000)::bigint FROM fencepost.run_keys "
        "WHERE unique_key = $1",
        key,
    )
    return None if at is None else int(at)


async def _runs(world: World) -> int:
    return int(await world.value("SELECT count(*) FROM fencepost.run_queue"))


async def test_the_key_of_a_live_run_is_held_in_every_state(
    producer: Producer, world: World
) -> None:
    first = await producer.one("report", "order-7")
    assert not first.existing
    assert first.record is not None
    assert first.record.unique_key == "order-7"

    async def held(state: str) -> None:
        again = await producer.one("report", "order-7")
        assert (again.key, again.existing) == (first.key, True)
        assert again.record is not None
        assert again.record.state.name.lower() == state
        refused = await producer.refused("report", "order-7", REJECT)
        assert isinstance(refused, UniqueKeyHeld)
        assert refused.metadata["run"].endswith(f"/runs/{str(first.key).partition('/')[2]}")
        if state != "queued":
            assert (await producer.one("report", "order-7", REPLACE)).key == first.key

    await held("queued")
    [run] = await world.claim()
    await held("running")
    await world.report(run, Snoozed(delay=HOUR))
    await held("retrying")
    await world.query(
        "UPDATE fencepost.run_queue SET state = 'blocked', attempt = 0, attempt_open = false"
    )
    await held("blocked")
    assert await _runs(world) == 1


async def test_other_keys_other_jobs_and_no_key_are_free(producer: Producer, world: World) -> None:
    await world.add_job("mail")
    made = [
        await producer.one("report", "order-7"),
        await producer.one("report", "order-8"),
        await producer.one("mail", "order-7"),
        await producer.one("report"),
        await producer.one("report"),
    ]
    assert not any(each.existing for each in made)
    assert len({each.key for each in made}) == 5


@pytest.mark.parametrize("keep_for", [0, 1, HOUR, 30 * DAY])
async def test_a_key_is_kept_after_the_end(producer: Producer, world: World, keep_for: int) -> None:
    first = await producer.one("report", "order-7", keep_for=keep_for)
    [run] = await world.claim()
    await world.report(run)
    # Seconds are rounded up.
    until = world.now + -(-keep_for // SECOND) * SECOND
    if keep_for:
        for at in (world.now, until - 1):
            await world.move_to(at)
            again = await producer.one("report", "order-7")
            assert (again.key, again.existing) == (first.key, True)
            assert (await producer.one("report", "order-7", REPLACE)).existing
            assert isinstance(await producer.refused("report", "order-7", REJECT), UniqueKeyHeld)
    await world.move_to(until)
    second = await producer.one("report", "order-7", REJECT)
    assert second.key != first.key
    assert not second.existing
    assert await _holder(world) == second.key.scheduled_at
    assert (await producer.one("report", "order-7")).key == second.key


@pytest.mark.parametrize("place", ["job_runs", "job_runs_stray", "dead_letters"])
async def test_a_holder_is_found_in_every_place(
    producer: Producer, world: World, place: str
) -> None:
    first = await producer.one("report", "order-7", keep_for=HOUR)
    await end_as_dead(world, first.key, place, ended_at=world.now)
    await world.move(HOUR - 1)
    assert (await producer.one("report", "order-7")).key == first.key
    await world.move(1)
    assert (await producer.one("report", "order-7")).key != first.key


async def test_a_holder_that_is_nowhere_counts_while_its_stamp_says_so(
    producer: Producer, world: World
) -> None:
    first = await producer.one("report", "order-7")
    await world.query("DELETE FROM fencepost.run_queue")
    await world.query("UPDATE fencepost.run_keys SET until = $1", to_datetime(world.now + HOUR))
    again = await producer.one("report", "order-7")
    assert (again.key, again.existing, again.record) == (first.key, True, None)
    await world.move(HOUR)
    second = await producer.one("report", "order-7")
    assert not second.existing
    await world.query("DELETE FROM fencepost.run_queue")
    assert not (await producer.one("report", "order-7")).existing
    assert await world.value("SELECT until FROM fencepost.run_keys") is None


@pytest.mark.parametrize("days_ahead", [0, 300])
async def test_a_waiting_run_is_replaced(producer: Producer, world: World, days_ahead: int) -> None:
    at = world.now + days_ahead * DAY
    first = await producer.one("report", "order-7", at=at)
    second = await producer.one("report", "order-7", REPLACE, at=at)
    assert second.key != first.key
    assert not second.existing
    row = await world.ended(first.key, "job_runs_stray" if days_ahead else "job_runs")
    assert (row["state"], row["cancel_cause"], row["unique_key"], row["attempt"]) == (
        "cancelled",
        "replaced",
        "order-7",
        0,
    )
    assert (await world.live(second.key))["unique_key"] == "order-7"
    assert (await producer.one("report", "order-7")).key == second.key


@pytest.mark.parametrize("commits", [True, False])
async def test_replacing_waits_for_a_claim_and_is_told_what_it_was(
    producer: Producer, world: World, commits: bool
) -> None:
    first = await producer.one("report", "order-7")
    async with application(world.dsn) as claimer:
        claim = claimer.transaction()
        await claim.start()
        await claimer.execute(
            "UPDATE fencepost.run_queue SET state = 'running', attempt = 1, attempt_open = true, "
            "lease_until = available_at + interval '30 s'"
        )
        replacing = asyncio.create_task(producer.one("report", "order-7", REPLACE))
        await until_blocked(world.raw, claimer, replacing)
        await (claim.commit() if commits else claim.rollback())
        answer = await replacing
    if commits:
        assert (answer.key, answer.existing) == (first.key, True)
        assert (await world.live(first.key))["state"] == "running"
    else:
        assert not answer.existing
        assert (await world.ended(first.key))["cancel_cause"] == "replaced"


async def test_entries_of_a_batch_see_those_before_them(producer: Producer, world: World) -> None:
    answers = await producer.batch(
        [
            entry("report", "a"),
            entry("report"),
            entry("report", "a"),
            entry("report", "b", REJECT),
            entry("report", "a", REJECT),
            entry("report", "a", REPLACE),
            entry("report", "a"),
            entry("nowhere", "a"),
            entry("report", "a", REPLACE),
            entry("report", "b", REJECT),
        ]
    )
    keys = [each.key if isinstance(each, Enqueued) else each.reason for each in answers]
    assert keys[2] == keys[0]
    assert keys[4] == keys[9] == "UNIQUE_KEY_HELD"
    assert keys[6] == keys[5]
    assert keys[7] == "JOB_NOT_FOUND"
    assert len({keys[0], keys[1], keys[3], keys[5], keys[8]}) == 5
    assert [isinstance(each, Enqueued) and each.existing for each in answers] == [
        False, False, True, False, False, False, True, False, False, False,
    ]  # fmt: skip
    states = [
        each.record.state.name if isinstance(each, Enqueued) and each.record else ""
        for each in answers
    ]
    assert states[0] == states[5] == "CANCELLED"
    assert states[8] == "QUEUED"
    last = answers[8]
    assert isinstance(last, Enqueued)
    assert await _holder(world, "a") == last.key.scheduled_at
    assert await _runs(world) == 3


async def test_many_entries_with_one_key_make_one_run(producer: Producer, world: World) -> None:
    answers = await producer.batch([entry("report", "a")] * 1000)
    assert len({each.key for each in answers if isinstance(each, Enqueued)}) == 1
    assert sum(isinstance(each, Enqueued) and not each.existing for each in answers) == 1
    assert await _runs(world) == 1


@pytest.mark.parametrize("rolls_back", [True, False])
async def test_who_comes_second_waits_for_the_first(
    producer: Producer, world: World, rolls_back: bool
) -> None:
    async with application(world.dsn) as first:
        transaction = first.transaction()
        await transaction.start()
        key, _ = await enqueue_in(first, unique_key="order-7")
        second = asyncio.create_task(producer.one("report", "order-7"))
        await until_blocked(world.raw, first, second)
        await (transaction.rollback() if rolls_back else transaction.commit())
        answer = await second
    assert answer.existing is not rolls_back
    # A place that was given back is free for the next.
    assert answer.key == key
    assert await _runs(world) == 1


async def test_a_takeover_that_is_rolled_back_leaves_the_key_free(
    producer: Producer, world: World
) -> None:
    first = await producer.one("report", "order-7", keep_for=0)
    await world.cancel(first.key)
    async with application(world.dsn) as other:
        transaction = other.transaction()
        await transaction.start()
        _, existing = await enqueue_in(other, unique_key="order-7")
        assert not existing
        second = asyncio.create_task(producer.one("report", "order-7"))
        await until_blocked(world.raw, other, second)
        await transaction.rollback()
        answer = await second
    assert not answer.existing
    assert await _holder(world) == answer.key.scheduled_at
    assert await _runs(world) == 1


async def test_asking_for_a_held_key_holds_up_nobody(producer: Producer, world: World) -> None:
    first = await producer.one("report", "order-7")
    async with (
        application(world.dsn) as one,
        application(world.dsn, lock_timeout="1ms") as two,
        one.transaction(),
    ):
        assert await enqueue_in(one, unique_key="order-7") == (first.key, True)
        assert await enqueue_in(two, unique_key="order-7") == (first.key, True)


async def test_a_busy_key_is_a_problem_of_its_entry_alone(producer: Producer, world: World) -> None:
    async with application(world.dsn) as other, other.transaction():
        await enqueue_in(other, unique_key="busy")
        answers = await producer.batch([entry("report", key) for key in ("a", "busy", "z", None)])
        refused = answers.pop(1)
        assert isinstance(refused, FencepostError)
        assert (refused.reason, refused.retryable) == ("STORAGE_UNAVAILABLE", True)
        assert "unique_key" in refused.message
        assert all(isinstance(each, Enqueued) and not each.existing for each in answers)
    assert await _runs(world) == 4
    assert await world.value("SELECT count(*) FROM fencepost.run_keys") == 3


_KEYS, _CALLERS, _CONNECTIONS = 100, 50, 10


async def test_winners_that_roll_back_leave_exactly_one_run(
    producer: Producer, world: World
) -> None:
    """The first of the applications that win a key, the third and so on roll back and try again;
    the server's calls come while the first has not rolled back yet."""
    idle: asyncio.Queue[Any] = asyncio.Queue()
    wins: dict[str, int] = {}
    won = {f"key-{n}": asyncio.Event() for n in range(_KEYS)}

    async def call(key: str) -> RunKey:
        connection = await idle.get()
        try:
            while True:
                transaction = connection.transaction()
                await transaction.start()
                run, existing = await enqueue_in(connection, unique_key=key)
                if not existing:
                    wins[key] = wins.get(key, 0) + 1
                    won[key].set()
                    if wins[key] < 4:
                        await transaction.rollback()
                        continue
                await transaction.commit()
                return run
        finally:
            idle.put_nowait(connection)

    async def call_server(key: str) -> RunKey:
        await won[key].wait()
        while True:
            (answer,) = await producer.batch([entry("report", key)])
            if isinstance(answer, Enqueued):
                return answer.key
            assert answer.retryable, answer

    async def race(key: str) -> None:
        apps = [call(key) for _ in range(_CALLERS - 10)]
        answers = await asyncio.gather(*apps, *(call_server(key) for _ in range(10)))
        assert len(set(answers)) == 1, key

    async with AsyncExitStack() as stack:
        for _ in range(_CONNECTIONS):
            idle.put_nowait(await stack.enter_async_context(application(world.dsn)))
        for first in range(0, _KEYS, 2):
            await asyncio.gather(*(race(f"key-{n}") for n in range(first, first + 2)))
    counts = await world.query(
        "SELECT unique_key, count(*) AS runs FROM fencepost.run_queue GROUP BY unique_key"
    )
    assert {row["unique_key"]: row["runs"] for row in counts} == {
        f"key-{n}": 1 for n in range(_KEYS)
    }
    assert wins.keys() == won.keys()
