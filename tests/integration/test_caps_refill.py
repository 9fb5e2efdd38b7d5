"""Places that ends leave under caps are taken again in the commit of the ends, where nobody who
waits for them is passed over, and told of to the others where they are not.
"""

import asyncio
from collections.abc import Collection, Sequence

import asyncpg
import pytest
from fencepost_server.clock import SECOND, to_datetime
from fencepost_server.domain.run import RunState
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.engine.refill import Refills
from fencepost_server.engine.verdicts import Report, Verdict
from fencepost_server.errors import StorageUnavailable

from tests.factories import job_spec
from tests.integration.takers import Taker, make_dispatcher, make_taker, running
from tests.integration.world import World, build


async def _refilling(
    world: World, *queues: str, kind: str | None = None, credits: int = 100
) -> tuple[Dispatcher, Taker, list[int]]:
    """A dispatcher that knows what is ready but whose loop does not run, somebody with credit,
    and the queues that it is told have places."""
    dispatcher = make_dispatcher(world)
    told: list[int] = []
    world.lifecycle.refills = Refills(
        pool=world.database.hot,
        clock=world.database.clock,
        claimer=world.claimer,
        dispatcher=dispatcher,
    )

    def freed(queue_ids: Collection[int]) -> None:
        told.extend(queue_ids)

    world.lifecycle.places_freed.append(freed)
    taker = await make_taker(world, *queues, kind=kind, credits=credits)
    dispatcher.subscribe(taker)
    await dispatcher.scan()
    return dispatcher, taker, told


async def _cap(world: World, table: str = "queues", **columns: int) -> None:
    for column, value in columns.items():
        await world.query(f"UPDATE fencepost.{table} SET {column} = $1", value)  # noqa: S608


async def test_a_place_is_taken_again_when_the_verdict_comes(world: World) -> None:
    await _cap(world, max_in_flight=1)
    _, second, _ = await world.enqueue(await world.add_job(), 3)
    await world.move(SECOND)
    [run] = await world.claim(1, capped=True)
    _, taker, told = await _refilling(world)
    judged = await world.report(run)
    assert (judged.verdict, judged.run_state) == (Verdict.APPLIED, RunState.SUCCEEDED)
    assert [each.key for each in taker.taken] == [second]
    assert taker.taken[0].attempt == 1
    assert told == []
    assert await world.value("SELECT count(*) FROM fencepost.run_queue WHERE attempt_open") == 1


async def test_no_commit_leaves_a_place_empty(database_url: str) -> None:
    async with build(database_url, at=None) as world:
        await _cap(world, max_in_flight=2)
        await world.enqueue(await world.add_job(), 30)
        await world.query("CREATE TABLE public.seen (open int)")
        # At the end of each transaction: what its commit leaves.
        await world.raw.execute(
            """
            CREATE FUNCTION public.look() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                INSERT INTO public.seen
                SELECT count(*) FROM fencepost.run_queue WHERE attempt_open;
                RETURN NULL;
            END $$;
            CREATE CONSTRAINT TRIGGER look AFTER UPDATE ON fencepost.run_queue
                DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.look();
            """
        )
        runs = await world.claim(2, capped=True)
        _, taker, told = await _refilling(world)
        for n in range(28):
            await world.report([*runs, *taker.taken][n])
        assert len(taker.taken) == 28
        seen = await world.query("SELECT DISTINCT open FROM public.seen")
        assert [row["open"] for row in seen] == [2]
        assert told == []


@pytest.mark.parametrize("parts", [False, True])
async def test_places_that_stay_free_are_told_of(world: World, parts: bool) -> None:
    """None is left to take, or, of keys, one had more free places than were asked for."""
    if parts:
        await _cap(world, max_in_flight_per_key=2)
    else:
        await _cap(world, max_in_flight=2)
    await world.enqueue(await world.add_job(), 3, key="a")
    await world.move(SECOND)
    runs = await world.claim(2, capped=True)
    _, taker, told = await _refilling(world, credits=1 if parts else 100)
    await world.lifecycle.report(
        [Report(key=run.key, attempt=run.attempt, ending=None) for run in runs]
    )
    assert len(taker.taken) == 1
    assert told == [await world.queue_id("default")]


