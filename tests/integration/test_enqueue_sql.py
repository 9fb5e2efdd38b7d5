"""`fencepost.enqueue`: an application makes runs in a transaction of its own."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from fencepost.v1 import payload_pb2
from fencepost_server.clock import DAY, HOUR, SECOND, from_datetime

from tests.factories import job_spec
from tests.integration.enqueue_calls import Producer, application, enqueue_in
from tests.integration.world import World

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def app(world: World) -> AsyncIterator[Any]:
    """An application's connection, and a job it may use."""
    await world.add_job("report", replace(job_spec(), labels={"team": "web"}))
    async with application(world.dsn) as connection:
        yield connection


async def _row(world: World) -> asyncpg.Record:
    [row] = await world.query("SELECT * FROM fencepost.run_queue")
    return row


async def test_a_run_appears_with_the_commit_and_goes_with_the_rollback(
    app: Any, world: World
) -> None:
    await app.execute("CREATE TABLE IF NOT EXISTS public.orders (id int)")
    transaction = app.transaction()
    await transaction.start()
    await app.execute("INSERT INTO public.orders VALUES (1)")
    await enqueue_in(app, payload='{"order": 1}', unique_key="order-1")
    await transaction.rollback()
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 0
    assert await world.value("SELECT count(*) FROM fencepost.run_keys") == 0
    async with app.transaction():
        key, existing = await enqueue_in(app, payload='{"order": 1}', unique_key="order-1")
        assert await world.claim() == []
    assert not existing
    [run] = await world.claim()
    assert run.key == key
    await app.execute("DROP TABLE public.orders")


async def test_every_parameter_reaches_the_run(app: Any, world: World) -> None:
    job_id = await world.value("SELECT job_id::text FROM fencepost.jobs")
    key, _ = await enqueue_in(
        app,
        job_id,
        payload="null",
        encoding="gzip",
        delay=_interval(hours=1),
        priority=7,
        labels=json.dumps({"team": "ops", "env": "prod"}),
        concurrency_key="customer-1",
        unique_key="k",
        on_conflict="reject",
        keep_for=_interval(hours=2),
        traceparent=PARENT,
        tracestate="a=b",
        tenant="default",
    )
    row = await _row(world)
    assert from_datetime(row["available_at"]) == world.now + HOUR
    assert world.now + HOUR < key.scheduled_at < world.now + HOUR + SECOND
    assert (row["priority"], row["concurrency_key"], row["unique_key"]) == (7, "customer-1", "k")
    assert json.loads(row["labels"]) == {"team": "ops", "env": "prod"}
    assert json.loads(row["trace_context"]) == {"traceparent": PARENT, "tracestate": "a=b"}
    assert (row["state"], row["origin"], row["attempt"]) == ("queued", "enqueue", 0)
    assert await world.value("SELECT keep_for_s FROM fencepost.run_keys") == 7200


async def test_defaults_are_the_jobs(app: Any, world: World) -> None:
    await world.query(
        "UPDATE fencepost.job_schedules SET priority = 3, concurrency_key = 'c', "
        "queue_timeout_s = 60, total_timeout_s = 90"
    )
    key, _ = await enqueue_in(app)
    row = await _row(world)
    assert key.scheduled_at == world.now + 1
    assert (row["priority"], row["concurrency_key"]) == (3, "c")
    assert (row["payload"], row["labels"], row["trace_context"]) == (None, None, None)
    assert from_datetime(row["wait_until"]) == world.now + 60 * SECOND
    assert from_datetime(row["total_until"]) == world.now + 90 * SECOND
    await world.query("DELETE FROM fencepost.run_queue")
    past = await world.value("SELECT fencepost.clock() - interval '1 day'")
    await enqueue_in(app, run_at=past, concurrency_key="", traceparent="nonsense", labels="{}")
    row = await _row(world)
    assert from_datetime(row["available_at"]) == world.now
    assert (row["concurrency_key"], row["trace_context"], row["labels"]) == (None, None, None)


_BODIES: list[dict[str, Any]] = [
    {"payload": '{"a": 1}'},
    {"payload": ""},
    {"payload": "é" * 100},
    {"payload": "x" * 16_384, "encoding": "zstd"},
    {"payload": "x" * 262_144},
    {"payload": "1", "content_type": "text/plain"},
    {"data": b"\x00\xff" * 64, "content_type": "application/x-thing"},
    {"data": b"", "content_type": "a"},
    {"data": b"x" * 262_144, "content_type": "image/png", "encoding": "e" * 63},
]


