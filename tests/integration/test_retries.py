"""Retries to their end: a run that kills its workers, budgets that nothing but their own kind
uses up, and what a read says of the policy that applies."""

import uuid
from itertools import pairwise

import pytest
from fencepost.v1 import job_pb2, run_service_pb2
from fencepost_server.clock import HOUR, SECOND, from_datetime
from fencepost_server.domain.run import LOST_LEASE_WAIT_MAX, RunState
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.verdicts import Held, LeaseLostReason, Verdict
from fencepost_server.policy.outcome import Released, Snoozed
from google.protobuf.duration_pb2 import Duration

from tests.factories import failed, job_spec, plain_retry
from tests.integration.running_server import running
from tests.integration.world import World


async def _claim_once(world: World) -> Claimed:
    """The one run, claimed by a worker process that nobody has seen before."""
    [run] = await world.claim(worker_id=str(uuid.uuid4()))
    return run


@pytest.mark.parametrize("budget", [1, 2, 5])
async def test_a_run_that_kills_its_workers_is_dispatched_as_often_as_its_budget_says(
    world: World, budget: int
) -> None:
    retry = plain_retry(max_lost_leases=budget)
    job = await world.add_job(spec=job_spec(retry=retry, lease_ttl=15 * SECOND), payload=b"pill")
    [key] = await world.enqueue(job)
    claims: list[Claimed] = []
    while (await world.value("SELECT count(*) FROM fencepost.run_queue")) and len(claims) < 10:
        claims.append(await _claim_once(world))
        await world.pass_time(15 * SECOND + 1)
        assert await world.reaper.reap() == 1
        # A backoff applies to lost leases, too.
        waits = await world.query("SELECT available_at FROM fencepost.run_queue")
        assert all(
            0 <= from_datetime(row["available_at"]) - world.now < LOST_LEASE_WAIT_MAX
            for row in waits
        )
        await world.pass_time(LOST_LEASE_WAIT_MAX)
    assert [run.attempt for run in claims] == list(range(1, budget + 1))
    row = await world.ended(key, "dead_letters")
    assert (row["dead_reason"], row["lost_lease_count"], row["failure_count"]) == (
        "max_lost_leases",
        budget,
        0,
    )
    assert await world.attempts_of(key) == [
        (number, "lease_expired", False) for number in range(1, budget + 1)
    ]
    # No process that comes back from a freeze changes anything.
    for run in claims:
        verdict = (await world.report(run)).verdict
        assert verdict is (Verdict.RUN_TERMINAL if run.attempt == budget else Verdict.STALE_ATTEMPT)


async def test_a_worker_id_that_is_used_again_keeps_no_run_alive(world: World) -> None:
    """A process that was killed and started again under its old id does not hold its runs."""
    run = await world.started()
    for _ in range(3):
        await world.pass_time(10 * SECOND)
        # The new process beats, but lists nothing.
        assert await world.lifecycle.heartbeat([]) == []
    await world.pass_time(1)
    assert await world.reaper.reap() == 1
    await world.pass_time(LOST_LEASE_WAIT_MAX)
    [again] = await world.claim(worker_id=world.worker_id)
    assert (again.key, again.attempt) == (run.key, 2)
    [renewal] = await world.lifecycle.heartbeat([Held(run.key, 1)])
    assert renewal.notice is not None
    assert renewal.notice.lost is LeaseLostReason.SUPERSEDED


async def test_runs_come_back_when_nobody_remembers_their_worker(world: World) -> None:
    run = await world.started()
    await world.raw.execute("DELETE FROM fencepost.workers")
    await world.lose_lease()
    [again] = await world.claim()
    assert (again.key, again.attempt) == (run.key, 2)


