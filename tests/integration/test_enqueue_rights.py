"""Who may call `fencepost.enqueue`: a role with two grants, which can do nothing else."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from fencepost.v1 import payload_pb2

from tests.integration.enqueue_calls import application, enqueue_in
from tests.integration.world import World

_PAGE = Path(__file__).parents[2] / "docs" / "enqueue.md"


@pytest.fixture(autouse=True)
async def job(world: World) -> str:
    """The job that callers may use."""
    return await world.add_job("report")


@asynccontextmanager
async def _role(world: World, *grants: str) -> AsyncIterator[Any]:
    """A connection of a fresh role that has these grants and nothing else."""
    name = "shop"
    await world.query(f"CREATE ROLE {name} LOGIN PASSWORD 'shop'")
    try:
        for grant in grants:
            await world.query(f"{grant} TO {name}")
        parts = urlsplit(world.dsn)
        host = parts.netloc.rpartition("@")[2]
        async with application(urlunsplit(parts._replace(netloc=f"{name}:shop@{host}"))) as shop:
            yield shop
    finally:
        await world.raw.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


_GRANTS = (
    "GRANT USAGE ON SCHEMA fencepost",
    "GRANT EXECUTE ON FUNCTION fencepost.enqueue",
)


async def test_a_role_needs_two_grants_and_can_do_nothing_else(world: World) -> None:
    async with _role(world, *_GRANTS) as shop:
        key, existing = await enqueue_in(shop, payload="1", unique_key="k", labels='{"a": "b"}')
        assert not existing
        assert await enqueue_in(shop, unique_key="k", on_conflict="replace_waiting") != (key, True)
        tables = await world.query("SELECT tablename FROM pg_tables WHERE schemaname = 'fencepost'")
        assert len(tables) > 20
        for table in tables:
            for statement in ("SELECT * FROM", "DELETE FROM"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await shop.execute(f"{statement} fencepost.{table['tablename']}")
        for call in (
            "fencepost.enqueue_runs(1, now(), false, '{a}', '{}', '{}', '{}', '{}', '{}', '{}', "
            "'{}', '{}', NULL, '{}', '{}', NULL)",
            "fencepost.enqueue_plain_runs(1, now(), '{a}', '{}', '{1}', '{}', '{}', NULL, '{}', "
            "'{}', '{}', NULL)",
            "fencepost.lock_out_enqueues(gen_random_uuid())",
            "fencepost.retake_keys('{}', '{}', now())",
            "fencepost.replace_waiting('{}', '{}', now())",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await shop.execute(f"SELECT * FROM {call}")  # noqa: S608 - the calls above


async def test_the_example_of_the_manual_runs_as_printed(world: World) -> None:
    grants, example = re.findall(r"```sql\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    await world.add_job("invoice")
    await world.query("CREATE TABLE public.orders (id int PRIMARY KEY, customer text, amount int)")
    try:
        async with _role(world) as shop:
            await world.raw.execute(grants)
            await world.query("GRANT INSERT ON public.orders TO shop")
            await shop.execute(example)
        assert await world.value("SELECT customer FROM public.orders") == "ada"
        [row] = await world.query("SELECT * FROM fencepost.run_queue")
        assert row["unique_key"] == "order-42"
        assert payload_pb2.Payload.FromString(row["payload"]).json == '{"order": 42}'
    finally:
        await world.query("DROP TABLE public.orders")


async def test_nobody_may_enqueue_without_the_grant(world: World) -> None:
    async with _role(world, _GRANTS[0]) as shop:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await enqueue_in(shop)


async def test_a_caller_cannot_put_functions_of_its_own_in_between(world: World) -> None:
    await world.query("CREATE SCHEMA trap")
    await world.query("GRANT ALL ON SCHEMA trap TO PUBLIC")
    try:
        async with _role(world, *_GRANTS) as shop:
            await shop.execute(
                "CREATE FUNCTION trap.length(bytea) RETURNS int LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION 'trapped as %', current_user; END $$"
            )
            await shop.execute("SET search_path = trap, pg_catalog")
            key, _ = await enqueue_in(shop, data=b"1", content_type="a")
            assert key.scheduled_at == world.now + 1
    finally:
        await world.raw.execute("DROP SCHEMA trap CASCADE")
