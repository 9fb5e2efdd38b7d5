"""Backfills end to end: what they make, how fast, and what they leave alone."""

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Instant, to_datetime
from fencepost_server.domain.names import JobName, OperationName
from fencepost_server.domain.operation import OperationState, StopCause
from fencepost_server.domain.run import RunKey
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.backfill import Backfill, BackfillAsked, Operations
from fencepost_server.engine.backfill_steps import BackfillSteps
from fencepost_server.engine.jobs import Jobs
from fencepost_server.engine.ledger import FireQuery, Ledger
from fencepost_server.errors import FencepostError, InvalidField, NoSchedule, TooManyFires
from fencepost_server.store.operations import OperationRecord
from fencepost_server.store.requests import RequestKey

from tests.factories import NOON, cron, every, job_spec
from tests.integration.world import World, build

NAME = JobName(tenant="default", job="report")
H = 3600


class Desk:
    """Asks for backfills and takes their steps."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.operations = Operations(database=world.database, catalogue=world.catalogue)
        self.steps = BackfillSteps(
            database=world.database, clock=world.database.clock, wake=world.woken
        )

    async def ask(self, since: Instant, until: Instant, **fields: Any) -> Backfill:
        answers: list[Backfill] = []

        def encode(made: Backfill) -> bytes:
            answers.append(made)
            return b"answer"

        values: dict[str, Any] = {
            "rate": 10.0,
            "max_runs": 10_000,
            "allows_overlap": True,
            "reason": "",
            "dry_run": False,
            "request": None,
        }
        await self.operations.backfill(
            BackfillAsked(name=NAME, since=since, until=until, **(values | fields)),
            now=self.world.now,
            encode=encode,
        )
        return answers[0]

    async def start(self, since: Instant, until: Instant, **fields: Any) -> OperationName:
        made = (await self.ask(since, until, **fields)).operation
        assert made is not None
        return OperationName(tenant="default", operation_id=made.operation_id)

    async def read(self, name: OperationName) -> OperationRecord:
        return await self.operations.get(name)

    async def ledger(self) -> list[tuple[int, str, str]]:
        """Hours after noon, disposition and reason of each entry, newest first."""
        ledger = Ledger(database=self.world.database, catalogue=self.world.catalogue)
        page = await ledger.page(
            NAME,
            FireQuery(since=NOON - 30 * DAY, until=self.world.now + 1),
            after=None,
            page_size=1000,
            now=self.world.now,
        )
        return [
            (
                (fire.first - NOON) // HOUR,
                fire.disposition.name,
                "" if fire.reason is None else fire.reason.name,
            )
            for fire in page.fires
        ]

    async def finish(self, name: OperationName) -> OperationRecord:
        """Steps, a second apart, to the operation's end."""
        for _ in range(2000):
            while await self.steps.step():
                pass
            found = await self.read(name)
            if found.state is not OperationState.RUNNING:
                return found
            await self.world.move(SECOND)
        raise AssertionError("the backfill does not end")


@pytest.fixture
def desk(world: World) -> Desk:
    return Desk(world)


async def _job(world: World, since: Instant, **rule: Any) -> str:
    """An hourly job that was made at `since` and whose scheduler has seen nothing yet."""
    job = await world.add_job(spec=job_spec(every(HOUR, **rule)), next_run_at=NOON + HOUR)
    await _made_at(world, since)
    return job


async def _made_at(world: World, since: Instant) -> None:
    await world.raw.execute("UPDATE fencepost.jobs SET created_at = $1", to_datetime(since))


