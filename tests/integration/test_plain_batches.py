"""Plain batches are made the short way as they would be the long way, or not at all."""

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

import pytest
from fencepost.v1 import run_service_pb2
from fencepost_server.api.wire_plain import notes_of
from fencepost_server.api.wire_run import read_remembered
from fencepost_server.clock import DAY, HOUR, SECOND, Instant, to_datetime
from fencepost_server.domain.run import Lane, RunKey
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.plain_enqueue import (
    JOBS_MAX,
    Places,
    PlainEnqueues,
    PlainMade,
    PlainRuns,
)
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.requests import RequestKey

from tests.factories import job_spec
from tests.integration.enqueue_calls import (
    Producer,
    application,
    end_as_dead,
    enqueue_in,
    entry,
    until_blocked,
)
from tests.integration.run_server import json_payload, serving
from tests.integration.world import World

_HELD = (
    "INSERT INTO fencepost.run_queue (job_id, scheduled_at, available_at, created_at, tenant_id, "
    "queue_id, kind_id, version, state, origin, priority, lease_s, cancel_grace_s, "
    "attempt_timeout_s) SELECT s.job_id, $1, $1, $1, s.tenant_id, s.queue_id, s.kind_id, 1, "
    "'queued', 'enqueue', 0, 30, 30, 60 FROM fencepost.job_schedules AS s"
)


def plain(
    count: int = 3,
    *,
    jobs: tuple[str, ...] = ("report",),
    keys: list[str | None] | None = None,
    ids: list[str] | None = None,
    payloads: list[bytes | None] | None = None,
) -> PlainRuns:
    """Runs that take turns among the jobs."""
    return PlainRuns(
        jobs=jobs,
        numbers=[n % len(jobs) + 1 for n in range(count)] if len(jobs) > 1 else [],
        payloads=payloads or [None] * count,
        unique_keys=keys or [],
        request_ids=ids or [],
        body_hashes=[_hash(each) for each in ids or []],
    )


def _request_key(request_id: str) -> RequestKey:
    return RequestKey(request_id=request_id, body_hash=_hash(request_id))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@dataclass(kw_only=True)
class Plain:
    """Makes plain runs through the engine of a world."""

    world: World
    enqueues: PlainEnqueues = field(init=False)

    def __post_init__(self) -> None:
        self.enqueues = PlainEnqueues(
            database=self.world.database,
            catalogue=self.world.catalogue,
            specs=self.world.specs,
            wake=self.world.woken,
        )

    async def __call__(self, runs: PlainRuns, **values: Any) -> PlainMade | None:
        origin = Origin(tenant="default", now=self.world.now, **values)
        return await self.enqueues.enqueue(origin, runs, notes=notes_of)


@pytest.fixture
async def make(world: World) -> Plain:
    await world.add_job("report")
    return Plain(world=world)


async def _count(world: World, table: str) -> int:
    return int(await world.value(f"SELECT count(*) FROM fencepost.{table}"))  # noqa: S608 - a table of ours


async def _nothing_made(world: World, *, runs: int = 0, keys: int = 0, requests: int = 0) -> None:
    found = [await _count(world, each) for each in ("run_queue", "run_keys", "requests")]
    assert found == [runs, keys, requests]


# What is made ---------------------------------------------------------------------------------


async def test_rows_are_as_those_of_the_long_way(world: World) -> None:
    spec = job_spec(concurrency_key="tower", queue_timeout=HOUR, total_timeout=2 * HOUR)
    await world.add_job("report", spec, payload=b"\x0a\x011")
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    made = await Plain(world=world)(
        plain(keys=[None, "b", "a"], payloads=[None, b"\x0a\x012", None], ids=["x", "y", "z"]),
        trace_context=trace,
    )
    assert made is not None
    tables = {
        "run_queue": "scheduled_at, run_queue.*",
        "run_keys": "unique_key, run_keys.*",
        "requests": "request_id, tenant_id, method, body_hash, expires_at",
    }
    short = {
        table: await world.query(f"SELECT {columns} FROM fencepost.{table} ORDER BY 1")  # noqa: S608 - as above
        for table, columns in tables.items()
    }
    for table in tables:
        await world.query(f"DELETE FROM fencepost.{table}")  # noqa: S608 - as above
    producer = Producer(world=world)
    await producer.enqueues.enqueue(
        Origin(tenant="default", now=world.now, trace_context=trace),
        [
            entry("report", key, payload=payload, request=_request_key(request_id))
            for key, payload, request_id in zip(
                (None, "b", "a"), (None, b"\x0a\x012", None), "xyz", strict=True
            )
        ],
        encode=lambda made: b"",
    )  # fmt: skip
    for table, columns in tables.items():
        long = await world.query(f"SELECT {columns} FROM fencepost.{table} ORDER BY 1")  # noqa: S608 - as above
        assert len(short[table]) == (2 if table == "run_keys" else 3)
        assert [dict(row) for row in long] == [dict(row) for row in short[table]]


