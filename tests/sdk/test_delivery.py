"""How a worker opens, takes runs, and reports what became of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from fencepost import Context, Payload, Worker
from fencepost.v1 import run_service_pb2, worker_pb2

from tests.sdk.conftest import running
from tests.sdk.factories import an_assignment
from tests.sdk.fake_server import FakeServer

MakeWorker = Callable[..., Worker]


async def test_hello_comes_first_and_names_a_new_worker_each_time(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    ids = set()
    for number in (1, 2):
        worker = make_worker(queues=["mail", "tenants/default/queues/bulk"], slots=7)
        worker.handler("echo")(lambda: None)
        async with running(worker):
            session = await server.session(number)
            assert session.requests[0].WhichOneof("event") == "hello"
            hello = session.hello
            assert str(uuid.UUID(hello.worker_id)) == hello.worker_id
            assert (hello.min_revision, hello.max_revision, hello.slots) == (1, 1, 7)
            assert [s.queue for s in hello.subscriptions] == [
                "tenants/default/queues/mail",
                "tenants/default/queues/bulk",
            ]
            assert hello.subscriptions[0].kinds == ["echo"]
            assert hello.sdk.name == "fencepost-python"
            ids.add(hello.worker_id)
    assert len(ids) == 2


async def test_payloads_come_back_byte_for_byte(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=20)

    @worker.handler("echo")
    async def echo(payload: Payload) -> Payload:
        return payload

    payloads = [
        Payload(json='{"a": 1.0, "b":  [null, "\\u0000", "żółć 🦊"]}'),
        Payload(json='""'),
        Payload(data=b"", content_type="application/octet-stream"),
        Payload(data=bytes(range(256)), content_type="application/x-all", encoding="zstd"),
        Payload(data=b"x" * 262144, content_type="application/octet-stream"),
        Payload(json='"' + "y" * 262142 + '"'),
    ]
    async with running(worker):
        session = await server.session()
        runs = [an_assignment(payload=payload) for payload in payloads]
        for run in runs:
            await session.give(run)
        await session.until(lambda: len(session.completions) == len(runs))
    for run in runs:
        [completion] = session.completions_of(run)
        assert completion.WhichOneof("outcome") == "success"
        assert completion.success.result == run.payload


async def test_credit_is_never_exceeded_and_always_restored(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=4)
    running_now = highest = 0

    @worker.handler("mixed")
    async def mixed(steps: int) -> None:
        nonlocal running_now, highest
        running_now += 1
        highest = max(highest, running_now)
        for _ in range(steps):
            await asyncio.sleep(0)
        running_now -= 1

    runs = [an_assignment("mixed", json=str(n % 7)) for n in range(1000)]
    async with running(worker):
        session = await server.session()
        await session.feed(runs)
        await session.until(lambda: len(session.completions) >= 1000, "1000 completions")
        await session.until(lambda: session.credit_limit == 1004, "the credit of four free slots")
    assert session.over_credit == []
    assert highest <= 4
    assert len({c.run.scheduled_at.seconds for c in session.completions}) == 1000


async def test_each_completion_raises_the_ceiling_by_what_it_freed(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=3)
    gates: dict[int, asyncio.Event] = {n: asyncio.Event() for n in range(3)}

    @worker.handler("gate")
    async def gate(n: int) -> None:
        await gates[n].wait()

    loop = asyncio.get_running_loop()
    async with running(worker):
        session = await server.session()
        await session.give(*(an_assignment("gate", json=str(n)) for n in range(3)))
        await session.until(lambda: session.received_batch_seq == 1)
        assert session.credit_limit == 3
        for n in range(3):
            freed_at = loop.time()
            gates[n].set()
            await session.until(lambda n=n: session.credit_limit == 4 + n, "credit")  # type: ignore[misc]
            assert loop.time() - freed_at < 5  # 100 ms on a machine of its own


async def test_receipts_are_prompt_while_all_slots_are_taken(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.prefetch = 4
    worker = make_worker(slots=1, prefetch=4)
    gate = asyncio.Event()

    @worker.handler("slow")
    async def slow() -> None:
        await gate.wait()

    async with running(worker):
        session = await server.session()
        for _ in range(5):
            await session.give(an_assignment("slow"))
        await session.until(lambda: session.received_batch_seq == 5, "the receipt of batch 5")
        assert session.completions == []
        gate.set()
        await session.until(lambda: len(session.completions) == 5)
    assert session.over_credit == []


async def test_a_thousand_instant_runs_share_their_messages(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=200)
    worker.handler("noop")(_noop)
    async with running(worker):
        session = await server.session()
        await session.feed([an_assignment("noop") for _ in range(1000)])
        await session.until(lambda: len(session.completions) == 1000)
    assert len(session.completions) / session.completion_messages >= 10


async def _noop() -> None:
    return None


async def test_an_unknown_event_and_unknown_values_do_not_disturb_the_session(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    worker.handler("noop")(_noop)
    async with running(worker):
        session = await server.session()
        unknown = run_service_pb2.WorkResponse()
        unknown.ParseFromString(b"\xfa\x01\x03abc")  # field 31, which no revision has yet
        await session.send(unknown)
        run = an_assignment("noop")
        run.start_mode = 77  # type: ignore[assignment]
        run.lease_uncertain_action = 77  # type: ignore[assignment]
        await session.give(run)
        await session.until(lambda: session.completions_of(run))
    assert len(server.sessions) == 1


async def test_an_unknown_kind_is_given_back_and_not_failed(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=2)
    worker.handler("known")(_noop)
    async with running(worker):
        session = await server.session()
        run = an_assignment("from.the.future", attempt=3)
        await session.give(run)
        await session.until(lambda: session.releases)
        [release] = session.releases
        assert (release.run, release.attempt) == (run.run, 3)
        assert release.reason == worker_pb2.RELEASE_REASON_UNSUPPORTED_KIND
        assert release.delay.seconds >= 5
        await session.until(lambda: session.credit_limit == 3, "credit for the next")
    assert session.completions == []


async def test_a_run_buffered_too_long_is_given_back(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    server.prefetch, server.max_buffer_time = 1, 0.3
    worker = make_worker(slots=1, prefetch=1)
    gate = asyncio.Event()

    @worker.handler("slow")
    async def slow() -> None:
        await gate.wait()

    async with running(worker):
        session = await server.session()
        first, second = an_assignment("slow"), an_assignment("slow")
        await session.give(first, second)
        await session.until(lambda: session.releases, "the release")
        gate.set()
        await session.until(lambda: session.completions_of(first))
    [release] = session.releases
    assert release.run == second.run
    assert release.reason == worker_pb2.RELEASE_REASON_NOT_STARTED
    assert session.completions_of(second) == []


async def test_duplicates_are_ignored_and_a_newer_attempt_replaces_the_old(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=10)
    events: list[str] = []
    gate = asyncio.Event()

    @worker.handler("work")
    async def work(ctx: Context) -> None:
        name = f"{ctx.run_key.nanos}/{ctx.attempt}"
        events.append(f"start {name}")
        try:
            await gate.wait()
        except asyncio.CancelledError:
            events.append(f"cancel {name} {ctx.cause.value if ctx.cause else ''}")
            raise

    async with running(worker):
        session = await server.session()
        run = an_assignment("work", attempt=2)
        run.run.scheduled_at.nanos = 412000

        def again(attempt: int, nanos: int = 412000) -> worker_pb2.Assignment:
            copy = worker_pb2.Assignment()
            copy.CopyFrom(run)
            copy.attempt, copy.run.scheduled_at.nanos = attempt, nanos
            return copy

        await session.give(run)
        await session.give(again(2))
        await session.give(again(1))
        await session.until(lambda: events, "the start of attempt 2")
        await session.give(again(3))
        await session.give(again(1, nanos=413000))
        await session.until(lambda: session.received_batch_seq == 5)
        gate.set()
        await session.until(lambda: len(session.completions) == 2)
    assert events == [
        "start 412000/2",
        "cancel 412000/2 lease_lost",
        "start 412000/3",
        "start 413000/1",
    ]
    ends = {(c.run.scheduled_at.nanos, c.attempt) for c in session.completions}
    assert ends == {(412000, 3), (413000, 1)}
