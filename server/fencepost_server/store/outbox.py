"""The outbox of an application, in a database of its own: rows are taken under a lock, and deleted,
put off or failed in the same transaction."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from types import TracebackType
from typing import Any, Self

import asyncpg

from fencepost_server.clock import Duration, Instant
from fencepost_server.store.database import ConflictError, Connection, Row, translated
from fencepost_server.store.statements import load

_SQL = load("outbox")
_CONNECT_S = 10
# Past the timeouts of the server nothing comes any more.
_COMMAND_S = 35


class OutboxUnusable(Exception):
    """The application's database is there and refuses; trying again would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    """A run that the application wants; None where the row says nothing."""

    id: str
    job: str
    tenant: str | None = None
    payload: str | None = None
    # JSON text of an object.
    labels: str | None = None
    run_at: Instant | None = None
    priority: int | None = None
    concurrency_key: str | None = None
    unique_key: str | None = None
    unique_keep_for: Duration | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxBatch:
    """Rows that nobody else has while the transaction lasts."""

    rows: Sequence[OutboxRow]
    connection: Connection

    async def settle(
        self,
        *,
        sent: Sequence[str],
        failed: Mapping[str, str],
        put_off: Mapping[str, str],
    ) -> None:
        """Delete what was sent, by id; keep the others with the text of why."""
        if sent:
            await self.connection.execute(_SQL["delete_outbox"], ids=list(sent))
        if failed:
            ids, failures = list(failed), list(failed.values())
            await self.connection.execute(_SQL["fail_outbox"], ids=ids, failures=failures)
        if put_off:
            ids, failures = list(put_off), list(put_off.values())
            await self.connection.execute(_SQL["put_off_outbox"], ids=ids, failures=failures)


class Outbox:
    """One connection to the application's database, opened when needed and again when lost.

    Everything raises StorageUnavailable while that database is away, and OutboxUnusable when it
    refuses: no such table, no permission, wrong password.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def __aenter__(self) -> Self:
        async with _explained():
            self._pool = await asyncpg.create_pool(
                self._dsn,
                min_size=0,
                max_size=1,
                timeout=_CONNECT_S,
                command_timeout=_COMMAND_S,
                # Behind a pooler in transaction mode there are no prepared statements.
                statement_cache_size=0,
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
            self._pool.terminate()

    @asynccontextmanager
    async def take(self, *, rows_max: int, bytes_max: int) -> AsyncIterator[OutboxBatch]:
        """The oldest rows that are due; they are free again, unchanged, when the block raises."""
        async with self._transaction() as connection:
            found = await connection.fetch(
                _SQL["take_outbox"], rows_max=rows_max, bytes_max=bytes_max
            )
            yield OutboxBatch(rows=[_row(each) for each in found], connection=connection)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        assert self._pool is not None, "the outbox is not open"
        async with (
            _explained(),
            self._pool.acquire(timeout=_CONNECT_S) as raw,
            raw.transaction(),
        ):
            connection = Connection(raw)
            await connection.fetch(_SQL["bound_outbox_transaction"])
            yield connection


def outbox_table() -> str:
    """The SQL that makes the table."""
    return resources.files(__package__).joinpath("outbox_table.sql").read_text()


@asynccontextmanager
async def _explained() -> AsyncIterator[None]:
    try:
        async with translated():
            yield
    except (asyncpg.PostgresError, ConflictError) as error:
        raise OutboxUnusable(str(error)) from error


def _row(row: Row) -> OutboxRow:
    values: dict[str, Any] = {name: row[name] for name in OutboxRow.__slots__}
    return OutboxRow(**values)