async def test_fires_without_a_run_get_one_and_those_with_one_are_left_alone(
    world: World, desk: Desk
) -> None:
    job = await _job(world, NOON - DAY)
    await world.raw.execute(
        "UPDATE fencepost.job_schedules SET next_run_at = $1", to_datetime(NOON - 3 * HOUR)
    )
    while await world.scheduler.fire_due():
        pass
    [own, _] = await world.claim(5)
    await world.report(own)
    before = await world.runs_of(job)
    made = await desk.ask(NOON - 6 * HOUR, NOON)
    assert made.matched == 5
    assert [fire.first for fire in made.samples] == [NOON - h * HOUR for h in (6, 5, 4, 3, 2)]
    assert made.operation is not None
    name = OperationName(tenant="default", operation_id=made.operation.operation_id)
    ended = await desk.finish(name)
    assert (ended.state, ended.matched, ended.changed) == (OperationState.DONE, 5, 5)
    assert (ended.unchanged, ended.failed) == (0, 0)
    runs = await world.runs_of(job)
    assert [run for run in runs if run[2] == "backfill"] == [
        (-h * H, "queued", "backfill") for h in (6, 5, 4, 3, 2)
    ]
    assert [run for run in runs if run[2] != "backfill"] == before
    assert (await desk.ask(NOON - 6 * HOUR, NOON)).matched == 0


async def test_a_dry_run_stores_nothing(world: World, desk: Desk) -> None:
    await _job(world, NOON - DAY)
    made = await desk.ask(NOON - 23 * HOUR, NOON, dry_run=True)
    assert (made.operation, made.matched, len(made.samples)) == (None, 23, 20)
    assert made.samples[0].local_time == "2026-11-30T13:00:00+00:00"
    assert await world.value("SELECT count(*) FROM fencepost.operations") == 0


async def test_too_many_fires_are_refused_before_anything_is_made(world: World, desk: Desk) -> None:
    await _job(world, NOON - DAY)
    assert (await desk.ask(NOON - 10 * HOUR, NOON, max_runs=10, dry_run=True)).matched == 10
    with pytest.raises(TooManyFires) as refused:
        await desk.ask(NOON - 11 * HOUR, NOON, max_runs=10)
    assert refused.value.field == "max_runs"
    assert await world.value("SELECT count(*) FROM fencepost.operations") == 0


@pytest.mark.parametrize("rate", [0.5, 2.0, 10.0, 400.0])
async def test_no_more_are_made_than_the_rate_says(world: World, desk: Desk, rate: float) -> None:
    spec = job_spec(every(SECOND))
    await world.add_job(spec=spec, next_run_at=NOON + HOUR)
    await _made_at(world, NOON - DAY)
    name = await desk.start(NOON - 2000 * SECOND, NOON, rate=rate)
    counts = []
    for _ in range(4):
        while await desk.steps.step():
            pass
        counts.append((await desk.read(name)).changed)
        await world.move(SECOND)
    per_step = max(1, int(rate))
    expected = [per_step * (1 + int(second * rate / per_step)) for second in range(4)]
    assert counts == expected


