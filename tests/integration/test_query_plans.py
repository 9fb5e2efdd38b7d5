"""The plans of hot statements, under the settings they run with: the index that each was
written for, and never a scan of a whole table.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
from fencepost_server.clock import DAY, SECOND, to_datetime
from fencepost_server.store.database import _HOT_SETTINGS
from fencepost_server.store.statements import Statement, load

from tests.factories import NOON, every, job_spec
from tests.integration.held_database import own_database
from tests.integration.world import build

_ROWS = 20_000


class Planner:
    """Explains statements as a hot connection plans them."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        self.connection = connection

    async def plan(self, statement: Statement, **values: Any) -> "Plan":
        arguments = ", ".join(_literal(value) for value in statement.arguments(values))
        await self.connection.execute(f"PREPARE explained AS {statement.text}")
        try:
            text = await self.connection.fetchval(
                f"EXPLAIN (FORMAT JSON) EXECUTE explained ({arguments})"
            )
        finally:
            await self.connection.execute("DEALLOCATE explained")
        return Plan(json.loads(text)[0]["Plan"])


class Plan:
    """The nodes of a plan."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.nodes = list(_walk(root))

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    @property
    def scanned_whole(self) -> set[str]:
        return {n["Relation Name"] for n in self.nodes if n["Node Type"] == "Seq Scan"}

    @property
    def kinds(self) -> set[str]:
        return {node["Node Type"] for node in self.nodes}

    @property
    def tables(self) -> set[str]:
        return {node["Relation Name"] for node in self.nodes if "Relation Name" in node}


def _walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from _walk(child)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "'{" + ",".join("NULL" if each is None else f'"{each}"' for each in value) + "}'"
    return f"'{value}'"


@pytest.fixture(scope="module")
def filled_dsn(postgres_dsn: str, template_database: str) -> Iterator[str]:
    """A database with many jobs, a long queue and fresh statistics; tests only read it."""
    name = f"fencepost_plans_{os.getpid()}"
    with own_database(postgres_dsn, template_database, name) as dsn:
        asyncio.run(_fill(dsn))
        yield dsn


async def _fill(dsn: str) -> None:
    async with build(dsn) as world:
        job = await world.add_job(spec=job_spec(every()), next_run_at=NOON)
        await world.raw.execute(
            """
            INSERT INTO fencepost.job_schedules
                (job_id, next_run_at, tenant_id, queue_id, kind_id, version, every_s,
                 partition_id, overlap)
            SELECT gen_random_uuid(), $1::timestamptz + n % 3600 * interval '1 second', tenant_id,
                   queue_id, kind_id, 1, 60, n % 256, 'skip'
            FROM fencepost.job_schedules, generate_series(1, $3::int) AS n
            WHERE job_id = $2::uuid
            """,
            to_datetime(NOON - 600 * SECOND),
            job,
            _ROWS,
        )
        await world.raw.execute(
            """
            INSERT INTO fencepost.run_queue
                (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id,
                 version, attempt, attempt_open, lease_until, state, origin, priority, lease_s,
                 cancel_grace_s, attempt_timeout_s)
            SELECT s.job_id, $1::timestamptz + n * interval '1 ms', $1, $1, s.tenant_id,
                   s.queue_id, s.kind_id, 1, (n % 4 = 0)::int, n % 4 = 0,
                   CASE WHEN n % 4 = 0 THEN $1::timestamptz END,
                   CASE WHEN n % 4 = 0 THEN 'running' WHEN n % 4 = 1 THEN 'blocked'
                        ELSE 'queued' END::fencepost.run_state,
                   'schedule', n % 10, 30, 30, 3600
            FROM (SELECT *, row_number() OVER () AS n FROM fencepost.job_schedules) AS s
            """,
            to_datetime(NOON - 60 * SECOND),
        )
        # History of other days, which a look at one day must not touch.
        days = [to_datetime(NOON + n * DAY).date() for n in (-9, 9)]
        await world.retention._tables.ensure(*days)
        await world.raw.execute("ANALYZE")


@pytest.fixture
async def planner(filled_dsn: str) -> AsyncIterator[Planner]:
    connection = await asyncpg.connect(
        filled_dsn, server_settings=_HOT_SETTINGS | {"timezone": "UTC"}
    )
    try:
        yield Planner(connection)
    finally:
        await connection.close()


_NOW = to_datetime(NOON).isoformat()
_KEYS: dict[str, Any] = {
    "job_ids": ["0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"] * 3,
    "scheduled_ats": [_NOW] * 3,
}
_NOTHING_WHOLE = {"run_queue", "job_schedules"}


def _assert_no_whole_scan(plan: Plan) -> None:
    assert not plan.scanned_whole & _NOTHING_WHOLE
    assert not plan.kinds & {"Hash Join", "Merge Join"}


@pytest.mark.parametrize("partitions", [[7], list(range(256))], ids=["one", "all"])
async def test_firing_walks_the_index_of_due_jobs(planner: Planner, partitions: list[int]) -> None:
    plan = await planner.plan(
        load("firing")["fire_due"],
        partitions=partitions,
        after="1970-01-01T00:00:00Z",
        now=_NOW,
        batch_max=64,
        tzdata="2026a",
        withheld=[],
        parked_before=_NOW,
        parked_until=_NOW,
    )
    _assert_no_whole_scan(plan)
    assert {"job_schedules_due", "run_queue_pkey", "schedule_fires_pkey"} <= plan.indexes
    # The index gives the order within a partition, so that nothing due is sorted.
    assert "Tid Scan" in plan.kinds
    # A probe of the memo for each row, by its whole key.
    memo = next(node for node in plan.nodes if node.get("Index Name") == "schedule_fires_pkey")
    assert "d.schedule_id" in memo["Index Cond"]
    assert "Materialize" not in plan.kinds


async def test_looking_for_what_is_due_reads_one_entry_per_partition(planner: Planner) -> None:
    plan = await planner.plan(
        load("firing")["next_due"],
        partitions=list(range(256)),
        after="1970-01-01T00:00:00Z",
        withheld=[],
    )
    _assert_no_whole_scan(plan)
    assert plan.indexes == {"job_schedules_due"}
    assert "Sort" not in plan.kinds


async def test_claims_walk_the_index_of_ready_runs(planner: Planner) -> None:
    plan = await planner.plan(
        load("claims")["claim_runs"],
        queue_id=1,
        kind_ids=[1, 1],
        priorities=[0, 1],
        worker_ids=[_KEYS["job_ids"][0]] * 4,
        slots=[1, 1, 1, 1],
        lane_maxes=[4, 4],
        runs_max=4,
        ageing_s=60,
        after="1970-01-01T00:00:00Z",
        now=_NOW,
    )
    _assert_no_whole_scan(plan)
    assert "run_queue_ready" in plan.indexes
    assert "Tid Scan" in plan.kinds


async def test_the_heads_of_lanes_are_found_by_one_index(planner: Planner) -> None:
    plan = await planner.plan(
        load("claims")["lane_heads"],
        queue_id=1,
        kind_ids=[1, 1],
        priorities=[0, 1],
        runs_max=4,
        ageing_s=60,
        after="1970-01-01T00:00:00Z",
        now=_NOW,
    )
    _assert_no_whole_scan(plan)
    assert plan.indexes == {"run_queue_ready"}
    assert "LockRows" not in plan.kinds


async def test_the_ready_lanes_are_found_by_probes_of_one_index(planner: Planner) -> None:
    plan = await planner.plan(load("claims")["ready_lanes"], lanes_max=100)
    _assert_no_whole_scan(plan)
    assert plan.indexes == {"run_queue_ready"}
    assert "Sort" not in plan.kinds


async def test_heartbeats_find_their_runs_by_key(planner: Planner) -> None:
    plan = await planner.plan(
        load("leases")["renew_leases"],
        attempts=[1] * 3,
        progresses=[None] * 3,
        now=_NOW,
        **_KEYS,
    )
    _assert_no_whole_scan(plan)
    assert plan.indexes == {"run_queue_pkey"}


async def test_successes_find_their_runs_by_key(planner: Planner) -> None:
    plan = await planner.plan(
        load("outcomes")["succeed_runs"],
        attempts=[1] * 3,
        results=[None] * 3,
        timings=[None] * 3,
        progresses=[None] * 3,
        now=_NOW,
        **_KEYS,
    )
    _assert_no_whole_scan(plan)
    assert "run_queue_pkey" in plan.indexes


_OF_KEYS = ("Function Scan", "Index Scan", "Tid Scan")


async def test_plain_reports_and_renewals_lock_in_the_order_they_are_given(
    planner: Planner,
) -> None:
    ends = await planner.plan(
        load("outcomes")["succeed_plain_runs"],
        results=[None] * 3,
        timings=[None] * 3,
        now=_NOW,
        **_KEYS,
    )
    renewals = await planner.plan(
        load("leases")["renew_plain_leases"], attempts=[1] * 3, now=_NOW, **_KEYS
    )
    for plan in (ends, renewals):
        _assert_no_whole_scan(plan)
        assert "run_queue_pkey" in plan.indexes
        # Loops only, the arrays outermost: they give the order.
        assert plan.kinds & {"Sort", "Hash Join", "Merge Join", "Materialize"} == set()
        scans = [node["Node Type"] for node in plan.nodes if node["Node Type"] in _OF_KEYS]
        assert scans == ["Function Scan", "Index Scan", "Tid Scan"]
        assert "LockRows" not in plan.kinds


async def test_the_reaper_reads_pages_of_open_attempts_only(planner: Planner) -> None:
    values = {"runs_max": 500, "gap_s": 10, "now": _NOW, "heartbeat_s": 10}
    async with planner.connection.transaction():
        await planner.connection.execute(load("leases")["read_by_pages"].text)
        plan = await planner.plan(load("leases")["find_overdue_attempts"], **values)
    [scan] = [node for node in plan.nodes if node.get("Relation Name") == "run_queue"]
    assert scan["Node Type"] == "Bitmap Heap Scan"
    assert plan.indexes == {"run_queue_open"}
    # For that transaction only.
    plan = await planner.plan(load("leases")["find_overdue_attempts"], **values)
    assert "Bitmap Heap Scan" not in plan.kinds


async def test_attempts_out_of_time_are_found_by_the_instant_they_are_over(
    planner: Planner,
) -> None:
    find = load("leases")["find_attempts_out_of_time"]
    plan = await planner.plan(find, runs_max=500, gap_s=10, now=_NOW)
    _assert_no_whole_scan(plan)
    assert plan.indexes == {"run_queue_total_until"}


async def test_runs_out_of_time_are_found_by_the_instant_they_are_over(planner: Planner) -> None:
    plan = await planner.plan(load("leases")["lock_expired_runs"], runs_max=500, gap_s=10, now=_NOW)
    _assert_no_whole_scan(plan)
    assert {"run_queue_wait_until", "run_queue_total_until", "run_queue_pkey"} <= plan.indexes


async def test_the_promoter_probes_the_index_of_blocked_runs(planner: Planner) -> None:
    sweep = await planner.plan(
        load("outcomes")["jobs_with_blocked_runs"],
        after="00000000-0000-0000-0000-000000000000",
        jobs_max=500,
    )
    promote = await planner.plan(
        load("outcomes")["promote_runs"], job_ids=_KEYS["job_ids"], now=_NOW
    )
    for plan in (sweep, promote):
        _assert_no_whole_scan(plan)
        assert "run_queue_blocked" in plan.indexes


async def test_a_heartbeat_changes_no_index(planner: Planner) -> None:
    indexed = await planner.connection.fetch(
        "SELECT DISTINCT a.attname FROM pg_index i JOIN pg_attribute a "
        "ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey) "
        "WHERE i.indrelid = 'fencepost.run_queue'::regclass"
    )
    names = {row["attname"] for row in indexed}
    assert "available_at" in names
    assert not names & {"lease_until", "progress", "lost_lease_count", "undelivered"}


async def test_looking_for_ended_keys_reads_their_days_only(planner: Planner) -> None:
    """The statement stands in a function; in a generic plan days are left out when it starts."""
    source = await planner.connection.fetchval(
        "SELECT prosrc FROM pg_proc WHERE proname = 'enqueue_runs'"
    )
    found = re.search(r"SELECT array_agg\(k\.job_id\), array_agg\(k\.at\)[^;]*", source)
    assert found is not None
    text = found[0].replace("INTO ended_jobs, ended_ats", "")
    for number, name in enumerate(("made_jobs", "made_ats", "first_at", "last_at"), start=1):
        text = re.sub(rf"\b{name}\b", f"${number}", text)
    await planner.connection.execute(
        "PREPARE ended (uuid[], timestamptz[], timestamptz, timestamptz) AS " + text
    )
    at = _literal(_NOW)
    keys = f"{_literal(_KEYS['job_ids'])}, ARRAY[{at}::timestamptz], {at}, {at}"
    try:
        await planner.connection.execute("SET plan_cache_mode = force_generic_plan")
        executed = await planner.connection.fetchval(
            f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE ended ({keys})"
        )
    finally:
        await planner.connection.execute("RESET plan_cache_mode; DEALLOCATE ended")
    plan = Plan(json.loads(executed)[0]["Plan"])
    read = {table for table in plan.tables if table.startswith("job_runs_2")}
    assert read == {"job_runs_20261201"}


async def test_a_plain_batch_looks_for_ended_runs_in_their_days_only(planner: Planner) -> None:
    source = await planner.connection.fetchval(
        "SELECT prosrc FROM pg_proc WHERE proname = 'enqueue_plain_runs'"
    )
    looks = r"IF (EXISTS \((?:(?!THEN).)*fencepost\.job_runs AS h.*?\)) THEN"
    found = re.search(looks, source, re.DOTALL)
    assert found is not None
    text = found[1]
    for number, name in enumerate(("ids", "first_at", "last_at"), start=1):
        text = re.sub(rf"\b{name}\b", f"${number}", text)
    await planner.connection.execute(
        "PREPARE ended_plain (uuid[], timestamptz, timestamptz) AS SELECT " + text
    )
    at = _literal(_NOW)
    try:
        await planner.connection.execute("SET plan_cache_mode = force_generic_plan")
        executed = await planner.connection.fetchval(
            "EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE ended_plain "
            f"({_literal(_KEYS['job_ids'])}, {at}, {at})"
        )
    finally:
        await planner.connection.execute("RESET plan_cache_mode; DEALLOCATE ended_plain")
    plan = Plan(json.loads(executed)[0]["Plan"])
    _assert_no_whole_scan(plan)
    read = {table for table in plan.tables if table.startswith("job_runs_2")}
    assert read == {"job_runs_20261201"}


def _inlined(statement: Statement, values: dict[str, Any]) -> str:
    text = statement.text
    for number, value in reversed(list(enumerate(statement.arguments(values), start=1))):
        text = text.replace(f"${number}", _literal(value))
    return text


async def test_looking_for_awaited_ends_reads_the_jobs_that_wait_and_their_runs(
    planner: Planner,
) -> None:
    plan = await planner.plan(
        load("completion")["jobs_awaiting_ends"],
        after="00000000-0000-0000-0000-000000000000",
        jobs_max=500,
    )
    _assert_no_whole_scan(plan)
    assert plan.indexes == {"job_schedules_awaiting", "run_queue_pkey"}
    plan = await planner.plan(load("completion")["read_ends"], **_KEYS)
    _assert_no_whole_scan(plan)
    assert "run_queue_pkey" in plan.indexes


async def test_told_changes_are_read_by_the_numbers_of_their_transactions(
    planner: Planner,
) -> None:
    plan = await planner.plan(
        load("watch")["read_changes"],
        since_end="1000",
        since_open=["900", "950"],
        until="900:1100:900",
        after_xid="0",
        after_place="(0,0)",
        tenant_ids=["1"],
        statements_max=64,
    )
    assert "run_changes_order" in plan.indexes
    assert not plan.scanned_whole & {"run_changes", "jobs"}
    assert not plan.kinds & {"Hash Join", "Merge Join"}


async def test_explaining_a_run_looks_at_open_attempts_and_lanes_only(planner: Planner) -> None:
    # Reads of the API are planned freely.
    for setting in ("enable_hashjoin", "enable_mergejoin", "enable_seqscan", "enable_bitmapscan"):
        await planner.connection.execute(f"SET {setting} = on")
    ahead = await planner.plan(
        load("explain")["count_runs_ahead"],
        queue_id=1,
        kinds=["send"],
        scheduled_at=_NOW,
        available_at=_NOW,
        priority=0,
        ageing_s=60,
        now=_NOW,
        runs_max=10_000,
        lanes_max=1_000,
    )
    assert "run_queue_ready" in ahead.indexes
    assert "run_queue" not in ahead.scanned_whole
    places = await planner.plan(
        load("explain")["places_taken"],
        all_queues=True,
        tenant_id=1,
        queue_id=1,
        job_id=_KEYS["job_ids"][0],
        concurrency_key="a",
    )
    assert "run_queue" not in places.scanned_whole


@pytest.mark.parametrize("name", ["lock_schedules", "lock_free_schedules"])
async def test_the_second_path_of_fires_locks_jobs_by_key(planner: Planner, name: str) -> None:
    plan = await planner.plan(load("settle")[name], job_ids=_KEYS["job_ids"])
    _assert_no_whole_scan(plan)
    assert not plan.scanned_whole & {"jobs", "job_versions"}
    assert {"job_schedules_pkey", "jobs_pkey", "job_versions_pkey"} <= plan.indexes


async def test_overlaps_are_counted_among_the_runs_of_their_jobs(planner: Planner) -> None:
    plan = await planner.plan(load("settle")["count_live_runs"], job_ids=_KEYS["job_ids"], now=_NOW)
    _assert_no_whole_scan(plan)
    assert plan.indexes == {"run_queue_pkey"}


async def test_what_became_of_a_run_is_found_by_its_key_in_every_place(planner: Planner) -> None:
    plan = await planner.plan(load("outcomes")["inspect_runs"], **_KEYS)
    assert plan.scanned_whole == set()
    assert "run_queue_pkey" in plan.indexes


async def test_a_named_run_is_leased_by_its_key(planner: Planner) -> None:
    plan = await planner.plan(
        load("claims")["lease_run"],
        job_id=_KEYS["job_ids"][0],
        scheduled_at=_NOW,
        worker_id=_KEYS["job_ids"][0],
        now=_NOW,
    )
    _assert_no_whole_scan(plan)
    assert "run_queue_pkey" in plan.indexes


async def test_the_governor_probes_parked_runs_and_the_earliest_of_each_partition(
    planner: Planner,
) -> None:
    tenants = await planner.plan(load("governor")["parked_tenants"], after=0, tenants_max=100)
    _assert_no_whole_scan(tenants)
    assert tenants.indexes == {"run_queue_parked"}
    overdue = await planner.plan(load("governor")["overdue_fires"], before=_NOW)
    _assert_no_whole_scan(overdue)
    assert overdue.indexes == {"job_schedules_due"}
    released = await planner.plan(
        load("governor")["release_runs"],
        tenant_ids=["1"],
        now=_NOW,
        until=_NOW,
        runs_max=100,
        rate=500,
    )
    _assert_no_whole_scan(released)
    assert "run_queue_parked" in released.indexes
