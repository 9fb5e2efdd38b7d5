"""Day tables of history: made ahead, indexed when their day is over, detached and dropped,
all without holding up writers.

Their statements are DDL, which takes no parameters: names and bounds are built here from
dates alone, and nowhere else.
"""

import re
from datetime import date, timedelta

import asyncpg
import structlog

from fencepost_server.clock import DAY, Instant, to_datetime
from fencepost_server.store.database import translated
from fencepost_server.store.statements import load

_SQL = load("upkeep")
_log = structlog.get_logger("retention")

PARENTS = ("job_runs", "run_attempts")
_DAY = re.compile(r"^(job_runs|run_attempts)_(\d{8})$")
_LOCK_TIMEOUT = "200ms"
_DROP_LOCK = 0x64617973
_INDEX_LOCK = 0x64617969
# What lists of runs filter by and every row has: on the table of the day that is being written
# each would cost every end something, on a day that is over they are cheap and small.
DAY_INDEXES = {
    "kind": "(kind_id)",
    "queue": "(queue_id)",
    "worker": "(worker_id)",
    "origin": "(origin)",
    "labels": "USING gin (labels) WHERE labels IS NOT NULL",
    "times": "USING brin (created_at, ended_at) WITH (pages_per_range = 32)",
}
# An index is built in the background, so it may wait for others for longer, and takes its time.
_BUILD_LOCK_TIMEOUT = "5s"
_BUILD_TIMEOUT_S = 3600


def day_of(at: Instant) -> date:
    """The UTC day of an instant."""
    return to_datetime(at).date()


def start_of(day: date) -> Instant:
    """The first instant of a UTC day."""
    return (day - date(1970, 1, 1)).days * DAY


