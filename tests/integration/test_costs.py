"""What a run costs Postgres from fire to history, as numbers that do not depend on the machine:
statements, rows and bytes of WAL per 1,000 runs. A change that makes a run dearer fails here.

The bounds stand below. `pytest tests/integration/test_costs.py --log-cli-level=INFO` prints what
is measured now; each bound is that and about a sixth more. Full-page images are off, because
they depend on checkpoints and not on what is written.
"""

import asyncio
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from fencepost_server.clock import HOUR
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.verdicts import Held, Report, Verdict
from fencepost_server.store.database import Connection
from fencepost_server.store.migrate import migrate
from fencepost_server.store.statements import Statement

from tests.factories import NOON, cron, every, job_spec
from tests.integration.own_postgres import own_postgres
from tests.integration.running_server import until
from tests.integration.world import World, build

# Bytes of WAL per run.
WAL_MAX = {"fire": 800, "claim": 500, "complete": 565, "renew": 100}
WAL_OF_A_RUN_MAX = 1830
# Statements per 1,000 runs, in batches of 500.
STATEMENTS_MAX = {"fire": 10, "claim": 4.5, "complete": 2.5, "renew": 2.5}
# Rows inserted, updated and deleted per run, over all tables.
ROWS = {
    "fire": (1, 1, 0),
    "claim": (0, 1, 0),
    "complete": (1, 0, 1),
    "renew": (0, 1, 0),
}
HOT_RENEWALS_MIN = 0.95

RUNS = 2000
_BATCH = 500
# As workers tell them: what a run waited and worked.
_TIMINGS = bytes.fromhex("0a0310c0841e120310c0841e")
_ROW_KINDS = ("n_tup_ins", "n_tup_upd", "n_tup_del", "n_tup_hot_upd")
# Written by the clock and the number of servers, not by runs.
_NOT_BY_RUNS = ("shard_state", "firing_state", "schedule_fires")

