"""The dispatcher: runs go to whoever has credit, for no more than that, and nobody starves."""

import asyncio

import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND
from fencepost_server.domain.run import Lane
from fencepost_server.store.statements import Statement

from tests.factories import NOON, job_spec
from tests.integration.takers import drain, make_dispatcher, make_taker, running
from tests.integration.world import World

# What is claimed next, of whatever lane.
_HOLD = Statement(
    name="hold",
    text="SELECT job_id FROM fencepost.run_queue WHERE state = 'queued' "
    "ORDER BY available_at - priority * interval '1 minute' LIMIT $1 FOR UPDATE",
    parameters=("held",),
)


async def test_no_more_is_claimed_than_there_is_credit_for(world: World) -> None:
    await world.enqueue(await world.add_job(), 10)
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world, credits=4)
    dispatcher.subscribe(taker)
    assert await drain(dispatcher) == 4
    assert await world.value("SELECT count(*) FROM fencepost.run_queue WHERE attempt > 0") == 4
    assert all(run.lease_ttl == 30 * SECOND for run in taker.taken)


async def test_runs_are_dealt_round_robin(world: World) -> None:
    await world.enqueue(await world.add_job(), 30)
    dispatcher = make_dispatcher(world)
    takers = [await make_taker(world) for _ in range(3)]
    for taker in takers:
        dispatcher.subscribe(taker)
    assert await drain(dispatcher) == 30
    assert [len(taker.taken) for taker in takers] == [10, 10, 10]
    for taker in takers:
        rows = [await world.live(run.key) for run in taker.taken]
        assert {str(row["worker_id"]) for row in rows} == {taker.worker_id}


async def test_a_backlog_goes_out_in_whole_messages_and_little_work_to_all(world: World) -> None:
    job = await world.add_job()
    await world.enqueue(job, 1600)
    dispatcher = make_dispatcher(world, batch_max=100)
    takers = [await make_taker(world) for _ in range(40)]
    for taker in takers:
        dispatcher.subscribe(taker)
    await dispatcher.scan()
    gained: list[list[int]] = []
    for _ in range(16):
        for taker in takers:
            taker.credits = 20
        assert await dispatcher.dispatch() == 100
        gained.append([20 - taker.credits for taker in takers])
    assert set(gained[0]) == {2, 3}
    for each in gained[-8:]:
        assert sorted(each) == [0] * 35 + [20] * 5
    assert [sum(each) for each in zip(*gained[-8:], strict=True)] == [20] * 40
    assert await drain(dispatcher) == 0
    for taker in takers:
        taker.credits = 20
    await world.move(SECOND)
    await world.enqueue(job, 40)
    assert await drain(dispatcher) == 40
    assert [taker.credits for taker in takers] == [19] * 40


async def test_a_worker_gets_only_the_kinds_and_queues_it_asked_for(world: World) -> None:
    await world.enqueue(await world.add_job("a", job_spec(kind="a")), 5)
    await world.enqueue(await world.add_job("b", job_spec(kind="b")), 5)
    await world.enqueue(await world.add_job("c", job_spec(kind="a", queue="other")), 5)
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world, kind="a")
    dispatcher.subscribe(taker)
    assert await drain(dispatcher) == 5
    assert {run.spec.job_name for run in taker.taken} == {"a"}


async def test_the_backlog_of_a_kind_is_served_although_another_kind_was_drained(
    world: World,
) -> None:
    """What was drained for one worker's kinds says nothing about the age of others."""
    old = await world.add_job("old", job_spec(kind="old"))
    new = await world.add_job("new", job_spec(kind="new"))
    await world.enqueue(old, 40)
    await world.move(HOUR)
    dispatcher = make_dispatcher(world, batch_max=10)
    first = await make_taker(world, kind="new")
    dispatcher.subscribe(first)
    await world.enqueue(new, 3)
    assert await drain(dispatcher) == 3
    second = await make_taker(world, kind="old")
    dispatcher.subscribe(second)
    assert await drain(dispatcher) == 40