async def test_while_somebody_else_claims_the_end_is_stored_and_the_place_is_told_of(
    database_url: str,
) -> None:
    async with build(database_url, day_tables=False) as world:
        await _cap(world, max_in_flight=1)
        await world.enqueue(await world.add_job(), 2)
        await world.move(SECOND)
        [run] = await world.claim(1, capped=True)
        _, taker, told = await _refilling(world)
        transaction = world.raw.transaction()
        await transaction.start()
        queue_id = await world.queue_id("default")
        await world.raw.execute("SELECT fencepost.lock_caps($1)", queue_id)
        async with asyncio.timeout(10):
            judged = await world.report(run)
        assert judged.verdict is Verdict.APPLIED
        assert taker.taken == []
        assert told == [queue_id]
        await transaction.rollback()


async def test_a_kind_that_the_taker_does_not_take_is_not_passed_over(world: World) -> None:
    await _cap(world, max_in_flight=1)
    job = await world.add_job("mine", job_spec(kind="mine"))
    other = await world.add_job("theirs", job_spec(kind="theirs"))
    await world.enqueue(job, 2)
    await world.move(SECOND)
    [run] = await world.claim(1, capped=True)
    await world.enqueue(other, 1)
    await world.move(SECOND)
    _, taker, told = await _refilling(world, kind="mine")
    await world.report(run)
    assert taker.taken == []
    assert told == [await world.queue_id("default")]


@pytest.mark.parametrize("subscribed", [("one",), ("one", "two")])
async def test_another_queue_of_a_capped_tenant_is_not_passed_over(
    world: World, subscribed: Sequence[str]
) -> None:
    for name in ("one", "two"):
        await world.enqueue(await world.add_job(name, job_spec(queue=name)), 2)
    await _cap(world, "tenants", max_in_flight=1)
    await world.move(SECOND)
    [run] = await world.claim(1, queue="one", capped=True)
    _, taker, told = await _refilling(world, *subscribed)
    await world.report(run)
    assert taker.taken == []
    assert told == [await world.queue_id("one")]


@pytest.mark.parametrize("why", ["paused", "draining", "offered"])
async def test_nothing_is_taken_for_who_may_not_have_it(world: World, why: str) -> None:
    await _cap(world, max_in_flight=1)
    await world.enqueue(await world.add_job(), 2)
    await world.move(SECOND)
    [run] = await world.claim(1, capped=True)
    dispatcher, taker, told = await _refilling(world, credits=1)
    dealer, queue_id = dispatcher.dealer, await world.queue_id("default")
    dispatcher.is_draining = why == "draining"
    if why == "paused":
        await world.query("UPDATE fencepost.queues SET paused = true")
    # Its one credit may be on offer in a claim of the dispatcher.
    dealer.order([queue_id])
    slots = dealer.deal(queue_id, [taker], [queue_id])
    with dealer.offered(slots if why == "offered" else []):
        await world.report(run)
    assert taker.taken == []
    assert told == [queue_id]
    assert await world.value("SELECT max(attempt) FROM fencepost.run_queue") == 0


async def test_an_end_that_history_refuses_holds_up_no_other(database_url: str) -> None:
    async with build(database_url, at=None) as world:
        await _cap(world, max_in_flight=2)
        await world.enqueue(await world.add_job(), 3)
        bad, good = await world.claim(2, capped=True)
        await world.raw.execute(
            """
            INSERT INTO fencepost.job_runs
                (job_id, scheduled_at, available_at, created_at, ended_at, tenant_id, queue_id,
                 kind_id, version, attempt, failure_count, lost_lease_count, snooze_count,
                 replay_count, state, origin, priority)
            SELECT job_id, scheduled_at, available_at, created_at, created_at, tenant_id, queue_id,
                   kind_id, version, attempt, 0, 0, 0, 0, 'succeeded', origin, priority
            FROM fencepost.run_queue WHERE scheduled_at = $1
            """,
            to_datetime(bad.key.scheduled_at),
        )
        _, taker, _ = await _refilling(world)
        refused, stored = await world.lifecycle.report(
            [Report(key=run.key, attempt=run.attempt, ending=None) for run in (bad, good)]
        )
        assert refused.verdict is Verdict.ALREADY_APPLIED
        assert stored.verdict is Verdict.APPLIED
        assert len(taker.taken) == 1


