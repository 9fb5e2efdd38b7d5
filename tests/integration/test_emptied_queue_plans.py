"""Plans of a queue that was empty when it was last vacuumed: Postgres takes it for empty until
the next vacuum, whatever comes into it meanwhile, so no statement may count on that.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
from fencepost_server.clock import to_datetime
from fencepost_server.store.database import _HOT_SETTINGS
from fencepost_server.store.statements import Statement, load

from tests.factories import NOON
from tests.integration.held_database import own_database
from tests.integration.test_query_plans import Plan, Planner
from tests.integration.world import build

_NOW = to_datetime(NOON).isoformat()
_VALUES: dict[str, Any] = {
    "job_ids": ["0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"] * 3,
    "scheduled_ats": [_NOW] * 3,
    "attempts": [1] * 3,
    "now": _NOW,
    "until": _NOW,
    "gap_s": 10,
    "heartbeat_s": 10,
}
_FILES = ("outcomes", "leases", "completion")


def _by_keys() -> Iterator[Any]:
    """Every statement that is given keys of runs and looks for them in the queue."""
    for file in _FILES:
        for name, statement in load(file).items():
            keyed = {"job_ids", "scheduled_ats"} <= set(statement.parameters)
            if keyed and re.search(r"(FROM|JOIN|UPDATE) fencepost\.run_queue", statement.text):
                yield pytest.param(statement, id=name)


@pytest.fixture(scope="module")
def emptied_dsn(postgres_dsn: str, template_database: str) -> Iterator[str]:
    """A database through whose queue runs have gone, all of them, before it was vacuumed."""
    name = f"fencepost_emptied_{os.getpid()}"
    with own_database(postgres_dsn, template_database, name) as dsn:
        asyncio.run(_fill_and_empty(dsn))
        yield dsn


async def _fill_and_empty(dsn: str) -> None:
    async with build(dsn) as world:
        await world.enqueue(await world.add_job(), 2000)
        while await world.claim(500):
            pass
        await world.raw.execute("DELETE FROM fencepost.run_queue")
        # As the product does it, every fifteen seconds.
        await world.raw.execute("VACUUM (TRUNCATE off) fencepost.run_queue")
        row = await world.raw.fetchrow(
            "SELECT relpages, reltuples FROM pg_class WHERE oid = 'fencepost.run_queue'::regclass"
        )
        assert row is not None
        assert row["relpages"] > 10
        assert row["reltuples"] == 0


@pytest.fixture
async def emptied(emptied_dsn: str) -> AsyncIterator[Planner]:
    connection = await asyncpg.connect(
        emptied_dsn, server_settings=_HOT_SETTINGS | {"timezone": "UTC"}
    )
    try:
        yield Planner(connection)
    finally:
        await connection.close()


def _whole_scans(plan: Plan) -> list[str]:
    """Nodes that read all of the queue, or all open runs of it, once or for each key."""
    return [
        f"{node['Node Type']} on {node['Relation Name']}"
        for node in plan.nodes
        if node.get("Relation Name") == "run_queue"
        and node["Node Type"] != "ModifyTable"
        and "TID Cond" not in node
        and not re.search(r"job_id = .*scheduled_at = ", node.get("Index Cond", ""))
    ]


@pytest.mark.parametrize("statement", list(_by_keys()))
async def test_runs_are_found_by_their_keys(emptied: Planner, statement: Statement) -> None:
    values = {name: _VALUES.get(name, [None] * 3) for name in statement.parameters}
    plan = await emptied.plan(statement, **values)
    assert _whole_scans(plan) == []
    assert "run_queue_pkey" in plan.indexes


async def test_the_reaper_finds_by_indexes_and_locks_by_keys(emptied: Planner) -> None:
    leases = load("leases")
    values: dict[str, Any] = {"runs_max": 500, "gap_s": 10, "now": _NOW}
    plan = await emptied.plan(leases["lock_expired_runs"], **values)
    assert plan.indexes == {"run_queue_wait_until", "run_queue_total_until", "run_queue_pkey"}
    # Those that look for instants, and none by the keys.
    assert len(_whole_scans(plan)) == 2
    plan = await emptied.plan(leases["find_attempts_out_of_time"], **values)
    assert plan.indexes == {"run_queue_total_until"}
    async with emptied.connection.transaction():
        await emptied.connection.execute(leases["read_by_pages"].text)
        plan = await emptied.plan(leases["find_overdue_attempts"], **values, heartbeat_s=10)
    assert plan.indexes == {"run_queue_open"}
    assert "Bitmap Heap Scan" in plan.kinds
