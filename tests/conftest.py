"""A real Postgres per test session, a migrated template in it, and a fresh copy of it per test."""

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from fencepost_server.dev.postgres import EmbeddedPostgres

_numbers = itertools.count(1)


@pytest.fixture
def postgres_dir() -> Iterator[Path]:
    """An empty directory for Postgres data that the user Postgres runs as can enter.

    pytest's own tmp_path is closed to other users, and Postgres refuses to run as root.
    """
    with _open_dir() as path:
        yield path


@pytest.fixture(scope="session")
def postgres_dsn() -> Iterator[str]:
    """Superuser connection string of the session's Postgres.

    FENCEPOST_TEST_DATABASE_URL names a running one to use instead of starting one; its user must
    be allowed to create databases.
    """
    given = os.environ.get("FENCEPOST_TEST_DATABASE_URL")
    if given:
        yield given
        return
    with _open_dir() as path, EmbeddedPostgres(path, durable=False) as postgres:
        yield postgres.dsn


@pytest.fixture(scope="session")
def template_database(postgres_dsn: str) -> Iterator[str]:
    """Name of a migrated database that nobody connects to."""
    from fencepost_server.store.migrate import migrate

    name = f"fencepost_template_{os.getpid()}"
    _administer(postgres_dsn, f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
    try:
        asyncio.run(migrate(_dsn_of(postgres_dsn, name)))
        yield name
    finally:
        _administer(postgres_dsn, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database_url(postgres_dsn: str, template_database: str) -> Iterator[str]:
    """Connection string of a fresh, migrated database that is dropped after the test."""
    name = f"fencepost_test_{os.getpid()}_{next(_numbers)}"
    _administer(postgres_dsn, f"CREATE DATABASE {name} TEMPLATE {template_database}")
    try:
        yield _dsn_of(postgres_dsn, name)
    finally:
        _administer(postgres_dsn, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def empty_database_url(postgres_dsn: str) -> Iterator[str]:
    """Connection string of a database without any tables that is dropped after the test."""
    name = f"fencepost_empty_{os.getpid()}_{next(_numbers)}"
    _administer(postgres_dsn, f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'")
    try:
        yield _dsn_of(postgres_dsn, name)
    finally:
        _administer(postgres_dsn, f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def _open_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="fencepost-test-"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _dsn_of(dsn: str, database: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{database}"))


def _administer(dsn: str, statement: str) -> None:
    async def execute() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(execute())
