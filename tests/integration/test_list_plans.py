"""The plans of lists over history: an index for every filter, on days that are over and on the
day that is being written, and never a sort of a day for a plain list.

What is asserted is what ListRuns itself asks, explained on its own connection.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import asyncpg
import pytest
from fencepost_server.api.run_filter import read_filter
from fencepost_server.clock import DAY, SECOND, to_datetime
from fencepost_server.store import run_lists
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.day_tables import DAY_INDEXES, DayTables
from fencepost_server.store.statements import Statement

from tests.factories import NOON
from tests.integration.held_database import own_database
from tests.integration.test_query_plans import Plan
from tests.integration.world import build

_DAY_ROWS = 20_000
_TODAY, _YESTERDAY = "20261201", "20261130"
_WORKER = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
# A run per needle of each filter, among many thousands that do not match.
_FILL = """
INSERT INTO fencepost.job_runs
    (job_id, scheduled_at, available_at, created_at, ended_at, tenant_id, queue_id, kind_id,
     version, attempt, failure_count, lost_lease_count, snooze_count, replay_count, state, origin,
     priority, worker_id, labels, failure_code, cancel_cause, unique_key)
SELECT ('0197a4c2-7d1e-7b1a-9c55-' || lpad(to_hex(n % 500), 12, '0'))::uuid, x.at, x.at, x.at,
       x.at + interval '1 s', q.tenant_id, q.queue_id, k.kind_id, 1, 1, 0, 0, 0, 0,
       (CASE WHEN n % 500 = 0 THEN 'cancelled' ELSE 'succeeded' END)::fencepost.run_state,
       'schedule', 0, w.id, CASE WHEN n % 50 = 0 THEN '{"customer": "c1"}'::jsonb END,
       CASE WHEN n % 100 = 0 THEN 'E' || n % 7 END,
       CASE WHEN n % 500 = 0 THEN 'requested' END::fencepost.cancel_cause,
       CASE WHEN n % 20 = 0 THEN 'order-' || n END
FROM generate_series(1, $2::int) AS n
CROSS JOIN LATERAL (SELECT $1::timestamptz + n * interval '2 s' AS at) AS x
JOIN (SELECT q.*, row_number() OVER (ORDER BY queue_id) - 1 AS place FROM fencepost.queues q) AS q
    ON q.place = n % 5
JOIN (SELECT k.*, row_number() OVER (ORDER BY kind_id) - 1 AS place FROM fencepost.kinds k) AS k
    ON k.place = n % 40
JOIN (SELECT md5(p::text)::uuid AS id, p FROM generate_series(0, 49) AS p) AS w ON w.p = n % 50
ORDER BY x.at
"""


class Explained(Connection):
    """A connection that keeps the plan of each statement it carries out."""

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self.plans: list[tuple[str, Plan]] = []

    async def fetch(self, statement: Statement, **values: Any) -> Sequence[Row]:
        """As the connection does, after asking how."""
        arguments = statement.arguments(values)
        text = await self._raw.fetchval(f"EXPLAIN (FORMAT JSON) {statement.text}", *arguments)
        self.plans.append((statement.name, Plan(json.loads(text)[0]["Plan"])))
        return await super().fetch(statement, **values)

    def of(self, *statements: str) -> list[Plan]:
        """The plans of these statements."""
        return [plan for name, plan in self.plans if name in statements]

    @property
    def history(self) -> list[Plan]:
        """The plans of windows of history."""
        return self.of("page_of_history", "page_of_sparse_history")


@pytest.fixture(scope="module")
def month_dsn(postgres_dsn: str, template_database: str) -> Iterator[str]:
    """Two days of history, one of them over, with fresh statistics; tests only read it."""
    name = f"fencepost_lists_{os.getpid()}"
    with own_database(postgres_dsn, template_database, name) as dsn:
        asyncio.run(_fill(dsn))
        yield dsn


async def _fill(dsn: str) -> None:
    async with build(dsn) as world:
        await world.raw.execute(
            """
            INSERT INTO fencepost.kinds (name) SELECT 'kind.' || n FROM generate_series(0, 40) n;
            INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at)
            SELECT tenant_id, 'q' || n, now(), now()
            FROM fencepost.tenants, generate_series(1, 5) n
            """
        )
        await world.raw.execute(
            "INSERT INTO fencepost.jobs (job_id, tenant_id, name, version, created_at, updated_at) "
            "SELECT ('0197a4c2-7d1e-7b1a-9c55-' || lpad(to_hex(n), 12, '0'))::uuid, tenant_id, "
            "'job-' || n, 1, now(), now() FROM fencepost.tenants, generate_series(0, 499) n"
        )
        await world.raw.execute(
            "INSERT INTO fencepost.job_versions (job_id, version, spec, created_at) SELECT job_id, "
            "1, CASE WHEN name = 'job-7' THEN '{\"labels\": {\"team\": \"few\"}}' ELSE '{}' END"
            "::jsonb, now() FROM fencepost.jobs"
        )
        today = to_datetime(NOON).replace(hour=0)
        tables = DayTables(dsn)
        await tables.ensure(to_datetime(NOON - DAY).date(), today.date())
        await world.retention._set_bounds()
        for day in (to_datetime(NOON - DAY).replace(hour=0), today):
            await world.raw.execute(_FILL, day, _DAY_ROWS)
        assert await tables.index_before(today.date(), tables_max=5) == [f"job_runs_{_YESTERDAY}"]
        await world.raw.execute("ANALYZE")


@pytest.fixture
async def database(month_dsn: str) -> AsyncIterator[Database]:
    async with Database(month_dsn, hot_size=1, requests_size=2) as database:
        yield database


async def _explain(database: Database, text: str) -> Explained:
    """What the first page of a list of the last two days asks."""
    catalogue = Catalogue(pool=database.requests)
    tenant_id = await catalogue.tenant_id("default")
    async with database.requests.transaction() as connection:
        explained = Explained(connection._raw)
        await run_lists.page(
            explained,
            read_filter(text, job=None),
            tenant_id=tenant_id,
            job_id=None,
            after=None,
            history_from=NOON - 2 * DAY,
            now=NOON,
            page_size=50,
            time_max=60 * SECOND,
        )
    return explained


def _indexes(plans: Sequence[Plan], day: str) -> set[str]:
    """What the plans use of one day's table, by the columns the index is on."""
    return {
        name.removeprefix(f"job_runs_{day}_")
        for plan in plans
        for name in plan.indexes
        if f"_{day}_" in name
    }


