"""Tenants that share workers: each gets its part, whatever another has piled up."""

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from fencepost.v1 import job_pb2, run_service_pb2, worker_pb2
from fencepost_server.clock import to_datetime
from fencepost_server.engine.dealing import Subscription

from tests.integration.run_server import WORKER, serving
from tests.integration.takers import Taker, make_dispatcher
from tests.integration.world import World

_TENANTS = 50
_SMALL, _LARGE = 40, 5_000


def jain(counts: Iterable[int]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything."""
    values = list(counts)
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


async def _tenants_with_work(
    world: World, runs: Mapping[str, int], weights: Mapping[str, int] | None = None
) -> dict[int, str]:
    """Tenants with a queue and so many queued runs each; their names by queue_id."""
    job = await world.add_job()
    names: dict[int, str] = {}
    for name, count in runs.items():
        tenant_id = await world.value(
            "INSERT INTO fencepost.tenants (name, weight, created_at, updated_at) "
            "VALUES ($1, $2, $3, $3) RETURNING tenant_id",
            name,
            (weights or {}).get(name, 1),
            to_datetime(world.now),
        )
        queue_id = await world.value(
            "INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at) "
            "VALUES ($1, 'default', $2, $2) RETURNING queue_id",
            tenant_id,
            to_datetime(world.now),
        )
        names[queue_id] = name
        await world.query(
            """
            INSERT INTO fencepost.run_queue
                (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id,
                 version, state, origin, priority, lease_s, cancel_grace_s, attempt_timeout_s)
            SELECT s.job_id, $2::timestamptz + ($3::int * 10000 + n) * interval '1 us', $2, $2, $4,
                   $3, s.kind_id, s.version, 'queued', 'enqueue', 0, 30, 30, 3600
            FROM fencepost.job_schedules AS s, generate_series(1, $5::int) AS n
            WHERE s.job_id = $1::uuid
            """,
            job,
            to_datetime(world.now),
            queue_id,
            tenant_id,
            count,
        )
    return names


def _shared_worker(queue_ids: Iterable[int]) -> Taker:
    return Taker(
        subscriptions={each: Subscription(queue_id=each, kind_ids=None) for each in queue_ids},
        credits=0,
    )


@pytest.mark.parametrize(("servers", "credit"), [(1, 1), (1, 7), (1, 200), (3, 7)])
async def test_a_tenant_with_a_flood_gets_no_more_than_the_others(
    world: World, servers: int, credit: int
) -> None:
    runs = {f"tenant-{n}": _SMALL for n in range(1, _TENANTS)} | {"flood": _LARGE}
    names = await _tenants_with_work(world, runs)
    dispatchers = [make_dispatcher(world) for _ in range(servers)]
    workers = [_shared_worker(names) for _ in dispatchers]
    for dispatcher, worker in zip(dispatchers, workers, strict=True):
        dispatcher.subscribe(worker)
        await dispatcher.scan()
    # While every tenant still has work: what is handed out is a part of what each has.
    contended = _TENANTS * (4 if credit == 1 else 20)
    while sum(len(worker.taken) for worker in workers) < contended:
        for dispatcher, worker in zip(dispatchers, workers, strict=True):
            worker.credits = credit
            assert await dispatcher.dispatch() == credit
    got = Counter(names[run.queue_id] for worker in workers for run in worker.taken)
    assert jain(got[name] for name in runs) >= 0.95
    assert max(got.values()) - min(got[name] for name in runs) <= 2 * servers


async def test_a_tenant_of_twice_the_weight_gets_twice_as_much(world: World) -> None:
    runs = dict.fromkeys(("one", "two", "five"), 1000)
    names = await _tenants_with_work(world, runs, {"two": 2, "five": 5})
    dispatcher, worker = make_dispatcher(world), _shared_worker(names)
    dispatcher.subscribe(worker)
    await dispatcher.scan()
    for _ in range(100):
        worker.credits = 4
        await dispatcher.dispatch()
    got = Counter(names[run.queue_id] for run in worker.taken)
    assert sum(got.values()) == 400
    assert abs(got["one"] - 50) <= 4
    assert abs(got["two"] - 100) <= 4
    assert abs(got["five"] - 250) <= 4


async def test_what_a_tenant_leaves_unused_goes_to_the_others(world: World) -> None:
    names = await _tenants_with_work(world, {"little": 3, "much": 500})
    dispatcher, worker = make_dispatcher(world), _shared_worker(names)
    dispatcher.subscribe(worker)
    await dispatcher.scan()
    worker.credits = 100
    while worker.credits:
        assert await dispatcher.dispatch() > 0
    got = Counter(names[run.queue_id] for run in worker.taken)
    assert got == {"little": 3, "much": 97}


async def test_a_tenant_that_is_full_does_not_hold_up_the_turn_of_others(world: World) -> None:
    names = await _tenants_with_work(world, {"full": 50, "free": 50})
    await world.query("UPDATE fencepost.tenants SET max_in_flight = 2 WHERE name = 'full'")
    dispatcher, worker = make_dispatcher(world), _shared_worker(names)
    dispatcher.subscribe(worker)
    await dispatcher.scan()
    for _ in range(40):
        worker.credits = 1
        assert await dispatcher.dispatch() == 1
    got = Counter(names[run.queue_id] for run in worker.taken)
    assert got == {"full": 2, "free": 38}


async def test_long_polls_deal_over_the_queues_they_name(database_url: str) -> None:
    async with serving(database_url) as server:
        for name, count in (("flood", 60), ("a", 12), ("b", 12)):
            await server.query(
                "INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at) "
                "VALUES (1, $1, now(), now())",
                name,
            )
            target = job_pb2.Target(kind="mail.send", queue=f"tenants/default/queues/{name}")
            await server.make_job(name, target=target)
            for _ in range(count):
                await server.enqueue(name)
        request = run_service_pb2.ClaimRunsRequest(
            subscriptions=[
                worker_pb2.QueueSubscription(queue=f"tenants/default/queues/{name}")
                for name in ("flood", "a", "b")
            ],
            worker_id=WORKER,
            max_runs=4,
        )
        got: Counter[str] = Counter()
        for _ in range(9):
            answer = await server.runs.ClaimRuns(request)
            assert len(answer.runs) == 4
            got.update(run.job.rpartition("/")[2] for run in answer.runs)
        assert got == {"flood": 12, "a": 12, "b": 12}
        # One queue per call with a request id, and the turns count all the same.
        for n in range(3):
            request.request_id = f"claim-{n}"
            answer = await server.runs.ClaimRuns(request)
            assert {run.job.rpartition("/")[2] for run in answer.runs} == {"flood"}