@pytest.mark.parametrize("body", _BODIES, ids=range(len(_BODIES)))
async def test_payloads_are_stored_as_the_server_stores_them(
    app: Any, world: World, body: dict[str, Any]
) -> None:
    await enqueue_in(app, **body)
    message = payload_pb2.Payload(encoding=body.get("encoding", ""))
    if "payload" in body:
        message.json = body["payload"]
    else:
        message.data = body["data"]
        message.content_type = body["content_type"]
    assert (await _row(world))["payload"] == message.SerializeToString(deterministic=True)


def _interval(**parts: float) -> timedelta:
    return timedelta(**parts)


_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("payload", {"payload": "x" * 262_145}, "262144"),
    ("payload", {"payload": "é" * 131_073}, "262144"),
    ("data", {"data": b"x" * 262_145, "content_type": "a"}, "262144"),
    ("data", {"payload": "1", "data": b"1", "content_type": "a"}, "not both"),
    ("content_type", {"data": b"1"}, "media type"),
    ("content_type", {"data": b"1", "content_type": "x" * 128}, "127"),
    ("content_type", {"data": b"1", "content_type": "a\nb"}, "printable"),
    ("content_type", {"content_type": "a"}, "payload or data"),
    ("encoding", {"payload": "1", "encoding": "ü"}, "ASCII"),
    ("encoding", {"encoding": "gzip"}, "payload or data"),
    ("delay", {"delay": _interval(seconds=-1)}, "0 s to 366 d"),
    ("delay", {"delay": _interval(days=367)}, "0 s to 366 d"),
    ("priority", {"priority": 10}, "0 to 9"),
    ("priority", {"priority": -1}, "0 to 9"),
    ("labels", {"labels": "[1]"}, "object"),
    ("labels[a]", {"labels": '{"a": 1}'}, "text"),
    ("labels[a]", {"labels": '{"a": null}'}, "text"),
    ("labels[a]", {"labels": json.dumps({"a": "x" * 64})}, "63"),
    ("labels (key)", {"labels": '{"": "x"}'}, "63"),
    ("labels (key)", {"labels": json.dumps({"x" * 64: "a"})}, "63"),
    ("labels", {"labels": json.dumps({f"k{n}": "x" for n in range(33)})}, "32"),
    ("labels", {"labels": json.dumps({f"k{n}": "x" for n in range(32)})}, "32"),
    ("concurrency_key", {"concurrency_key": "é" * 65}, "128"),
    ("unique_key", {"unique_key": ""}, "1 to 256"),
    ("unique_key", {"unique_key": "é" * 129}, "1 to 256"),
    ("unique_key", {"on_conflict": "reject"}, "on_conflict"),
    ("unique_key", {"keep_for": _interval(days=1)}, "keep_for"),
    ("on_conflict", {"unique_key": "k", "on_conflict": "REJECT"}, "replace_waiting"),
    ("keep_for", {"unique_key": "k", "keep_for": _interval(days=31)}, "0 s to 30 d"),
    ("keep_for", {"unique_key": "k", "keep_for": _interval(seconds=-1)}, "0 s to 30 d"),
    ("tenant", {"tenant": "No Body"}, "[a-z0-9-]"),
    ("tenant", {"tenant": None}, "[a-z0-9-]"),
]


@pytest.mark.parametrize(
    ("parameter", "values", "allowed"),
    _REFUSED,
    ids=[f"{n}-{case[0]}" for n, case in enumerate(_REFUSED)],
)
async def test_refusals_name_parameter_value_and_what_is_allowed(
    app: Any, world: World, parameter: str, values: dict[str, Any], allowed: str
) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
        await enqueue_in(app, **values)
    error = caught.value
    assert str(error).startswith(f"{parameter}: got ")
    assert error.detail is not None
    assert error.detail.startswith(f"Parameter: {parameter}. Value: ")
    assert error.hint is not None
    assert error.hint.startswith("Allowed: ")
    assert allowed in error.hint
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 0


