"""Leases: heartbeats that nothing delays, notices, deadlines, and confirmed starts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from fencepost import Context, RunCancelled, Worker
from fencepost.v1 import job_pb2, worker_pb2

from tests.sdk.conftest import running
from tests.sdk.factories import a_cancel, a_lost_lease, an_assignment
from tests.sdk.fake_server import FakeServer, FakeSession

MakeWorker = Callable[..., Worker]


async def test_an_idle_worker_heartbeats_with_an_empty_inventory(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    worker.handler("noop")(lambda: None)
    async with running(worker):
        session = await server.session()
        await session.until(lambda: len(session.beats) >= 3, "three heartbeats")
    assert [b.message.seq for b in session.beats[:3]] == [1, 2, 3]
    assert all(b.message.complete_inventory and not b.message.runs for b in session.beats[:3])


async def test_heartbeats_come_on_time_while_the_event_loop_is_blocked(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    # The worker gets a loop of its own in a thread, so that only it is blocked.
    worker = make_worker(slots=2)
    released = threading.Event()

    @worker.handler("block_loop")
    async def block_loop() -> None:
        released.wait(20)

    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    session = await server.session()
    run = an_assignment("block_loop")
    await session.give(run)
    await session.until(lambda: len(session.beats_naming(run)) >= 4, "heartbeats with the run")
    released.set()
    await session.until(lambda: session.completions_of(run))
    gaps = [b.at - a.at for a, b in zip(session.beats, session.beats[1:], strict=False)]
    assert max(gaps) < 3  # the interval is 0.2 s
    worker.stop()
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive()


async def test_a_short_lease_makes_heartbeats_come_sooner(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.heartbeat_interval = 60.0
    worker = make_worker()
    gate = asyncio.Event()

    @worker.handler("slow")
    async def slow() -> None:
        await gate.wait()

    async with running(worker):
        session = await server.session()
        run = an_assignment("slow", lease_ttl=3.0)
        await session.give(run)
        await session.until(lambda: len(session.beats_naming(run)) >= 2, "two heartbeats")
        gate.set()
        await session.until(lambda: session.completions_of(run))


async def test_an_unanswered_heartbeat_replaces_the_session_and_disturbs_no_handler(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.heartbeat_ack_timeout = 0.3
    worker = make_worker()
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
        server.heartbeat_ack_timeout = 10.0
        first.answer_heartbeats = False
        second = await server.session(2)
        assert [(h.run, h.attempt) for h in second.hello.inventory] == [(run.run, 1)]
        await first.until(lambda: first.ended, "the end of the deaf session")
        gate.set()
        await second.until(lambda: second.completions_of(run))
    assert starts == 1
    assert second.hello.previous_session_id == "session-1"


async def test_a_lost_lease_cancels_the_handler_and_nothing_is_completed(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=2)
    causes: list[str] = []
    never = asyncio.Event()

    @worker.handler("stubborn")
    async def stubborn(ctx: Context) -> str:
        try:
            await never.wait()
        except asyncio.CancelledError:
            causes.append(ctx.cause.value if ctx.cause else "none")
        return "finished anyway"

    async with running(worker):
        session = await server.session()
        early, with_ack = an_assignment("stubborn"), an_assignment("stubborn")
        await session.give(early, with_ack)
        await session.until(lambda: session.received_batch_seq == 1)
        unknown_reason = a_lost_lease(early)
        unknown_reason.lease_lost.reason = 77  # type: ignore[assignment]
        await session.notify(unknown_reason)
        session.notices = [a_lost_lease(with_ack)]
        await session.until(lambda: len(causes) == 2, "both cancels")
        await session.until(lambda: session.credit_limit == 4, "both slots")
    assert causes == ["lease_lost", "lease_lost"]
    assert session.completions == []
    assert worker.stats.outcomes == {"lost": 2}


async def test_a_cancel_reaches_the_handler_once_and_it_completes_as_cancelled(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    cancels = 0
    go = asyncio.Event()

    @worker.handler("until_cancelled")
    async def until_cancelled(ctx: Context) -> None:
        nonlocal cancels
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancels += 1
            await go.wait()
            raise

    async with running(worker):
        session = await server.session()
        run = an_assignment("until_cancelled")
        await session.give(run)
        await session.until(lambda: session.received_batch_seq == 1)
        for _ in range(3):
            await session.notify(a_cancel(run))
        session.notices = [a_cancel(run)]
        beats = len(session.beats)
        await session.until(lambda: len(session.beats) > beats + 1)
        go.set()
        await session.until(lambda: session.completions)
    assert cancels == 1
    [completion] = session.completions
    assert completion.WhichOneof("outcome") == "cancelled"


async def test_a_sync_handler_sees_the_cancel_too(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    seen: list[BaseException] = []

    @worker.handler("sync")
    def sync(ctx: Context) -> None:
        assert ctx.wait_cancelled(20)
        try:
            ctx.raise_if_cancelled()
        except RunCancelled as error:
            seen.append(error)
            raise

    async with running(worker):
        session = await server.session()
        run = an_assignment("sync")
        await session.give(run)
        await session.until(lambda: session.received_batch_seq == 1)
        await session.notify(a_cancel(run))
        await session.until(lambda: session.completions_of(run))
    assert len(seen) == 1
    assert session.completions[0].WhichOneof("outcome") == "cancelled"


async def test_a_handler_that_ignores_a_cancel_and_succeeds_is_reported_as_a_success(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()

    @worker.handler("ignore_cancel")
    async def ignore_cancel(ctx: Context) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done"
        return "never"

    async with running(worker):
        session = await server.session()
        run = an_assignment("ignore_cancel")
        await session.give(run)
        await session.until(lambda: session.received_batch_seq == 1)
        await session.notify(a_cancel(run))
        await session.until(lambda: session.completions_of(run))
    assert session.completions[0].success.result.json == '"done"'


async def test_an_attempt_that_overruns_is_cancelled_and_fails_with_timeout(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=2)
    causes: list[str] = []
    never = asyncio.Event()

    @worker.handler("slow")
    async def slow(obey: bool, ctx: Context) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            causes.append(ctx.cause.value if ctx.cause else "none")
            if obey:
                raise
            await never.wait()

    async with running(worker):
        session = await server.session()
        obeying = an_assignment("slow", json="true", attempt_timeout=0.3)
        deaf = an_assignment("slow", json="false", attempt_timeout=0.3, cancel_grace=0.2)
        await session.give(obeying, deaf)
        await session.until(lambda: len(session.completions) == 2, "two failures")
        await session.until(lambda: session.credit_limit == 3, "one slot")
        # The handler that will not stop keeps its slot.
        assert session.credit_limit == 3
        never.set()
        await session.until(lambda: session.credit_limit == 4, "the other slot")
    assert causes == ["timeout", "timeout"]
    for completion in session.completions:
        assert completion.failure.code == "TIMEOUT"
        assert completion.failure.origin == 4  # FAILURE_ORIGIN_ATTEMPT_TIMEOUT


@pytest.mark.parametrize("stops", [True, False], ids=["STOP", "CONTINUE"])
async def test_a_lease_that_cannot_be_renewed_stops_the_handler_before_its_end(
    server: FakeServer, make_worker: MakeWorker, stops: bool
) -> None:
    worker = make_worker()
    loop = asyncio.get_running_loop()
    stopped_at: list[tuple[float, str]] = []
    gate = asyncio.Event()

    @worker.handler("slow")
    async def slow(ctx: Context) -> None:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            stopped_at.append((loop.time(), ctx.cause.value if ctx.cause else "none"))
            raise

    action = (
        job_pb2.LEASE_UNCERTAIN_ACTION_STOP if stops else job_pb2.LEASE_UNCERTAIN_ACTION_CONTINUE
    )
    async with running(worker):
        session = await server.session()
        session.answer_heartbeats = False
        server.on_hello = _say_nothing  # type: ignore[method-assign]
        run = an_assignment("slow", lease_ttl=2.4, lease_uncertain_action=action)
        given_at = loop.time()
        await session.give(run)
        if stops:
            await session.until(lambda: session.releases, "the release")
            [(at, cause)] = stopped_at
            assert cause == "lease_uncertain"
            assert 1.5 < at - given_at < 2.4
            assert session.completions == []
        else:
            # Heartbeats are 0.2 s apart, the local deadline is 2 s after receipt.
            await session.until(lambda: session.beats and session.beats[-1].at > given_at + 2.2)
            gate.set()
            await session.until(lambda: session.completions_of(run))
            assert stopped_at == []


async def test_a_confirmed_start_waits_for_the_answer_to_its_heartbeat(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=2)
    started: list[int] = []

    @worker.handler("careful")
    async def careful(n: int) -> None:
        started.append(n)

    async with running(worker):
        session = await server.session()
        session.answer_heartbeats = False
        mode = job_pb2.START_MODE_CONFIRMED
        kept = an_assignment("careful", json="1", start_mode=mode)
        lost = an_assignment("careful", json="2", start_mode=mode)
        await session.give(kept, lost)
        await session.until(
            lambda: any(len(b.message.runs) == 2 for b in session.beats), "the early heartbeat"
        )
        [beat] = [b.message for b in session.beats if len(b.message.runs) == 2][:1]
        assert not beat.complete_inventory
        assert {h.phase for h in beat.runs} == {worker_pb2.HELD_PHASE_BUFFERED}
        assert started == []
        session.notices = [a_lost_lease(lost)]
        await session.acknowledge(beat.seq)
        session.answer_heartbeats = True
        await session.until(lambda: session.completions_of(kept))
        await session.until(lambda: session.credit_limit == 4, "both slots")
    assert started == [1]
    assert session.completions_of(lost) == []


async def _say_nothing(session: FakeSession) -> None:
    """A server that is there and does not answer."""


async def test_a_cancel_before_the_handlers_first_step_still_frees_its_slot(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=2)
    started: list[str] = []
    blocking, blocked = threading.Event(), threading.Event()

    @worker.handler("block_loop")
    async def block_loop() -> None:
        blocking.set()
        blocked.wait(20)

    @worker.handler("late")
    async def late() -> None:
        started.append("late")

    # The worker gets a loop of its own in a thread, so that only it is blocked.
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    session = await server.session()
    await session.give(an_assignment("block_loop"))
    assert await asyncio.to_thread(blocking.wait, 20)
    run = an_assignment("late")
    await session.give(run)
    await session.until(lambda: session.beats_naming(run), "a heartbeat with the second run")
    await session.notify(a_cancel(run))
    beats = len(session.beats)
    await session.until(lambda: len(session.beats) > beats + 1)
    blocked.set()
    await session.until(lambda: len(session.completions) == 2, "both completions")
    await session.until(lambda: session.credit_limit == 4, "both slots")
    assert session.completions_of(run)[0].WhichOneof("outcome") == "cancelled"
    assert started == []
    worker.stop()
    await asyncio.to_thread(thread.join, 20)
