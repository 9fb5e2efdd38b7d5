"""How workers hear of cancels and forced ends: at once where they have a session, on whatever
server the call came in; and whom the end of a waiting run sets free."""

from typing import Any

from fencepost.v1 import job_service_pb2, run_pb2, run_service_pb2, schedule_pb2, worker_pb2
from fencepost_server.domain.names import format_run
from fencepost_server.domain.run import RunKey
from google.protobuf.duration_pb2 import Duration

from tests.integration.running_server import RunningServer, held, key_of, running, success


async def _cancel(server: RunningServer, name: str, grace: Duration | None = None) -> run_pb2.Run:
    request = run_service_pb2.CancelRunRequest(name=name, reason="wrong month")
    if grace is not None:
        request.grace.CopyFrom(grace)
    run: run_pb2.Run = (await server.runs.CancelRun(request)).run
    return run


def _name(key: RunKey | Any) -> str:
    run = key if isinstance(key, RunKey) else key_of(key)
    return format_run("default", run.job_id, run.scheduled_at)


async def test_a_worker_hears_of_a_cancel_without_a_heartbeat(database_url: str) -> None:
    async with running(database_url) as server, server.session(credit=1) as worker:
        await server.make_job()
        await server.enqueue()
        [assignment] = await worker.runs(1)
        asked = await _cancel(server, _name(assignment.run))
        assert (asked.state, asked.cancel_requested) == (run_pb2.RUN_STATE_RUNNING, True)
        [notice] = (await worker.hear("notices")).notices
        assert (notice.run, notice.attempt) == (assignment.run, 1)
        assert notice.cancel_requested.reason == "wrong month"
        assert 25 < notice.cancel_requested.grace_remaining.ToMilliseconds() / 1000 <= 30
        cancelled = worker_pb2.Completion(
            run=assignment.run, attempt=1, cancelled=worker_pb2.Cancelled()
        )
        [verdict] = await worker.complete(cancelled)
        assert verdict.run_state == run_pb2.RUN_STATE_CANCELLED


async def test_a_worker_of_another_server_hears_of_it_too(database_url: str) -> None:
    async with (
        running(database_url) as one,
        running(database_url) as two,
        two.session(credit=1) as worker,
    ):
        await one.make_job()
        await one.enqueue()
        [assignment] = await worker.runs(1)
        await _cancel(one, _name(assignment.run))
        [notice] = (await worker.hear("notices")).notices
        assert notice.cancel_requested.reason == "wrong month"


async def test_a_worker_is_told_that_its_run_was_ended_by_force(database_url: str) -> None:
    """A handler that ignores the cancel is fenced when its grace is over."""
    async with running(database_url) as server, server.session(credit=2) as worker:
        await server.make_job()
        await server.enqueue(2)
        # The database of a test is older than its server: as after an outage, the reaper pauses.
        await server.query("UPDATE fencepost.shard_state SET no_reap_until = '-infinity'")
        slow, now = await worker.runs(2)
        await _cancel(server, _name(slow.run), Duration(nanos=400_000_000))
        [asked] = (await worker.hear("notices")).notices
        assert asked.HasField("cancel_requested")
        [lost] = (await worker.hear("notices")).notices
        assert lost.lease_lost.reason == worker_pb2.LEASE_LOST_REASON_RUN_TERMINAL
        ended = await _cancel(server, _name(now.run), Duration())
        assert ended.state == run_pb2.RUN_STATE_CANCELLED
        [lost] = (await worker.hear("notices")).notices
        assert lost.run == now.run
        assert lost.lease_lost.reason == worker_pb2.LEASE_LOST_REASON_RUN_TERMINAL
        for assignment in (slow, now):
            [verdict] = await worker.complete(success(assignment))
            assert verdict.verdict == worker_pb2.VERDICT_RUN_TERMINAL
            assert verdict.run_state == run_pb2.RUN_STATE_CANCELLED


async def test_a_worker_hears_it_again_with_each_heartbeat(database_url: str) -> None:
    async with running(database_url) as server, server.session(credit=1) as worker:
        await server.make_job()
        await server.enqueue()
        [assignment] = await worker.runs(1)
        await _cancel(server, _name(assignment.run))
        await worker.hear("notices")
        for _ in range(2):
            [notice] = (await worker.beat([held(assignment)])).notices
            assert notice.HasField("cancel_requested")


async def test_deleting_a_job_with_its_runs_tells_their_workers(database_url: str) -> None:
    async with running(database_url) as server, server.session(credit=1) as worker:
        job = await server.make_job()
        await server.enqueue()
        [assignment] = await worker.runs(1)
        await server.jobs.DeleteJob(
            job_service_pb2.DeleteJobRequest(name=job.name, cancel_runs=True)
        )
        [notice] = (await worker.hear("notices")).notices
        assert (notice.run, notice.HasField("cancel_requested")) == (assignment.run, True)


async def test_a_newer_fire_tells_the_worker_of_the_run_it_cancels(database_url: str) -> None:
    async with running(database_url) as server, server.session(credit=1) as worker:
        interval = schedule_pb2.IntervalSpec(every=Duration(seconds=1))
        await server.make_job(
            schedule=schedule_pb2.Schedule(
                interval=interval, overlap_policy=schedule_pb2.OVERLAP_POLICY_CANCEL_PREVIOUS
            )
        )
        [assignment] = await worker.runs(1)
        [notice] = (await worker.hear("notices")).notices
        assert (notice.run, notice.HasField("cancel_requested")) == (assignment.run, True)


async def test_the_next_run_is_free_when_a_waiting_one_is_cancelled(database_url: str) -> None:
    """At once, not by the sweep, which does not come."""
    async with running(database_url, promote_interval_s=60) as server:
        job = await server.make_job(
            schedule=schedule_pb2.Schedule(
                interval=schedule_pb2.IntervalSpec(every=Duration(seconds=1)),
                overlap_policy=schedule_pb2.OVERLAP_POLICY_QUEUE_ONE,
            ),
        )
        count = "SELECT count(*)::int FROM fencepost.run_queue WHERE state = '{}'"
        await server.until(count.format("blocked"), want=1)
        await server.jobs.PauseJob(job_service_pb2.PauseJobRequest(name=job.name))
        [first] = await server.query(
            "SELECT job_id, (extract(epoch FROM scheduled_at) * 1000000)::bigint AS at "
            "FROM fencepost.run_queue WHERE state = 'queued'"
        )
        ended = await _cancel(server, _name(RunKey(str(first["job_id"]), first["at"])))
        assert ended.state == run_pb2.RUN_STATE_CANCELLED
        await server.until(count.format("queued"), want=1)
        await server.until(count.format("blocked"), want=0)