@pytest.mark.parametrize(
    ("sql", "parameter"),
    [
        ("fencepost.enqueue('report', run_at => 'infinity')", "run_at"),
        (
            "fencepost.enqueue('report', run_at => fencepost.clock() + interval '366 d 1 s')",
            "run_at",
        ),
        ("fencepost.enqueue('report', run_at => fencepost.clock(), delay => '1 s')", "delay"),
        ("fencepost.enqueue('report', delay => '1 month -40 days')", "delay"),
        ("fencepost.enqueue(NULL)", "job"),
        ("fencepost.enqueue('Report')", "job"),
        ("fencepost.enqueue('tenants/default/jobs/report')", "job"),
        ("fencepost.enqueue(E'report\\n')", "job"),
        ("fencepost.enqueue($$'; DROP TABLE fencepost.jobs; --$$)", "job"),
    ],
)
async def test_hostile_values_are_refused(app: Any, sql: str, parameter: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
        await app.fetch(f"SELECT * FROM {sql}")  # noqa: S608 - the cases above
    assert str(caught.value).startswith(f"{parameter}: got ")


async def test_old_and_far_instants_are_taken(app: Any, world: World) -> None:
    await app.execute("SELECT fencepost.enqueue('report', run_at => '-infinity')")
    await app.execute("SELECT fencepost.enqueue('report', run_at => '4713-01-01 BC')")
    await app.execute(
        "SELECT fencepost.enqueue('report', run_at => fencepost.clock() + interval '8784 hours')"
    )
    latest = await world.value("SELECT max(available_at) FROM fencepost.run_queue")
    assert from_datetime(latest) == world.now + 366 * DAY
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 3


async def test_what_does_not_exist_and_what_is_held(app: Any, world: World) -> None:
    for values, name in (
        ({"job": "nowhere"}, "tenants/default/jobs/nowhere"),
        ({"tenant": "nobody"}, "tenants/nobody"),
        ({"job": "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"}, "/jobs/0197a4c2"),
    ):
        with pytest.raises(asyncpg.NoDataFoundError, match="does not exist") as missing:
            await enqueue_in(app, **values)
        assert name in str(missing.value)
    key, _ = await enqueue_in(app, unique_key="it's")
    with pytest.raises(asyncpg.UniqueViolationError, match="is held by tenants/default") as held:
        await enqueue_in(app, unique_key="it's", on_conflict="reject")
    assert str(key).partition("/")[2] in str(held.value)
    assert await enqueue_in(app, unique_key="it's") == (key, True)
    other, existing = await enqueue_in(app, unique_key="it's", on_conflict="replace_waiting")
    assert (other != key, existing) == (True, False)
    await world.query("UPDATE fencepost.jobs SET deleted_at = created_at")
    with pytest.raises(asyncpg.NoDataFoundError):
        await enqueue_in(app)


async def test_server_and_applications_share_keys(app: Any, world: World) -> None:
    producer = Producer(world=world)
    first = await producer.one("report", "k")
    assert await enqueue_in(app, unique_key="k") == (first.key, True)
    key, _ = await enqueue_in(app, unique_key="j")
    assert (await producer.one("report", "j")).key == key


async def test_a_busy_key_is_an_error_that_may_be_tried_again(app: Any, world: World) -> None:
    async with application(world.dsn, lock_timeout="20ms") as other, app.transaction():
        await enqueue_in(app, unique_key="k")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await enqueue_in(other, unique_key="k")
        assert await other.fetchval("SHOW lock_timeout") == "20ms"


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_one_snapshot_for_all_is_refused(app: Any, isolation: Any) -> None:
    async with app.transaction(isolation=isolation):
        with pytest.raises(asyncpg.FeatureNotSupportedError, match="READ COMMITTED"):
            await enqueue_in(app)


async def test_settings_of_the_session_are_left_alone(app: Any) -> None:
    names = "lock_timeout", "search_path", "TimeZone", "jit", "plan_cache_mode", "enable_seqscan"
    await app.execute("SET timezone = 'Asia/Kolkata'")
    async with app.transaction():
        before = [await app.fetchval(f"SHOW {name}") for name in names]
        await enqueue_in(app, unique_key="k")
        assert [await app.fetchval(f"SHOW {name}") for name in names] == before