async def test_a_plain_list_reads_the_newest_rows_in_the_order_of_the_index(
    database: Database,
) -> None:
    explained = await _explain(database, "")
    *_, plan = explained.history
    assert "Sort" not in plan.kinds
    assert not plan.scanned_whole
    assert plan.tables == {f"job_runs_{_TODAY}"}, "other days are not looked at"


# A filter that hardly anything matches, and the index that a day that is over answers it from.
_OVER = {
    "kind=kind.40": "kind",
    "queue=q5": "queue",
    f"worker={_WORKER}": "worker",
    "origin=BACKFILL": "origin",
    "state=SKIPPED": "tenant_id_state_scheduled_at_idx",
    "cancel_cause=OVERLAP": "tenant_id_cancel_cause_scheduled_at_idx",
    "last_failure.code=NEEDLE": "tenant_id_failure_code_scheduled_at_idx",
    "unique_key=needle": "tenant_id_unique_key_idx",
    "labels.customer=needle": "labels",
    "labels:nothing": "labels",
    "created_at<2026-01-01T00:00:00Z": "times",
    "ended_at>2027-01-01T00:00:00Z": "times",
}


@pytest.mark.parametrize("text", _OVER)
async def test_a_day_that_is_over_has_an_index_for_each_filter(
    database: Database, text: str
) -> None:
    explained = await _explain(database, text)
    plans = explained.history
    assert _OVER[text] in _indexes(plans, _YESTERDAY)
    assert not any(f"job_runs_{_YESTERDAY}" in plan.scanned_whole for plan in plans)


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("state=SKIPPED", "tenant_id_state_scheduled_at_idx"),
        ("last_failure.code=NEEDLE", "tenant_id_failure_code_scheduled_at_idx"),
        ("unique_key=needle", "tenant_id_unique_key_idx"),
        ("labels.customer=needle", "tenant_id_scheduled_at_idx"),
        ("labels.team=few", "pkey"),
        ("job=job-7,job-9 unique_key!=x", "pkey"),
    ],
)
async def test_what_is_rare_is_indexed_on_the_day_that_is_being_written(
    database: Database, text: str, index: str
) -> None:
    explained = await _explain(database, text)
    assert index in _indexes(explained.history, _TODAY)


@pytest.mark.parametrize("text", ["kind=kind.40", "queue=q5"])
async def test_today_kinds_and_queues_are_told_apart_without_reading_rows(
    database: Database, text: str
) -> None:
    explained = await _explain(database, text)
    # After the first window, which is walked in order.
    conditions = [
        node["Index Cond"]
        for plan in explained.of("page_of_sparse_history")
        for node in plan.nodes
        if "kind_id_que" in node.get("Index Name", "") and _TODAY in node["Index Name"]
    ]
    column = "kind_id" if text.startswith("kind") else "queue_id"
    assert conditions
    assert all(column in condition for condition in conditions)


async def test_dead_letters_and_live_runs_of_one_job_are_found_by_key(database: Database) -> None:
    catalogue = Catalogue(pool=database.requests)
    tenant_id = await catalogue.tenant_id("default")
    async with database.requests.transaction() as connection:
        explained = Explained(connection._raw)
        await run_lists.page(
            explained,
            read_filter("state=CANCELLED", job=None),
            tenant_id=tenant_id,
            job_id="0197a4c2-7d1e-7b1a-9c55-000000000007",
            after=None,
            history_from=NOON - 2 * DAY,
            now=NOON,
            page_size=50,
            time_max=60 * SECOND,
        )
    for plan in explained.history:
        assert {name for name in plan.indexes if not name.endswith("_pkey")} <= {
            name for name in plan.indexes if "_state_" in name
        }
    assert not explained.of("page_of_live"), "no live run is cancelled"


async def test_the_day_that_is_being_written_has_none_of_the_later_indexes(
    month_dsn: str,
) -> None:
    connection = await asyncpg.connect(month_dsn)
    try:
        rows = await connection.fetch(
            "SELECT indexname FROM pg_indexes WHERE tablename = $1", f"job_runs_{_TODAY}"
        )
    finally:
        await connection.close()
    names = {row["indexname"].removeprefix(f"job_runs_{_TODAY}_") for row in rows}
    assert not names & DAY_INDEXES.keys()
    assert "pkey" in names
