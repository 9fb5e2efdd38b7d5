"""Fixtures of the tests that need a database."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.held_database import own_database, reset
from tests.integration.world import World, build


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

    async def prepare(dsn: str) -> None:
        async with build(dsn):
            pass

    name = f"fencepost_world_{os.getpid()}"
    with own_database(postgres_dsn, template_database, name) as dsn:
        asyncio.run(prepare(dsn))
        yield dsn
