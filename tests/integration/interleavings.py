"""Runs actors through every order of their statements on real Postgres sessions.

An actor is a coroutine over the engine whose connections wait for a turn before each
statement and each COMMIT. One order after another is carried out, depth first, until none
is left; a failing one is printed as a list that `only` takes.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from fencepost_server.store.database import Connection, Pool, Row
from fencepost_server.store.statements import Statement

# Reads of what no actor changes. They happen in the turn before: turns of their own would
# only multiply orders that mean the same. So do settings, and what the reaper finds but judges
# again when it has locked it: of that the look over all open attempts takes turns.
_CONSTANT = frozenset(
    {
        "find_attempts_out_of_time",
        "find_kinds",
        "find_named_queues",
        "find_queues",
        "find_tenant",
        "intern_kinds",
        "intern_schedules",
        "read_by_pages",
        "schedule_rules",
        "tenant_defaults",
        "versions_of_runs",
    }
)
# Inside a transaction these touch only rows that it has locked already, so nobody can tell
# when before the COMMIT they happened. One that waits for a lock fails its order.
_UNDER_LOCK = frozenset(
    {
        "advance_schedules",
        "bury_job",
        "end_runs",
        "extend_skips",
        "insert_fires",
        "insert_skips",
        "insert_version",
        "put_back_runs",
        "read_jobs",
        "record_attempts",
        "redefine_schedule",
        "request_cancel",
        "set_paused",
        "touch_job",
    }
)
# For a thorough run by hand: these take turns, too.
_EVERY_STATEMENT = bool(os.environ.get("FENCEPOST_EVERY_STATEMENT"))
# Likewise: orders that are only sampled otherwise are carried out one and all.
_ALL_ORDERS = bool(os.environ.get("FENCEPOST_ALL_ORDERS"))
_ORDERS_MAX = 50_000 if _EVERY_STATEMENT or _ALL_ORDERS else 1000
# How long a statement may be quiet before Postgres is asked whether it waits for a lock.
_QUIET_S = 0.004
_STATEMENT_TIMEOUT_US = 15_000_000
_SEED = 20261201

Body = Callable[[], Awaitable[object]]


class Gate:
    """Where an actor waits for its turns; `at` is the statement it wants to run next.

    `commits`: what it does can be seen by others as soon as its turn is over.
    """

    def __init__(self) -> None:
        self.at: str | None = None
        self.pid = 0
        self.commits = False
        self.moved = asyncio.Event()
        self.under_lock: str | None = None
        self._granted = asyncio.Event()

    async def turn(self, statement: str, pid: int, *, commits: bool) -> None:
        """Returns when the statement may run on the connection with that backend."""
        if statement in _CONSTANT:
            return
        self.under_lock = None
        if statement in _UNDER_LOCK and not commits and not _EVERY_STATEMENT:
            self.under_lock = statement
            return
        self.at, self.pid, self.commits = statement, pid, commits
        self.moved.set()
        await self._granted.wait()
        self._granted.clear()

    def grant(self) -> None:
        """Lets the waiting statement run."""
        self.at = None
        self._granted.set()


class _GatedConnection(Connection):
    def __init__(
        self,
        raw: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]",
        gate: Gate,
        *,
        in_transaction: bool,
    ) -> None:
        super().__init__(raw)
        self._gate = gate
        self._commits = not in_transaction
        self.pid: int = raw.get_server_pid()

    async def fetch(self, statement: Statement, **values: Any) -> Sequence[Row]:
        await self._gate.turn(statement.name, self.pid, commits=self._commits)
        return await super().fetch(statement, **values)

    async def fetch_one(self, statement: Statement, **values: Any) -> Row | None:
        await self._gate.turn(statement.name, self.pid, commits=self._commits)
        return await super().fetch_one(statement, **values)

    async def execute(self, statement: Statement, **values: Any) -> int:
        await self._gate.turn(statement.name, self.pid, commits=self._commits)
        return await super().execute(statement, **values)


class GatedPool(Pool):
    """A pool of the server whose statements wait at a gate.

    BEGIN goes with the first statement of its transaction: under READ COMMITTED it takes
    neither a lock nor a snapshot.
    """

    def __init__(self, dsn: str, *, hot: bool, gate: Gate) -> None:
        super().__init__(dsn, size=2, hot=hot, statement_timeout=_STATEMENT_TIMEOUT_US)
        self._gate = gate

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """See `Pool.connection`."""
        async with super().connection() as connection:
            yield _GatedConnection(connection._raw, self._gate, in_transaction=False)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """See `Pool.transaction`."""
        async with super().transaction() as connection:
            gated = _GatedConnection(connection._raw, self._gate, in_transaction=True)
            yield gated
            await self._gate.turn("COMMIT", gated.pid, commits=True)


@dataclass(slots=True, kw_only=True)
class Actor:
    """Who takes part: `body` runs on the engine behind `gate`, once per order."""

    name: str
    gate: Gate
    body: Body
    running: "asyncio.Task[object] | None" = None

    @property
    def is_done(self) -> bool:
        return self.running is not None and self.running.done()

    @property
    def is_ready(self) -> bool:
        return not self.is_done and self.gate.at is not None

    @property
    def is_moving(self) -> bool:
        return not self.is_done and self.gate.at is None


@dataclass(slots=True, kw_only=True)
class _Choice:
    """Whose turn it was, and who else could have had it and has not been tried."""

    name: str
    untried: list[str]


@dataclass(slots=True, kw_only=True)
class Stage:
    """What surrounds each order; `answers` are what the actors' bodies returned."""

    prepare: Callable[[], Awaitable[None]]
    observe: Callable[[], Awaitable[None]]
    finish: Callable[[Mapping[str, object]], Awaitable[None]]


