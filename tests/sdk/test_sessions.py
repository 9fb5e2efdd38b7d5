"""Sessions come and go; runs, completions and handlers live on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest
from fencepost import Client, FailedPrecondition, Timings, Worker
from fencepost.status import StatusDetails
from fencepost.v1 import worker_pb2

from tests.sdk.conftest import QUICK, running
from tests.sdk.factories import a_key, a_lost_lease, an_assignment
from tests.sdk.fake_server import FakeServer, Refusal, a_verdict, serving
from tests.sdk.proxy import proxying

MakeWorker = Callable[..., Worker]


async def test_a_server_of_another_revision_ends_the_worker_without_a_loop(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.work_refusals = [
        Refusal(
            code=grpc.StatusCode.FAILED_PRECONDITION,
            text="this server speaks revisions 2 to 3, the worker 1 to 1",
            details=StatusDetails(reason="UNSUPPORTED_PROTOCOL"),
        )
    ]
    worker = make_worker()
    worker.handler("noop")(lambda: None)
    with pytest.raises(FailedPrecondition) as caught:
        await worker.run_async()
    assert caught.value.reason == "UNSUPPORTED_PROTOCOL"
    assert server.work_calls == 1


async def test_an_unavailable_server_is_tried_again(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.work_refusals = [Refusal(code=grpc.StatusCode.UNAVAILABLE)] * 3
    worker = make_worker()
    worker.handler("noop")(lambda: None)
    async with running(worker):
        await server.session()
    assert server.work_calls == 4


async def test_after_a_broken_stream_hello_lists_exactly_what_is_running(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=5)
    starts = 0
    gate = asyncio.Event()

    @worker.handler("slow")
    async def slow() -> None:
        nonlocal starts
        starts += 1
        await gate.wait()

    async with running(worker):
        first = await server.session(1)
        runs = [
            an_assignment("slow", key=a_key(seconds=1_764_579_600, nanos=nanos), attempt=attempt)
            for nanos, attempt in ((0, 1), (1000, 2), (412_000, 3), (999_999_000, 4))
        ]
        await first.give(*runs)
        await first.until(lambda: first.received_batch_seq == 1)
        first.reset()
        second = await server.session(2)
        listed = [(h.run, h.attempt, h.phase) for h in second.hello.inventory]
        assert listed == [(r.run, r.attempt, worker_pb2.HELD_PHASE_HANDLING) for r in runs]
        await second.until(lambda: second.credit_limit == 1, "credit of the fifth slot")
        gate.set()
        await second.until(lambda: len(second.completions) == 4)
    assert starts == 4
    assert first.completions == []


async def test_a_completion_is_sent_until_a_verdict_and_held_meanwhile(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.verdict_of = lambda message: None
    worker = make_worker()

    @worker.handler("answer")
    async def answer() -> int:
        return 42

    async with running(worker):
        first = await server.session(1)
        run = an_assignment("answer")
        await first.give(run)
        await first.until(lambda: first.completions_of(run))
        await first.until(lambda: first.beats_naming(run), "a heartbeat that still lists it")
        [held] = first.beats_naming(run)[0].message.runs
        assert held.phase == worker_pb2.HELD_PHASE_COMPLETING
        first.reset()
        second = await server.session(2)
        assert [h.phase for h in second.hello.inventory] == [worker_pb2.HELD_PHASE_COMPLETING]
        await second.until(lambda: second.completions_of(run), "the same completion again")
        assert second.completions == first.completions
        await second.send_verdict(run, worker_pb2.VERDICT_ALREADY_APPLIED)
        beats = len(second.beats)
        await second.until(lambda: len(second.beats) > beats + 2)
        assert not second.beats[-1].message.runs
    assert len(second.completions) == 1


async def test_a_completion_without_a_verdict_is_sent_again_on_the_same_stream(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.verdict_of = lambda message: None
    worker = make_worker(timings=Timings(resend_after=0.3, farewell=0.5))
    worker.handler("noop")(lambda: None)
    async with running(worker):
        session = await server.session()
        run = an_assignment("noop")
        await session.give(run)
        await session.until(lambda: len(session.completions_of(run)) == 2, "the resend")
        await session.send_verdict(run, worker_pb2.VERDICT_APPLIED)
    first, second = session.completions_of(run)[:2]
    assert first == second


async def test_retry_sends_again_after_the_wait_and_only_once(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    verdicts = [worker_pb2.VERDICT_RETRY]
    server.verdict_of = lambda message: (
        a_verdict(message, verdicts.pop(), retry_after=0.6) if verdicts else a_verdict(message)
    )
    worker = make_worker()
    worker.handler("noop")(lambda: None)
    async with running(worker):
        session = await server.session()
        run = an_assignment("noop")
        await session.give(run)
        await session.until(lambda: len(session.completions_of(run)) == 2)
        beats = len(session.beats)
        await session.until(lambda: len(session.beats) > beats + 3)
    first, second = session.completed_at
    assert second - first >= 0.6


@pytest.mark.parametrize(
    "verdict",
    [
        worker_pb2.VERDICT_STALE_ATTEMPT,
        worker_pb2.VERDICT_RUN_TERMINAL,
        worker_pb2.VERDICT_NOT_FOUND,
    ],
)
async def test_a_refused_completion_is_dropped_quietly(
    server: FakeServer, make_worker: MakeWorker, verdict: worker_pb2.Verdict.ValueType
) -> None:
    server.verdict_of = lambda message: a_verdict(message, verdict)
    worker = make_worker(slots=1)
    worker.handler("noop")(lambda: None)
    async with running(worker):
        session = await server.session()
        await session.give(an_assignment("noop"))
        await session.give(an_assignment("noop"))
        await session.until(lambda: len(session.completions) == 2)
        beats = len(session.beats)
        await session.until(lambda: len(session.beats) > beats + 1)
        assert not session.beats[-1].message.runs
        assert session.credit_limit == 3
    assert len(session.completions) == 2


async def test_an_invalid_completion_is_replaced_by_a_failure(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.verdict_of = lambda message: (
        a_verdict(message, worker_pb2.VERDICT_INVALID, reason="PAYLOAD_TOO_LARGE")
        if isinstance(message, worker_pb2.Completion) and message.HasField("success")
        else a_verdict(message)
    )
    worker = make_worker()
    worker.handler("noop")(lambda: None)
    async with running(worker):
        session = await server.session()
        await session.give(an_assignment("noop"))
        await session.until(lambda: len(session.completions) == 2)
    assert session.completions[1].failure.code == "RESULT_TOO_LARGE"
    assert session.completions[1].failure.retry == 1  # RETRY_DIRECTIVE_NEVER


async def test_a_server_drain_moves_the_worker_without_losing_or_repeating_a_run(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=20)
    starts: dict[int, int] = {}
    gate = asyncio.Event()

    @worker.handler("load")
    async def load(n: int) -> None:
        starts[n] = starts.get(n, 0) + 1
        if n % 10 == 0:
            await gate.wait()

    async with running(worker):
        first = await server.session(1)
        runs = [an_assignment("load", json=str(n)) for n in range(150)]
        for run in runs[:100]:
            await first.give(run)
        await first.drain(reconnect_delay=0.2)
        second = await server.session(2)
        assert not first.ended
        assert second.peer != first.peer  # another TCP connection
        assert second.hello.previous_session_id == "session-1"
        waiting = {h.run.scheduled_at.seconds for h in second.hello.inventory}
        slow = {r.run.scheduled_at.seconds for n, r in enumerate(runs[:100]) if n % 10 == 0}
        assert waiting >= slow
        before = len(first.beats)
        await second.until(lambda: second.beats_naming(runs[0]), "heartbeats on the new session")
        assert len(first.beats) <= before + 1
        gate.set()
        for run in runs[100:]:
            await second.give(run)
        await first.until(lambda: first.half_closed, "the end of the old session")
        await server.until(
            lambda: len(_instants(first.completions) | _instants(second.completions)) == 150
        )
    assert set(starts.values()) == {1}
    assert len(starts) == 150


def _instants(completions: list[worker_pb2.Completion]) -> set[int]:
    return {c.run.scheduled_at.seconds for c in completions}


async def test_a_restarted_server_finds_the_worker_and_its_runs_again() -> None:
    async with serving() as before:
        worker = Worker(Client(before.address), slots=2, grace=0, timings=QUICK)
        gate = asyncio.Event()

        @worker.handler("slow")
        async def slow() -> None:
            await gate.wait()

        work = asyncio.create_task(worker.run_async())
        first = await before.session()
        run = an_assignment("slow", attempt=7)
        await first.give(run)
        await first.until(lambda: first.received_batch_seq == 1)
    async with serving(port=int(before.address.rpartition(":")[2])) as after:
        second = await after.session()
        assert [(h.run, h.attempt) for h in second.hello.inventory] == [(run.run, 7)]
        gate.set()
        await second.until(lambda: second.completions_of(run))
        worker.stop()
        await asyncio.wait_for(work, 15)


async def test_a_lease_lost_while_completing_is_ignored_and_the_verdict_decides(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.verdict_of = lambda message: None
    worker = make_worker()
    worker.handler("noop")(lambda: None)
    async with running(worker):
        session = await server.session()
        run = an_assignment("noop")
        await session.give(run)
        await session.until(lambda: session.completions_of(run))
        await session.notify(a_lost_lease(run))
        beats = len(session.beats)
        await session.until(lambda: len(session.beats) > beats + 1)
        [held] = session.beats[-1].message.runs
        assert held.phase == worker_pb2.HELD_PHASE_COMPLETING
        await session.send_verdict(run, worker_pb2.VERDICT_STALE_ATTEMPT)
        beats = len(session.beats)
        await session.until(lambda: len(session.beats) > beats + 1)
        assert not session.beats[-1].message.runs
    assert worker.stats.verdicts == {"STALE_ATTEMPT": 1}


async def test_a_token_travels_with_every_call(server: FakeServer) -> None:
    worker = Worker(Client(server.address, token="s3cret"), grace=0, timings=QUICK)
    worker.handler("noop")(lambda: None)
    async with running(worker):
        await server.session()
    assert server.metadata[0]["authorization"] == "Bearer s3cret"


async def test_a_half_open_connection_is_replaced_by_a_new_one(server: FakeServer) -> None:
    server.heartbeat_ack_timeout = 0.5
    async with proxying(server.address) as proxy:
        worker = Worker(Client(proxy.address), slots=2, grace=0, timings=QUICK)
        starts = 0
        gate = asyncio.Event()

        @worker.handler("slow")
        async def slow() -> None:
            nonlocal starts
            starts += 1
            await gate.wait()

        async with running(worker):
            first = await server.session(1)
            run = an_assignment("slow")
            await first.give(run)
            await first.until(lambda: first.beats_naming(run))
            server.heartbeat_ack_timeout = 10.0
            proxy.freeze()
            second = await server.session(2)
            assert [h.run for h in second.hello.inventory] == [run.run]
            gate.set()
            await second.until(lambda: second.completions_of(run))
        assert (starts, proxy.connections) == (1, 2)


async def test_log_lines_say_what_happened_in_text_and_in_attributes(
    server: FakeServer, make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fencepost.worker")
    server.work_refusals = [Refusal(code=grpc.StatusCode.UNAVAILABLE, text="still waking up")]
    worker = make_worker()

    @worker.handler("fail")
    async def fail() -> None:
        raise ValueError("x")

    async with running(worker):
        session = await server.session()
        run = an_assignment("fail", attempt=2)
        await session.give(run)
        await session.until(lambda: session.completions_of(run))
    [refused] = [r for r in caplog.records if r.getMessage().startswith("session.refused")]
    assert "error=still waking up retry_in=" in refused.getMessage()
    [ended] = [r for r in caplog.records if r.getMessage().startswith("attempt.ended")]
    assert ended.getMessage().endswith("attempt=2 kind=fail outcome=failure code=VALUE_ERROR")
    assert ended.__dict__["attempt"] == 2
