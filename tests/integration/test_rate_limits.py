"""Rates of queues: never more claims than the bucket gives, hardly fewer, whoever claims."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from fencepost.v1 import run_service_pb2
from fencepost_server.clock import HOUR, MILLISECOND, MINUTE, SECOND, Duration
from fencepost_server.store.admin import AdminStore, QueueRecord, QueueSettings

from tests.factories import NOON, job_spec
from tests.integration.run_server import serving
from tests.integration.takers import make_dispatcher, make_taker, running
from tests.integration.test_unary_claims import lease, set_queue
from tests.integration.world import World, build


async def _set_rate(world: World, rate: float | None, queue: str = "default") -> None:
    await world.query(
        "UPDATE fencepost.queues SET rate_limit = $1 WHERE queue_id = $2",
        rate,
        await world.queue_id(queue),
    )


async def _claims_over_time(
    world: World, *, step: Duration, steps: int, claimers: int, wanted: int
) -> list[int]:
    """How many runs all claimers together got at each step; the first step takes no time."""
    got: list[int] = []
    for i in range(steps + 1):
        if i:
            await world.move(step)
        claims = await asyncio.gather(*(world.claim(wanted, capped=True) for _ in range(claimers)))
        got.append(sum(map(len, claims)))
    return got


def _most_in_any_window(got: Sequence[int], step: Duration, rate: float) -> float:
    """By how much the claims of the worst window go over rate * time."""
    worst = 0.0
    # The sum that ends here and is highest above the rate, as in Kadane's algorithm.
    ending = 0.0
    for count in got:
        ending = max(ending - rate * step / SECOND, 0.0) + count
        worst = max(worst, ending)
    return worst


@pytest.mark.parametrize(
    ("rate", "step", "steps"),
    [
        (0.1, SECOND, 120),
        (1 / 3, 600 * MILLISECOND, 120),
        (2.5, 130 * MILLISECOND, 120),
        (40.0, 37 * MILLISECOND, 60),
        (1.0, 20 * SECOND, 5),
    ],
)
async def test_a_rate_is_neither_exceeded_nor_left_unused(
    database_url: str, rate: float, step: Duration, steps: int
) -> None:
    async with build(database_url, day_tables=False, hot_size=4) as world:
        await world.enqueue(await world.add_job(), 400)
        await _set_rate(world, rate)
        got = await _claims_over_time(world, step=step, steps=steps, claimers=3, wanted=5)
        burst = max(1.0, rate)
        assert _most_in_any_window(got, step, rate) <= burst + 1e-6
        # What the bucket could not hold while nobody asked is lost by right.
        givable = int(burst) + sum(min(rate * step / SECOND, burst) for _ in range(steps))
        assert sum(got) >= 0.9 * givable - 1


async def test_only_what_was_claimed_uses_tokens(world: World) -> None:
    job = await world.add_job()
    await _set_rate(world, 10)
    await world.enqueue(job, 3)
    assert len(await world.claim(10, capped=True)) == 3
    assert await world.claim(10, capped=True) == []
    await world.enqueue(job, 30, at=NOON - MINUTE)
    assert len(await world.claim(30, capped=True)) == 7


async def test_the_rate_of_one_queue_leaves_others_alone(world: World) -> None:
    for queue in ("slow", "free"):
        await world.enqueue(await world.add_job(queue, job_spec(queue=queue)), 5)
    await _set_rate(world, 1, "slow")
    assert len(await world.claim(5, queue="slow", capped=True)) == 1
    assert len(await world.claim(5, queue="free")) == 5


async def test_a_claimer_that_has_not_heard_of_a_rate_gets_nothing(world: World) -> None:
    await world.enqueue(await world.add_job(), 5)
    await _set_rate(world, 2)
    assert await world.claim(5, capped=False) == []
    assert len(await world.claim(5, capped=True)) == 2


async def test_claiming_a_lost_attempt_again_is_a_claim_too(world: World) -> None:
    await world.enqueue(await world.add_job())
    await _set_rate(world, 0.01)
    [run] = await world.claim(2, capped=True)
    await world.lose_lease()
    assert await world.claim(2, capped=True) == []
    await world.move(70 * SECOND)
    [again] = await world.claim(2, capped=True)
    assert (again.key, again.attempt) == (run.key, 2)


async def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing(world: World) -> None:
    await world.enqueue(await world.add_job(), 40)
    await world.move(HOUR)
    await _set_rate(world, 5)
    assert len(await world.claim(3, capped=True)) == 3
    await world.move(-10 * MINUTE)
    assert len(await world.claim(9, capped=True)) == 2
    await world.move(SECOND)
    assert len(await world.claim(9, capped=True)) == 5


def _with_rate(rate: float | None) -> Callable[[QueueRecord], QueueSettings]:
    def change(stored: QueueRecord) -> QueueSettings:
        kept = stored.settings
        return QueueSettings(
            labels=kept.labels,
            paused=kept.paused,
            pause_reason=kept.pause_reason,
            max_in_flight=kept.max_in_flight,
            max_in_flight_per_key=kept.max_in_flight_per_key,
            rate_limit=rate,
        )

    return change


async def test_a_higher_rate_does_not_work_back_into_the_past(world: World) -> None:
    await world.enqueue(await world.add_job(), 300)
    store = AdminStore(database=world.database)
    await store.update_queue(world.tenant_id, "default", _with_rate(1), now=world.now)
    assert len(await world.claim(100, capped=True)) == 1
    await world.move(SECOND // 2)
    await store.update_queue(world.tenant_id, "default", _with_rate(100), now=world.now)
    # Half a token so far, and from here on one each 10 ms.
    assert await world.claim(100, capped=True) == []
    await world.move(105 * MILLISECOND)
    assert len(await world.claim(100, capped=True)) == 11
    await store.update_queue(world.tenant_id, "default", _with_rate(2), now=world.now)
    await world.move(HOUR)
    assert len(await world.claim(100, capped=True)) == 2
    await store.update_queue(world.tenant_id, "default", _with_rate(None), now=world.now)
    assert len(await world.claim(100)) == 100


async def test_the_dispatcher_waits_for_tokens_and_not_for_the_next_look(
    database_url: str,
) -> None:
    async with build(database_url, at=None, day_tables=False) as world:
        await world.enqueue(await world.add_job(), 90)
        await _set_rate(world, 60)
        # Its looks are an hour apart: only tokens can bring it more than the first burst.
        dispatcher = make_dispatcher(world, poll=HOUR)
        taker = await make_taker(world)
        dispatcher.subscribe(taker)
        async with running(dispatcher):
            await taker.until(90)
        assert len({run.key for run in taker.taken}) == 90


async def test_a_throttled_poll_waits_for_its_token_or_says_when_to_come_again(
    database_url: str,
) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        runs = [await server.enqueue("mail") for _ in range(5)]
        await set_queue(server, "rate_limit = 0.001")
        assert len((await server.claim(max_runs=5)).runs) == 1
        throttled = await server.claim(wait_s=20)
        assert not throttled.runs
        assert throttled.retry_after.ToMicroseconds() > 0
        limited = await lease(server, runs[4])
        assert limited.refusal == run_service_pb2.LEASE_REFUSAL_LIMITED
        assert 0 < limited.retry_after.seconds <= 1000
        await set_queue(server, "rate_limit = 3")
        # The bucket fills within the poll, and the poll waits for it.
        assert (await server.claim(wait_s=20)).runs


async def test_a_named_run_takes_a_token_and_gives_it_back_if_it_is_not_leased(
    database_url: str,
) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        runs = [await server.enqueue("mail") for _ in range(4)]
        await set_queue(server, "rate_limit = 0.001, max_in_flight = 1")
        taken = await lease(server, runs[0])
        assert taken.assignment.attempt == 1
        left = await server.query("SELECT tokens FROM fencepost.queue_limits")
        assert left[0]["tokens"] < 1
        await server.query("UPDATE fencepost.queue_limits SET tokens = 1 RETURNING 1")
        refused = await lease(server, runs[1])
        assert refused.refusal == run_service_pb2.LEASE_REFUSAL_LIMITED
        left = await server.query("SELECT tokens FROM fencepost.queue_limits")
        assert left[0]["tokens"] == 1