async def test_what_is_answered_is_what_was_made(make: Plain, world: World) -> None:
    ids = [await world.add_job(name) for name in ("mail", "sms")]
    made = await make(plain(5, jobs=("mail", "sms")))
    assert made is not None
    assert [each.job_name for each in made.records] == ["mail", "sms"]
    assert [each.key.job_id for each in made.records] == ids
    base = world.now
    assert [at - base for at in made.ats] == [1, 1, 2, 2, 3]
    rows = await world.query("SELECT job_id, scheduled_at FROM fencepost.run_queue")
    numbers = [0, 1, 0, 1, 0]
    wanted = {(ids[n], to_datetime(at)) for n, at in zip(numbers, made.ats, strict=True)}
    assert {(str(row["job_id"]), row["scheduled_at"]) for row in rows} == wanted
    lanes = await world.query(
        "SELECT DISTINCT queue_id, kind_id, priority FROM fencepost.run_queue"
    )
    assert {Lane(*row) for row in lanes} == world.woken.lane_hints[-1][0]


async def test_whole_seconds_are_left_out(make: Plain, world: World) -> None:
    await world.move(SECOND - 2)
    made = await make(plain(4))
    assert made is not None
    assert [at - world.now for at in made.ats] == [0, 1, 3, 4]


async def test_batches_of_one_instant_follow_each_other(make: Plain, world: World) -> None:
    batches = await asyncio.gather(*(make(plain(100)) for _ in range(6)))
    ats = [at for made in batches if made is not None for at in made.ats]
    assert len(set(ats)) == 600
    assert max(ats) - min(ats) == 599


async def test_places_of_others_are_gone_round(make: Plain, world: World) -> None:
    await world.raw.execute(_HELD, to_datetime(world.now + 2))
    await world.raw.execute(_HELD, to_datetime(world.now + 5))
    made = await make(plain())
    assert made is not None
    # The places that were looked at in vain are not looked at again.
    assert [at - world.now for at in made.ats] == [7, 8, 9]


async def test_watchers_are_told(make: Plain, world: World) -> None:
    assert await make(plain()) is not None
    assert await _count(world, "run_changes") == 0
    await world.query(
        "UPDATE fencepost.shard_state SET watched_until = $1", to_datetime(world.now + HOUR)
    )
    made = await make(plain())
    assert made is not None
    [told] = await world.query("SELECT job_ids, scheduled_ats FROM fencepost.run_changes")
    assert told["scheduled_ats"] == [to_datetime(at) for at in made.ats]
    assert {str(each) for each in told["job_ids"]} == {made.records[0].key.job_id}


def test_a_clock_that_is_set_back_moves_no_places_ahead() -> None:
    places = Places()
    now: Instant = 1_000 * DAY + 5
    assert places.take(1, "a", 3, now=now) == [now, now + 1, now + 2]
    assert places.take(1, "a", 1, now=now) == [now + 3]
    assert places.take(1, "b", 1, now=now) == [now]
    assert places.take(2, "a", 1, now=now) == [now]
    assert places.take(1, "a", 2, now=now - HOUR) == [now - HOUR, now - HOUR + 1]
    places.leave_out(1, "a", until=now - HOUR + 9)
    assert places.take(1, "a", 1, now=now - HOUR) == [now - HOUR + 10]


# What is not plain ----------------------------------------------------------------------------


async def test_a_key_that_was_taken_before_is_left_to_the_long_way(
    make: Plain, world: World
) -> None:
    await Producer(world=world).one("report", "b")
    assert await make(plain(keys=["a", "b", None], ids=["x", "y", "z"])) is None
    await _nothing_made(world, runs=1, keys=1)


@pytest.mark.parametrize("repeated", ["x", "y", "z"])
async def test_a_request_id_that_came_before_is_left_to_the_long_way(
    make: Plain, world: World, repeated: str
) -> None:
    assert await make(plain(1, ids=[repeated])) is not None
    assert await make(plain(keys=["a", "b", None], ids=["x", "y", "z"])) is None
    await _nothing_made(world, runs=1, requests=1)


@pytest.mark.parametrize("jobs", [("report", "nothing"), ("nothing",)])
async def test_a_job_that_does_not_exist_is_left_to_the_long_way(
    make: Plain, world: World, jobs: tuple[str, ...]
) -> None:
    assert await make(plain(jobs=jobs)) is None
    await _nothing_made(world)


async def test_a_job_by_name_and_by_id_is_one_job(make: Plain, world: World) -> None:
    job_id = str(await world.value("SELECT job_id FROM fencepost.jobs"))
    assert await make(plain(keys=["a", "a", None], jobs=("report", job_id))) is None
    await _nothing_made(world)
    assert await make(plain(jobs=(job_id,))) is not None


