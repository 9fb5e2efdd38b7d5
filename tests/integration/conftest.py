"""Fixtures of the tests that need a database."""

from collections.abc import AsyncIterator

import pytest

from tests.integration.world import World, build


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    """The engine's parts on a fresh database, at noon until the test moves the clock."""
    async with build(database_url) as world:
        yield world