async def test_a_long_run_that_is_renewed_is_never_handed_out_again(world: World) -> None:
    run = await world.started(job_spec(attempt_timeout=2 * HOUR))
    for _ in range(360):
        await world.pass_time(10 * SECOND)
        await world.lifecycle.heartbeat([Held(run.key, 1)])
        assert await world.reaper.reap() == 0
    assert await world.claim() == []
    # Heartbeats stop for longer than the lease: another attempt, exactly one.
    await world.lose_lease()
    [again] = await world.claim()
    assert again.attempt == 2
    assert await world.claim() == []
    assert (await world.report(run)).verdict is Verdict.STALE_ATTEMPT


async def test_each_budget_is_used_by_its_own_kind_only(world: World) -> None:
    run = await world.started(job_spec(retry=plain_retry(max_failures=2, max_lost_leases=2)))
    key = run.key
    for ending in (Snoozed(delay=0), Released(), Snoozed(delay=0), Released()):
        await world.report(run, ending)
        [run] = await world.claim()
    await world.lose_lease()
    [run] = await world.claim()
    await world.report(run, failed())
    await world.pass_time(20 * SECOND)
    [run] = await world.claim()
    row = await world.live(key)
    assert (row["attempt"], row["failure_count"], row["lost_lease_count"], row["snooze_count"]) == (
        7,
        1,
        1,
        2,
    )
    judged = await world.report(run, failed())
    assert judged.run_state is RunState.DEAD
    assert (await world.ended(key, "dead_letters"))["dead_reason"] == "max_failures"
    outcomes = [outcome for _, outcome, _ in await world.attempts_of(key)]
    assert outcomes == [
        "snoozed",
        "released",
        "snoozed",
        "released",
        "lease_expired",
        "failed",
        "failed",
    ]


async def test_waits_grow_and_stay_under_their_cap_over_a_whole_budget(world: World) -> None:
    retry = plain_retry(max_failures=40, base=SECOND, cap=HOUR)
    run = await world.started(job_spec(retry=retry))
    waits = []
    for _ in range(39):
        await world.report(run, failed())
        waits.append(from_datetime((await world.live(run.key))["available_at"]) - world.now)
        await world.move(waits[-1])
        await world.keeper.tick()
        [run] = await world.claim()
    assert waits[:3] == [2 * SECOND, 4 * SECOND, 8 * SECOND]
    assert all(sooner <= later for sooner, later in pairwise(waits))
    assert waits[-1] == HOUR


async def test_a_read_says_which_policy_and_limits_apply(database_url: str) -> None:
    async with running(database_url) as server:
        job = await server.make_job(
            retry_policy=job_pb2.RetryPolicy(max_failures=3, base=Duration(seconds=1)),
            limits=job_pb2.RunLimits(
                queue_timeout=Duration(seconds=3600), total_timeout=Duration(seconds=7200)
            ),
        )
        # A job shows what was set on it, a run what applies.
        assert job.retry_policy == job_pb2.RetryPolicy(max_failures=3, base=Duration(seconds=1))
        assert job.limits == job_pb2.RunLimits(
            queue_timeout=Duration(seconds=3600), total_timeout=Duration(seconds=7200)
        )
        enqueued = await server.runs.EnqueueRun(run_service_pb2.EnqueueRunRequest(job=job.name))
        request = run_service_pb2.GetRunRequest(name=enqueued.run.name)
        run = (await server.runs.GetRun(request)).run
        policy, limits = run.retry_policy, run.limits
        assert (policy.max_failures, policy.max_lost_leases, policy.base.seconds) == (3, 5, 1)
        assert (policy.cap.seconds, policy.jitter) == (3600, job_pb2.BACKOFF_JITTER_FULL)
        seconds = {
            name: getattr(limits, name).seconds
            for name in (
                "attempt_timeout",
                "queue_timeout",
                "total_timeout",
                "lease_ttl",
                "cancel_grace",
            )
        }
        assert seconds == {
            "attempt_timeout": 3600,
            "queue_timeout": 3600,
            "total_timeout": 7200,
            "lease_ttl": 30,
            "cancel_grace": 30,
        }