async def test_a_key_that_follows_from_the_payload_is_left_to_the_long_way(
    make: Plain, world: World
) -> None:
    await world.add_job("templated", job_spec(concurrency_key="{payload.customer}"))
    assert await make(plain(jobs=("report", "templated"))) is None
    await _nothing_made(world)


@pytest.mark.parametrize("place", ["job_runs", "job_runs_stray", "dead_letters"])
async def test_the_place_of_a_run_that_has_ended_is_never_used_again(
    make: Plain, world: World, place: str
) -> None:
    await world.raw.execute(_HELD, to_datetime(world.now + 2))
    job_id = str(await world.value("SELECT job_id FROM fencepost.jobs"))
    await end_as_dead(world, RunKey(job_id, world.now + 2), place, ended_at=world.now)
    assert await make(plain(keys=["a", None, None], ids=["x", "y", "z"])) is None
    await _nothing_made(world)
    answers = await Producer(world=world).batch([entry("report")] * 3)
    assert len(answers) == 3
    rows = await world.query("SELECT scheduled_at FROM fencepost.run_queue ORDER BY 1")
    assert to_datetime(world.now + 2) not in {row["scheduled_at"] for row in rows}


# Races ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
async def test_a_key_that_somebody_is_taking_is_not_waited_for_long(
    make: Plain, world: World, commits: bool
) -> None:
    """The short way gives up; the long way then waits, or says that the key is busy."""
    async with application(world.dsn) as other:
        transaction = other.transaction()
        await transaction.start()
        await enqueue_in(other, unique_key="b")
        assert await make(plain(keys=["a", "b", None])) is None
        assert await _count(world, "run_keys") == 0
        await (transaction.commit() if commits else transaction.rollback())
    made = await make(plain(keys=["a", "b", None]))
    assert (made is None) == commits
    await _nothing_made(world, runs=1 if commits else 3, keys=1 if commits else 2)


@pytest.mark.parametrize("commits", [True, False])
async def test_a_place_that_somebody_is_taking_is_left_to_him(
    make: Plain, world: World, commits: bool
) -> None:
    async with application(world.dsn) as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute(_HELD, to_datetime(world.now + 2))
        call = asyncio.create_task(make(plain(keys=["a", None, None], ids=["x", "y", "z"])))
        await until_blocked(world.raw, other, call)
        await (transaction.commit() if commits else transaction.rollback())
        made = await call
    assert (made is None) == commits
    await _nothing_made(
        world, runs=1 if commits else 3, keys=0 if commits else 1, requests=0 if commits else 3
    )


async def test_a_request_id_that_somebody_is_taking_makes_one_run(
    make: Plain, world: World
) -> None:
    async with application(world.dsn) as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute(
            "INSERT INTO fencepost.requests VALUES ($1, 'EnqueueRun', 'y', $2, '', $3)",
            world.tenant_id,
            _hash("y"),
            to_datetime(world.now + HOUR),
        )
        call = asyncio.create_task(make(plain(ids=["x", "y", "z"])))
        await until_blocked(world.raw, other, call)
        await transaction.commit()
        assert await call is None
    await _nothing_made(world, requests=1)


async def test_a_job_that_is_being_deleted_gets_no_run(make: Plain, world: World) -> None:
    async with application(world.dsn) as other:
        async with other.transaction():
            job_id = await other.fetchval("SELECT job_id FROM fencepost.jobs")
            await other.execute("SELECT fencepost.lock_out_enqueues($1)", job_id)
            await other.execute("UPDATE fencepost.jobs SET deleted_at = now()")
            assert await make(plain()) is None
        assert await make(plain()) is None
    await _nothing_made(world)


async def test_a_deletion_waits_for_a_plain_batch(make: Plain, world: World) -> None:
    """Whoever is about to make runs of a job holds it, also while he waits for a place."""
    async with application(world.dsn) as other, application(world.dsn) as deleter:
        transaction = other.transaction()
        await transaction.start()
        await other.execute(_HELD, to_datetime(world.now + 2))
        call = asyncio.create_task(make(plain()))
        await until_blocked(world.raw, other, call)
        job_id = await world.value("SELECT job_id FROM fencepost.jobs")
        locked = asyncio.create_task(
            deleter.execute("SELECT fencepost.lock_out_enqueues($1)", job_id)
        )
        await transaction.rollback()
        assert await call is not None
        await locked