async def test_it_is_oldest_first_and_one_at_a_time(world: World, desk: Desk) -> None:
    job = await _job(world, NOON - DAY)
    name = await desk.start(NOON - 4 * HOUR, NOON, allows_overlap=False)
    await desk.finish(name)
    assert await world.runs_of(job) == [
        (-4 * H, "queued", "backfill"),
        *((-h * H, "blocked", "backfill") for h in (3, 2, 1)),
    ]
    order = []
    for _ in range(4):
        [run] = await world.claim(10)
        order.append((run.key.scheduled_at - NOON) // HOUR)
        await world.report(run)
        await world.promoter.sweep()
    assert order == [-4, -3, -2, -1]
    done = await desk.read(name)
    assert (done.changed, done.changed_ended, done.changed_dead) == (4, 4, 0)


async def test_it_waits_while_a_thousand_runs_are_blocked(world: World, desk: Desk) -> None:
    await world.add_job(spec=job_spec(every(SECOND)), next_run_at=NOON + HOUR)
    await _made_at(world, NOON - DAY)
    name = await desk.start(NOON - 1200 * SECOND, NOON, allows_overlap=False, rate=1000)
    for _ in range(5):
        while await desk.steps.step():
            pass
        await world.move(2 * SECOND)
    waiting = "SELECT count(*) FROM fencepost.run_queue WHERE state = 'blocked'"
    assert await world.value(waiting) == 1000
    assert (await desk.read(name)).state is OperationState.RUNNING
    await world.raw.execute("DELETE FROM fencepost.run_queue WHERE state = 'blocked'")
    done = await desk.finish(name)
    assert done.changed == 1200
    assert await world.value(waiting) == 199


async def test_a_regular_fire_goes_before_the_waiting_backfill(world: World, desk: Desk) -> None:
    job = await _job(world, NOON - DAY, overlap=OverlapPolicy.SKIP)
    await desk.finish(await desk.start(NOON - 3 * HOUR, NOON, allows_overlap=False))
    await world.move_to(NOON + HOUR)
    await world.scheduler.fire_due()
    assert (H, "blocked", "schedule") in await world.runs_of(job)
    order = []
    for _ in range(4):
        [run] = await world.claim(10)
        order.append((run.key.scheduled_at - NOON) // HOUR)
        await world.report(run)
        await world.promoter.sweep()
    assert order == [-3, 1, -2, -1]


async def test_a_run_that_ended_unclaimed_is_queued_again(world: World, desk: Desk) -> None:
    job = await _job(world, NOON - DAY)
    await desk.finish(await desk.start(NOON - 2 * HOUR, NOON))
    # As the reaper leaves a run that waited too long.
    await world.raw.execute(
        "WITH gone AS (DELETE FROM fencepost.run_queue RETURNING *)"
        " INSERT INTO fencepost.job_runs (job_id, scheduled_at, available_at, created_at, ended_at,"
        " tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,"
        " snooze_count, replay_count, state, origin, priority, skip_reason)"
        " SELECT job_id, scheduled_at, available_at, created_at, created_at, tenant_id, queue_id,"
        " kind_id, version, 0, 0, 0, 0, 0, 'skipped', 'schedule', priority, 'expired' FROM gone"
    )
    await world.move(MINUTE)
    assert await desk.ledger() == [(-1, "SKIPPED", "EXPIRED"), (-2, "SKIPPED", "EXPIRED")]
    again = await desk.finish(await desk.start(NOON - 2 * HOUR, NOON))
    assert (again.matched, again.changed, again.unchanged) == (2, 2, 0)
    assert await world.runs_of(job) == [(-h * H, "queued", "backfill") for h in (2, 1)]
    assert await world.value("SELECT count(*) FROM fencepost.job_runs") == 0
    assert await desk.ledger() == [(-1, "BACKFILLED", ""), (-2, "BACKFILLED", "")]


async def test_what_a_calendar_excludes_is_not_made_and_says_so(world: World, desk: Desk) -> None:
    holidays = ("holidays",)
    rule = replace(cron("0 0 * * *"), exclude_calendars=holidays)
    job = await world.add_job(spec=job_spec(rule), next_run_at=NOON - 3 * DAY + 12 * HOUR)
    await _made_at(world, NOON - 9 * DAY)
    await world.raw.execute(
        "WITH made AS (INSERT INTO fencepost.calendars"
        " (tenant_id, name, dates, created_at, updated_at)"
        " VALUES ($1, 'holidays', '{2026-11-28,2026-11-30}', now(), now()) RETURNING calendar_id)"
        " INSERT INTO fencepost.job_calendars SELECT $2::uuid, calendar_id FROM made",
        world.tenant_id,
        job,
    )
    await world.raw.execute("UPDATE fencepost.job_schedules SET has_calendars = true")
    while await world.scheduler.fire_due():
        pass
    made = await desk.ask(NOON - 5 * DAY, NOON - 12 * HOUR)
    assert made.matched == 2
    assert made.operation is not None
    await desk.finish(OperationName(tenant="default", operation_id=made.operation.operation_id))
    ledger = Ledger(database=world.database, catalogue=world.catalogue)
    page = await ledger.page(
        NAME,
        FireQuery(since=NOON - 9 * DAY, until=NOON),
        after=None,
        page_size=50,
        now=world.now,
    )
    found = [
        (fire.local_time[:10], "" if fire.reason is None else fire.reason.name, fire.detail)
        for fire in page.fires
    ]
    assert found == [
        ("2026-12-01", "", ""),
        ("2026-11-30", "EXCLUDED", "holidays"),
        ("2026-11-29", "", ""),
        ("2026-11-27", "", ""),
    ]


async def test_what_an_owner_makes_meanwhile_counts_as_unchanged(world: World, desk: Desk) -> None:
    await _job(world, NOON - DAY)
    late = await desk.start(NOON - 4 * HOUR, NOON)
    await world.move(SECOND)
    # Another backfill was asked for earlier, and comes first.
    await world.raw.execute("UPDATE fencepost.operations SET next_step_at = '2100-01-01'")
    early = await desk.start(NOON - 4 * HOUR, NOON - 2 * HOUR)
    await world.raw.execute(
        "UPDATE fencepost.operations SET operation_id = '00000000-0000-7000-8000-000000000001'"
        " WHERE operation_id = $1::uuid",
        early.operation_id,
    )
    early = OperationName(tenant="default", operation_id="00000000-0000-7000-8000-000000000001")
    assert (await desk.finish(early)).changed == 2
    await world.move(SECOND)
    await world.raw.execute("UPDATE fencepost.operations SET next_step_at = created_at")
    done = await desk.finish(late)
    assert (done.matched, done.changed, done.unchanged) == (4, 2, 2)


async def test_backfills_of_one_job_take_turns(world: World, desk: Desk) -> None:
    await _job(world, NOON - DAY)
    first = await desk.start(NOON - 20 * HOUR, NOON, rate=1)
    await world.move(1000)
    second = await desk.start(NOON - 20 * HOUR, NOON, rate=1000)
    await world.move(1000)
    for _ in range(5):
        while await desk.steps.step():
            pass
        await world.move(SECOND)
    assert (await desk.read(second)).changed == 0
    assert (await desk.finish(first)).changed == 20
    assert (await desk.finish(second)).unchanged == 20
    assert (await desk.read(second)).changed_ended == 0


async def test_it_goes_on_after_a_restart_where_it_was(world: World, desk: Desk) -> None:
    job = await _job(world, NOON - DAY)
    name = await desk.start(NOON - 20 * HOUR, NOON, rate=5)
    assert await desk.steps.step()
    assert (await desk.read(name)).changed == 5
    await world.move(SECOND)
    other = Desk(world)
    done = await other.finish(name)
    assert done.changed == 20
    assert [at for at, _, _ in await world.runs_of(job)] == [-h * H for h in range(20, 0, -1)]


async def test_two_servers_never_take_the_same_step(database_url: str) -> None:
    async with build(database_url) as world:
        desk = Desk(world)
        await world.add_job(spec=job_spec(every(SECOND)), next_run_at=NOON + HOUR)
        await _made_at(world, NOON - DAY)
        name = await desk.start(NOON - 500 * SECOND, NOON, rate=50)
        others = [Desk(world) for _ in range(4)]
        for _ in range(20):
            await asyncio.gather(*(other.steps.step() for other in others))
            await world.move(SECOND)
        done = await desk.finish(name)
        assert done.changed == 500
        assert await world.value("SELECT count(*) FROM fencepost.run_queue") == 500


async def test_a_stop_takes_effect_before_the_next_run(world: World, desk: Desk) -> None:
    job = await _job(world, NOON - DAY)
    name = await desk.start(NOON - 20 * HOUR, NOON, rate=5)
    assert await desk.steps.step()
    stopped = await desk.operations.stop(name, now=world.now)
    assert (stopped.state, stopped.stop_cause) == (OperationState.STOPPED, StopCause.REQUESTED)
    assert stopped.ended_at == world.now
    await world.move(MINUTE)
    assert not await desk.steps.step()
    assert len(await world.runs_of(job)) == 5
    assert await desk.operations.stop(name, now=world.now) == stopped


async def test_a_deleted_job_stops_it(world: World, desk: Desk) -> None:
    await _job(world, NOON - DAY)
    name = await desk.start(NOON - 20 * HOUR, NOON)
    jobs = Jobs(database=world.database, catalogue=world.catalogue, wake=world.woken)
    await jobs.delete(NAME, etag="", allow_missing=False, cancel_runs=False, now=world.now)
    ended = await desk.finish(name)
    assert (ended.state, ended.stop_cause) == (OperationState.STOPPED, StopCause.REFUSED)
    assert ended.changed == 0


async def test_dead_and_ended_runs_are_counted_also_after_the_end(world: World, desk: Desk) -> None:
    await _job(world, NOON - DAY)
    name = await desk.start(NOON - 3 * HOUR, NOON)
    await desk.finish(name)
    runs = await world.claim(3)
    await world.report(runs[0])
    await world.raw.execute(
        "WITH gone AS (DELETE FROM fencepost.run_queue WHERE scheduled_at = $1 RETURNING *)"
        " INSERT INTO fencepost.dead_letters (job_id, scheduled_at, available_at, created_at,"
        " ended_at, tenant_id, queue_id, kind_id, version, attempt, failure_count,"
        " lost_lease_count, snooze_count, replay_count, state, origin, priority, dead_reason)"
        " SELECT job_id, scheduled_at, available_at, created_at, created_at, tenant_id, queue_id,"
        " kind_id, version, 1, 1, 0, 0, 0, 'dead', origin, priority, 'not_retryable' FROM gone",
        to_datetime(runs[1].key.scheduled_at),
    )
    ended = await desk.read(name)
    assert (ended.changed, ended.changed_ended, ended.changed_dead) == (3, 2, 1)


async def test_suppressed_and_pending_fires_are_not_made(world: World, desk: Desk) -> None:
    rule = cron("30 2 * * *", "Europe/Paris")
    await world.add_job(spec=job_spec(rule), next_run_at=NOON - HOUR)
    made = await desk.ask(NOON - 40 * DAY, NOON, dry_run=True)
    # The night in which clocks went back had one fire, and the job was not there yet.
    assert made.matched == 40
    job = await world.value("SELECT job_id::text FROM fencepost.jobs")
    name = await desk.start(NOON - 2 * DAY, NOON)
    await desk.finish(name)
    assert RunKey(job, NOON - HOUR) not in {
        RunKey(job, NOON + at * SECOND) for at, _, _ in await world.runs_of(job)
    }


async def test_last_scheduled_at_rises_and_the_next_fire_stays(world: World, desk: Desk) -> None:
    job = await _job(world, NOON - DAY)
    await desk.finish(await desk.start(NOON - 5 * HOUR, NOON - 2 * HOUR))
    row = (await world.query("SELECT * FROM fencepost.job_schedules"))[0]
    assert row["last_scheduled_at"] == to_datetime(NOON - 3 * HOUR)
    assert row["fire_count"] == 0
    assert await world.next_of(job) == H
    await desk.finish(await desk.start(NOON - 9 * HOUR, NOON - 7 * HOUR))
    row = (await world.query("SELECT * FROM fencepost.job_schedules"))[0]
    assert row["last_scheduled_at"] == to_datetime(NOON - 3 * HOUR)


async def _refused(call: Any) -> FencepostError:
    with pytest.raises(FencepostError) as refused:
        await call
    return refused.value


async def test_pending_fires_of_a_paused_job_wait_for_its_resume(world: World, desk: Desk) -> None:
    await world.add_job(spec=job_spec(every(HOUR)), next_run_at=NOON - 3 * HOUR, paused=True)
    await _made_at(world, NOON - DAY)
    error = await _refused(desk.ask(NOON - 6 * HOUR, NOON))
    assert isinstance(error, InvalidField)
    assert error.field == "until"
    assert "resume" in error.message
    assert (await desk.ask(NOON - 6 * HOUR, NOON - 3 * HOUR)).matched == 3


async def test_history_that_is_gone_is_not_made_again(world: World, desk: Desk) -> None:
    await _job(world, NOON - 60 * DAY)
    error = await _refused(desk.ask(NOON - 31 * DAY, NOON - DAY))
    assert isinstance(error, InvalidField)
    assert error.field == "since"
    # Before the job's creation nothing can have run.
    await _made_at(world, NOON - DAY)
    assert (await desk.ask(NOON - 31 * DAY, NOON, dry_run=True)).matched == 31 * 24


async def test_the_floor_may_rise_while_it_works(world: World, desk: Desk) -> None:
    await _job(world, NOON - 60 * DAY)
    name = await desk.start(NOON - 4 * HOUR, NOON)
    await world.raw.execute(
        "UPDATE fencepost.shard_state SET retention_floor = $1", to_datetime(NOON - 2 * HOUR)
    )
    done = await desk.finish(name)
    assert (done.changed, done.failed, len(done.problems)) == (2, 2, 2)
    assert "no longer kept" in done.problems[0].message


async def test_jobs_without_a_schedule_have_nothing_to_backfill(world: World, desk: Desk) -> None:
    await world.add_job()
    assert isinstance(await _refused(desk.ask(NOON - HOUR, NOON)), NoSchedule)


async def test_the_same_request_id_makes_one_operation(world: World, desk: Desk) -> None:
    await _job(world, NOON - DAY)
    request = RequestKey(request_id="one", body_hash=os.urandom(32))
    made = await desk.ask(NOON - 3 * HOUR, NOON, request=request)
    assert made.matched == 3
    with pytest.raises(IndexError):
        # The stored answer comes back; nothing is encoded anew.
        await desk.ask(NOON - 3 * HOUR, NOON, request=request)
    assert await world.value("SELECT count(*) FROM fencepost.operations") == 1
    other = RequestKey(request_id="one", body_hash=os.urandom(32))
    error = await _refused(desk.ask(NOON - 2 * HOUR, NOON, request=other))
    assert error.reason == "REQUEST_ID_REUSED"


async def test_a_step_that_fails_does_not_hold_up_others(world: World, desk: Desk) -> None:
    await _job(world, NOON - DAY)
    broken = await desk.start(NOON - 3 * HOUR, NOON)
    await world.raw.execute(
        """UPDATE fencepost.job_versions SET spec = '{"target": {}}' WHERE version = 1"""
    )
    assert await desk.steps.step()
    assert not await desk.steps.step()
    row = (await world.query("SELECT * FROM fencepost.operations"))[0]
    assert row["next_step_at"] == to_datetime(world.now + MINUTE)
    assert row["state"] == "running"
    assert str(row["operation_id"]) == broken.operation_id


async def test_operations_are_listed_newest_first(world: World, desk: Desk) -> None:
    await _job(world, NOON - DAY)
    names = []
    for hours in range(1, 4):
        names.append(await desk.start(NOON - hours * HOUR, NOON))
        await world.move(1000)
    await desk.operations.stop(names[0], now=world.now)
    found, following = await desk.operations.list(
        "default", states=None, actions=None, before=None, page_size=2
    )
    assert [each.operation_id for each in found] == [n.operation_id for n in (names[2], names[1])]
    rest, end = await desk.operations.list(
        "default", states=None, actions=None, before=following, page_size=2
    )
    assert ([each.operation_id for each in rest], end) == ([names[0].operation_id], None)
    stopped, _ = await desk.operations.list(
        "default", states=[OperationState.STOPPED], actions=None, before=None, page_size=9
    )
    assert [each.operation_id for each in stopped] == [names[0].operation_id]


async def test_operations_are_kept_for_thirty_days_after_their_end(database_url: str) -> None:
    # A database of its own: retention moves the day tables that other tests share.
    async with build(database_url) as world:
        desk = Desk(world)
        await _job(world, NOON - DAY)
        ended = await desk.start(NOON - HOUR, NOON)
        await world.move(SECOND)
        await desk.start(NOON - HOUR, NOON)
        await desk.operations.stop(ended, now=world.now)
        await world.move(30 * DAY - MINUTE)
        await world.retention.keep()
        assert await world.value("SELECT count(*) FROM fencepost.operations") == 2
        await world.move(2 * MINUTE)
        await world.retention.keep()
        [left] = await world.query("SELECT state FROM fencepost.operations")
        assert left["state"] == "running"
