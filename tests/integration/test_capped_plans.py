"""The plans inside the function that claims under caps, and what people are told of queues."""

import json

import asyncpg
from fencepost_server.clock import HOUR, SECOND, to_datetime
from fencepost_server.policy.outcome import Failed
from fencepost_server.store.database import _HOT_SETTINGS
from fencepost_server.store.queue_stats import QueueStats
from fencepost_server.store.statements import load

from tests.factories import NOON, job_spec, plain_retry
from tests.integration.test_query_plans import Plan, _inlined
from tests.integration.world import World, build

_EXPLAIN = """
    LOAD 'auto_explain';
    SET auto_explain.log_min_duration = 0;
    SET auto_explain.log_nested_statements = on;
    SET auto_explain.log_format = 'json';
    SET auto_explain.log_level = 'notice';
"""


async def test_claims_under_caps_read_open_attempts_and_heads_of_lanes_only(
    database_url: str,
) -> None:
    """Behind a long head of a full key, which takes all the looks that there are."""
    async with build(database_url, day_tables=False) as world:
        job = await world.add_job()
        await world.query(
            "UPDATE fencepost.queues SET max_in_flight_per_key = 1, max_in_flight = 1000, "
            "rate_limit = 1000"
        )
        await world.enqueue(job, 3000, key="full")
        assert len(await world.claim(1, capped=True)) == 1
        await world.move(SECOND)
        await world.enqueue(job, 3)
        await world.move(SECOND)
        await world.raw.execute("ANALYZE fencepost.run_queue")
        connection = await asyncpg.connect(
            database_url, server_settings=_HOT_SETTINGS | {"timezone": "UTC"}
        )
        try:
            said: list[str] = []
            await connection.execute(_EXPLAIN)
            connection.add_log_listener(lambda _, told: said.append(told.message))
            statement = load("claims")["claim_capped_runs"]
            values = {
                "queue_id": await world.queue_id("default"),
                "kind_ids": [await world.value("SELECT kind_id FROM fencepost.kinds")],
                "priorities": [0],
                "worker_ids": [world.worker_id] * 4,
                "runs_max": 4,
                "ageing_s": 60,
                "now": to_datetime(world.now).isoformat(),
            }
            assert len(await connection.fetch(_inlined(statement, values))) == 3
        finally:
            await connection.close()
    plans = [Plan(json.loads(text[text.index("{") :])["Plan"]) for text in said if "{" in text]
    inside = [plan for plan in plans if "run_queue" in plan.tables]
    assert len(inside) >= 5
    for plan in inside:
        assert "run_queue" not in plan.scanned_whole
    used = set().union(*(plan.indexes for plan in inside))
    assert {"run_queue_ready", "run_queue_open", "run_queue_capped"} <= used
    [claiming] = [plan for plan in inside if "run_attempts" in str(plan.tables)]
    assert "Tid Scan" in claiming.kinds


async def test_a_queue_says_what_it_holds(world: World) -> None:
    job = await world.add_job(spec=job_spec(retry=plain_retry(base=HOUR)))
    once = await world.add_job("once", job_spec(retry=plain_retry(max_failures=1)))
    elsewhere = await world.add_job("elsewhere", job_spec(queue="other"))
    await world.enqueue(once)
    [run] = await world.claim()
    await world.report(run, Failed(code="BOOM", reported=True))
    await world.enqueue(job, 4, priority=3)
    _, back, _, _ = await world.claim(4)
    await world.report(back, Failed(code="BOOM", reported=True))
    await world.enqueue(job, 2, at=NOON + HOUR)
    await world.enqueue(elsewhere, 5)
    ready = await world.enqueue(job, 3, at=NOON + SECOND, priority=1)
    await world.query(
        "UPDATE fencepost.run_queue SET state = 'blocked' WHERE scheduled_at = $1",
        to_datetime(ready[0].scheduled_at),
    )
    await world.move(31 * SECOND)
    queue_id, other_id = await world.queue_id("default"), await world.queue_id("other")
    stats = QueueStats(world.database.requests)
    found = await stats.get([queue_id, other_id], now=world.now)
    numbers = found[queue_id]
    assert (numbers.ready, numbers.delayed, numbers.retrying) == (2, 2, 1)
    assert (numbers.blocked, numbers.running, numbers.dead) == (1, 3, 1)
    assert numbers.oldest_at == NOON + SECOND
    assert numbers.measured_at == world.now
    assert (found[other_id].ready, found[other_id].running) == (5, 0)
    await world.enqueue(job)
    again = await stats.get([queue_id], now=world.now)
    assert again[queue_id] == numbers
    await world.move(5 * SECOND)
    assert (await stats.get([queue_id], now=world.now))[queue_id].ready == 3
