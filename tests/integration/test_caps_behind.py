"""Claims under caps when most of what waits may not go: others behind it do, and soon."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND, to_datetime
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.store.admin import AdminStore, QueueRecord, QueueSettings

from tests.factories import NOON, job_spec
from tests.integration.takers import make_dispatcher, make_taker, running
from tests.integration.world import World, build

# More than a claim steps over one by one.
_LONG = 1500


async def _key_cap(world: World, cap: int) -> None:
    await world.query("UPDATE fencepost.queues SET max_in_flight_per_key = $1", cap)


async def _keys(world: World, runs: list[Claimed]) -> list[str | None]:
    return [(await world.live(run.key))["concurrency_key"] for run in runs]


async def test_a_full_key_holds_up_no_other_key_behind_it(world: World) -> None:
    await _key_cap(world, 2)
    job = await world.add_job()
    await world.enqueue(job, _LONG, key="full")
    await world.move(SECOND)
    await world.enqueue(job, 3, key="other")
    await world.move(SECOND)
    assert await _keys(world, await world.claim(2, capped=True)) == ["full", "full"]
    assert await _keys(world, await world.claim(5, capped=True)) == ["other", "other"]
    assert await world.claim(5, capped=True) == []


async def test_a_full_job_holds_up_no_other_job_behind_it(world: World) -> None:
    narrow, narrow_too = await world.add_jobs(["a", "b"], job_spec(max_in_flight=2))
    free = await world.add_job("free")
    await world.enqueue(narrow, _LONG)
    await world.move(SECOND)
    await world.enqueue(narrow_too, 3)
    await world.enqueue(free, 3)
    await world.move(SECOND)
    first = await world.claim(2, capped=True)
    assert [run.key.job_id for run in first] == [narrow] * 2
    rest = await world.claim(9, capped=True) + await world.claim(9, capped=True)
    assert sorted(run.key.job_id for run in rest) == sorted([narrow_too] * 2 + [free] * 3)


async def test_a_freed_place_goes_to_the_oldest_of_its_key(world: World) -> None:
    await _key_cap(world, 1)
    job = await world.add_job()
    full = await world.enqueue(job, _LONG, key="full")
    await world.move(SECOND)
    [run] = await world.claim(5, capped=True)
    for place in range(1, 4):
        assert await world.claim(5, capped=True) == []
        await world.report(run)
        [run] = await world.claim(5, capped=True)
        assert run.key == full[place]


async def test_a_lost_attempt_is_claimed_again_under_a_full_cap_and_a_long_backlog(
    world: World,
) -> None:
    await world.query("UPDATE fencepost.queues SET max_in_flight = 1")
    job = await world.add_job()
    await world.enqueue(job, _LONG)
    [run] = await world.claim(1, capped=True)
    await world.lose_lease()
    [again] = await world.claim(5, capped=True)
    assert (again.key, again.attempt) == (run.key, 2)


async def test_a_lower_cap_of_a_newer_version_counts_what_runs_already(world: World) -> None:
    job = await world.add_job(spec=job_spec(max_in_flight=5))
    other = await world.add_job("other")
    await world.enqueue(job, 10)
    assert len(await world.claim(3, capped=True)) == 3
    await world.query("UPDATE fencepost.run_queue SET max_in_flight = 2 WHERE attempt = 0")
    await world.move(SECOND)
    await world.enqueue(other, 1)
    assert [run.key.job_id for run in await world.claim(5, capped=True)] == [other]


async def test_runs_that_waited_too_long_are_not_claimed_under_caps(world: World) -> None:
    await world.query("UPDATE fencepost.queues SET max_in_flight = 10")
    job = await world.add_job()
    waited, overdue, fine = await world.enqueue(job, 3)
    for key, column in ((waited, "wait_until"), (overdue, "total_until")):
        await world.query(
            f"UPDATE fencepost.run_queue SET {column} = $2 WHERE scheduled_at = $1",  # noqa: S608
            to_datetime(key.scheduled_at),
            to_datetime(NOON + SECOND),
        )
    await world.move(SECOND)
    assert [run.key for run in await world.claim(5, capped=True)] == [fine]


async def test_claims_under_caps_are_told_to_whoever_watches(world: World) -> None:
    await world.query("UPDATE fencepost.queues SET max_in_flight = 10")
    await world.enqueue(await world.add_job(), 3)
    assert len(await world.claim(1, capped=True)) == 1
    assert await world.value("SELECT count(*) FROM fencepost.run_changes") == 0
    await world.query(
        "UPDATE fencepost.shard_state SET watched_until = $1", to_datetime(NOON + MINUTE)
    )
    [run, _] = await world.claim(2, capped=True)
    told = await world.value("SELECT scheduled_ats FROM fencepost.run_changes")
    assert to_datetime(run.key.scheduled_at) in told
    assert len(told) == 2


async def test_a_row_that_somebody_changes_is_left_to_the_next_claim(database_url: str) -> None:
    async with build(database_url, day_tables=False) as world:
        await world.query("UPDATE fencepost.queues SET max_in_flight = 10")
        held, free = await world.enqueue(await world.add_job(), 2)
        await world.move(SECOND)
        transaction = world.raw.transaction()
        await transaction.start()
        await world.raw.execute(
            "UPDATE fencepost.run_queue SET available_at = $2 WHERE scheduled_at = $1",
            to_datetime(held.scheduled_at),
            to_datetime(NOON + HOUR),
        )
        assert [run.key for run in await world.claim(5, capped=True)] == [free]
        await transaction.commit()
        assert await world.claim(5, capped=True) == []


# Places that get free ----------------------------------------------------------------------


async def test_a_place_freed_here_is_used_without_another_look(database_url: str) -> None:
    async with build(database_url, at=None) as world:
        await world.query("UPDATE fencepost.queues SET max_in_flight = 2")
        await world.enqueue(await world.add_job(), 9)
        dispatcher = make_dispatcher(world, poll=HOUR)
        world.lifecycle.places_freed.append(dispatcher.places_freed)
        taker = await make_taker(world)
        dispatcher.subscribe(taker)
        async with running(dispatcher):
            for done in range(9):
                await taker.until(min(9, done + 2))
                await world.report(taker.taken[done])
        assert len(taker.taken) == 9


async def test_a_place_freed_on_another_server_is_used_without_another_look(
    database_url: str,
) -> None:
    async with build(database_url, at=None) as world:
        await world.query("UPDATE fencepost.tenants SET max_in_flight = 1")
        await world.enqueue(await world.add_job(), 2)
        here, there = (make_dispatcher(world, poll=HOUR) for _ in range(2))
        world.lifecycle.places_freed.append(there.places_freed)
        # What the notifier would carry from one process to the other.
        there.book.tell_freed = here.places_freed_elsewhere
        await there.book.load([await world.queue_id("default")])
        [run] = await world.claim(1, capped=True)
        taker = await make_taker(world)
        here.subscribe(taker)
        await here.scan()
        assert await here.dispatch() == 0
        assert here.book.is_closed(await world.queue_id("default"))
        async with running(here):
            await world.report(run)
            await taker.until(1)


class _Slow(Claimer):
    """Holds back what its next claim of nothing has found."""

    def __init__(self, world: World, **parts: Any) -> None:
        super().__init__(pool=world.database.hot, clock=world.database.clock, specs=world.specs)
        self.counted, self.goes_on = asyncio.Event(), asyncio.Event()

    async def claim(self, *args: Any, **kwargs: Any) -> list[Claimed]:
        runs = await super().claim(*args, **kwargs)
        if not runs:
            self.counted.set()
            await self.goes_on.wait()
        return runs


async def test_a_place_that_gets_free_after_a_claim_has_counted_is_used_without_another_look(
    database_url: str,
) -> None:
    async with build(database_url, at=None) as world:
        await world.query("UPDATE fencepost.queues SET max_in_flight = 1")
        await world.enqueue(await world.add_job(), 2)
        [run] = await world.claim(1, capped=True)
        slow = _Slow(world)
        dispatcher = Dispatcher(
            pool=world.database.hot,
            clock=world.database.clock,
            claimer=slow,
            batch_max=10,
            poll=HOUR,
        )
        world.lifecycle.places_freed.append(dispatcher.places_freed)
        taker = await make_taker(world)
        dispatcher.subscribe(taker)
        async with running(dispatcher):
            await slow.counted.wait()
            await world.report(run)
            slow.goes_on.set()
            await taker.until(1)


# Pauses --------------------------------------------------------------------------------------


def _paused(paused: bool) -> Callable[[QueueRecord], QueueSettings]:
    def change(stored: QueueRecord) -> QueueSettings:
        kept = stored.settings
        return QueueSettings(
            labels=kept.labels,
            paused=paused,
            pause_reason="",
            max_in_flight=kept.max_in_flight,
            max_in_flight_per_key=kept.max_in_flight_per_key,
            rate_limit=kept.rate_limit,
        )

    return change


@pytest.mark.parametrize("path", ["plain", "capped", "named"])
async def test_nothing_is_claimed_by_a_call_that_begins_after_the_pause(
    database_url: str, path: str
) -> None:
    async with build(database_url, day_tables=False, hot_size=8) as world:
        keys = await world.enqueue(await world.add_job(), 600)
        await world.move(SECOND)
        if path == "capped":
            await world.query("UPDATE fencepost.queues SET max_in_flight = 100000")
        store = AdminStore(database=world.database)
        enough, paused = asyncio.Event(), asyncio.Event()
        claimed_before = late = calls_after = 0

        async def one_call(n: int) -> int:
            if path != "named":
                return len(await world.claim(1, capped=path == "capped"))
            async with world.database.hot.transaction() as connection:
                run = await world.claimer.lease(
                    connection, keys[n % len(keys)], worker_id=world.worker_id
                )
            return 0 if run is None else 1

        async def claimer(first: int) -> None:
            nonlocal claimed_before, late, calls_after
            n = first
            while calls_after < 24:
                began_after = paused.is_set()
                got = await one_call(n)
                n += 4
                if began_after:
                    calls_after += 1
                    late += got
                else:
                    claimed_before += got
                    if claimed_before >= 20:
                        enough.set()

        async def pauser() -> None:
            await enough.wait()
            await store.update_queue(world.tenant_id, "default", _paused(True), now=world.now)
            paused.set()

        async with asyncio.timeout(60):
            await asyncio.gather(pauser(), *(claimer(n) for n in range(4)))
        assert late == 0
        assert claimed_before >= 20
        await store.update_queue(world.tenant_id, "default", _paused(False), now=world.now)
        assert await one_call(599) == 1


async def test_a_resumed_queue_is_served_at_the_hint_and_at_the_next_look(
    database_url: str,
) -> None:
    async with build(database_url, at=None, day_tables=False) as world:
        await world.query("UPDATE fencepost.queues SET paused = true")
        await world.enqueue(await world.add_job(), 2)
        store = AdminStore(database=world.database)
        told = make_dispatcher(world, poll=HOUR)
        taker = await make_taker(world, credits=1)
        told.subscribe(taker)
        await told.scan()
        async with running(told):
            await store.update_queue(world.tenant_id, "default", _paused(False), now=world.now)
            told.hint((), 0)
            await taker.until(1)
        looking: Dispatcher = make_dispatcher(world, poll=SECOND // 10)
        other = await make_taker(world, credits=1)
        looking.subscribe(other)
        async with running(looking):
            await other.until(1)
