"""The feed of changed runs: what one engine commits, watchers of another one hear, each change
once and none lost, whatever the order of commits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest
from fencepost_server.clock import MINUTE, SECOND, to_datetime
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.cancel import cancel_run
from fencepost_server.engine.watch import WATCHERS_MAX, Watches
from fencepost_server.engine.watcher import PENDING_MAX, Position, Watcher
from fencepost_server.errors import QuotaExceeded, ServerDraining
from fencepost_server.policy.outcome import Released, Snoozed
from fencepost_server.store.database import Database

from tests.factories import NOON, every, failed, job_spec
from tests.integration.running_server import until
from tests.integration.world import World

_COUNT = "SELECT count(*) FROM fencepost.run_changes"


@asynccontextmanager
async def elsewhere(world: World, *, settle_max: int = MINUTE) -> AsyncIterator[Watches]:
    """The feed of another process on the same database."""
    async with Database(world.dsn, hot_size=2, requests_size=2) as database:
        database.clock = world.database.clock
        yield Watches(database=database, clock=database.clock, settle_max=settle_max)


@pytest.fixture
async def watches(world: World) -> AsyncIterator[Watches]:
    async with elsewhere(world) as feed:
        yield feed


async def attached(
    watches: Watches, world: World, *, since: Position | None = None, job_id: str | None = None
) -> Watcher:
    return await watches.attach(tenant_id=world.tenant_id, job_id=job_id, since=since)


async def told(watches: Watches, watcher: Watcher) -> list[tuple[RunKey, RunState, int]]:
    """What one look brings, as key, state and attempt."""
    await watches.look()
    taken = watcher.take(PENDING_MAX)
    runs = await watches.read([change.key for change in taken.changes])
    return [
        (key, runs[key].state, runs[key].attempt)
        for key, _ in taken.changes
        if key in runs and watcher.is_news(runs[key])
    ]


async def stored(world: World) -> int:
    count: int = await world.value(_COUNT)
    return count


async def keep_watching(world: World) -> None:
    """As if somebody renewed the watch while the test moves the clock by minutes."""
    await world.raw.execute(
        "UPDATE fencepost.shard_state SET watched_until = $1", to_datetime(world.now + 30 * MINUTE)
    )


async def started(world: World, job_id: str) -> RunKey:
    """A run of the job that is running now."""
    await world.enqueue(job_id)
    [run] = await world.claim()
    return run.key


@asynccontextmanager
async def cancelling(world: World, key: RunKey) -> AsyncIterator[None]:
    """A cancel that commits when the block ends."""
    async with world.database.requests.transaction() as connection:
        assert await cancel_run(connection, key=key, reason="", grace=None, now=world.now)
        yield


async def test_every_transition_is_told_in_order(world: World, watches: Watches) -> None:
    [key] = await world.enqueue(await world.add_job())
    watcher = await attached(watches, world)
    await keep_watching(world)
    [run] = await world.claim()
    assert await told(watches, watcher) == [(key, RunState.RUNNING, 1)]
    await world.report(run, failed())
    assert await told(watches, watcher) == [(key, RunState.RETRYING, 1)]
    await world.pass_time(MINUTE)
    [run] = await world.claim()
    assert await told(watches, watcher) == [(key, RunState.RUNNING, 2)]
    await world.report(run, Released())
    assert await told(watches, watcher) == [(key, RunState.QUEUED, 2)]
    [run] = await world.claim()
    await world.report(run, Snoozed(delay=SECOND))
    # Two changes within one look are one event, of the newer state.
    assert await told(watches, watcher) == [(key, RunState.RETRYING, 3)]
    await world.pass_time(2 * SECOND)
    [run] = await world.claim()
    await world.lose_lease()
    assert await told(watches, watcher) == [(key, RunState.RETRYING, 4)]
    await world.report(run)
    assert await told(watches, watcher) == [(key, RunState.SUCCEEDED, 4)]
    assert await told(watches, watcher) == []


async def test_fires_promotions_and_ends_by_cancel_are_told(world: World, watches: Watches) -> None:
    spec = job_spec(every(MINUTE, overlap=OverlapPolicy.QUEUE_ALL))
    job_id = await world.add_job(spec=spec, next_run_at=NOON)
    watcher = await attached(watches, world)
    await keep_watching(world)
    first, second = RunKey(job_id, NOON), RunKey(job_id, NOON + MINUTE)
    assert await world.scheduler.fire_due() == 1
    assert await told(watches, watcher) == [(first, RunState.QUEUED, 0)]
    await world.move_to(NOON + MINUTE)
    await world.scheduler.fire_due()
    assert await told(watches, watcher) == [(second, RunState.BLOCKED, 0)]
    await world.cancel(first)
    assert await told(watches, watcher) == [(first, RunState.CANCELLED, 0)]
    await world.promoter.sweep()
    assert await told(watches, watcher) == [(second, RunState.QUEUED, 0)]


async def test_a_cancel_request_of_a_running_run_is_told(world: World, watches: Watches) -> None:
    run = await world.started()
    watcher = await attached(watches, world)
    await world.cancel(run.key)
    assert await told(watches, watcher) == [(run.key, RunState.RUNNING, 1)]


async def test_a_transaction_that_commits_after_a_later_one_is_not_missed(
    world: World, watches: Watches
) -> None:
    first, second = await world.enqueue(await world.add_job(), 2)
    watcher = await attached(watches, world)
    async with cancelling(world, first):
        await world.cancel(second)
        assert [key for key, _, _ in await told(watches, watcher)] == [second]
        between = watcher.position
    assert [key for key, _, _ in await told(watches, watcher)] == [first]
    # Whoever goes on elsewhere from the cursor of that moment hears of it as well.
    async with elsewhere(world) as other:
        again = await attached(other, world, since=between)
        assert [key for key, _, _ in await told(other, again)] == [first]
        assert not again.take(1).gap
        compacted = await attached(
            other, world, since=Position(epoch=between.epoch, low=between.low, end=between.low)
        )
        assert {key for key, _, _ in await told(other, compacted)} == {first, second}


async def test_a_statement_older_than_the_watch_ends_before_the_first_cursor(
    world: World, watches: Watches
) -> None:
    [key] = await world.enqueue(await world.add_job())
    older = await asyncpg.connect(world.dsn)
    try:
        # A snapshot without a transaction number, as a statement has before its first write.
        await older.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        assert await older.fetchval(_COUNT) == 0
        attaching = asyncio.create_task(attached(watches, world))
        await until(lambda: _watched(world), what="watching has begun")
        await older.execute(
            "UPDATE fencepost.run_queue SET available_at = available_at WHERE job_id = $1::uuid",
            key.job_id,
        )
        assert not attaching.done()
        await older.execute("COMMIT")
        watcher = await attaching
    finally:
        await older.close()
    assert not watcher.take(1).gap


async def _watched(world: World) -> bool:
    return bool(
        await world.value("SELECT watched_until > fencepost.clock() FROM fencepost.shard_state")
    )


async def test_an_old_transaction_that_does_not_end_costs_a_gap_once_it_has(world: World) -> None:
    older = await asyncpg.connect(world.dsn)
    async with elsewhere(world, settle_max=0) as watches:
        await older.execute("BEGIN")
        await older.fetchval("SELECT 1")
        watcher = await attached(watches, world)
        await watches.look()
        assert not watcher.take(1).gap
        await older.close()

        async def lost() -> bool:
            await watches.look()
            return watcher.take(1).gap

        await until(lost, what="a gap")
        await watches.look()
        assert not watcher.take(1).gap


async def test_resuming_elsewhere_tells_everything_since_the_cursor(
    world: World, watches: Watches
) -> None:
    job_id = await world.add_job()
    watcher = await attached(watches, world)
    await world.enqueue(job_id, 3)
    runs = await world.claim(3)
    await watches.look()
    taken = watcher.take(1)
    assert len(taken.changes) == 1
    watches.detach(watcher)
    await world.report(runs[0])
    async with elsewhere(world) as other:
        again = await attached(other, world, since=watcher.position)
        states = {key: state for key, state, _ in await told(other, again)}
        assert not again.take(1).gap
    assert states == {
        runs[0].key: RunState.SUCCEEDED,
        runs[1].key: RunState.RUNNING,
        runs[2].key: RunState.RUNNING,
    }


async def test_what_happened_while_nobody_watched_is_a_gap(world: World, watches: Watches) -> None:
    job_id = await world.add_job()
    watcher = await attached(watches, world)
    await started(world, job_id)
    await watches.look()
    watches.detach(watcher)
    rows = await stored(world)
    assert rows > 0
    await world.move(31 * SECOND)
    await started(world, job_id)
    assert await stored(world) == rows, "nobody watches any more, and yet changes are stored"
    async with elsewhere(world) as other:
        again = await attached(other, world, since=watcher.position)
        assert again.take(1).gap
        await world.move(SECOND)
        key = await started(world, job_id)
        assert [each for each, _, _ in await told(other, again)] == [key]


async def test_a_process_whose_own_watching_lapsed_tells_its_watchers(
    world: World, watches: Watches
) -> None:
    watcher = await attached(watches, world)
    await world.move(MINUTE)
    async with elsewhere(world) as other:
        await attached(other, world)
    await watches.look()
    assert watcher.take(1).gap


async def test_old_changes_are_pruned_and_an_older_cursor_is_a_gap(
    world: World, watches: Watches
) -> None:
    job_id = await world.add_job()
    watcher = await attached(watches, world)
    old = watcher.position
    await started(world, job_id)
    await told(watches, watcher)
    recent = watcher.position
    assert await watches.prune() == 0
    await keep_watching(world)
    await world.move(11 * MINUTE)
    assert (await attached(watches, world, since=old)).take(1).gap is False
    assert await watches.prune() > 0
    assert await stored(world) == 0
    assert (await attached(watches, world, since=old)).take(1).gap
    assert not (await attached(watches, world, since=recent)).take(1).gap


async def test_changes_of_a_transaction_that_is_still_open_are_not_pruned_over(
    world: World, watches: Watches
) -> None:
    [key] = await world.enqueue(await world.add_job())
    watcher = await attached(watches, world)
    await keep_watching(world)
    async with cancelling(world, key):
        await world.move(11 * MINUTE)
        assert await watches.prune() == 0
        before = watcher.position
        await watches.look()
    async with elsewhere(world) as other:
        # It has ended just now, and its change is old enough to go at once.
        assert await other.prune() == 1
        assert (await attached(other, world, since=before)).take(1).gap
    await watches.look()
    assert watcher.take(1).gap


async def test_a_watcher_that_falls_far_behind_gets_a_gap_and_goes_on(
    world: World, watches: Watches
) -> None:
    job_id = await world.add_job()
    watcher = await attached(watches, world)
    other = await attached(watches, world, job_id="00000000-0000-0000-0000-000000000000")
    for start in range(0, PENDING_MAX + 500, 500):
        await world.raw.execute(
            "INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats) "
            "SELECT $1, array_agg($2::uuid), array_agg($1::timestamptz + n * interval '1 us') "
            "FROM generate_series($3::int, $3 + 499) AS n",
            to_datetime(world.now),
            job_id,
            start,
        )
    await watches.look()
    assert watcher.pending <= PENDING_MAX
    taken = watcher.take(PENDING_MAX)
    assert taken.gap
    assert watcher.pending == 0
    key = await started(world, job_id)
    assert await told(watches, watcher) == [(key, RunState.RUNNING, 1)]
    assert not other.take(1).gap, "it does not watch that job"


async def test_jobs_and_tenants_are_kept_apart(world: World, watches: Watches) -> None:
    mine, other = await world.add_job("mine"), await world.add_job("other")
    foreign = await watches.attach(tenant_id=world.tenant_id + 1, job_id=None, since=None)
    one = await attached(watches, world, job_id=mine)
    everything = await attached(watches, world)
    key = await started(world, mine)
    another = await started(world, other)
    assert [each for each, _, _ in await told(watches, one)] == [key]
    assert {each for each, _, _ in await told(watches, everything)} == {key, another}
    assert await told(watches, foreign) == []


async def test_a_process_has_room_for_so_many_watchers_and_none_when_it_leaves(
    world: World, watches: Watches
) -> None:
    watchers = [await attached(watches, world) for _ in range(WATCHERS_MAX)]
    with pytest.raises(QuotaExceeded):
        await attached(watches, world)
    watches.detach(watchers.pop())
    await attached(watches, world)
    watches.drain()
    assert all(watcher.woken.is_set() for watcher in watchers)
    with pytest.raises(ServerDraining):
        await attached(watches, world)
