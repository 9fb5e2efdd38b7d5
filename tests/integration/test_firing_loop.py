"""The scheduler's loop: when it sleeps, what wakes it, and what it leaves alone."""

import asyncio

import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.engine import firing
from fencepost_server.engine.firing import Scheduler
from fencepost_server.store.statements import load

from tests.factories import NOON, every, job_spec
from tests.integration.world import World, build

FIRING = load("firing")


async def test_the_loop_sleeps_until_a_job_is_due_and_fires_it_at_its_second(
    database_url: str,
) -> None:
    async with build(database_url, at=None) as world:
        due_at = (world.now // SECOND + 1) * SECOND
        job = await world.add_job(spec=job_spec(every(HOUR)), next_run_at=due_at)
        loop = asyncio.create_task(world.scheduler.run(poll=60 * SECOND, contended=100_000))
        try:
            async with asyncio.timeout(10):
                await world.woken.event.wait()
            fired_at = world.now
        finally:
            await _stop(loop)
        assert due_at <= fired_at < due_at + SECOND
        assert len(await world.runs_of(job)) == 1


async def test_a_hint_ends_the_sleep(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = asyncio.Event()
    sleep = Scheduler._sleep

    async def watched(scheduler: Scheduler, pause: int) -> None:
        asleep.set()
        await sleep(scheduler, pause)

    monkeypatch.setattr(Scheduler, "_sleep", watched)
    loop = asyncio.create_task(world.scheduler.run(poll=HOUR, contended=HOUR))
    try:
        async with asyncio.timeout(10):
            await asleep.wait()
            job = await world.add_job(spec=job_spec(every()), next_run_at=NOON)
            world.scheduler.wake()
            await world.woken.event.wait()
    finally:
        await _stop(loop)
    assert await world.runs_of(job) == [(0, "queued", "schedule")]


async def test_nothing_fires_while_the_clock_is_not_trusted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    def distrust() -> bool:
        asked.set()
        return False

    job = await world.add_job(spec=job_spec(every()), next_run_at=NOON)
    world.scheduler.is_trusted = distrust
    loop = asyncio.create_task(world.scheduler.run(poll=HOUR, contended=HOUR))
    try:
        async with asyncio.timeout(10):
            await asked.wait()
            asked.clear()
            world.scheduler.wake()
            await asked.wait()
    finally:
        await _stop(loop)
    assert await world.runs_of(job) == []


async def test_the_bound_of_due_scans_is_lifted_every_minute(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.scheduler._pass(HOUR, SECOND)
    # Committed late, below the bound that the empty pass has raised.
    job = await world.add_job(spec=job_spec(every(HOUR)), next_run_at=NOON - MINUTE)
    await world.scheduler._pass(HOUR, SECOND)
    assert await world.runs_of(job) == []
    monkeypatch.setattr(firing, "monotonic", lambda: 10**15)
    await world.scheduler._pass(HOUR, SECOND)
    assert [at for at, _, _ in await world.runs_of(job)] == [-60]


async def test_a_scheduler_with_no_partitions_fires_nothing(world: World) -> None:
    class NoPartitions(AllPartitions):
        def partitions(self) -> range:
            return range(0)

    job = await world.add_job(spec=job_spec(every()), next_run_at=NOON)
    world.scheduler._ownership = NoPartitions()
    assert await world.scheduler.fire_due() == 0
    assert await world.runs_of(job) == []


async def _stop(loop: "asyncio.Task[None]") -> None:
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop
