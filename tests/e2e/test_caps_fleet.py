"""Caps over four server processes, one of which is killed: never over, and well used."""

import asyncio
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from fencepost_server.clock import SECOND

from tests.checker import invariants
from tests.checker.history import read_history
from tests.checker.invariants import Caps
from tests.checker.recorder import record
from tests.e2e.fleet import Process, Server, fleet
from tests.factories import job_spec
from tests.integration.world import build

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_WORKER = Path(__file__).with_name("steady_worker.py")
_QUEUE = "tenants/default/queues/default"
_RUNS = 600
_SAMPLE_S = 0.004
# Of a cap, on average. A machine that is busy with other things still reaches this.
_USED_MIN = 0.85
# So many waiting runs of a scope are a backlog.
_BACKLOG = 20
# Counts every claim's outcome under the claim's own locks, so that no moment is missed.
_AUDIT = """
    CREATE TABLE public.seen (scope text, name text, open int);
    CREATE FUNCTION public.look() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.seen
        SELECT 'tenant', tenant_id::text, count(*) FROM fencepost.run_queue
        WHERE attempt_open GROUP BY 2
        UNION ALL
        SELECT 'job', job_id::text, count(*) FROM fencepost.run_queue
        WHERE attempt_open AND max_in_flight IS NOT NULL GROUP BY 2
        UNION ALL
        SELECT 'key', concurrency_key, count(*) FROM fencepost.run_queue
        WHERE attempt_open AND concurrency_key IS NOT NULL GROUP BY 2;
        RETURN NULL;
    END $$;
    CREATE TRIGGER look AFTER UPDATE ON fencepost.run_queue
        FOR EACH STATEMENT EXECUTE FUNCTION public.look();
"""
_SCOPES = """
    SELECT s.scope, count(*) FILTER (WHERE q.attempt_open) AS open,
           count(*) FILTER (WHERE NOT q.attempt_open) AS waiting
    FROM fencepost.run_queue AS q
    CROSS JOIN LATERAL (VALUES
        ('tenant ' || q.tenant_id),
        (CASE WHEN q.max_in_flight IS NOT NULL THEN 'job ' || q.job_id END),
        ('key ' || q.concurrency_key)) AS s (scope)
    WHERE s.scope IS NOT NULL
    GROUP BY s.scope
"""


@dataclass(kw_only=True)
class Sampled:
    """What a connection of its own saw: the most per scope, and while a scope had a backlog how
    many of it were open on average.
    """

    most: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)

    def used(self, scope: str, cap: int) -> float:
        return self.total[scope] / self.samples[scope] / cap


async def _sample(dsn: str, ended_wanted: int, sampled: Sampled, reached: asyncio.Event) -> None:
    """Until only few runs wait; sets `reached` once so many have ended."""
    connection = await asyncpg.connect(dsn)
    try:
        while True:
            rows = await connection.fetch(_SCOPES)
            open_in = Counter({row["scope"]: row["open"] for row in rows})
            waiting_in = Counter({row["scope"]: row["waiting"] for row in rows})
            waiting = waiting_in["tenant 1"]
            if _RUNS - waiting >= ended_wanted:
                reached.set()
            if waiting < _BACKLOG:
                return
            sampled.most |= open_in
            # Not before work has begun.
            if waiting < _RUNS - 2 * _BACKLOG:
                for scope, count in waiting_in.items():
                    if count >= _BACKLOG:
                        sampled.total[scope] += open_in[scope]
                        sampled.samples[scope] += 1
            await asyncio.sleep(_SAMPLE_S)
    finally:
        await connection.close()


async def _work_off(dsn: str) -> Sampled:
    """Four servers with a worker each carry out what is queued; one server is killed."""
    sampled, reached = Sampled(), asyncio.Event()
    with fleet() as processes:
        servers = [Server(dsn) for _ in range(4)]
        processes.extend(servers)
        processes.extend(
            Process([sys.executable, str(_WORKER), server.address, _QUEUE]) for server in servers
        )
        sampling = asyncio.create_task(_sample(dsn, _RUNS // 3, sampled, reached))
        async with asyncio.timeout(200):
            await reached.wait()
            servers[0].send(signal.SIGKILL)
            await sampling
        assert all(server.popen.poll() is None for server in servers[1:])
    return sampled


async def _prepare(dsn: str, sql: str, *jobs: tuple[str, dict[str, Any]]) -> list[str]:
    async with build(dsn, at=None) as world:
        ids = [
            await world.add_job(name, job_spec(kind="steady", lease_ttl=15 * SECOND, **limits))
            for name, limits in jobs
        ]
        await world.raw.execute(sql)
        for n, job_id in enumerate(ids):
            for key in ("a", "b", "c") if n == len(ids) - 1 and len(ids) > 1 else (None,):
                parts = 3 * len(ids) if len(ids) > 1 and key else len(ids)
                await world.enqueue(job_id, _RUNS // parts, key=key, at=world.now)
        await world.raw.execute(_AUDIT)
        return ids


async def _most_seen(dsn: str) -> dict[str, int]:
    connection = await asyncpg.connect(dsn)
    try:
        rows = await connection.fetch(
            "SELECT scope || ' ' || name AS scope, max(open) AS most FROM public.seen GROUP BY 1"
        )
        return {row["scope"]: row["most"] for row in rows}
    finally:
        await connection.close()


async def test_the_cap_of_a_tenant_over_four_servers(database_url: str) -> None:
    await record(database_url)
    await _prepare(database_url, "UPDATE fencepost.tenants SET max_in_flight = 5", ("steady", {}))
    sampled = await _work_off(database_url)
    history = await read_history(database_url)
    assert invariants.always(history) == []
    assert invariants.caps_hold(history, Caps(tenants={1: 5})) == []
    seen = await _most_seen(database_url)
    used = sampled.used("tenant 1", 5)
    print(f"{sampled.samples['tenant 1']} samples, {used:.0%} of the cap used on average")
    assert sampled.most["tenant 1"] == 5
    assert seen["tenant 1"] == 5
    assert used >= _USED_MIN


async def test_caps_of_jobs_and_keys_in_one_queue_over_four_servers(database_url: str) -> None:
    await record(database_url)
    narrow, _keyed = await _prepare(
        database_url,
        "UPDATE fencepost.queues SET max_in_flight_per_key = 2",
        ("narrow", {"max_in_flight": 3}),
        ("keyed", {}),
    )
    sampled = await _work_off(database_url)
    history = await read_history(database_url)
    assert invariants.always(history) == []
    assert invariants.caps_hold(history, Caps(jobs={narrow: 3}, keys_of_queues={1: 2})) == []
    seen = await _most_seen(database_url)
    for most in (sampled.most, seen):
        assert most[f"job {narrow}"] == 3
        assert {most[f"key {key}"] for key in "abc"} == {2}
        assert most["tenant 1"] <= 9
    for scope, cap in ((f"job {narrow}", 3), ("key a", 2), ("key b", 2), ("key c", 2)):
        used = sampled.used(scope, cap)
        print(f"{scope}: {sampled.samples[scope]} samples, {used:.0%} of its cap used on average")
        assert used >= _USED_MIN
