"""Schedulers and governors of servers on a world's database, and what they have released."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from fencepost_server.clock import DAY, Duration, to_datetime
from fencepost_server.cluster.ownership import AllPartitions
from fencepost_server.engine.firing import Scheduler
from fencepost_server.engine.governor import AHEAD, Governor
from fencepost_server.store.database import Database

from tests.factories import every, job_spec
from tests.integration.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The scheduler and the governor of one process."""

    scheduler: Scheduler
    governor: Governor

    async def fire(self) -> None:
        while await self.scheduler.fire_due():
            pass


def server_of(
    world: World,
    rate: float,
    *,
    database: Database | None = None,
    batch_max: int = 500,
    runs_max: int = 10_000,
) -> Server:
    used = world.database if database is None else database
    clock = world.database.clock
    return Server(
        scheduler=Scheduler(
            database=used,
            clock=clock,
            ownership=AllPartitions(),
            wake=world.woken,
            batch_max=batch_max,
            concurrency=2,
            parks=rate > 0,
        ),
        governor=Governor(
            database=used, clock=clock, wake=world.woken, rate=rate, runs_max=runs_max
        ),
    )


@asynccontextmanager
async def servers_of(world: World, count: int, rate: float) -> AsyncIterator[Sequence[Server]]:
    """Servers with connections of their own, in small batches."""
    async with AsyncExitStack() as stack:
        servers = []
        for _ in range(count):
            database = Database(world.dsn, hot_size=3, requests_size=2)
            await stack.enter_async_context(database)
            servers.append(server_of(world, rate, database=database, batch_max=7, runs_max=20))
        yield servers


async def released(world: World) -> list[tuple[float, datetime]]:
    """Seconds from now until each run that has a place may be claimed, and its fire, the
    soonest first."""
    rows = await world.query(
        "SELECT available_at, scheduled_at FROM fencepost.run_queue"
        " WHERE state = 'queued' AND NOT parked ORDER BY available_at, scheduled_at DESC"
    )
    now = to_datetime(world.now)
    return [((row["available_at"] - now).total_seconds(), row["scheduled_at"]) for row in rows]


async def parked(world: World) -> int:
    return int(await world.value("SELECT count(*) FROM fencepost.run_queue WHERE parked"))


async def release_all(world: World, *governors: Governor, step: Duration = AHEAD) -> None:
    """Time passes until nothing is parked."""
    for _ in range(10_000):
        await asyncio.gather(*(governor.release() for governor in governors))
        if not await parked(world):
            return
        await world.move(step)
    raise AssertionError(f"{await parked(world)} runs are never released")


def assert_newest_first(places: Sequence[tuple[float, datetime]]) -> None:
    """No older fire has an earlier place than a newer one."""
    assert [at for _, at in places] == sorted((at for _, at in places), reverse=True)


async def late_jobs(
    world: World, count: int, *, late: Duration, step: Duration = 0, **rule: object
) -> None:
    """Daily jobs whose fires are due one `step` after the other, the first `late` ago; their
    names, and so their partitions, have nothing to do with their age."""
    for number in range(count):
        await world.add_job(
            f"job-{late}-{number * 7919 % 10_007}",
            job_spec(every(DAY, **rule)),
            next_run_at=world.now - late + number * step,
        )
