"""CancelRun against CompleteRun on a real server, two hundred times: the first commit decides,
both callers are told the same end, and it never changes again."""

import asyncio

import pytest
from fencepost.v1 import run_pb2, run_service_pb2, worker_pb2
from fencepost_server.domain.names import format_run
from google.protobuf.duration_pb2 import Duration

from tests.integration.running_server import QUEUE, RunningServer, key_of, running, success

_ROUNDS = 200
_AT_ONCE = 20
SUCCEEDED, CANCELLED = run_pb2.RUN_STATE_SUCCEEDED, run_pb2.RUN_STATE_CANCELLED


async def _claimed(server: RunningServer, count: int) -> list[worker_pb2.Assignment]:
    await server.enqueue(count)
    request = run_service_pb2.ClaimRunsRequest(max_runs=count)
    request.subscriptions.add(queue=QUEUE)
    request.wait.FromSeconds(5)
    found: list[worker_pb2.Assignment] = []
    while len(found) < count:
        answer = await server.runs.ClaimRuns(request)
        found += answer.runs
    return found


async def _complete(
    server: RunningServer, assignment: worker_pb2.Assignment, barrier: asyncio.Barrier
) -> worker_pb2.AttemptVerdict:
    request = run_service_pb2.BatchCompleteRunsRequest(completions=[success(assignment)])
    await barrier.wait()
    while True:
        verdict: worker_pb2.AttemptVerdict
        [verdict] = (await server.runs.BatchCompleteRuns(request)).verdicts
        if verdict.verdict != worker_pb2.VERDICT_RETRY:
            return verdict


async def _cancel(
    server: RunningServer, name: str, grace: Duration | None, barrier: asyncio.Barrier | None = None
) -> run_pb2.Run:
    request = run_service_pb2.CancelRunRequest(name=name)
    if grace is not None:
        request.grace.CopyFrom(grace)
    if barrier is not None:
        await barrier.wait()
    run: run_pb2.Run = (await server.runs.CancelRun(request)).run
    return run


async def _race(
    server: RunningServer, assignment: worker_pb2.Assignment, name: str, grace: Duration | None
) -> tuple[run_pb2.Run, worker_pb2.AttemptVerdict]:
    barrier = asyncio.Barrier(2)
    return await asyncio.gather(
        _cancel(server, name, grace, barrier), _complete(server, assignment, barrier)
    )


@pytest.mark.parametrize("grace", [None, Duration()], ids=["asked", "without grace"])
async def test_cancel_and_completion_at_a_barrier(
    database_url: str, grace: Duration | None
) -> None:
    async with running(database_url) as server:
        await server.make_job()
        ends: dict[str, int] = {}
        for _ in range(_ROUNDS // 2 // _AT_ONCE):
            claimed = await _claimed(server, _AT_ONCE)
            names = [_name(each) for each in claimed]
            pairs = zip(claimed, names, strict=True)
            races = await asyncio.gather(*(_race(server, *pair, grace) for pair in pairs))
            for name, (cancelled, verdict) in zip(names, races, strict=True):
                ends[name] = _agreed(cancelled, verdict, grace)
        assert len(ends) == _ROUNDS // 2
        # Nothing that comes later changes an end.
        for name, state in ends.items():
            assert (await _cancel(server, name, Duration())).state == state
            run = (await server.runs.GetRun(run_service_pb2.GetRunRequest(name=name))).run
            assert run.state == state
        assert not await server.query("SELECT FROM fencepost.run_queue")


def _agreed(
    cancelled: run_pb2.Run, verdict: worker_pb2.AttemptVerdict, grace: Duration | None
) -> int:
    """The end that both were told of."""
    if verdict.verdict == worker_pb2.VERDICT_APPLIED:
        assert verdict.run_state == SUCCEEDED
        # Read after the cancel's commit: asked in time, or ended already.
        assert cancelled.state in (run_pb2.RUN_STATE_RUNNING, SUCCEEDED)
        assert cancelled.cancel_requested == (cancelled.state == run_pb2.RUN_STATE_RUNNING)
        assert grace is None or cancelled.state == SUCCEEDED
        return SUCCEEDED
    assert grace is not None, "only a cancel without grace ends a running attempt at once"
    assert verdict.verdict == worker_pb2.VERDICT_RUN_TERMINAL
    assert verdict.run_state == cancelled.state == CANCELLED
    return CANCELLED


def _name(assignment: worker_pb2.Assignment) -> str:
    key = key_of(assignment.run)
    return format_run("default", key.job_id, key.scheduled_at)