@pytest.mark.parametrize("credits", [1, 9])
async def test_other_servers_hear_of_places_that_this_one_leaves(
    world: World, credits: int
) -> None:
    await _cap(world, max_in_flight=2)
    await world.enqueue(await world.add_job(), 6)
    await world.move(SECOND)
    runs = await world.claim(2, capped=True)
    dispatcher = make_dispatcher(world)
    told: list[int] = []

    def tell(tenant_ids: Collection[int]) -> None:
        told.extend(tenant_ids)

    dispatcher.book.tell_freed = tell
    world.lifecycle.places_freed.append(dispatcher.places_freed)
    taker = await make_taker(world, credits=credits)
    dispatcher.subscribe(taker)
    await dispatcher.scan()
    await dispatcher.dispatch()
    for run in runs:
        await world.report(run)
    assert told == []
    await dispatcher.dispatch()
    assert len(taker.taken) == min(credits, 2)
    assert told == ([world.tenant_id] if credits == 1 else [])
    # Without credit there is nothing to wait for.
    taker.credits = 0
    await world.report(taker.taken[0])
    assert told[-1:] == [world.tenant_id]


async def _work_off(
    world: World, taker: Taker, others: int, connection: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    """Completes what a refilling server and `others` without refills claim, until all is done."""

    async def complete_taken() -> None:
        done = 0
        while await connection.fetchval("SELECT EXISTS (SELECT FROM fencepost.run_queue)"):
            runs, done = taker.taken[done:], len(taker.taken)
            await world.lifecycle.report(
                [Report(key=run.key, attempt=run.attempt, ending=None) for run in runs]
            )

    async def claim_too(left: int) -> None:
        while left and (runs := await world.claim(2, capped=True)):
            for run in runs:
                await world.report(run)
            left -= 1

    async with asyncio.timeout(60):
        await asyncio.gather(complete_taken(), *(claim_too(20) for _ in range(others)))


@pytest.mark.parametrize("scope", ["queue_id", "concurrency_key", "job_id"])
async def test_caps_hold_while_some_refill_and_others_claim(database_url: str, scope: str) -> None:
    async with build(database_url, at=None, hot_size=8) as world:
        if scope == "queue_id":
            await _cap(world, max_in_flight=3)
        elif scope == "concurrency_key":
            await _cap(world, max_in_flight_per_key=3)
        job = await world.add_job(spec=job_spec(max_in_flight=3 if scope == "job_id" else None))
        for key in ("a", "b"):
            await world.enqueue(job, 80, key=key, at=world.now)
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
        dispatcher, taker, _ = await _refilling(world, credits=10**6)
        world.lifecycle.places_freed.append(dispatcher.places_freed)
        async with running(dispatcher):
            await _work_off(world, taker, 3, world.raw)
        assert await world.value("SELECT max(open) FROM public.seen") == 3
        assert await world.value("SELECT count(*) FROM fencepost.job_runs") == 160
        assert await world.value("SELECT max(attempt) FROM fencepost.job_runs") == 1


async def test_a_process_that_freezes_before_its_commit_does_not_hold_its_tenant_up_for_long(
    database_url: str,
) -> None:
    async with build(database_url, day_tables=False) as world:
        await _cap(world, max_in_flight=1)
        await world.enqueue(await world.add_job(), 1)
        await world.move(SECOND)
        queue_id = await world.queue_id("default")
        lanes = await world.query("SELECT kind_id, priority FROM fencepost.run_queue")

        async def freeze() -> None:
            async with world.database.hot.transaction() as frozen:
                taken = await world.claimer.claim(
                    queue_id,
                    lanes=[(row["kind_id"], row["priority"]) for row in lanes],
                    worker_ids=[world.worker_id],
                    is_capped=True,
                    connection=frozen,
                    is_refill=True,
                )
                assert len(taken) == 1
                # Has to wait until Postgres ends the session of the frozen process. Any other
                # idle transaction would be left alone for longer than this.
                async with asyncio.timeout(9):
                    await world.raw.execute("SELECT fencepost.lock_caps($1)", queue_id)

        with pytest.raises(StorageUnavailable):
            await freeze()
        assert await world.value("SELECT max(attempt) FROM fencepost.run_queue") == 0