_log = logging.getLogger("costs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One step of RUNS runs: WAL bytes, statements by name, rows by _ROW_KINDS."""

    wal: int
    statements: Mapping[str, int]
    rows: Mapping[str, int]

    def per_run(self, kind: str) -> float:
        """Rows of a kind."""
        return self.rows[kind] / RUNS


@pytest.fixture(scope="module")
def costs() -> Iterator[Mapping[str, Cost]]:
    """Each step measured once, one after the other, in a Postgres that does nothing else."""
    folder = Path(tempfile.mkdtemp(prefix="fencepost-costs-"))
    folder.chmod(0o711)
    try:
        with own_postgres(folder) as postgres:
            yield asyncio.run(_measure(postgres.dsn))
    finally:
        shutil.rmtree(folder)


async def _measure(dsn: str) -> Mapping[str, Cost]:
    await migrate(dsn)
    probe = await asyncpg.connect(dsn)
    try:
        await probe.execute("ALTER SYSTEM SET autovacuum = off")
        await probe.execute("SELECT pg_reload_conf()")
        assert await probe.fetchval("SHOW full_page_writes") == "off"
        async with build(dsn) as world:
            await _make_jobs(world)
        claimed: list[Claimed] = []
        return {
            "fire": await _step(dsn, probe, _fire),
            "claim": await _step(dsn, probe, lambda world: _claim(world, claimed)),
            "renew": await _renewals(dsn, probe, claimed),
            "complete": await _step(dsn, probe, lambda world: _complete(world, claimed)),
        }
    finally:
        await probe.close()


async def _make_jobs(world: World) -> None:
    """Half of them by cron, half by interval, all due at noon."""
    for name, schedule in (("cron", cron("0 * * * *")), ("every", every(HOUR))):
        names = [f"{name}-{n}" for n in range(RUNS // 2)]
        await world.add_jobs(names, job_spec(schedule), NOON)


async def _fire(world: World) -> None:
    assert await world.scheduler.fire_due() == RUNS


async def _claim(world: World, claimed: list[Claimed]) -> None:
    lane = await world.raw.fetchrow("SELECT queue_id, kind_id FROM fencepost.run_queue LIMIT 1")
    assert lane is not None
    for _ in range(RUNS // _BATCH):
        claimed += await world.claimer.claim(
            lane["queue_id"],
            lanes={(lane["kind_id"], 0)},
            worker_ids=[world.worker_id] * _BATCH,
            is_capped=False,
        )
    assert len(claimed) == RUNS


async def _renewals(
    dsn: str, probe: "asyncpg.Connection[asyncpg.Record]", claimed: list[Claimed]
) -> Cost:
    """Those of runs that have been held for a while: the first ones find pages that the claims
    have filled."""
    for _ in range(2):
        await _step(dsn, probe, lambda world: _renew(world, claimed))
    return await _step(dsn, probe, lambda world: _renew(world, claimed))


async def _renew(world: World, claimed: list[Claimed]) -> None:
    for batch in _batches(claimed):
        renewed = await world.lifecycle.heartbeat([Held(run.key, run.attempt) for run in batch])
        assert not any(each.notice or each.not_renewed for each in renewed)


async def _complete(world: World, claimed: list[Claimed]) -> None:
    for batch in _batches(claimed):
        judged = await world.lifecycle.report(
            [
                Report(key=run.key, attempt=run.attempt, ending=None, timings=_TIMINGS)
                for run in batch
            ]
        )
        assert {each.verdict for each in judged} == {Verdict.APPLIED}


def _batches(claimed: list[Claimed]) -> list[list[Claimed]]:
    return [claimed[first : first + _BATCH] for first in range(0, RUNS, _BATCH)]


async def _step(
    dsn: str,
    probe: "asyncpg.Connection[asyncpg.Record]",
    step: Callable[[World], Awaitable[None]],
) -> Cost:
    # As the product does every fifteen seconds.
    await probe.execute("VACUUM fencepost.run_queue")
    before = await _rows(probe)
    async with build(dsn) as world:
        start = await probe.fetchval("SELECT pg_current_wal_insert_lsn()::text")
        with _counted() as statements:
            await step(world)
        wal = await probe.fetchval("SELECT pg_current_wal_insert_lsn() - $1::text::pg_lsn", start)
    after = await _rows(probe)
    return Cost(
        wal=int(wal),
        statements=dict(statements),
        rows={kind: after[kind] - before[kind] for kind in _ROW_KINDS},
    )


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Counts statements of all connections by name."""
    counts: Counter[str] = Counter()

    def counting(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def sent(connection: Connection, statement: Statement, **values: Any) -> Any:
            counts[statement.name] += 1
            return await send(connection, statement, **values)

        return sent

    with pytest.MonkeyPatch.context() as patch:
        for method in ("fetch", "fetch_one", "execute"):
            patch.setattr(Connection, method, counting(getattr(Connection, method)))
        yield counts


async def _rows(probe: "asyncpg.Connection[asyncpg.Record]") -> dict[str, int]:
    """Rows written so far. Sessions tell when they end, so all others must have."""

    async def alone() -> bool:
        others: int = await probe.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return others == 0

    await until(alone, what="all other sessions have ended")
    sums = ", ".join(f"coalesce(sum({kind}), 0)::bigint AS {kind}" for kind in _ROW_KINDS)
    row = await probe.fetchrow(
        f"SELECT {sums} FROM pg_stat_user_tables "  # noqa: S608 - names of columns
        "WHERE schemaname = 'fencepost' AND relname <> ALL ($1)",
        list(_NOT_BY_RUNS),
    )
    assert row is not None
    return dict(row)


def _told(name: str, cost: Cost) -> None:
    _log.info(
        "%s: %.0f bytes of WAL per run; per 1,000 runs %.1f statements %s, rows %s",
        name,
        cost.wal / RUNS,
        1000 * sum(cost.statements.values()) / RUNS,
        cost.statements,
        {kind: round(1000 * cost.per_run(kind)) for kind in _ROW_KINDS},
    )


@pytest.mark.parametrize("name", WAL_MAX)
def test_a_step_writes_no_more_than_its_share(costs: Mapping[str, Cost], name: str) -> None:
    _told(name, costs[name])
    assert 0 < costs[name].wal / RUNS <= WAL_MAX[name]


def test_a_run_writes_no_more_than_promised(costs: Mapping[str, Cost]) -> None:
    written = sum(costs[name].wal for name in ("fire", "claim", "complete"))
    assert 0 < written / RUNS <= WAL_OF_A_RUN_MAX


@pytest.mark.parametrize("name", STATEMENTS_MAX)
def test_runs_share_statements(costs: Mapping[str, Cost], name: str) -> None:
    sent = costs[name].statements
    assert 0 < 1000 * sum(sent.values()) / RUNS <= STATEMENTS_MAX[name], sent


@pytest.mark.parametrize("name", ROWS)
def test_a_step_writes_each_row_once(costs: Mapping[str, Cost], name: str) -> None:
    cost = costs[name]
    written = tuple(cost.per_run(kind) for kind in ("n_tup_ins", "n_tup_upd", "n_tup_del"))
    assert written == ROWS[name]


def test_renewals_touch_no_index(costs: Mapping[str, Cost]) -> None:
    renewals = costs["renew"]
    assert renewals.rows["n_tup_hot_upd"] >= HOT_RENEWALS_MIN * renewals.rows["n_tup_upd"]
