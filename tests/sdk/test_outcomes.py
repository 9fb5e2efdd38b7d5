"""What a handler returns or raises, as the server sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from fencepost import Context, Fatal, Retryable, Snooze, Worker, current_context
from fencepost.v1 import failure_pb2, payload_pb2, run_pb2, worker_pb2
from pydantic import BaseModel

from tests.sdk.conftest import running
from tests.sdk.factories import JOB_ID, a_key, an_assignment
from tests.sdk.fake_server import FakeServer

MakeWorker = Callable[..., Worker]


class Invoice(BaseModel):
    """A typed input."""

    number: str
    cents: int


@dataclass
class Receipt:
    """A typed result."""

    number: str
    paid: bool


class HTTPServerError(Exception):
    """Its code is HTTP_SERVER_ERROR."""


def _raise(error: BaseException) -> None:
    raise error


async def _outcome(
    server: FakeServer,
    worker: Worker,
    assignment: worker_pb2.Assignment,
) -> worker_pb2.Completion:
    async with running(worker):
        session = await server.session()
        await session.give(assignment)
        await session.until(lambda: session.completions_of(assignment), "the completion")
    assert len(server.sessions) == 1
    return session.completions[0]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("error", "code", "retry", "delay"),
    [
        (Retryable("SMTP_DOWN", "later"), "SMTP_DOWN", "UNSPECIFIED", 0.0),
        (Retryable("RATE_LIMIT", after=7.5), "RATE_LIMIT", "AFTER_DELAY", 7.5),
        (Fatal("bad address"), "BAD_ADDRESS", "NEVER", 0.0),
        (ValueError("x"), "VALUE_ERROR", "UNSPECIFIED", 0.0),
        (HTTPServerError("x"), "HTTP_SERVER_ERROR", "UNSPECIFIED", 0.0),
        (SystemExit(3), "PANIC", "UNSPECIFIED", 0.0),
    ],
    ids=["retryable", "retry_after", "fatal", "uncaught", "acronym", "panic"],
)
async def test_an_exception_becomes_a_failure(
    server: FakeServer,
    make_worker: MakeWorker,
    is_async: bool,
    error: BaseException,
    code: str,
    retry: str,
    delay: float,
) -> None:
    worker = make_worker()
    if is_async:

        @worker.handler("fail")
        async def fail() -> None:
            _raise(error)
    else:

        @worker.handler("fail")
        def fail_sync() -> None:
            _raise(error)

    completion = await _outcome(server, worker, an_assignment("fail"))
    failure = completion.failure
    assert failure.code == code
    assert failure_pb2.RetryDirective.Name(failure.retry) == f"RETRY_DIRECTIVE_{retry}"
    assert failure.retry_delay.seconds + failure.retry_delay.nanos / 1e9 == delay
    assert failure.origin == failure_pb2.FAILURE_ORIGIN_HANDLER
    assert "_raise" in failure.stack_trace


async def test_a_snooze_asks_for_another_call_and_is_no_failure(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    worker.handler("snooze")(lambda: _raise(Snooze(minutes=5, reason="not ready")))
    completion = await _outcome(server, worker, an_assignment("snooze"))
    assert completion.snooze.delay.seconds == 300
    assert completion.snooze.reason == "not ready"


async def test_text_is_cut_and_repaired_instead_of_refused(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()

    @worker.handler("loud")
    async def loud() -> None:
        raise RuntimeError("\ud800\0" + "é" * 20_000)

    failure = (await _outcome(server, worker, an_assignment("loud"))).failure
    assert failure.message.startswith("?\ufffdé")
    assert len(failure.message.encode()) <= 4096
    assert len(failure.stack_trace.encode()) <= 16384
    assert "cut" in failure.stack_trace
    assert failure.stack_trace.startswith("Traceback")


@pytest.mark.parametrize(
    ("result", "code"),
    [(b"x" * 300 * 1024, "RESULT_TOO_LARGE"), (object(), "RESULT_NOT_SERIALIZABLE")],
    ids=["too large", "not serialisable"],
)
async def test_a_result_that_cannot_be_sent_is_a_final_failure(
    server: FakeServer, make_worker: MakeWorker, result: object, code: str
) -> None:
    worker = make_worker()

    @worker.handler("big_result")
    async def big_result() -> object:
        return result

    failure = (await _outcome(server, worker, an_assignment("big_result"))).failure
    assert failure.code == code
    assert failure.retry == failure_pb2.RETRY_DIRECTIVE_NEVER
    assert failure.origin == failure_pb2.FAILURE_ORIGIN_SDK


async def test_a_model_comes_in_and_a_dataclass_goes_out(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()

    @worker.handler("pay")
    async def pay(invoice: Invoice, ctx: Context) -> Receipt:
        assert current_context() is ctx
        return Receipt(number=f"{invoice.number}/{ctx.attempt}", paid=invoice.cents > 0)

    run = an_assignment("pay", json='{"number": "inv-1", "cents": 12}', attempt=2)
    completion = await _outcome(server, worker, run)
    assert completion.success.result.json == '{"number":"inv-1/2","paid":true}'
    assert completion.timings.HasField("handling")


async def test_an_input_of_the_wrong_shape_fails_for_good_and_says_where(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()

    @worker.handler("pay")
    async def pay(receipt: Receipt) -> None:
        raise AssertionError("not called")

    run = an_assignment("pay", json='{"number": 7, "paid": true}')
    failure = (await _outcome(server, worker, run)).failure
    assert failure.code == "PAYLOAD_UNDECODABLE"
    assert "payload.number must be str, got 7" in failure.message
    assert failure.retry == failure_pb2.RETRY_DIRECTIVE_NEVER


async def test_the_context_tells_identity_tokens_labels_and_trace(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-4ff6238511c19641-01"

    @worker.handler("report_context")
    async def report(ctx: Context) -> dict[str, object]:
        assert ctx.cause is None
        assert 3500 < ctx.remaining <= 3600
        return {
            "key": ctx.idempotency_key,
            "parts": [ctx.run_key.job_id, ctx.run_key.seconds, ctx.run_key.nanos],
            "at": ctx.scheduled_at,
            "token": ctx.fencing_token,
            "labels": ctx.labels,
            "trace": ctx.trace.traceparent,
            "logged": ctx.logger.extra,
            "failure": ctx.last_failure.code if ctx.last_failure else None,
        }

    run = an_assignment(
        "report_context", key=a_key(seconds=1_796_115_600, nanos=412_000), attempt=3
    )
    run.labels["team"] = "billing"
    run.trace_context.traceparent = traceparent
    run.last_failure.code = "SMTP_DOWN"
    completion = await _outcome(server, worker, run)
    text = f"{JOB_ID}/2026-12-01T09:00:00.000412Z"
    assert completion.success.result == payload_pb2.Payload(
        json=(
            f'{{"key":"{text}","parts":["{JOB_ID}",1796115600,412000],'
            '"at":"2026-12-01T09:00:00.000412+00:00","token":3,"labels":{"team":"billing"},'
            f'"trace":"{traceparent}",'
            f'"logged":{{"run_key":"{text}","attempt":3,"kind":"report_context"}},'
            '"failure":"SMTP_DOWN"}'
        )
    )


async def test_progress_travels_with_heartbeats_and_the_next_attempt_resumes_from_it(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    gate = asyncio.Event()

    @worker.handler("checkpoint")
    async def checkpoint(ctx: Context) -> object:
        done = ctx.last_checkpoint()
        if done is not None:
            return done
        await ctx.progress(50, "half", checkpoint={"page": 7})
        await gate.wait()
        await ctx.progress(90, "nearly")
        raise Retryable("CONNECTION_LOST")

    async with running(worker):
        session = await server.session()
        first = an_assignment("checkpoint")
        await session.give(first)
        await session.until(
            lambda: any(h.progress.percent == 50 for b in session.beats for h in b.message.runs),
            "the progress",
        )
        told = [h.progress for b in session.beats for h in b.message.runs if h.HasField("progress")]
        assert told[0].message == "half"
        assert told[0].checkpoint.json == '{"page":7}'
        beats = len(session.beats)
        await session.until(lambda: len(session.beats) > beats + 2)
        assert not session.beats[-1].message.runs[0].HasField("progress")
        gate.set()
        await session.until(lambda: session.completions_of(first))
        stored: run_pb2.Progress = session.completions[0].progress
        assert (stored.percent, stored.checkpoint.json) == (90, '{"page":7}')
        second = an_assignment("checkpoint", attempt=2, progress=stored)
        await session.give(second)
        await session.until(lambda: session.completions_of(second))
    assert session.completions[1].success.result.json == '{"page":7}'


async def test_what_goes_around_handlers_sees_context_and_exceptions(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    events: list[str] = []

    @worker.around
    @contextmanager
    def outer(ctx: Context) -> Iterator[None]:
        events.append(f"outer {ctx.attempt}")
        try:
            yield
        except Retryable as error:
            events.append(f"saw {error.code}")
            raise

    @worker.around
    @contextmanager
    def inner(ctx: Context) -> Iterator[None]:
        events.append("inner")
        yield

    @worker.handler("fail")
    async def fail() -> None:
        events.append("handler")
        raise Retryable("AGAIN")

    completion = await _outcome(server, worker, an_assignment("fail"))
    assert completion.failure.code == "AGAIN"
    assert events == ["outer 1", "inner", "handler", "saw AGAIN"]


class _Careless(Retryable):
    """Forgets to call its base class, and cannot be shown."""

    def __init__(self) -> None:
        Exception.__init__(self)


class _BrokenModel:
    def model_dump_json(self) -> str:
        raise ZeroDivisionError("a bug in a model")


async def test_broken_exceptions_and_results_still_end_the_attempt(
    server: FakeServer, make_worker: MakeWorker
) -> None:
    worker = make_worker(slots=1)

    @worker.handler("broken")
    async def broken(kind: str) -> object:
        if kind == "exception":
            raise _Careless
        return _BrokenModel()

    async with running(worker):
        session = await server.session()
        await session.give(an_assignment("broken", json='"exception"'))
        await session.give(an_assignment("broken", json='"result"'))
        await session.until(lambda: len(session.completions) == 2, "both completions")
    first, second = (c.failure for c in session.completions)
    assert first.code == "BROKEN_EXCEPTION"
    assert first.retry == failure_pb2.RETRY_DIRECTIVE_UNSPECIFIED
    assert (second.code, second.message) == ("RESULT_NOT_SERIALIZABLE", "a bug in a model")