async def _lanes_with_a_backlog(world: World, runs: int) -> None:
    """So many runs of each of three kinds, of different priorities and at different times."""
    for n, priority in ((0, 0), (1, 1), (2, 3)):
        job = await world.add_job(f"job-{n}", job_spec(kind=f"kind-{n}"))
        for late in range(0, runs, 10):
            at = world.now - HOUR + late * 3 * SECOND
            await world.enqueue(job, 10, at=at, priority=priority)
    await world.query("UPDATE fencepost.run_queue SET available_at = scheduled_at")


async def test_of_lanes_with_a_backlog_no_more_runs_are_locked_than_are_taken(
    world: World,
) -> None:
    await _lanes_with_a_backlog(world, 200)
    dispatcher = make_dispatcher(world, batch_max=50)
    taker = await make_taker(world)
    dispatcher.subscribe(taker)
    await dispatcher.scan()
    locked = "SELECT count(*) FROM fencepost.run_queue WHERE state = 'queued' AND xmax <> 0"
    assert await dispatcher.dispatch() == 50
    before = await world.value(locked)
    assert before > 0
    for _ in range(5):
        assert await dispatcher.dispatch() == 50
        assert await world.value(locked) <= before
    ranks = await world.query(
        "SELECT claimed_at, state, available_at - priority * interval '1 minute' AS rank "
        "FROM fencepost.run_queue"
    )
    taken = [row["rank"] for row in ranks if row["state"] == "running"]
    left = [row["rank"] for row in ranks if row["state"] == "queued"]
    assert (len(taken), len(left)) == (300, 300)
    assert max(taken) <= min(left)
    assert await drain(dispatcher) == 300


@pytest.mark.parametrize("held", [50, 80, 400])
async def test_runs_that_others_hold_end_no_backlog_of_several_lanes(
    world: World, held: int
) -> None:
    await _lanes_with_a_backlog(world, 200)
    dispatcher = make_dispatcher(world, batch_max=50)
    taker = await make_taker(world)
    dispatcher.subscribe(taker)
    await dispatcher.scan()
    for _ in range(2):
        assert await dispatcher.dispatch() == 50
    async with world.database.requests.transaction() as other:
        locked = await other.fetch(_HOLD, held=held)
        assert len(locked) == held
        while await dispatcher.dispatch():
            pass
    assert len(taker.taken) == 600 - held
    # The next look finds what was passed over, however old it is.
    assert await drain(dispatcher) == held


async def test_of_two_queues_with_work_each_gets_its_share_of_a_shared_worker(
    world: World,
) -> None:
    for queue in ("one", "two"):
        await world.enqueue(await world.add_job(queue, job_spec(queue=queue)), 20)
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world, "one", "two", credits=10)
    dispatcher.subscribe(taker)
    await dispatcher.scan()
    await dispatcher.dispatch()
    shares = [run.spec.job_name for run in taker.taken]
    assert shares.count("one") >= 2
    assert shares.count("two") >= 2
    assert len(shares) <= 10


async def test_a_hint_brings_a_run_to_a_waiting_worker(world: World) -> None:
    job = await world.add_job()
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world)
    dispatcher.subscribe(taker)
    kind = (await world.catalogue.kind_ids(["send"]))["send"]
    async with running(dispatcher):
        [key] = await world.enqueue(job)
        dispatcher.hint([Lane(await world.queue_id("default"), kind, 0)], 0)
        await taker.until(1)
    assert [run.key for run in taker.taken] == [key]


async def test_a_hint_without_lanes_makes_it_look_everywhere(world: World) -> None:
    job = await world.add_job()
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world)
    dispatcher.subscribe(taker)
    scanned = asyncio.Event()
    dispatcher.watch([await world.queue_id("default")], scanned)
    async with running(dispatcher):
        await world.enqueue(await world.add_job("first"))
        dispatcher.hint([], 0)
        await taker.until(1)
        await world.enqueue(job)
        dispatcher.hint([], 0)
        await taker.until(2)
    assert len({run.key for run in taker.taken}) == 2


async def test_new_credit_is_used_at_once(world: World) -> None:
    await world.enqueue(await world.add_job(), 2)
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world, credits=1)
    dispatcher.subscribe(taker)
    async with running(dispatcher):
        await taker.until(1)
        taker.credits = 1
        dispatcher.credit_raised()
        await taker.until(2)
    assert len(taker.taken) == 2


