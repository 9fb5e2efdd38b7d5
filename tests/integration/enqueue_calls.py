"""Enqueue calls as tests make them: through the engine, and from an application's connection."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from fencepost_server.clock import Duration, Instant, from_datetime, to_datetime
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.enqueue import (
    KEEP_FOR_DEFAULT,
    Enqueued,
    EnqueueEntry,
    Enqueues,
    UniqueConflict,
    UniqueKey,
)
from fencepost_server.engine.job_creation import Origin
from fencepost_server.errors import FencepostError

from tests.integration.world import World

RETURN, REJECT, REPLACE = UniqueConflict


def entry(
    job: str = "report",
    key: str | None = None,
    conflict: UniqueConflict = RETURN,
    *,
    keep_for: Duration = KEEP_FOR_DEFAULT,
    at: Instant | None = None,
    **values: Any,
) -> EnqueueEntry:
    unique = None if key is None else UniqueKey(key=key, conflict=conflict, keep_for=keep_for)
    return EnqueueEntry(job=JobName(tenant="default", job=job), due_at=at, unique=unique, **values)


@dataclass(kw_only=True)
class Producer:
    """Enqueues through the engine of a world; answers as values."""

    world: World
    enqueues: Enqueues = field(init=False)

    def __post_init__(self) -> None:
        world = self.world
        self.enqueues = Enqueues(
            database=world.database, catalogue=world.catalogue, specs=world.specs, wake=world.woken
        )

    async def batch(self, entries: Sequence[EnqueueEntry]) -> list[Enqueued | FencepostError]:
        """One call; what became of each entry."""
        answers: dict[bytes, Enqueued] = {}

        def encode(made: Enqueued) -> bytes:
            token = str(len(answers)).encode()
            answers[token] = made
            return token

        outcomes = await self.enqueues.enqueue(
            Origin(tenant="default", now=self.world.now), entries, encode=encode
        )
        return [answers[each] if isinstance(each, bytes) else each for each in outcomes]

    async def one(self, *arguments: Any, **values: Any) -> Enqueued:
        """A single call, which is answered with a run."""
        (answer,) = await self.batch([entry(*arguments, **values)])
        assert isinstance(answer, Enqueued), answer
        return answer

    async def refused(self, *arguments: Any, **values: Any) -> FencepostError:
        """A single call, which is refused."""
        (answer,) = await self.batch([entry(*arguments, **values)])
        assert isinstance(answer, FencepostError), answer
        return answer


@asynccontextmanager
async def application(dsn: str, **settings: str) -> AsyncIterator["asyncpg.Connection[Any]"]:
    """A connection of somebody who is not the server."""
    connection = await asyncpg.connect(dsn, server_settings=settings)
    try:
        yield connection
    finally:
        await connection.close()


async def enqueue_in(
    connection: Any, job: str = "report", **parameters: Any
) -> tuple[RunKey, bool]:
    """`fencepost.enqueue` with named parameters: the run, and whether it was there before."""
    names = "".join(f", {name} => ${i}" for i, name in enumerate(parameters, start=2))
    row = await connection.fetchrow(
        f"SELECT * FROM fencepost.enqueue($1{names})",  # noqa: S608 - names that the test wrote
        job,
        *parameters.values(),
    )
    return RunKey(str(row["job_id"]), from_datetime(row["scheduled_at"])), row["existing"]


async def until_blocked(monitor: Any, by: Any, task: "asyncio.Task[Any] | None" = None) -> None:
    """Returns when a backend waits for a lock that the connection `by` holds."""
    while not await monitor.fetchval(
        "SELECT EXISTS (SELECT FROM pg_stat_activity a WHERE $1 = ANY (pg_blocking_pids(a.pid)))",
        by.get_server_pid(),
    ):
        assert task is None or not task.done(), "it did not wait"
        await asyncio.sleep(0.002)


async def end_as_dead(world: World, key: RunKey, place: str, *, ended_at: Instant) -> None:
    """The run is dead, in that place."""
    await world.query(
        f"""
        WITH gone AS (
            DELETE FROM fencepost.run_queue WHERE job_id = $1::uuid AND scheduled_at = $2
            RETURNING *
        )
        INSERT INTO fencepost.{place}
            (job_id, scheduled_at, available_at, created_at, ended_at, tenant_id, queue_id,
             kind_id, version, attempt, failure_count, lost_lease_count, snooze_count,
             replay_count, state, origin, priority, dead_reason, unique_key)
        SELECT job_id, scheduled_at, available_at, created_at, $3, tenant_id, queue_id, kind_id,
               version, 1, 1, 0, 0, 0, 'dead', origin, priority, 'max_failures', unique_key
        FROM gone
        """,  # noqa: S608 - a table that the test names
        key.job_id,
        to_datetime(key.scheduled_at),
        to_datetime(ended_at),
    )
