"""Claims: in which order, never twice, and never more at once than the caps allow."""

import asyncio
import random
from typing import Any

import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND, to_datetime
from fencepost_server.engine.claims import AGEING_S
from fencepost_server.policy.outcome import Released

from tests.factories import NOON, job_spec
from tests.integration.world import World, build


async def test_the_oldest_runs_are_claimed_first(world: World) -> None:
    job = await world.add_job()
    for seconds in (30, 10, 20):
        await world.enqueue(job, at=NOON + seconds * SECOND)
    await world.move(MINUTE)
    claimed = await world.claim(2) + await world.claim(2)
    ages = [(run.key.scheduled_at - NOON) // SECOND for run in claimed]
    assert ages == [10, 20, 30]


async def test_nothing_is_claimed_before_it_is_available(world: World) -> None:
    job = await world.add_job()
    await world.enqueue(job, at=NOON + 10 * SECOND)
    await world.move(10 * SECOND - 1)
    assert await world.claim() == []
    await world.move(1)
    assert len(await world.claim()) == 1


@pytest.mark.parametrize("capped", [False, True])
async def test_priority_goes_first_until_the_others_have_waited_long_enough(
    world: World, capped: bool
) -> None:
    job = await world.add_job()
    [low] = await world.enqueue(job, priority=0)
    await world.move((2 * AGEING_S - 1) * SECOND)
    [urgent] = await world.enqueue(job, priority=2)
    await world.move(2 * SECOND)
    [late] = await world.enqueue(job, priority=2)
    order = [run.key for run in await world.claim(3, capped=capped)]
    assert order == [urgent, low, late]


@pytest.mark.parametrize("capped", [False, True])
async def test_concurrent_claimers_never_get_the_same_run(database_url: str, capped: bool) -> None:
    async with build(database_url, day_tables=False, hot_size=8) as world:
        job = await world.add_job(spec=job_spec(max_in_flight=10_000 if capped else None))
        await world.enqueue(job, 600)
        claims = await asyncio.gather(*(world.claim(20, capped=capped) for _ in range(40)))
        claimed = [run for claim in claims for run in claim]
        # Claimers skip what others have locked; what was skipped is taken by the next.
        while more := await world.claim(100, capped=capped):
            claimed += more
        assert len({run.key for run in claimed}) == len(claimed) == 600
        assert {run.attempt for run in claimed} == {1}


async def test_each_run_goes_to_the_worker_of_its_place(world: World) -> None:
    job = await world.add_job()
    await world.enqueue(job, 3)
    kind = await world.value("SELECT kind_id FROM fencepost.run_queue LIMIT 1")
    workers = [f"00000000-0000-0000-0000-00000000000{i}" for i in range(3)]
    runs = await world.claimer.claim(
        await world.queue_id("default"), lanes={(kind, 0)}, worker_ids=workers, is_capped=False
    )
    assert [run.place for run in runs] == [1, 2, 3]
    assert [str((await world.live(run.key))["worker_id"]) for run in runs] == workers


@pytest.mark.parametrize("capped", [False, True])
async def test_a_claim_closes_the_lost_attempt_before_it(world: World, capped: bool) -> None:
    await world.enqueue(await world.add_job())
    [run] = await world.claim()
    await world.pass_time(31 * SECOND)
    await world.reaper.reap()
    assert await world.attempts_of(run.key) == []
    await world.pass_time(2 * SECOND)
    [again] = await world.claim(capped=capped)
    assert again.attempt == 2
    assert await world.attempts_of(run.key) == [(1, "lease_expired", False)]
    assert (await world.live(run.key))["lost_lease_count"] == 1


async def _set(world: World, table: str, **columns: Any) -> None:
    for column, value in columns.items():
        await world.query(f"UPDATE fencepost.{table} SET {column} = $1", value)  # noqa: S608


async def _most_open(world: World, scope: str, expected: int) -> int:
    """The most open attempts in one `scope` that any commit left, while many claimers work.

    A trigger counts after each claim with what it can see under the claim's own lock.
    """
    await world.raw.execute(
        f"""
        CREATE TABLE public.seen (open int);
        CREATE FUNCTION public.look() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO public.seen
            SELECT max(n) FROM (SELECT count(*) AS n FROM fencepost.run_queue
                                WHERE attempt_open GROUP BY {scope}) x;
            RETURN NULL;
        END $$;
        CREATE TRIGGER look AFTER UPDATE ON fencepost.run_queue
            FOR EACH STATEMENT EXECUTE FUNCTION public.look();
        """  # noqa: S608
    )
    claimed = 0

    async def worker() -> None:
        nonlocal claimed
        while claimed < expected:
            runs = await world.claim(random.randint(1, 9), capped=True)
            claimed += len(runs)
            for run in runs:
                await world.report(run)

    async with asyncio.timeout(60):
        await asyncio.gather(*(worker() for _ in range(6)))
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 0
    most: int = await world.value("SELECT max(open) FROM public.seen")
    return most


async def test_the_cap_of_a_queue_holds_under_concurrent_claimers(database_url: str) -> None:
    async with build(database_url, hot_size=8) as world:
        await world.enqueue(await world.add_job(), 120)
        await _set(world, "queues", max_in_flight=5)
        assert await _most_open(world, "queue_id", 120) == 5


async def test_the_cap_of_a_tenant_holds_over_its_queues(world: World) -> None:
    for name in ("one", "two"):
        await world.enqueue(await world.add_job(name, job_spec(queue=name)), 10)
    await _set(world, "tenants", max_in_flight=6)
    claims = await asyncio.gather(
        *(world.claim(4, queue=queue, capped=True) for queue in ("one", "two") * 3)
    )
    assert sum(len(claim) for claim in claims) == 6


async def test_the_cap_of_a_job_holds_and_leaves_room_for_others(database_url: str) -> None:
    async with build(database_url, hot_size=8) as world:
        await world.enqueue(await world.add_job("narrow", job_spec(max_in_flight=2)), 40)
        await world.enqueue(await world.add_job("narrower", job_spec(max_in_flight=1)), 10)
        # One claim looks at a bounded number of rows; the next leaves out jobs that are full.
        claimed = await world.claim(10, capped=True) + await world.claim(10, capped=True)
        assert len(claimed) == 3
        for run in claimed:
            await world.report(run)
        assert await _most_open(world, "job_id", 47) == 2


async def test_the_cap_of_a_concurrency_key_holds_over_jobs(world: World) -> None:
    first, second = await world.add_jobs(["one", "two"], job_spec())
    await _set(world, "queues", max_in_flight_per_key=2)
    await world.enqueue(first, 5, key="customer-7")
    await world.enqueue(second, 5, key="customer-7")
    await world.enqueue(second, 5, at=NOON - HOUR, key="customer-8")
    claims = await asyncio.gather(*(world.claim(5, capped=True) for _ in range(6)))
    keys = sorted([(await world.live(run.key))["concurrency_key"] for c in claims for run in c])
    assert keys == ["customer-7"] * 2 + ["customer-8"] * 2


async def test_a_lost_attempt_keeps_its_place_under_a_cap(world: World) -> None:
    job = await world.add_job()
    await _set(world, "queues", max_in_flight=1)
    await world.enqueue(job, 2)
    [run] = await world.claim(5, capped=True)
    await world.pass_time(31 * SECOND)
    await world.reaper.reap()
    await world.pass_time(2 * SECOND)
    # The attempt may still report, so nothing else may take its place; but it may be claimed.
    [again] = await world.claim(5, capped=True)
    assert (again.key, again.attempt) == (run.key, 2)
    await world.report(again, Released())
    assert len(await world.claim(5, capped=True)) == 1


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("queues", "max_in_flight"),
        ("queues", "max_in_flight_per_key"),
        ("tenants", "max_in_flight"),
    ],
)
async def test_a_claimer_that_has_not_heard_of_a_cap_gets_nothing(
    world: World, table: str, column: str
) -> None:
    await world.enqueue(await world.add_job(), 5)
    await _set(world, table, **{column: 1})
    assert await world.claim(5, capped=False) == []
    assert len(await world.claim(5, capped=True)) == (5 if column.endswith("per_key") else 1)


