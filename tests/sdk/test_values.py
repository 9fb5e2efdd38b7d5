"""The SDK's values on their own: keys, payloads, text, paces, the outbox."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import fencepost
import pytest
from fencepost import Context, Payload, PayloadError, RunKey, Worker, decode_payload, encode_payload
from fencepost.completions import (
    PlainSuccesses,
    completion_body,
    read_completions,
    read_releases,
    release_body,
)
from fencepost.durations import duration_seconds
from fencepost.handler import make_handler
from fencepost.held import Held
from fencepost.leases import Lease, ack_timeout, heartbeat_interval
from fencepost.outbox import Outbox
from fencepost.retry import Backoff
from fencepost.run_key import run_id
from fencepost.text import cut, cut_middle
from fencepost.v1 import worker_pb2

from tests.sdk.factories import an_assignment

_JOB = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"


@pytest.mark.parametrize(
    ("instant", "first", "third"),
    [
        ("2026-12-01T09:00:00Z", "4ff6238511c19641", "7782615ec3d10909"),
        ("2026-12-01T09:00:00.000412Z", "a997fdf4c5b81335", "9cd564c4432216ab"),
        ("2026-12-01T09:00:00.500000Z", "919dd841077b6b11", "9ec8cd3b0fb6ca7b"),
    ],
)
def test_the_text_form_and_span_ids_match_the_protocols_vectors(
    instant: str, first: str, third: str
) -> None:
    text = f"{_JOB}/{instant}"
    key = RunKey.parse(text)
    assert str(key) == text
    assert (key.span_id(1), key.span_id(3)) == (first, third)
    assert RunKey.of(key.to_message()) == key
    assert run_id(key.to_message()) == (key.job_id, key.seconds, key.nanos)


@pytest.mark.parametrize("text", ["", "no-slash", "a/2026-12-01", "/2026-12-01T09:00:00Z"])
def test_a_text_that_is_no_run_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"run key|ISO"):
        RunKey.parse(text)


@dataclass
class Line:
    sku: str
    amount: float = 1.0


@dataclass
class Order:
    lines: list[Line]
    note: str | None = None
    tags: dict[str, int] = field(default_factory=dict)


def test_dataclasses_go_through_json_nested() -> None:
    order = Order(lines=[Line("a", 2), Line("ż")], tags={"x": 1})
    payload = encode_payload(order)
    assert payload is not None
    assert decode_payload(payload, Order) == order
    assert decode_payload(Payload(json='{"lines": [], "later": 1}'), Order) == Order(lines=[])


@pytest.mark.parametrize(
    ("json", "wanted", "told"),
    [
        ("{", Any, "not JSON"),
        ("[1]", Order, "payload must be an object"),
        ('{"lines": [{"sku": 3}]}', Order, r"payload.lines\[0\].sku must be str, got 3"),
        ("{}", Order, "lines"),
        ("true", int, "payload must be int, got True"),
        ("[1]", dict, "payload must be an object"),
    ],
)
def test_a_payload_that_does_not_fit_says_where(json: str, wanted: Any, told: str) -> None:
    with pytest.raises(PayloadError, match=told):
        decode_payload(Payload(json=json), wanted)


def test_every_json_value_bytes_and_lone_surrogates_survive() -> None:
    for value in [0, 1.5, "", "\ud800", [None, True], {"ż": "\0"}]:
        payload = encode_payload(value)
        assert payload is not None
        assert decode_payload(Payload.FromString(payload.SerializeToString())) == value
    assert encode_payload(None) is None
    assert encode_payload(b"\xff") == Payload(data=b"\xff", content_type="application/octet-stream")
    assert decode_payload(Payload(data=b"\xff", content_type="x/y")) == b"\xff"
    for value in [float("nan"), {1, object()}, object()]:
        with pytest.raises(PayloadError):
            encode_payload(value)


def test_an_encoded_payload_is_for_handlers_that_take_it_raw() -> None:
    payload = Payload(json="1", encoding="gzip")
    assert decode_payload(payload, Payload) is payload
    with pytest.raises(PayloadError, match="'gzip'"):
        decode_payload(payload)


def test_text_is_cut_at_a_character() -> None:
    assert cut("żółw", 3) == "ż"
    assert cut_middle("a" * 100 + "b" * 100, 60).startswith("aaa")
    assert len(cut_middle("é" * 9000, 1000).encode()) <= 1000


def test_a_lease_ends_a_sixth_early_and_moves_only_forward() -> None:
    lease = Lease.received(an_assignment(lease_ttl=30, lease_remaining=28), 100.0)
    assert lease.deadline == 123.0
    lease.renew(110.0)
    assert lease.deadline == 135.0
    lease.renew(105.0)
    assert lease.deadline == 135.0
    assert heartbeat_interval(10.0, 15.0) == 5.0
    assert ack_timeout(8.0, 60.0) == 8.0


def test_reconnects_back_off_with_full_jitter_up_to_a_bound() -> None:
    backoff = Backoff()
    for bound in [0.5, 1, 2, 4, 8, 15, 15]:
        assert 0 <= backoff.next_delay() <= bound
    backoff.reset()
    assert backoff.next_delay() <= 0.5


def _held() -> Held:
    return Held(an_assignment("noop"), make_handler("noop", lambda: None), 0.0)


def test_the_outbox_keeps_everything_until_it_is_settled() -> None:
    outbox = Outbox(max_entries=2, max_bytes=10_000, resend_after=5.0)
    first, second = _held(), _held()
    outbox.put(first, completion_body(first.new_completion()))
    assert not outbox.full
    outbox.put(second, completion_body(second.new_completion()))
    assert outbox.full
    sent = outbox.take(session=1, now=10.0, max_entries=100, max_bytes=10_000)
    assert [entry.held for entry in sent] == [first, second]
    assert outbox.unanswered(1) == 2
    assert outbox.take(session=1, now=10.0, max_entries=100, max_bytes=10_000) == []

    outbox.requeue_overdue(14.9)
    assert outbox.ready_count == 0
    outbox.requeue_overdue(15.0)
    assert outbox.ready_count == 2
    outbox.take(session=1, now=15.0, max_entries=1, max_bytes=10_000)
    outbox.requeue_session(1)
    assert (outbox.ready_count, outbox.unanswered(1)) == (2, 0)

    assert outbox.settle((first.id, 1)) is not None
    assert outbox.settle((first.id, 1)) is None
    assert (len(outbox), outbox.ready_count, outbox.full) == (1, 1, False)


def test_batches_of_the_outbox_respect_their_size() -> None:
    outbox = Outbox(max_entries=100, max_bytes=10**7, resend_after=5.0)
    for _ in range(3):
        held = _held()
        completion = held.new_completion()
        completion.success.result.json = "x" * 600
        outbox.put(held, completion_body(completion))
    sizes = [
        len(outbox.take(session=1, now=0.0, max_entries=100, max_bytes=1500)) for _ in range(3)
    ]
    assert sizes == [2, 1, 0]
    assert outbox.ready_bytes == 0


def test_handlers_are_called_by_their_signature() -> None:
    async def both(value: int, ctx: Context) -> None: ...
    def swapped(ctx: Context, value: int) -> None: ...
    def only_context(context) -> None: ...  # type: ignore[no-untyped-def]

    context = Context(an_assignment(), 0.0)
    assert make_handler("a", both).arguments(1, context) == (1, context)
    assert make_handler("a", both).is_async
    assert make_handler("a", both).input_type is int
    assert make_handler("a", swapped).arguments(1, context) == (context, 1)
    assert make_handler("a", only_context).arguments(1, context) == (context,)
    assert make_handler("a", lambda: None).arguments(1, context) == ()


@pytest.mark.parametrize("kind", ["", "a b", "x" * 129, "fencepost.http"])
def test_a_bad_kind_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        make_handler(kind, lambda: None)


def test_a_handler_with_too_many_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match="nothing more"):
        make_handler("a", lambda one, two: None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"slots": 0}, "slots must be 1 to 5000, got 0"),
        ({"queues": []}, "queues must name 1 to 64, got 0"),
        ({"grace": -1}, "grace must be 0 s or more"),
        ({"prefetch": -1}, "prefetch must be 0 or more"),
    ],
)
def test_a_worker_refuses_settings_out_of_bounds(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Worker(fencepost.Client(), **options)


def test_progress_refuses_what_the_server_would() -> None:
    context = Context(an_assignment(), 0.0)
    with pytest.raises(ValueError, match="percent must be 0 to 100, got 101"):
        context.progress(101)
    with pytest.raises(ValueError, match="at most 4096 are allowed"):
        context.progress(1, checkpoint="x" * 5000)


def test_all_public_names_are_there() -> None:
    for name in fencepost.__all__:
        assert getattr(fencepost, name) is not None
    with pytest.raises(AttributeError, match="Nothing"):
        fencepost.Nothing  # noqa: B018


def test_importing_messages_loads_no_grpc() -> None:
    program = (
        "import sys, fencepost.v1.run_pb2;"
        "sys.exit('grpc' in sys.modules or 'asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 0


def test_an_attempt_has_one_entry_in_the_outbox_the_newest() -> None:
    outbox = Outbox(max_entries=10, max_bytes=10_000, resend_after=5.0)
    held = _held()
    release = worker_pb2.Release(run=held.assignment.run, attempt=held.attempt)
    outbox.put(held, release_body(release), is_release=True)
    outbox.put(held, completion_body(held.new_completion()))
    [entry] = outbox.remaining()
    assert not entry.is_release
    assert read_completions([entry.body]) == [held.new_completion()]


def test_bodies_one_after_the_other_are_the_message_of_all() -> None:
    first, second = _held(), _held()
    plain = PlainSuccesses()
    first.started_at = second.started_at = 1.5
    bodies = [plain.body(first, 2.0), plain.body(second, 2.0), plain.body(first, 4.25)]
    completions = read_completions(bodies)
    assert [(c.run, c.attempt) for c in completions] == [
        (held.assignment.run, held.attempt) for held in (first, second, first)
    ]
    assert all(c.HasField("success") for c in completions)
    handling = [duration_seconds(c.timings.handling) for c in completions]
    assert handling == [0.5, 0.5, 2.75]
    releases = [
        worker_pb2.Release(run=held.assignment.run, attempt=held.attempt)
        for held in (first, second)
    ]
    assert read_releases(release_body(release) for release in releases) == releases
