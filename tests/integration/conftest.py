"""Fixtures of the tests that need a database."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from tests.integration.world import World, build, reset


@pytest.fixture
async def world(_world_database: str) -> AsyncIterator[World]:
    """The engine's parts on an emptied database, at noon until the test moves the clock.

    A test that changes the schema builds its own on `database_url`.
    """
    await reset(_world_database)
    async with build(_world_database, day_tables=False) as world:
        yield world


@pytest.fixture(scope="session")
def _world_database(postgres_dsn: str, template_database: str) -> Iterator[str]:
    """One database for all worlds, because making one takes longer than most tests."""
    name = f"fencepost_world_{os.getpid()}"
    dsn = urlunsplit(urlsplit(postgres_dsn)._replace(path=f"/{name}"))

    async def prepare() -> None:
        async with build(dsn):
            pass

    asyncio.run(_administer(postgres_dsn, f"CREATE DATABASE {name} TEMPLATE {template_database}"))
    try:
        asyncio.run(prepare())
        yield dsn
    finally:
        asyncio.run(_administer(postgres_dsn, f"DROP DATABASE {name} WITH (FORCE)"))


async def _administer(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
