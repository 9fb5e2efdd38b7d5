"""Brings a database to the newest schema: numbered SQL files, applied once, in order.

Every server may call it at the same time: an advisory lock lets one work and the others
find it done. A file that has changed since it was applied, or a database that is newer
than this version knows, stops it.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from fencepost_server.store.database import translated

_LOCK = 0x66656E6365
_FILE = re.compile(r"^(\d{4})_[a-z0-9_]+\.sql$")
_LEDGER = """
CREATE SCHEMA IF NOT EXISTS fencepost;
CREATE TABLE IF NOT EXISTS fencepost.schema_migrations (
    number     int PRIMARY KEY,
    name       text NOT NULL,
    checksum   text NOT NULL,
    applied_at timestamptz NOT NULL
);
"""


_APPLIED = "SELECT number, name, checksum FROM fencepost.schema_migrations ORDER BY number"


class MigrationError(Exception):
    """The database and the migration files do not fit together, or it lets nobody in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One file: its number, name, text and SHA-256."""

    number: int
    name: str
    text: str
    checksum: str


def migrations_dir() -> Path:
    """Where the files are: inside an installed wheel, else at the top of the repository."""
    packaged = Path(__file__).parents[1] / "migrations"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "migrations"


def load_migrations(folder: Path) -> list[Migration]:
    """The files of `folder` in order. Raises MigrationError on a gap or a stray file."""
    found: list[Migration] = []
    for path in sorted(folder.glob("*.sql")):
        match = _FILE.match(path.name)
        if match is None or int(match[1]) != len(found) + 1:
            raise MigrationError(f"{path.name}: expected {len(found) + 1:04d}_name.sql next")
        text = path.read_text()
        checksum = hashlib.sha256(text.encode()).hexdigest()
        found.append(Migration(number=int(match[1]), name=path.stem, text=text, checksum=checksum))
    if not found:
        raise MigrationError(f"no migrations in {folder}")
    return found


async def migrate(dsn: str) -> list[str]:
    """Apply what is missing; returns the names applied. Safe to call twice, and at once."""
    known = load_migrations(migrations_dir())
    async with translated():
        connection = await asyncpg.connect(dsn, timeout=10)
    try:
        async with translated():
            await connection.execute("SELECT pg_advisory_lock($1)", _LOCK)
            await connection.execute(_LEDGER)
            return await _apply(connection, known)
    finally:
        await connection.close()


async def check_schema(dsn: str) -> None:
    """Raises MigrationError unless the database has the schema that this version was made for."""
    known = load_migrations(migrations_dir())
    try:
        async with translated():
            connection = await asyncpg.connect(dsn, timeout=10)
    except (
        asyncpg.InvalidAuthorizationSpecificationError,
        asyncpg.InvalidCatalogNameError,
    ) as error:
        raise MigrationError(f"Postgres refuses the connection: {error}") from error
    try:
        async with translated():
            rows = await connection.fetch(_APPLIED)
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        rows = []
    finally:
        await connection.close()
    missing = _missing(rows, known)
    if missing:
        raise MigrationError(
            f"the database lacks migration {missing[0].name}: run `fencepost migrate` first"
        )


def _missing(rows: Sequence[asyncpg.Record], known: Sequence[Migration]) -> Sequence[Migration]:
    """What is still to be applied. Raises MigrationError if it is not ours to apply."""
    if len(rows) > len(known):
        raise MigrationError(
            f"the database has migration {rows[-1]['name']}, newer than this version knows "
            f"({known[-1].name}): use a newer server"
        )
    for row, migration in zip(rows, known, strict=False):
        if row["checksum"] != migration.checksum:
            raise MigrationError(f"{migration.name} was changed after it had been applied")
    return known[len(rows) :]


async def _apply(
    connection: "asyncpg.Connection[asyncpg.Record]", known: list[Migration]
) -> list[str]:
    rows = await connection.fetch(_APPLIED)
    applied: list[str] = []
    for migration in _missing(rows, known):
        async with connection.transaction():
            await connection.execute(migration.text)
            await connection.execute(
                "INSERT INTO fencepost.schema_migrations VALUES ($1, $2, $3, clock_timestamp())",
                migration.number,
                migration.name,
                migration.checksum,
            )
        applied.append(migration.name)
    return applied