async def test_a_scan_finds_what_no_hint_has_told(world: World) -> None:
    dispatcher = make_dispatcher(world, poll=SECOND // 20)
    taker = await make_taker(world)
    dispatcher.subscribe(taker)
    async with running(dispatcher):
        await world.enqueue(await world.add_job())
        await taker.until(1)
    assert len(taker.taken) == 1


async def test_a_paused_queue_hands_out_nothing(world: World) -> None:
    await world.enqueue(await world.add_job(), 5)
    await world.query("UPDATE fencepost.queues SET paused = true")
    dispatcher = make_dispatcher(world)
    dispatcher.subscribe(await make_taker(world))
    assert await drain(dispatcher) == 0
    await world.query("UPDATE fencepost.queues SET paused = false")
    assert await drain(dispatcher) == 5


async def test_a_cap_holds_from_the_commit_that_sets_it(world: World) -> None:
    job = await world.add_job()
    await world.enqueue(job, 5)
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world, credits=1)
    dispatcher.subscribe(taker)
    assert await drain(dispatcher) == 1
    await world.query("UPDATE fencepost.queues SET max_in_flight = 2")
    taker.credits = 10
    # The dispatcher still believes that the queue has no cap.
    assert await dispatcher.dispatch() == 0
    assert await drain(dispatcher) == 1
    assert await world.value("SELECT count(*) FROM fencepost.run_queue WHERE attempt_open") == 2


async def test_a_draining_server_claims_nothing(world: World) -> None:
    await world.enqueue(await world.add_job(), 5)
    dispatcher = make_dispatcher(world)
    dispatcher.subscribe(await make_taker(world))
    dispatcher.is_draining = True
    assert await drain(dispatcher) == 0


async def test_whoever_has_left_gets_nothing_more(world: World) -> None:
    await world.enqueue(await world.add_job(), 5)
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world)
    dispatcher.subscribe(taker)
    assert dispatcher.workers_of(await world.queue_id("default")) == 1
    dispatcher.unsubscribe(taker)
    assert dispatcher.workers_of(await world.queue_id("default")) == 0
    assert await drain(dispatcher) == 0


async def test_a_run_is_handed_out_when_its_backoff_is_over(world: World) -> None:
    await world.enqueue(await world.add_job(), at=NOON + MINUTE)
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world)
    dispatcher.subscribe(taker)
    assert await drain(dispatcher) == 0
    await world.move(MINUTE)
    assert await dispatcher.dispatch() == 1


async def test_idle_queues_are_read_in_turn_and_those_that_hold_runs_each_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost_server.engine.dispatcher._IDLE_READ", 1)
    for queue in ("busy", "one", "two", "three"):
        await world.add_job(queue, job_spec(queue=queue))
    job = await world.add_job("work", job_spec(queue="busy"))
    await world.enqueue(job, 1)
    dispatcher = make_dispatcher(world)
    dispatcher.subscribe(await make_taker(world, "busy", "one", "two", "three", credits=0))
    await dispatcher.dispatch()
    idle = {await world.queue_id(queue) for queue in ("one", "two", "three")}
    busy = await world.queue_id("busy")
    await world.query("UPDATE fencepost.queues SET paused = true")
    known = dispatcher.book.settings
    assert not any(settings.paused for settings in known.values())
    for scans in (1, 2, 3):
        await dispatcher.scan()
        assert known[busy].paused
        assert sum(known[queue_id].paused for queue_id in idle) == scans


async def test_an_idle_queue_that_was_paused_unseen_hands_out_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost_server.engine.dispatcher._IDLE_READ", 0)
    job = await world.add_job()
    dispatcher = make_dispatcher(world)
    taker = await make_taker(world)
    dispatcher.subscribe(taker)
    await dispatcher.dispatch()
    await world.query("UPDATE fencepost.queues SET paused = true")
    await world.enqueue(job, 3)
    assert await drain(dispatcher) == 0
    await world.query("UPDATE fencepost.queues SET paused = false")
    assert await drain(dispatcher) == 3