async def test_a_claimer_that_has_not_heard_of_the_first_capped_job_gets_nothing(
    world: World,
) -> None:
    await world.enqueue(await world.add_job(spec=job_spec(max_in_flight=1)), 5)
    assert await world.claim(5, capped=False) == []
    assert len(await world.claim(5, capped=True)) == 1


@pytest.mark.parametrize("capped", [False, True])
async def test_a_paused_queue_gives_nothing_from_the_commit_of_the_pause(
    world: World, capped: bool
) -> None:
    await world.enqueue(await world.add_job(), 5)
    await _set(world, "queues", paused=True)
    assert await world.claim(5, capped=capped) == []
    await _set(world, "queues", paused=False)
    assert len(await world.claim(5, capped=capped)) == 5


async def test_a_named_run_is_leased_once_and_only_when_it_is_due(world: World) -> None:
    job = await world.add_job()
    [key] = await world.enqueue(job, at=NOON + SECOND)
    async with world.database.requests.transaction() as connection:
        assert await world.claimer.lease(connection, key, worker_id=world.worker_id) is None
    await world.move(2 * SECOND)
    async with world.database.requests.transaction() as connection:
        run = await world.claimer.lease(connection, key, worker_id=world.worker_id)
        assert run is not None
        assert (run.key, run.attempt) == (key, 1)
        assert run.lease_until == world.now + 30 * SECOND
        assert await world.claimer.lease(connection, key, worker_id=world.worker_id) is None


async def test_a_claim_with_a_bound_leaves_older_runs_alone(world: World) -> None:
    job = await world.add_job()
    old, new = await world.enqueue(job, 2)
    await world.query(
        "UPDATE fencepost.run_queue SET available_at = $2 WHERE scheduled_at = $1",
        to_datetime(old.scheduled_at),
        to_datetime(NOON - HOUR),
    )
    kind = await world.value("SELECT kind_id FROM fencepost.run_queue LIMIT 1")
    runs = await world.claimer.claim(
        await world.queue_id("default"),
        lanes={(kind, 0)},
        worker_ids=[world.worker_id] * 5,
        is_capped=False,
        after=NOON - MINUTE,
    )
    assert [run.key for run in runs] == [new]