class DayTables:
    """One connection for DDL, opened for each use. Several servers may do this at once."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    async def ensure(self, first: date, last: date) -> list[str]:
        """Make the missing day tables of [first, last]; returns their names.

        A table is filled in empty and attached with a matching CHECK, so that writers of
        other days wait for nothing but the catalogue entry.
        """
        made: list[str] = []
        async with translated():
            connection = await self._connect()
            try:
                for parent in PARENTS:
                    known = set(await self._attached(connection, parent))
                    day = first
                    while day <= last:
                        name = _name(parent, day)
                        if name not in known:
                            await self._make(connection, parent, day)
                            made.append(name)
                        day += timedelta(days=1)
            finally:
                await connection.close()
        return made

    async def attached_days(self) -> list[date]:
        """The days that have a history table now."""
        async with translated():
            connection = await self._connect()
            try:
                names = await self._attached(connection, "job_runs")
            finally:
                await connection.close()
        return sorted(_day(name) for name in names)

    async def drop_before(self, floor: date, *, tables_max: int) -> list[str]:
        """Drop at most `tables_max` day tables of days before `floor`, oldest first.

        Gives up on a table whose lock does not come at once; the next pass tries again.
        """
        dropped: list[str] = []
        async with translated():
            connection = await self._connect()
            try:
                # One server at a time: two that drop the same table trip over each other.
                if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _DROP_LOCK):
                    return []
                for parent in PARENTS:
                    await self._drop_detached(connection, parent)
                    names = await self._attached(connection, parent)
                    old = [name for name in names if _day(name) < floor]
                    dropped += [
                        name
                        for name in old[:tables_max]
                        if await self._drop(connection, parent, name)
                    ]
            finally:
                await connection.close()
        return dropped

    async def index_before(self, today: date, *, tables_max: int) -> list[str]:
        """Build what is missing of DAY_INDEXES on tables of days before `today`, the newest
        first, on at most `tables_max` of them; returns the names of the tables.

        An index that could not be finished is built again by a later call.
        """
        done: list[str] = []
        async with translated():
            connection = await self._connect(statement_timeout_s=_BUILD_TIMEOUT_S)
            try:
                if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _INDEX_LOCK):
                    return []
                await connection.execute(f"SET lock_timeout = '{_BUILD_LOCK_TIMEOUT}'")
                for name in reversed(await self._attached(connection, "job_runs")):
                    if len(done) == tables_max:
                        break
                    if _day(name) < today and await self._index(connection, name):
                        done.append(name)
            finally:
                await connection.close()
        return done

    async def vacuum_queue(self) -> None:
        """The queue turns over faster than the cluster's autovacuum looks at it."""
        async with translated():
            connection = await self._connect()
            try:
                await connection.execute("VACUUM (SKIP_LOCKED, TRUNCATE off) fencepost.run_queue")
            finally:
                await connection.close()

    async def _connect(
        self, *, statement_timeout_s: int = 60
    ) -> "asyncpg.Connection[asyncpg.Record]":
        return await asyncpg.connect(
            self._dsn,
            timeout=5,
            server_settings={
                "application_name": "fencepost-retention",
                "lock_timeout": _LOCK_TIMEOUT,
                "statement_timeout": f"{statement_timeout_s}s",
                "timezone": "UTC",
            },
        )

    async def _attached(
        self, connection: "asyncpg.Connection[asyncpg.Record]", parent: str
    ) -> list[str]:
        rows = await connection.fetch(_SQL["day_tables"].text, f"fencepost.{parent}")
        return [row["name"] for row in rows if not row["is_detaching"] and _DAY.match(row["name"])]

    async def _make(
        self, connection: "asyncpg.Connection[asyncpg.Record]", parent: str, day: date
    ) -> None:
        column = {"job_runs": "scheduled_at", "run_attempts": "ended_at"}[parent]
        name = _name(parent, day)
        low, high = f"{day} 00:00:00+00", f"{day + timedelta(days=1)} 00:00:00+00"
        try:
            async with connection.transaction():
                await connection.execute(
                    f"CREATE TABLE fencepost.{name} "
                    f"(LIKE fencepost.{parent} INCLUDING DEFAULTS INCLUDING CONSTRAINTS, "
                    f"CONSTRAINT day CHECK ({column} >= '{low}' AND {column} < '{high}'))"
                )
                await connection.execute(
                    f"ALTER TABLE fencepost.{parent} ATTACH PARTITION fencepost.{name} "
                    f"FOR VALUES FROM ('{low}') TO ('{high}')"
                )
                await connection.execute(f"ALTER TABLE fencepost.{name} DROP CONSTRAINT day")
        except (
            asyncpg.DuplicateTableError,
            asyncpg.DuplicateObjectError,
            asyncpg.UniqueViolationError,
        ):
            pass  # Another server made it between the look and the CREATE.

    async def _index(self, connection: "asyncpg.Connection[asyncpg.Record]", table: str) -> bool:
        """Whether something was missing and now is there."""
        rows = await connection.fetch(_SQL["day_indexes"].text, f"fencepost.{table}")
        valid = {row["name"]: row["is_valid"] for row in rows}
        made = False
        try:
            for suffix, what in DAY_INDEXES.items():
                name = f"{table}_{suffix}"
                if valid.get(name) is False:
                    await connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS fencepost.{name}")
                if not valid.get(name):
                    await connection.execute(
                        f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} "
                        f"ON fencepost.{table} {what}"
                    )
                    made = True
            if made:
                await connection.execute(f"ANALYZE fencepost.{table}")
        except (asyncpg.LockNotAvailableError, asyncpg.UndefinedTableError) as error:
            # Others hold an old snapshot, or retention was faster: later, or never mind.
            _log.info("day_index_put_off", name=table, error=str(error))
            return False
        return made

    async def _drop(
        self, connection: "asyncpg.Connection[asyncpg.Record]", parent: str, name: str
    ) -> bool:
        try:
            if parent == "run_attempts":
                await self._keep_attempts(connection, _day(name))
            await connection.execute(
                f"ALTER TABLE fencepost.{parent} DETACH PARTITION fencepost.{name} CONCURRENTLY"
            )
            await connection.execute(f"DROP TABLE IF EXISTS fencepost.{name}")
        except (asyncpg.LockNotAvailableError, asyncpg.ObjectNotInPrerequisiteStateError) as error:
            _log.info("day_table_kept", name=name, error=str(error))
            return False
        except asyncpg.UndefinedTableError:
            return False  # Another server was faster.
        return True

    async def _keep_attempts(
        self, connection: "asyncpg.Connection[asyncpg.Record]", day: date
    ) -> None:
        """Copies what runs that are not over still need out of a day of attempts.

        A run that leaves the dead letters meanwhile is live then, and was copied; nothing is
        written into so old a day any more.
        """
        first = to_datetime(start_of(day))
        await connection.execute(_SQL["keep_attempts"].text, first, first + timedelta(days=1))

    async def _drop_detached(
        self, connection: "asyncpg.Connection[asyncpg.Record]", parent: str
    ) -> None:
        """What an earlier pass detached, or began to, and could not drop."""
        rows = await connection.fetch(_SQL["day_tables"].text, f"fencepost.{parent}")
        for row in rows:
            if row["is_detaching"]:
                try:
                    await connection.execute(
                        f"ALTER TABLE fencepost.{parent} "
                        f"DETACH PARTITION fencepost.{row['name']} FINALIZE"
                    )
                except asyncpg.LockNotAvailableError as error:
                    _log.info("day_table_kept", name=row["name"], error=str(error))
        pattern = f"^{parent}_[0-9]{{8}}$"
        for row in await connection.fetch(_SQL["detached_day_tables"].text, pattern):
            try:
                await connection.execute(f"DROP TABLE IF EXISTS fencepost.{row['name']}")
            except asyncpg.LockNotAvailableError as error:
                _log.info("day_table_kept", name=row["name"], error=str(error))


def _name(parent: str, day: date) -> str:
    return f"{parent}_{day:%Y%m%d}"


def _day(name: str) -> date:
    match = _DAY.match(name)
    assert match is not None, f"{name} is not a day table"
    return date(int(match[2][:4]), int(match[2][4:6]), int(match[2][6:]))
