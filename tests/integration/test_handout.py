"""A run goes to a waiting worker in the commit of its enqueue, or it is queued like any other."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import asyncpg
import pytest
from fencepost.v1 import run_pb2, run_service_pb2
from fencepost_server.clock import MILLISECOND, SECOND
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine.dispatcher import Dispatcher
from fencepost_server.engine.enqueue import (
    Enqueued,
    EnqueueEntry,
    Enqueues,
    UniqueConflict,
    UniqueKey,
)
from fencepost_server.engine.handout import UNDER_WAY_MAX, HandOuts
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.single_enqueue import Answers, SingleEnqueues
from fencepost_server.errors import JobNotFound, UniqueKeyHeld
from fencepost_server.store.requests import RequestKey

from tests.factories import job_spec
from tests.integration.running_server import RunningServer, key_of, running, success, until
from tests.integration.takers import Taker, drain, make_dispatcher, make_taker
from tests.integration.world import World


@dataclass(kw_only=True)
class Desk:
    """EnqueueRun of one server whose dispatcher moves only when it is told to."""

    world: World
    dispatcher: Dispatcher
    singles: SingleEnqueues
    answers: dict[bytes, Enqueued]

    async def enqueue(self, job: str = "report", **values: Any) -> Enqueued:
        """A millisecond after whatever came before."""
        await self.world.move(MILLISECOND)
        return await self.enqueue_now(job, **values)

    async def enqueue_now(self, job: str = "report", **values: Any) -> Enqueued:
        entry = EnqueueEntry(job=JobName(tenant="default", job=job), **values)
        origin = Origin(tenant="default", now=self.world.now)
        return self.answers[await self.singles.enqueue(origin, entry)]


async def make_desk(world: World, *takers: Taker, job: str = "report") -> Desk:
    """A desk that knows the job already, as after its first enqueue, and whose queue is empty."""
    dispatcher = make_dispatcher(world)
    answers: dict[bytes, Enqueued] = {}

    def encode(made: Enqueued) -> bytes:
        answer = uuid.uuid4().bytes
        answers[answer] = made
        return answer

    def remember(tenant: str, key: RunKey) -> bytes:
        return f"{key.job_id} {key.scheduled_at}".encode()

    def recall(note: bytes) -> tuple[RunKey, bool]:
        job_id, at = note.decode().split()
        return RunKey(job_id, int(at)), False

    desk = Desk(
        world=world,
        dispatcher=dispatcher,
        answers=answers,
        singles=SingleEnqueues(
            database=world.database,
            catalogue=world.catalogue,
            specs=world.specs,
            wake=world.woken,
            handouts=HandOuts(dispatcher=dispatcher, claimer=world.claimer),
            enqueues=Enqueues(
                database=world.database,
                catalogue=world.catalogue,
                specs=world.specs,
                wake=world.woken,
            ),
            answers=Answers(encode=encode, remember=remember, recall=recall),
        ),
    )
    await desk.enqueue(job)
    await world.query("DELETE FROM fencepost.run_queue")
    for taker in takers:
        dispatcher.subscribe(taker)
    await dispatcher.dispatch()
    return desk


async def enqueue_one(server: RunningServer) -> run_pb2.Run:
    """EnqueueRun of the job "mail"."""
    answer = await server.runs.EnqueueRun(
        run_service_pb2.EnqueueRunRequest(job="tenants/default/jobs/mail")
    )
    run: run_pb2.Run = answer.run
    return run


@asynccontextmanager
async def job_locked(world: World, job_id: str) -> AsyncIterator[asyncpg.Connection]:
    """Enqueues of the job wait until this ends; what the connection did is committed then."""
    holder = await asyncpg.connect(world.dsn)
    try:
        async with holder.transaction():
            await holder.execute("SELECT fencepost.lock_out_enqueues($1)", job_id)
            yield holder
    finally:
        await holder.close()


async def waits(world: World) -> None:
    """Until an enqueue waits for the lock of its job."""

    async def is_so() -> bool:
        return bool(
            await world.value(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' "
                "AND datname = current_database()"
            )
        )

    await until(is_so, what="an enqueue waits")


async def test_a_run_is_running_from_its_first_moment(world: World) -> None:
    await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    made = await desk.enqueue(payload=b"\x0a\x012")
    row = await world.live(made.key)
    assert (row["state"], row["attempt"], row["attempt_open"]) == ("running", 1, True)
    assert str(row["worker_id"]) == taker.worker_id
    assert row["claimed_at"] == row["first_claimed_at"] == row["created_at"]
    assert (row["lease_until"] - row["claimed_at"]).total_seconds() == 30
    [run] = taker.taken
    assert (run.key, run.attempt, run.payload) == (made.key, 1, b"\x0a\x012")
    assert run.lease_until == world.now + 30 * SECOND
    record = made.record
    assert record is not None
    assert (record.state, record.attempt, record.worker_id) == (
        RunState.RUNNING,
        1,
        taker.worker_id,
    )
    assert record.lease_until == run.lease_until
    assert (await world.report(run)).run_state == RunState.SUCCEEDED


async def test_what_the_job_says_goes_along(world: World) -> None:
    await world.add_job(spec=replace(job_spec(priority=4), labels={"team": "a", "site": "x"}))
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    made = await desk.enqueue(labels={"site": "y"}, concurrency_key="k")
    assert made.record is not None
    assert dict(made.record.labels) == {"team": "a", "site": "y"}
    assert (made.record.priority, made.record.concurrency_key) == (4, "k")
    [run] = taker.taken
    assert run.labels == {"team": "a", "site": "y"}
    other = await desk.enqueue(priority=9)
    assert [each.key for each in taker.taken] == [made.key, other.key]
    assert (await world.live(other.key))["priority"] == 9


async def test_who_watches_runs_is_told_once(world: World) -> None:
    await world.add_job()
    desk = await make_desk(world, await make_taker(world))
    await world.query("UPDATE fencepost.shard_state SET watched_until = 'infinity'")
    made = await desk.enqueue()
    rows = await world.query("SELECT job_ids, scheduled_ats FROM fencepost.run_changes")
    assert [[str(each) for each in row["job_ids"]] for row in rows] == [[made.key.job_id]]


_UNKNOWN = {
    "paused": "UPDATE fencepost.queues SET paused = true",
    "capped queue": "UPDATE fencepost.queues SET max_in_flight = 10",
    "capped keys": "UPDATE fencepost.queues SET max_in_flight_per_key = 10",
    "rate": "UPDATE fencepost.queues SET rate_limit = 1000",
    "capped tenant": "UPDATE fencepost.tenants SET max_in_flight = 10",
    "capped jobs": "UPDATE fencepost.queues SET has_capped_jobs = true",
    "other lane": "UPDATE fencepost.job_schedules SET priority = 7",
}


@pytest.mark.parametrize("why", _UNKNOWN)
async def test_the_statement_sees_what_the_process_does_not_know_yet(
    world: World, why: str
) -> None:
    await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    await world.query(_UNKNOWN[why])
    made = await desk.enqueue()
    assert made.record is not None
    assert (made.record.state, made.record.attempt) == (RunState.QUEUED, 0)
    row = await world.live(made.key)
    assert (row["state"], row["attempt"], row["worker_id"]) == ("queued", 0, None)
    assert taker.taken == []


@pytest.mark.parametrize("is_known", [True, False])
async def test_whoever_waits_already_goes_first(world: World, is_known: bool) -> None:
    job_id = await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    [older] = await world.enqueue(job_id)
    if is_known:
        await desk.dispatcher.scan()
    made = await desk.enqueue()
    assert (await world.live(made.key))["state"] == "queued"
    assert taker.taken == []
    assert await drain(desk.dispatcher) == 2
    assert [run.key for run in taker.taken] == [older, made.key]


async def test_a_run_of_another_lane_that_the_worker_takes_goes_first(world: World) -> None:
    await world.add_job()
    other = await world.add_job("other", job_spec(kind="other"))
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    await world.enqueue(other)
    await desk.dispatcher.scan()
    made = await desk.enqueue()
    assert (await world.live(made.key))["state"] == "queued"


async def test_a_run_that_the_worker_does_not_take_holds_nothing_up(world: World) -> None:
    await world.add_job(spec=job_spec(kind="a"))
    other = await world.add_job("other", job_spec(kind="other"))
    taker = await make_taker(world, kind="a")
    desk = await make_desk(world, taker)
    await world.enqueue(other)
    await desk.dispatcher.scan()
    made = await desk.enqueue()
    assert [run.key for run in taker.taken] == [made.key]


def _no_credit(desk: Desk, taker: Taker) -> None:
    taker.credits = 0


def _gone(desk: Desk, taker: Taker) -> None:
    desk.dispatcher.unsubscribe(taker)


def _draining(desk: Desk, taker: Taker) -> None:
    desk.dispatcher.is_draining = True


def _polled(desk: Desk, taker: Taker) -> None:
    desk.dispatcher.watch(taker.subscriptions, asyncio.Event())


@pytest.mark.parametrize("how", [_no_credit, _gone, _draining, _polled])
async def test_nobody_to_hand_it_to(world: World, how: Callable[[Desk, Taker], None]) -> None:
    await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    how(desk, taker)
    made = await desk.enqueue()
    assert (await world.live(made.key))["state"] == "queued"
    assert taker.taken == []


async def test_a_run_of_the_future_waits(world: World) -> None:
    await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    made = await desk.enqueue(due_at=world.now + 5 * SECOND)
    assert (await world.live(made.key))["state"] == "queued"
    at_once = await desk.enqueue(due_at=world.now - 5 * SECOND)
    assert [run.key for run in taker.taken] == [at_once.key]


async def test_a_repeated_call_gets_the_first_run_and_claims_nothing(world: World) -> None:
    await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    request = RequestKey(request_id="r-1", body_hash=b"x" * 32)
    first = await desk.enqueue(request=request)
    again = await desk.enqueue(request=request)
    assert first.key == again.key
    assert [run.key for run in taker.taken] == [first.key]
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 1
    assert (await world.live(first.key))["attempt"] == 1


async def test_a_run_that_has_the_unique_key_is_never_claimed_by_this(world: World) -> None:
    await world.add_job()
    taker = await make_taker(world, credits=0)
    desk = await make_desk(world, taker)
    waiting = await desk.enqueue(unique=UniqueKey(key="k"))
    taker.credits = 5
    await world.query("UPDATE fencepost.run_queue SET available_at = 'infinity'")
    existing = await desk.enqueue(unique=UniqueKey(key="k"))
    assert (existing.key, existing.existing) == (waiting.key, True)
    assert (await world.live(waiting.key))["state"] == "queued"
    assert taker.taken == []
    with pytest.raises(UniqueKeyHeld):
        await desk.enqueue(unique=UniqueKey(key="k", conflict=UniqueConflict.REJECT))
    free = await desk.enqueue(unique=UniqueKey(key="free"))
    assert [run.key for run in taker.taken] == [free.key]
    holders = await world.query("SELECT unique_key, scheduled_at FROM fencepost.run_keys")
    assert {row["unique_key"] for row in holders} == {"k", "free"}


async def test_the_place_of_a_run_that_has_ended_is_not_used_again(world: World) -> None:
    await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    first = await desk.enqueue(unique=UniqueKey(key="a", keep_for=0))
    await world.report(taker.taken[0])
    # The clock stands still: the same instant again.
    second = await desk.enqueue_now(unique=UniqueKey(key="b"))
    assert second.key != first.key
    assert (await world.live(second.key))["state"] == "queued"
    assert await drain(desk.dispatcher) == 1
    third = await desk.enqueue()
    assert [run.key for run in taker.taken] == [first.key, second.key, third.key]


async def test_credit_is_used_once(world: World) -> None:
    job_id = await world.add_job()
    taker = await make_taker(world, credits=1)
    desk = await make_desk(world, taker)
    await world.move(MILLISECOND)
    async with job_locked(world, job_id):
        enqueueing = asyncio.create_task(desk.enqueue_now())
        await waits(world)
        [other] = await world.enqueue(await world.add_job("other"))
        assert await drain(desk.dispatcher) == 0
    made = await enqueueing
    # The other one came first, so it has the credit.
    assert (await world.live(made.key))["state"] == "queued"
    assert await drain(desk.dispatcher) == 1
    assert [run.key for run in taker.taken] == [other]


async def test_under_load_few_are_handed_out_at_once(world: World) -> None:
    await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    names = [f"j{n}" for n in range(3 * UNDER_WAY_MAX)]
    await world.add_jobs(names, job_spec())
    taker.credits = 0
    for name in names:
        await desk.enqueue(name)
    taker.credits = 100
    await drain(desk.dispatcher)
    taker.taken.clear()
    await world.move(MILLISECOND)
    made = await asyncio.gather(*(desk.enqueue_now(name) for name in names))
    states = Counter([(await world.live(each.key))["state"] for each in made])
    assert states["running"] == len(taker.taken) <= UNDER_WAY_MAX
    assert states["queued"] == len(names) - len(taker.taken)


# Races: the statement waits for the lock of its job while something else happens.


async def test_a_pause_that_commits_first_holds_the_run(world: World) -> None:
    job_id = await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    await world.move(MILLISECOND)
    async with job_locked(world, job_id) as holder:
        enqueueing = asyncio.create_task(desk.enqueue_now())
        await waits(world)
        await holder.execute("UPDATE fencepost.queues SET paused = true")
    made = await enqueueing
    assert (await world.live(made.key))["state"] == "queued"
    assert taker.taken == []


async def test_a_job_deleted_meanwhile_gets_no_run(world: World) -> None:
    job_id = await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    await world.move(MILLISECOND)
    async with job_locked(world, job_id) as holder:
        enqueueing = asyncio.create_task(desk.enqueue_now(unique=UniqueKey(key="k")))
        await waits(world)
        await holder.execute("UPDATE fencepost.jobs SET deleted_at = now()")
    with pytest.raises(JobNotFound):
        await enqueueing
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 0
    assert await world.value("SELECT count(*) FROM fencepost.run_keys") == 0
    assert taker.taken == []


async def test_a_caller_who_goes_does_not_take_the_run_along(world: World) -> None:
    job_id = await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    await world.move(MILLISECOND)
    async with job_locked(world, job_id):
        enqueueing = asyncio.create_task(desk.enqueue_now())
        await waits(world)
        enqueueing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await enqueueing
    await desk.singles.finish()
    [run] = taker.taken
    assert (await world.live(run.key))["state"] == "running"


async def test_a_cancel_meets_a_running_run(world: World) -> None:
    await world.add_job()
    taker = await make_taker(world)
    desk = await make_desk(world, taker)
    made = await desk.enqueue()
    await world.cancel(made.key)
    row = await world.live(made.key)
    assert (row["state"], row["cancel_requested"]) == ("running", True)


async def test_two_servers_and_their_claims_share_out_every_run_once(world: World) -> None:
    jobs = [f"j{n}" for n in range(6)]
    await world.add_job()
    await world.add_jobs(jobs, job_spec())
    takers = [await make_taker(world) for _ in range(2)]
    desks = [await make_desk(world, taker) for taker in takers]
    await world.move(MILLISECOND)
    made = []
    for _ in range(15):
        await world.move(MILLISECOND)
        answers = await asyncio.gather(
            *(desks[n % 2].enqueue_now(job) for n, job in enumerate(jobs)),
            *(drain(desk.dispatcher) for desk in desks),
        )
        made += [each.key for each in answers[: len(jobs)] if isinstance(each, Enqueued)]
    for desk in desks:
        await drain(desk.dispatcher)
    taken = [run.key for taker in takers for run in taker.taken]
    assert Counter(taken) == Counter(made)
    assert {run.attempt for taker in takers for run in taker.taken} == {1}
    rows = await world.query("SELECT DISTINCT state::text, attempt FROM fencepost.run_queue")
    assert [tuple(row) for row in rows] == [("running", 1)]


# With a whole server.


async def test_a_session_that_ends_meanwhile_gives_the_run_back(database_url: str) -> None:
    async with running(database_url) as server:
        job = await server.make_job()
        async with server.session(credit=9) as session:
            await enqueue_one(server)
            await session.complete(*map(success, await session.runs(1)))
            made = await enqueue_one(server)
            [assignment] = await session.runs(1)
            assert key_of(assignment.run) == key_of(made.key)
            assert (made.state, made.attempt) == (run_pb2.RUN_STATE_RUNNING, 1)
            await session.complete(success(assignment))
            holder = await asyncpg.connect(server.dsn)
            async with holder.transaction():
                await holder.execute("SELECT fencepost.lock_out_enqueues($1)", job.job_id)
                enqueueing = asyncio.create_task(enqueue_one(server))
                await server.until(
                    "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'advisory' "
                    "AND datname = current_database()"
                )
                await session.break_off()
                await server.until(
                    "SELECT count(*) > 0 FROM fencepost.workers WHERE state = 'disconnected'"
                )
            await holder.close()
            lost = await enqueueing
        assert lost.attempt == 1
        async with server.session(credit=9) as other:
            [again] = await other.runs(1)
            assert key_of(again.run) == key_of(lost.key)
            assert again.attempt == 2
            [row] = await server.query("SELECT lost_lease_count FROM fencepost.run_queue")
            assert row[0] == 0