async def test_servers_that_press_into_one_instant_make_every_run_once(
    make: Plain, world: World
) -> None:
    """Neither places nor keys nor request ids are shared, whoever is faster with them."""
    await world.add_job("mail")
    servers = [make, Plain(world=world), Plain(world=world)]
    producer = Producer(world=world)

    async def call(server: Plain, number: int) -> None:
        jobs = ("mail", "report") if number % 2 else ("report", "mail")
        keys = [f"k{(number + n) % 30}" if n % 3 else None for n in range(20)]
        ids = [f"{number}-{n}" for n in range(20)]
        runs = plain(20, jobs=jobs, keys=keys, ids=ids)
        if await server(runs) is None:
            await producer.enqueues.enqueue(
                Origin(tenant="default", now=world.now),
                [
                    entry(jobs[n % 2], key, request=_request_key(request_id))
                    for n, (key, request_id) in enumerate(zip(keys, ids, strict=True))
                ],
                encode=lambda made: b"",
                recall=read_remembered,
            )

    # Every call comes twice, as after an answer that was lost.
    await asyncio.gather(*(call(servers[n % 3], n // 2) for n in range(36)))
    keyless = 18 * 7
    rows = await world.query("SELECT job_id, unique_key FROM fencepost.run_queue")
    assert sum(row["unique_key"] is None for row in rows) == keyless
    named = [tuple(row) for row in rows if row["unique_key"] is not None]
    assert len(named) == len(set(named)) == await _count(world, "run_keys")
    assert await _count(world, "requests") == 18 * 20
    holders = await world.value(
        "SELECT count(*) FROM fencepost.run_keys AS k JOIN fencepost.run_queue AS q "
        "USING (job_id, scheduled_at, unique_key)"
    )
    assert holders == len(named)


# Over the wire --------------------------------------------------------------------------------


def _request(job: str, number: int, **values: Any) -> run_service_pb2.EnqueueRunRequest:
    return run_service_pb2.EnqueueRunRequest(
        job=f"tenants/default/jobs/{job}", request_id=f"id-{number}", **values
    )


async def test_a_batch_that_is_sent_again_gets_its_runs(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        entries = [
            _request("mail", n, payload=json_payload(str(n)), unique_key={"key": str(n)})
            for n in range(5)
        ]
        request = run_service_pb2.BatchEnqueueRunsRequest(
            parent="tenants/default", requests=entries
        )
        first = await server.runs.BatchEnqueueRuns(request)
        again = await server.runs.BatchEnqueueRuns(request)
        assert again == first
        assert len({each.response.run.name for each in first.outcomes}) == 5
        for number, outcome in enumerate(first.outcomes):
            run = await server.get(outcome.response.run)
            assert run.payload.json == str(number)
            assert run.unique_key == outcome.response.run.unique_key == str(number)
        assert len(await server.query("SELECT 1 FROM fencepost.run_queue")) == 5
        # One of them alone, and one that now says something else.
        assert await server.runs.EnqueueRun(entries[2]) == first.outcomes[2].response
        request.requests[1].payload.json = "other"
        third = await server.runs.BatchEnqueueRuns(request)
        assert third.outcomes[1].problem.reason == "REQUEST_ID_REUSED"
        assert third.outcomes[0] == first.outcomes[0]


async def test_entries_that_are_not_plain_share_a_batch_with_those_that_are(
    database_url: str,
) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        held = await server.enqueue("mail", unique_key={"key": "k"})
        response = await server.runs.BatchEnqueueRuns(
            run_service_pb2.BatchEnqueueRunsRequest(
                parent="tenants/default",
                requests=[
                    _request("mail", 1),
                    _request("mail", 2, unique_key={"key": "k"}),
                    _request("nobody", 3),
                    _request("mail", 4, priority=7),
                ],
            )
        )
        made, existing, missing, other = response.outcomes
        assert made.response.run.priority == 0
        assert existing.response.existing
        assert existing.response.run.name == held.name
        assert missing.problem.reason == "JOB_NOT_FOUND"
        assert other.response.run.priority == 7


async def test_more_jobs_than_a_plain_batch_takes_are_no_reason_to_refuse(
    database_url: str,
) -> None:
    async with serving(database_url) as server:
        names = [f"job-{n}" for n in range(JOBS_MAX + 1)]
        for name in names:
            await server.make_job(name)
        response = await server.runs.BatchEnqueueRuns(
            run_service_pb2.BatchEnqueueRunsRequest(
                parent="tenants/default",
                requests=[_request(name, n) for n, name in enumerate(names)],
            )
        )
        runs = [each.response.run.job for each in response.outcomes]
        assert runs == [f"tenants/default/jobs/{name}" for name in names]


async def test_a_database_that_is_away_is_said_to_be_away(make: Plain, world: World) -> None:
    await world.raw.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    outcomes = await asyncio.gather(*(make(plain(1)) for _ in range(8)), return_exceptions=True)
    assert all(
        isinstance(each, PlainMade | StorageUnavailable) for each in outcomes
    ), outcomes  # fmt: skip