@dataclass(kw_only=True)
class Interleavings:
    """`monitor` is a connection of its own, which asks who waits for whom."""

    monitor: "asyncpg.Connection[asyncpg.Record]"
    _actors: Sequence[Actor] = ()
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    _steps: list[str] = field(default_factory=list)

    async def explore(
        self,
        actors: Sequence[Actor],
        stage: Stage,
        *,
        orders_max: int = _ORDERS_MAX,
        only: Sequence[str] | None = None,
        sample: int | None = None,
    ) -> int:
        """Carries out every order of the actors' statements; how many there were.

        Raises AssertionError with the order when one fails, deadlocks, or when there are
        more than `orders_max`. `only` carries out a single one, as a failure has printed it.
        With `sample` that many orders are drawn instead, the same ones each time, and counted
        once each.
        """
        for actor in actors:
            actor.gate.moved = self._moved
        self._actors = actors
        if sample is not None and only is None and not _ALL_ORDERS:
            return await self._sample(stage, sample)
        choices: list[_Choice] = []
        orders = 0
        while True:
            wanted = [choice.name for choice in choices] if only is None else only
            await self._carry_out(choices, wanted, stage)
            orders += 1
            while choices and not choices[-1].untried:
                choices.pop()
            if not choices or only is not None:
                return orders
            assert orders < orders_max, f"more than {orders_max} orders"
            choices[-1].name = choices[-1].untried.pop()

    async def _sample(self, stage: Stage, count: int) -> int:
        """Orders in which everybody who can go on is as likely to; how many were different."""
        drawn = random.Random(_SEED)
        seen: set[tuple[str, ...]] = set()
        for _ in range(count):
            choices: list[_Choice] = []
            await self._carry_out(choices, (), stage, drawn)
            seen.add(tuple(choice.name for choice in choices))
        return len(seen)

    async def _carry_out(
        self,
        choices: list[_Choice],
        wanted: Sequence[str],
        stage: Stage,
        drawn: random.Random | None = None,
    ) -> None:
        """One order: the `wanted` turns, then always the first who can, or one who is `drawn`;
        extends `choices`."""
        await stage.prepare()
        self._steps = []
        for actor in self._actors:
            actor.running = asyncio.create_task(_finished(actor))
        names: list[str] = []
        try:
            await self._rest()
            while ready := [actor for actor in self._actors if actor.is_ready]:
                place = len(names)
                actor = _pick(ready, wanted[place] if place < len(wanted) else None, drawn)
                if place >= len(choices):
                    others = [other.name for other in ready if other is not actor]
                    choices.append(_Choice(name=actor.name, untried=others))
                names.append(actor.name)
                self._steps.append(f"{actor.name}: {actor.gate.at}")
                commits = actor.gate.commits
                actor.gate.grant()
                await self._rest()
                if commits:
                    await stage.observe()
            waiting = [actor.name for actor in self._actors if not actor.is_done]
            assert not waiting, f"deadlock of {waiting}"
            await stage.finish({actor.name: _answer(actor) for actor in self._actors})
        except Exception as error:
            raise AssertionError(self._told(names, error)) from error
        finally:
            tasks = [actor.running for actor in self._actors if actor.running is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _rest(self) -> None:
        """Returns when nobody moves: each waits for a turn, for a lock, or is done."""
        known_blocked: set[str] = set()
        while moving := [actor for actor in self._actors if actor.is_moving]:
            self._moved.clear()
            quiet = 0.0 if {actor.name for actor in moving} <= known_blocked else _QUIET_S
            try:
                async with asyncio.timeout(quiet):
                    await self._moved.wait()
            except TimeoutError:
                blocked = await self._blocked(moving)
                if all(actor.is_moving and actor.name in blocked for actor in moving):
                    return
                known_blocked = blocked

    async def _blocked(self, moving: Sequence[Actor]) -> set[str]:
        """Those whose statements wait for a lock that another actor holds."""
        rows = await self.monitor.fetch(
            "SELECT pid FROM unnest($1::int[]) AS p (pid) WHERE pg_blocking_pids(pid) && $2",
            [actor.gate.pid for actor in moving],
            [actor.gate.pid for actor in self._actors],
        )
        pids = {row["pid"] for row in rows}
        blocked = [actor for actor in moving if actor.gate.pid in pids]
        for actor in blocked:
            assert actor.gate.under_lock is None, f"{actor.gate.under_lock} waits for a lock"
        return {actor.name for actor in blocked}

    def _told(self, names: Sequence[str], error: Exception) -> str:
        lines = [f"{type(error).__name__}: {error}", "in this order:"]
        lines += [f"  {step}" for step in self._steps]
        return "\n".join([*lines, f"again: only={list(names)}"])


async def _finished(actor: Actor) -> object:
    try:
        return await actor.body()
    finally:
        actor.gate.at = None
        # The task itself is done a moment after its last line.
        asyncio.get_running_loop().call_soon(actor.gate.moved.set)


def _pick(ready: Sequence[Actor], name: str | None, drawn: random.Random | None) -> Actor:
    if name is None:
        return ready[0] if drawn is None else drawn.choice(ready)
    for actor in ready:
        if actor.name == name:
            return actor
    names = [actor.name for actor in ready]
    raise AssertionError(f"{name} cannot go on here as it could before, only {names}")


def _answer(actor: Actor) -> object:
    assert actor.running is not None
    return actor.running.result()
