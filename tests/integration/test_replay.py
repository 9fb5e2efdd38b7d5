"""Replays: the run goes on under its key with a fresh budget, once, whoever else acts on it."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fencepost_server.clock import HOUR, MINUTE, SECOND, to_datetime
from fencepost_server.domain.job import RetryPolicy
from fencepost_server.domain.run import Lane, RunKey, RunState
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.replay import ReplayOptions, lock_dead_letters, replay_locked
from fencepost_server.engine.verdicts import Held, LeaseLostReason, Verdict
from fencepost_server.errors import (
    FencepostError,
    JobNotFound,
    RequestIdReused,
    RunDiscarded,
    RunNotDead,
    RunNotFound,
    StorageUnavailable,
    VersionNotKept,
)
from fencepost_server.policy.outcome import Failed, Released
from fencepost_server.store.requests import RequestKey

from tests.factories import every, job_spec
from tests.integration.dead_letter_desk import DeadLetterDesk
from tests.integration.world import World

_DEAD = "SELECT count(*) FROM fencepost.dead_letters"


@pytest.fixture
def desk(world: World) -> DeadLetterDesk:
    return DeadLetterDesk(world)


async def refusal(call: object) -> FencepostError:
    with pytest.raises(FencepostError) as caught:
        await call  # type: ignore[misc]  # any awaitable
    return caught.value


async def test_a_replayed_run_keeps_its_identity_and_gets_a_fresh_budget(
    world: World, desk: DeadLetterDesk
) -> None:
    spec = job_spec(
        retry=RetryPolicy.of(max_failures=2),
        queue_timeout=HOUR,
        total_timeout=2 * HOUR,
        lease_ttl=45 * SECOND,
    )
    await world.enqueue(await world.add_job(spec=spec))
    for _ in range(2):
        [run] = await world.claim()
        await world.report(run, Failed(code="X"), progress=b"half", failure_code="X")
        await world.move(MINUTE)
    before = await world.ended(run.key, "dead_letters")
    assert (before["attempt"], before["failure_count"]) == (2, 2)
    await world.move(MINUTE)
    record = await desk.replay(run.key)
    assert (record.key, record.state, record.replay_count) == (run.key, RunState.QUEUED, 1)
    row = await world.live(run.key)
    now = to_datetime(world.now)
    assert (row["attempt"], row["attempt_open"]) == (2, False)
    assert (row["failure_count"], row["lost_lease_count"], row["replay_count"]) == (0, 0, 1)
    assert row["available_at"] == now
    assert row["wait_until"] == to_datetime(world.now + HOUR)
    assert row["total_until"] == to_datetime(world.now + 2 * HOUR)
    assert (row["lease_s"], row["progress"], row["failure_code"]) == (45, b"half", "X")
    for kept in ("origin", "created_at", "first_claimed_at", "labels", "payload", "version"):
        assert row[kept] == before[kept]
    assert await world.value(_DEAD) == 0
    lane = Lane(row["queue_id"], row["kind_id"], row["priority"])
    assert ({lane}, 0) in world.woken.lane_hints
    [again] = await world.claim()
    assert (again.key, again.attempt, again.progress) == (run.key, 3, b"half")
    # The budget is new: the first failure is not the last.
    await world.report(again, Failed(code="X"))
    assert (await desk.read(run.key)).state is RunState.RETRYING


async def test_a_new_payload_takes_the_old_checkpoint_away(
    world: World, desk: DeadLetterDesk
) -> None:
    [key] = await desk.dead()
    await world.raw.execute("UPDATE fencepost.dead_letters SET progress = 'half', payload = 'old'")
    await desk.replay(key, payload=b"new")
    [run] = await world.claim()
    assert (run.payload, run.progress) == (b"new", None)
    await desk.bury([run])
    await desk.replay(key)
    [run] = await world.claim()
    assert (run.payload, run.attempt) == (b"new", 3)
    assert (await desk.read(key)).replay_count == 2


async def edit(world: World) -> None:
    """The job gets a second version: a queue, kind and priority of its own, and half the time."""
    queue_id = await world.queue_id("fast")
    kinds = await world.catalogue.kind_ids(["other"])
    spec = job_spec(
        queue="fast", kind="other", priority=7, attempt_timeout=MINUTE, concurrency_key="newer"
    )
    await world.raw.execute("UPDATE fencepost.jobs SET version = 2")
    await world.raw.execute(
        "INSERT INTO fencepost.job_versions SELECT job_id, 2, $1::text::jsonb, 'newest', now() "
        "FROM fencepost.job_versions",
        json.dumps(spec.to_json()),
    )
    await world.raw.execute(
        "UPDATE fencepost.job_schedules SET version = 2, queue_id = $1, kind_id = $2, "
        "priority = 7, attempt_timeout_s = 60, concurrency_key = 'newer'",
        queue_id,
        kinds["other"],
    )


async def test_the_recorded_version_applies_unless_the_newest_is_asked_for(
    world: World, desk: DeadLetterDesk
) -> None:
    spec = job_spec(attempt_timeout=HOUR, concurrency_key="older")
    recorded, newest, own = await desk.dead(3, spec=spec)
    await world.raw.execute(
        "UPDATE fencepost.dead_letters SET concurrency_key = 'its own' WHERE scheduled_at = $1",
        to_datetime(own.scheduled_at),
    )
    await edit(world)
    await desk.replay(recorded)
    record = await desk.read(recorded)
    assert (record.version, record.queue_name, record.kind) == (1, "default", "send")
    assert (record.priority, record.concurrency_key) == (spec.target.priority, "older")
    row = await world.live(recorded)
    assert row["attempt_timeout_s"] == 3600
    for key, concurrency_key in ((newest, "newer"), (own, "its own")):
        await desk.replay(key, use_newest_version=True)
        record = await desk.read(key)
        assert (record.version, record.queue_name, record.kind) == (2, "fast", "other")
        assert (record.priority, record.concurrency_key) == (7, concurrency_key)
        # Without one of its own, the run's payload is its version's.
        assert record.payload == b"newest"
        assert (await world.live(key))["attempt_timeout_s"] == 60


async def test_only_what_is_dead_and_not_given_up_is_replayed(
    world: World, desk: DeadLetterDesk
) -> None:
    [key] = await desk.dead()
    await desk.replay(key)
    for state in ("QUEUED", "RUNNING", "SUCCEEDED"):
        refused = await refusal(desk.replay(key))
        assert isinstance(refused, RunNotDead)
        assert refused.metadata["runState"] == state
        refused = await refusal(desk.discard(key))
        assert isinstance(refused, RunNotDead)
        if state == "QUEUED":
            [run] = await world.claim()
        elif state == "RUNNING":
            await world.report(run)
    missing = RunKey(key.job_id, key.scheduled_at + 1)
    assert isinstance(await refusal(desk.replay(missing)), RunNotFound)
    [gone] = await desk.dead(name="gone")
    await desk.discard(gone)
    assert isinstance(await refusal(desk.replay(gone)), RunDiscarded)
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 0


async def test_a_deleted_job_and_a_version_that_is_gone_are_refused(
    world: World, desk: DeadLetterDesk
) -> None:
    [key] = await desk.dead()
    await edit(world)
    await world.raw.execute("DELETE FROM fencepost.job_versions WHERE version = 1")
    world.specs._specs.clear()
    refused = await refusal(desk.replay(key))
    assert isinstance(refused, VersionNotKept)
    assert "use_newest_version" in refused.message
    assert await world.value(_DEAD) == 1
    await world.raw.execute("UPDATE fencepost.jobs SET deleted_at = now()")
    assert isinstance(await refusal(desk.replay(key, use_newest_version=True)), JobNotFound)
    await world.raw.execute("UPDATE fencepost.jobs SET deleted_at = NULL")
    assert (await desk.replay(key, use_newest_version=True)).version == 2


async def test_a_repeated_request_gets_the_first_answer(world: World, desk: DeadLetterDesk) -> None:
    first, second = await desk.dead(2)
    request = RequestKey(request_id="once", body_hash=b"body")
    await desk.replay(first, request=request)
    [run] = await world.claim()
    await desk.bury([run])
    # It died again; a resend of the call is not another replay.
    await desk.replay(first, request=request)
    assert (await desk.read(first)).state is RunState.DEAD
    other = RequestKey(request_id="once", body_hash=b"another body")
    assert isinstance(await refusal(desk.replay(second, request=other)), RequestIdReused)
    # A refused call leaves its id free.
    refused = RequestKey(request_id="refused", body_hash=b"body")
    await desk.discard(second)
    assert isinstance(await refusal(desk.replay(second, request=refused)), RunDiscarded)
    await desk.replay(first, request=replace(refused, body_hash=b"another body"))
    assert (await desk.read(first)).replay_count == 2


async def test_five_hundred_replayed_twice_at_once_go_once_each(
    world: World, desk: DeadLetterDesk
) -> None:
    keys = await desk.dead(500)
    told: Counter[str] = Counter()

    async def replay_all(wanted: Sequence[RunKey]) -> None:
        for key in wanted:
            try:
                told[(await desk.replay(key)).state.name] += 1
            except RunNotDead as error:
                told[error.reason] += 1

    # Two callers of two connections each, from both ends.
    await asyncio.gather(
        *(replay_all(keys[part::2]) for part in range(2)),
        *(replay_all(keys[::-1][part::2]) for part in range(2)),
    )
    assert told == {"QUEUED": 500, "RUN_NOT_DEAD": 500}
    assert await world.value(_DEAD) == 0
    rows = await world.query(
        "SELECT count(*) AS runs, count(DISTINCT (job_id, scheduled_at)) AS keys, "
        "min(attempt) AS low, max(attempt) AS high, max(replay_count) AS replays "
        "FROM fencepost.run_queue WHERE state = 'queued'"
    )
    assert tuple(rows[0]) == (500, 500, 1, 1, 1)
    claimed = await world.claim(500)
    assert {(run.key, run.attempt) for run in claimed} == {(key, 2) for key in keys}


async def test_a_crash_in_the_middle_of_a_replay_leaves_the_dead_letter(
    world: World, desk: DeadLetterDesk
) -> None:
    [key] = await desk.dead()

    async def replay_and_crash() -> None:
        async with world.database.requests.transaction() as connection:
            rows = await lock_dead_letters(connection, [key])
            replayed = await replay_locked(
                connection, rows, world.specs, ReplayOptions(), now=world.now
            )
            assert replayed.counts == {key: 1}
            pid = connection._raw.get_server_pid()
            assert await world.value("SELECT pg_terminate_backend($1)", pid)

    with pytest.raises(StorageUnavailable):
        await replay_and_crash()
    assert (await world.ended(key, "dead_letters"))["replay_count"] == 0
    assert (await desk.replay(key)).replay_count == 1


async def test_the_worker_of_an_old_attempt_changes_nothing(
    world: World, desk: DeadLetterDesk
) -> None:
    await world.enqueue(await world.add_job())
    [old] = await world.claim()
    await desk.bury([old])
    await desk.replay(old.key)

    async def tell() -> tuple[set[Verdict], LeaseLostReason | None]:
        verdicts = {
            (await world.report(old)).verdict,
            (await world.report(old, Failed(code="X", final=True))).verdict,
            (await world.report(old, Released())).verdict,
        }
        [renewal] = await world.lifecycle.heartbeat([Held(old.key, old.attempt)])
        assert renewal.notice is not None
        return verdicts, renewal.notice.lost

    before = await world.live(old.key)
    assert await tell() == ({Verdict.ALREADY_APPLIED}, LeaseLostReason.ATTEMPT_CLOSED)
    assert await world.live(old.key) == before
    [new] = await world.claim()
    before = await world.live(old.key)
    assert await tell() == ({Verdict.STALE_ATTEMPT}, LeaseLostReason.SUPERSEDED)
    assert await world.live(old.key) == before
    assert (await world.report(new)).verdict is Verdict.APPLIED


async def test_a_worker_whose_lease_was_lost_for_good_is_not_told_that_it_was_heard(
    world: World, desk: DeadLetterDesk
) -> None:
    spec = job_spec(retry=RetryPolicy.of(max_lost_leases=1))
    old = await world.started(spec)
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 1
    assert (await world.ended(old.key, "dead_letters"))["dead_reason"] == "max_lost_leases"
    await desk.replay(old.key)
    assert (await world.report(old)).verdict is Verdict.RUN_TERMINAL
    [new] = await world.claim()
    assert (await world.report(old)).verdict is Verdict.STALE_ATTEMPT
    await world.report(new, Released())
    assert (await world.report(new)).verdict is Verdict.ALREADY_APPLIED


async def test_a_replayed_run_counts_for_overlap_and_is_not_held_back(
    world: World, desk: DeadLetterDesk
) -> None:
    spec = job_spec(every(MINUTE, overlap=OverlapPolicy.QUEUE_ONE))
    job = await world.add_job(spec=spec, next_run_at=world.now)
    await world.scheduler.fire_due()
    [first] = await world.claim()
    await desk.bury([first])
    await world.move(MINUTE)
    await world.scheduler.fire_due()
    [second] = await world.claim()
    # The second fire runs; the replay of the first does not wait for it.
    assert (await desk.replay(first.key)).state is RunState.QUEUED
    [replayed] = await world.claim()
    assert replayed.key == first.key
    await world.report(second)
    await world.move(MINUTE)
    await world.scheduler.fire_due()
    # The third fire waits for the replay, whose end frees it.
    assert [run[1] for run in await world.runs_of(job)] == ["running", "blocked"]
    await world.report(replayed)
    assert await world.promoter.sweep() == 1
    assert [run[1] for run in await world.runs_of(job)] == ["queued"]


async def test_a_key_that_is_live_already_is_never_made_twice(
    world: World, desk: DeadLetterDesk
) -> None:
    [key] = await desk.dead()
    await desk.replay(key)
    # What no code does: the same run among the dead as well.
    await world.raw.execute(
        "INSERT INTO fencepost.dead_letters (job_id, scheduled_at, available_at, created_at, "
        "ended_at, tenant_id, queue_id, kind_id, version, attempt, failure_count, "
        "lost_lease_count, snooze_count, replay_count, state, origin, priority, dead_reason) "
        "SELECT job_id, scheduled_at, available_at, created_at, created_at, tenant_id, queue_id, "
        "kind_id, version, attempt, 1, 0, 0, 0, 'dead', origin, priority, 'max_failures' "
        "FROM fencepost.run_queue"
    )
    assert (await refusal(desk.replay(key))).reason == "INTERNAL"
    assert await world.value(_DEAD) == 1
    assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 1
