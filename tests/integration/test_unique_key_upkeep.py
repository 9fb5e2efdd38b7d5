"""What becomes of unique keys when nobody holds them any more, and when a dead run is replayed."""

import pytest
from fencepost_server.clock import HOUR, SECOND, Instant, to_datetime
from fencepost_server.domain.run import RunKey
from fencepost_server.store.statements import load

from tests.integration.enqueue_calls import (
    Producer,
    application,
    end_as_dead,
    enqueue_in,
)
from tests.integration.world import World

_UPKEEP = load("upkeep")


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


async def _stamp(world: World) -> int:
    return await world.database.requests.execute(
        _UPKEEP["stamp_run_keys"], now=world.now, rows_max=1000
    )


async def _prune(world: World) -> int:
    return await world.database.requests.execute(
        _UPKEEP["prune_run_keys"], now=world.now, rows_max=1000
    )


async def test_keys_are_stamped_and_forgotten_after_their_time(
    producer: Producer, world: World
) -> None:
    for place in ("job_runs", "job_runs_stray", "dead_letters"):
        made = await producer.one("report", place, keep_for=HOUR)
        await end_as_dead(world, made.key, place, ended_at=world.now + SECOND)
    await producer.one("report", "live", keep_for=0)
    nowhere = await producer.one("report", "nowhere", keep_for=HOUR)
    await world.query(
        "DELETE FROM fencepost.run_queue WHERE scheduled_at = $1",
        to_datetime(nowhere.key.scheduled_at),
    )
    assert await _stamp(world) == 4
    assert await _stamp(world) == 0
    stamps = await world.query("SELECT unique_key, until FROM fencepost.run_keys")
    ended = to_datetime(world.now + SECOND + HOUR)
    assert {row["unique_key"]: row["until"] for row in stamps} == {
        "job_runs": ended,
        "job_runs_stray": ended,
        "dead_letters": ended,
        "nowhere": to_datetime(world.now),
        "live": None,
    }
    assert await _prune(world) == 0
    await world.move(1)
    assert await _prune(world) == 1
    await world.move(HOUR + SECOND)
    assert await _prune(world) == 3
    assert await world.value("SELECT array_agg(unique_key) FROM fencepost.run_keys") == ["live"]


async def test_clean_up_passes_by_keys_that_are_being_taken(
    producer: Producer, world: World
) -> None:
    first = await producer.one("report", "order-7", keep_for=0)
    await world.cancel(first.key)
    async with application(world.dsn) as other, other.transaction():
        await enqueue_in(other, unique_key="order-7")
        assert await _stamp(world) == 0
    assert await _stamp(world) == 0
    assert await world.value("SELECT until FROM fencepost.run_keys") is None


async def _dead_letter(producer: Producer, world: World, key: str) -> RunKey:
    made = await producer.one("report", key, keep_for=HOUR)
    await end_as_dead(world, made.key, "dead_letters", ended_at=world.now)
    return made.key


async def _retake(world: World, *keys: RunKey) -> set[RunKey]:
    rows = await world.query(
        "SELECT job_id, (extract(epoch FROM scheduled_at) * 1000000)::bigint AS at "
        "FROM fencepost.retake_keys($1::uuid[], $2::timestamptz[], $3)",
        [key.job_id for key in keys],
        [to_datetime(key.scheduled_at) for key in keys],
        to_datetime(world.now),
    )
    return {RunKey(str(row["job_id"]), row["at"]) for row in rows}


async def test_a_replayed_run_takes_its_key_back_if_it_is_free(
    producer: Producer, world: World
) -> None:
    own = await _dead_letter(producer, world, "own")
    await _stamp(world)
    pruned = await _dead_letter(producer, world, "pruned")
    await world.query("DELETE FROM fencepost.run_keys WHERE unique_key = 'pruned'")
    lost = await _dead_letter(producer, world, "lost")
    freed = await _dead_letter(producer, world, "freed")
    await world.move(HOUR)
    other = await producer.one("report", "lost")
    passed = await producer.one("report", "freed", keep_for=0)
    await world.cancel(passed.key)
    assert await _retake(world, own, pruned, lost, freed) == {own, pruned, freed}
    assert await _holder(world, "own") == own.scheduled_at
    assert await _holder(world, "pruned") == pruned.scheduled_at
    assert await _holder(world, "freed") == freed.scheduled_at
    assert await _holder(world, "lost") == other.key.scheduled_at
    stamped = "SELECT count(*) FROM fencepost.run_keys WHERE until IS NOT NULL"
    assert await world.value(stamped) == 0


async def test_a_replayed_run_waits_for_nobody_who_is_taking_its_key(
    producer: Producer, world: World
) -> None:
    dead = await _dead_letter(producer, world, "order-7")
    await world.move(HOUR)
    async with application(world.dsn) as other, other.transaction():
        await enqueue_in(other, unique_key="order-7")
        assert await _retake(world, dead) == set()
    assert await world.value("SHOW lock_timeout") == "0"


async def test_a_key_of_a_run_that_lives_again_is_not_forgotten(
    producer: Producer, world: World
) -> None:
    first = await producer.one("report", "order-7", keep_for=0)
    await world.query("UPDATE fencepost.run_keys SET until = $1", to_datetime(world.now - 1))
    assert await _prune(world) == 0
    assert await world.value("SELECT until FROM fencepost.run_keys") is None
    assert (await producer.one("report", "order-7")).key == first.key
