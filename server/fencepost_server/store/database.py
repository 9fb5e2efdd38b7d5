"""The pools, and the one place where errors of Postgres become ours.

Two pools per process: `hot` for firing, claims, heartbeats and completions (bounded, so
that they are never starved by reads), `requests` for everything the API asks.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import asyncpg

from fencepost_server.clock import SECOND, DatabaseClock, Duration, Instant, monotonic
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.statements import Statement


class ConflictError(Exception):
    """A constraint refused the rows of a statement: a bug, or a race the caller handles."""


class Row(Protocol):
    """One row of an answer, read by column name."""

    def __getitem__(self, column: str, /) -> Any: ...


_POSTGRES_EPOCH: Instant = 946_684_800_000_000
# Postgres is there but cannot serve (starting, stopping, read-only standby, too many
# connections, cancelled by an operator): the same call may succeed a moment later.
_AWAY_CODES = ("08", "53", "57", "25006", "25P03", "40", "55P03", "58")
_AWAY_ERRORS = (
    ConnectionError,
    TimeoutError,
    OSError,
    asyncpg.InterfaceError,
    # What asyncpg makes of a connection that breaks at the wrong moment.
    asyncpg.InternalClientError,
)

# The planner's guesses about due and ready rows are wrong in the ways that hurt most, so
# these statements get the plan they were written for (docs/adr/0004).
_HOT_SETTINGS = {
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}


class _Session(asyncpg.Connection):
    """Our statements leave nothing behind in a session (locks end with transactions), so the
    round trip that would clean it up each time it goes back to the pool is left out."""

    def get_reset_query(self) -> str:
        """Nothing to reset."""
        return ""


class Connection:
    """One connection inside a transaction; only statements by name get through."""

    def __init__(self, raw: "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]") -> None:
        self._raw = raw

    async def fetch(self, statement: Statement, **values: Any) -> Sequence[Row]:
        """All rows."""
        rows: Sequence[Row] = await self._raw.fetch(statement.text, *statement.arguments(values))
        return rows

    async def fetch_one(self, statement: Statement, **values: Any) -> Row | None:
        """The first row, or None."""
        row: Row | None = await self._raw.fetchrow(statement.text, *statement.arguments(values))
        return row

    async def execute(self, statement: Statement, **values: Any) -> int:
        """The number of rows the statement touched."""
        tag: str = await self._raw.execute(statement.text, *statement.arguments(values))
        last = tag.rsplit(" ", 1)[-1]
        return int(last) if last.isdigit() else 0


class Pool:
    """A bounded set of connections with our codecs and settings."""

    def __init__(self, dsn: str, *, size: int, hot: bool, statement_timeout: Duration) -> None:
        self._dsn = dsn
        self._size = size
        # Past the server's own timeout nothing comes any more: the network swallows packets.
        self._command_timeout_s = statement_timeout / SECOND + 2
        self._settings = {
            "application_name": "fencepost-hot" if hot else "fencepost",
            "timezone": "UTC",
            "statement_timeout": str(statement_timeout // 1000),
            # A frozen process must not hold row locks for longer than this.
            "idle_in_transaction_session_timeout": "10000",
            **(_HOT_SETTINGS if hot else {"jit": "off"}),
        }
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def __aenter__(self) -> Self:
        async with translated():
            self._pool = await asyncpg.create_pool(
                self._dsn,
                min_size=0,
                max_size=self._size,
                init=_prepare,
                connection_class=_Session,
                server_settings=self._settings,
                timeout=5,
                command_timeout=self._command_timeout_s,
                max_inactive_connection_lifetime=0,
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            try:
                await asyncio.wait_for(self._pool.close(), timeout=5)
            except TimeoutError:
                self._pool.terminate()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection without a transaction: every statement commits by itself."""
        assert self._pool is not None, "the pool is not open"
        async with translated(), self._pool.acquire(timeout=self._wait_s()) as raw:
            yield Connection(raw)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """A READ COMMITTED transaction; rolled back when the block raises."""
        assert self._pool is not None, "the pool is not open"
        async with (
            translated(),
            self._pool.acquire(timeout=self._wait_s()) as raw,
            raw.transaction(),
        ):
            yield Connection(raw)

    def _wait_s(self) -> float | None:
        """How long to wait for a connection. A bound costs a task of its own, and where one is
        idle there is nothing to wait for."""
        assert self._pool is not None, "the pool is not open"
        return None if self._pool.get_idle_size() else 5

    async def fetch(self, statement: Statement, **values: Any) -> Sequence[Row]:
        """All rows of one statement that commits by itself."""
        async with self.connection() as connection:
            return await connection.fetch(statement, **values)

    async def fetch_one(self, statement: Statement, **values: Any) -> Row | None:
        """The first row of one statement that commits by itself."""
        async with self.connection() as connection:
            return await connection.fetch_one(statement, **values)

    async def execute(self, statement: Statement, **values: Any) -> int:
        """One statement that commits by itself; the number of rows it touched."""
        async with self.connection() as connection:
            return await connection.execute(statement, **values)


class Database:
    """Both pools, and the clock they agree on."""

    def __init__(self, dsn: str, *, hot_size: int, requests_size: int) -> None:
        self.dsn = dsn
        self.clock = DatabaseClock()
        self.hot = Pool(dsn, size=hot_size, hot=True, statement_timeout=15_000_000)
        self.requests = Pool(dsn, size=requests_size, hot=False, statement_timeout=20_000_000)

    async def __aenter__(self) -> Self:
        await self.hot.__aenter__()
        await self.requests.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.requests.__aexit__(kind, error, trace)
        await self.hot.__aexit__(kind, error, trace)

    async def sample_clock(self, statement: Statement) -> Duration | None:
        """Read the database clock once; returns the step it made, None if discarded."""
        async with self.requests.connection() as connection:
            asked_at = monotonic()
            row = await connection.fetch_one(statement)
            answered_at = monotonic()
        assert row is not None
        return self.clock.sample(
            asked_at=asked_at, answered_at=answered_at, database_at=row["clock"]
        )


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Turns "the database is away" into StorageUnavailable, and refusals by constraints into
    ConflictError; everything else passes."""
    try:
        yield
    except asyncpg.IntegrityConstraintViolationError as error:
        raise ConflictError(str(error)) from error
    except asyncpg.PostgresError as error:
        if (error.sqlstate or "").startswith(_AWAY_CODES):
            raise StorageUnavailable from error
        raise
    except _AWAY_ERRORS as error:
        raise StorageUnavailable from error


async def _prepare(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    await connection.set_type_codec(
        "timestamptz",
        schema="pg_catalog",
        format="tuple",
        encoder=lambda at: (at - _POSTGRES_EPOCH,),
        decoder=lambda value: value[0] + _POSTGRES_EPOCH,
    )
    await connection.set_type_codec(
        "jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads
    )
