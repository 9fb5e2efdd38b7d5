"""Faults of runs that users of other schedulers have reported in public, as tests of ours."""

import asyncpg
from fencepost_server.clock import MINUTE, SECOND, to_datetime
from fencepost_server.domain.run import LOST_LEASE_WAIT_MAX
from fencepost_server.engine.verdicts import Held

from tests.checker import invariants
from tests.checker.history import read_history
from tests.checker.recorder import record
from tests.factories import NOON, cron, every, job_spec
from tests.integration.running_server import running
from tests.integration.world import World


async def test_a_restarted_process_of_the_same_id_keeps_only_what_it_names(world: World) -> None:
    """A worker that reuses an id must not keep its dead predecessor's runs alive, and runs are
    found again also when nobody remembers their worker."""
    await record(world.dsn)
    job = await world.add_job()
    await world.enqueue(job, 2)
    kept, forgotten = await world.claim(2)
    for _ in range(4):
        await world.pass_time(9 * SECOND)
        # The new process of that id names one of the two runs in its inventory.
        await world.lifecycle.heartbeat([Held(kept.key, kept.attempt)])
    await world.query("DELETE FROM fencepost.workers")
    assert await world.reaper.reap() == 1
    await world.pass_time(LOST_LEASE_WAIT_MAX)
    [again] = await world.claim(2)
    assert (again.key, again.attempt) == (forgotten.key, 2)
    assert invariants.always(await read_history(world.dsn)) == []


async def test_a_long_run_that_heartbeats_is_never_given_to_another_worker(world: World) -> None:
    """Age alone rescues nobody: five minutes with heartbeats is one attempt, and 31 seconds
    without them exactly one more."""
    run = await world.started()
    for _ in range(5 * MINUTE // (10 * SECOND)):
        await world.pass_time(10 * SECOND)
        renewal, *_ = await world.lifecycle.heartbeat([Held(run.key, run.attempt)])
        assert renewal.notice is None
        assert await world.reaper.reap() == 0
        assert await world.claim() == []
    await world.lose_lease()
    [again] = await world.claim()
    assert again.attempt == 2
    assert await world.claim() == []


async def test_no_run_stays_running_without_a_lease(world: World) -> None:
    """Whatever happens to its worker, a running run has a lease that is not long over."""
    job = await world.add_job()
    await world.enqueue(job, 20)
    overdue = (
        "SELECT count(*) FROM fencepost.run_queue WHERE state = 'running' "
        "AND (lease_until IS NULL OR lease_until < fencepost.clock() - interval '10 seconds')"
    )
    for _ in range(30):
        await world.claim(3)
        await world.pass_time(7 * SECOND)
        await world.reaper.reap()
        assert await world.value(overdue) == 0


async def test_a_fraction_in_a_stored_fire_does_not_stop_a_job(world: World) -> None:
    """An instant written by hand with microseconds is compared as it is, and fires."""
    for name, schedule in (("cron", cron()), ("interval", every())):
        job = await world.add_job(name, job_spec(schedule), next_run_at=NOON + MINUTE)
        await world.raw.execute(
            "UPDATE fencepost.job_schedules SET next_run_at = $2 WHERE job_id = $1::uuid",
            job,
            to_datetime(NOON + 123_457),
        )
    await world.move(SECOND)
    assert await world.scheduler.fire_due() == 2
    await world.move_to(NOON + 2 * MINUTE + SECOND)
    while await world.scheduler.fire_due():
        pass
    fired = await world.query("SELECT job_id FROM fencepost.run_queue")
    assert len(fired) > 2, "the jobs went on"


async def test_a_listener_that_never_reads_cannot_make_an_enqueue_fail(database_url: str) -> None:
    """Postgres keeps notifications for the slowest listener; they are few, short, and no part
    of the transaction that makes the runs."""
    idle = await asyncpg.connect(database_url)
    try:
        async with running(database_url) as server:
            await idle.execute("LISTEN fencepost_lanes")
            await idle.execute("LISTEN fencepost_jobs")
            await idle.execute("BEGIN")
            await idle.fetchval("SELECT pg_current_xact_id()")
            await server.make_job()
            for _ in range(5):
                assert len(await server.enqueue(1000)) == 1000
            for _ in range(100):
                assert len(await server.enqueue()) == 1
            [row] = await server.query(
                "SELECT pg_notification_queue_usage() AS usage, count(*) AS runs "
                "FROM fencepost.run_queue"
            )
    finally:
        await idle.close()
    assert row["runs"] == 5100
    assert row["usage"] < 0.1
