"""When the reaper looks over all open attempts, what it cannot have seen then, and that what it
has found is judged again.
"""

from collections.abc import Sequence

import pytest
from fencepost_server.api.settlement import UNRECEIPTED_FUSE
from fencepost_server.api.wire_job import LEASE_TTL_MIN
from fencepost_server.clock import MINUTE, SECOND, Instant
from fencepost_server.domain.run import RunKey
from fencepost_server.engine import reaper as reaper_module
from fencepost_server.engine.verdicts import Held
from fencepost_server.errors import StorageUnavailable

from tests.factories import job_spec
from tests.integration.held_database import HandClock
from tests.integration.world import World, build


@pytest.fixture
def ticking(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose clock says also when the reaper looks again."""
    monkeypatch.setattr(reaper_module, "monotonic", lambda: world.now)
    return world


async def _ticks_until_lost(world: World, key: RunKey) -> int:
    """How many passes, one a second, until a run is taken back."""
    for tick in range(1, 60):
        await world.pass_time(SECOND)
        await world.reaper.tick()
        if (await world.live(key))["state"] != "running":
            return tick
    raise AssertionError("it was not taken back")


async def test_a_lease_is_lost_in_the_first_pass_after_its_end(ticking: World) -> None:
    run = await ticking.started()
    await ticking.reaper.tick()
    assert await _ticks_until_lost(ticking, run.key) == 31


async def test_of_many_leases_each_is_lost_in_the_first_pass_after_its_end(ticking: World) -> None:
    runs = []
    for number in range(8):
        runs.append(await ticking.started(name=f"job {number}"))
        await ticking.pass_time(SECOND)
        await ticking.reaper.tick()
    for _ in range(22):
        await ticking.pass_time(SECOND)
        await ticking.reaper.tick()
    for number, run in enumerate(runs):
        assert (await ticking.live(run.key))["state"] == "running"
        await ticking.pass_time(SECOND)
        await ticking.reaper.tick()
        assert (await ticking.live(run.key))["state"] == "retrying", number


async def test_open_attempts_are_not_read_again_before_one_can_be_lost(ticking: World) -> None:
    run = await ticking.started()
    await ticking.reaper.tick()
    # Nothing that this product does, so that it can be seen who looks.
    await ticking.query("UPDATE fencepost.run_queue SET lease_until = '2000-01-01T00:00Z'")
    assert await _ticks_until_lost(ticking, run.key) == 5


async def test_a_pass_reads_all_at_once_when_it_is_told_of_a_cancel(ticking: World) -> None:
    run = await ticking.started()
    await ticking.reaper.tick()
    await ticking.cancel(run.key, grace=1)
    ticking.reaper.look_soon()
    await ticking.pass_time(SECOND)
    await ticking.reaper.tick()
    assert (await ticking.ended(run.key))["state"] == "cancelled"


async def test_a_hint_that_comes_while_it_looks_is_not_lost(world: World) -> None:
    at = world.now

    class HintedClock(HandClock):
        def now(self) -> Instant:
            world.reaper.look_soon()
            return self.at

    run = await world.started()
    world.reaper._clock = HintedClock(at)
    await world.reaper.tick()
    world.reaper._clock = world.database.clock
    await world.query("UPDATE fencepost.run_queue SET lease_until = '2000-01-01T00:00Z'")
    await world.reaper.tick()
    assert (await world.live(run.key))["state"] == "retrying"


async def test_what_a_look_cannot_have_seen_ends_after_the_next_one(ticking: World) -> None:
    assert min(UNRECEIPTED_FUSE, LEASE_TTL_MIN) >= reaper_module.LOOK_WITHIN
    cut, kept = [await ticking.started(name=name) for name in ("cut", "kept")]
    await ticking.reaper.tick()
    await ticking.lifecycle.cut_leases([(cut.key, 1)], fuse=UNRECEIPTED_FUSE)
    assert await _ticks_until_lost(ticking, cut.key) == UNRECEIPTED_FUSE // SECOND + 1
    assert (await ticking.live(kept.key))["state"] == "running"


async def test_a_run_out_of_time_is_found_without_a_look_at_all_the_others(ticking: World) -> None:
    await ticking.reaper.tick()
    run = await ticking.started(job_spec(total_timeout=2 * SECOND))
    await ticking.started(name="other")
    assert await ticking.reaper.reap(all_open=False) == 0
    await ticking.pass_time(2 * SECOND)
    assert await ticking.reaper.reap(all_open=False) == 1
    assert (await ticking.ended(run.key, "dead_letters"))["dead_reason"] == "total_timeout"


async def test_after_a_pause_the_next_pass_looks(ticking: World) -> None:
    run = await ticking.started()
    await ticking.move(10 * MINUTE)
    await ticking.keeper.tick()
    for _ in range(29):
        await ticking.pass_time(SECOND)
        await ticking.reaper.tick()
        assert (await ticking.live(run.key))["state"] == "running"
    assert await _ticks_until_lost(ticking, run.key) == 1


async def test_a_clock_that_is_not_trusted_stops_it(ticking: World) -> None:
    run = await ticking.started()
    await ticking.pass_time(31 * SECOND)
    ticking.reaper.is_trusted = lambda: False
    await ticking.reaper.tick()
    assert (await ticking.live(run.key))["state"] == "running"
    ticking.reaper.is_trusted = lambda: True
    await ticking.reaper.tick()
    assert (await ticking.live(run.key))["state"] == "retrying"


async def test_more_than_one_look_finds_are_taken_back_in_batches(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper_module, "_FOUND_MAX", 5)
    monkeypatch.setattr(reaper_module, "_BATCH", 2)
    await world.enqueue(await world.add_job(), 13)
    assert len(await world.claim(13)) == 13
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 13


async def test_what_another_transaction_has_locked_waits_for_the_next_pass(
    ticking: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many as a look finds at most: it must not look for them for ever.
    monkeypatch.setattr(reaper_module, "_FOUND_MAX", 1)
    run = await ticking.started()
    await ticking.pass_time(31 * SECOND)
    async with ticking.raw.transaction():
        await ticking.raw.execute("SELECT FROM fencepost.run_queue FOR UPDATE")
        assert await ticking.reaper.reap() == 0
    await ticking.reaper.tick()
    assert (await ticking.live(run.key))["state"] == "retrying"


async def test_what_was_found_is_judged_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, renewed = [await world.started(name=name) for name in ("lost", "renewed")]
    await world.pass_time(31 * SECOND)
    found = await world.reaper._find_overdue()
    assert set(found) == {lost.key, renewed.key}
    await world.lifecycle.heartbeat([Held(renewed.key, 1)])

    async def find() -> Sequence[RunKey]:
        return found

    monkeypatch.setattr(world.reaper, "_find_overdue", find)
    assert await world.reaper.reap() == 1
    assert (await world.live(renewed.key))["state"] == "running"
    # Nor is it taken back in a pause that has begun since.
    await world.pass_time(31 * SECOND)
    world.lifecycle.heartbeats_failed = True
    await world.keeper.tick()
    assert await world.reaper.reap() == 0


async def test_a_look_that_failed_is_made_again_in_the_next_pass(database_url: str) -> None:
    async with build(database_url) as world:
        run = await world.started()
        await world.pass_time(31 * SECOND)
        agrees = "ALTER FUNCTION {}.clock_agrees(timestamptz) SET SCHEMA {}"
        await world.raw.execute(agrees.format("fencepost", "public"))
        await world.raw.execute(
            "CREATE FUNCTION fencepost.clock_agrees(timestamptz) RETURNS boolean LANGUAGE plpgsql "
            "VOLATILE AS $$ BEGIN RAISE EXCEPTION SQLSTATE '57P03'; END $$"
        )
        with pytest.raises(StorageUnavailable):
            await world.reaper._find_overdue()
        await world.raw.execute("DROP FUNCTION fencepost.clock_agrees")
        await world.raw.execute(agrees.format("public", "fencepost"))
        await world.reaper.tick()
        assert (await world.live(run.key))["state"] == "retrying"
