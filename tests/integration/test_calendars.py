"""Exclusion calendars: their life, the jobs that name them, and fires that they exclude."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from fencepost.v1 import admin_service_pb2 as admin_pb
from fencepost.v1 import job_pb2, schedule_pb2
from fencepost.v1 import job_service_pb2 as job_pb
from fencepost_server.clock import MINUTE, to_datetime
from fencepost_server.domain.calendar import CalendarContent
from fencepost_server.store.calendars import CalendarSettings, CalendarStore, set_job_calendars
from google.protobuf.field_mask_pb2 import FieldMask

from tests.factories import NOON, cron, every, job_spec
from tests.integration.definition_calls import NAME, PARENT, create, read, update, yearly_job
from tests.integration.definition_server import DefinitionServer, refusal, serving
from tests.integration.world import World

HOLIDAYS = f"{PARENT}/calendars/holidays"


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as server:
        yield server


def _request(name: str = "holidays", **fields: object) -> admin_pb.CreateCalendarRequest:
    content = {"dates": ["2027-12-25"], **fields}
    request_id = str(content.pop("request_id", ""))
    return admin_pb.CreateCalendarRequest(
        parent=PARENT,
        calendar_name=name,
        calendar=schedule_pb2.Calendar(**content),  # type: ignore[arg-type]
        request_id=request_id,
    )


def _excluded_job(*names: str) -> job_pb2.Job:
    job = yearly_job("0 9 * * *")
    job.schedule.exclude_calendars.extend(names)
    return job


async def _delete(server: DefinitionServer, **fields: object) -> None:
    request = admin_pb.DeleteCalendarRequest(name=HOLIDAYS, **fields)  # type: ignore[arg-type]
    await server.admin.DeleteCalendar(request)


async def test_a_calendar_is_made_read_listed_changed_and_removed(
    server: DefinitionServer,
) -> None:
    made = (
        await server.admin.CreateCalendar(
            _request(
                description="closed",
                ranges=[schedule_pb2.DateRange(first_date="2027-01-01", last_date="2027-01-03")],
                ics="FREQ=WEEKLY;BYDAY=SU",
                time_zone="Europe/Paris",
            )
        )
    ).calendar
    assert made.name == HOLIDAYS
    assert made.created_at == made.updated_at
    got = await server.admin.GetCalendar(admin_pb.GetCalendarRequest(name=HOLIDAYS))
    assert got.calendar == made
    await server.admin.CreateCalendar(_request("other"))
    pages, token = [], ""
    while True:
        page = await server.admin.ListCalendars(
            admin_pb.ListCalendarsRequest(parent=PARENT, page_size=1, page_token=token)
        )
        pages += [(each.name.rpartition("/")[2], each.ics) for each in page.calendars]
        token = page.next_page_token
        if not token:
            break
    assert pages == [("holidays", ""), ("other", "")]
    changed = (
        await server.admin.UpdateCalendar(
            admin_pb.UpdateCalendarRequest(
                calendar=schedule_pb2.Calendar(
                    name=HOLIDAYS, dates=["2028-12-25"], etag=made.etag, description="no"
                ),
                update_mask=FieldMask(paths=["dates"]),
            )
        )
    ).calendar
    assert list(changed.dates) == ["2028-12-25"]
    assert (changed.description, changed.ics, changed.time_zone) == (
        "closed",
        "FREQ=WEEKLY;BYDAY=SU",
        "Europe/Paris",
    )
    assert changed.etag != made.etag
    same = await server.admin.UpdateCalendar(
        admin_pb.UpdateCalendarRequest(
            calendar=schedule_pb2.Calendar(name=HOLIDAYS, dates=["2028-12-25"])
        )
    )
    assert same.calendar == changed
    assert (await refusal(_delete(server, etag=made.etag))).reason == "ETAG_MISMATCH"
    await _delete(server, etag=changed.etag)
    assert (await refusal(_delete(server))).reason == "CALENDAR_NOT_FOUND"
    await _delete(server, allow_missing=True)


async def test_what_is_wrong_with_a_calendar_is_named(server: DefinitionServer) -> None:
    await server.admin.CreateCalendar(_request())
    taken = await refusal(server.admin.CreateCalendar(_request()))
    assert (taken.code, taken.reason) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "CALENDAR_ALREADY_EXISTS",
    )
    for fields, field in (
        ({"dates": ["tomorrow"]}, "calendar.dates[0]"),
        ({"dates": []}, "calendar.dates"),
        ({"ics": "FREQ=MINUTELY"}, "calendar.ics"),
        ({"time_zone": "+02:00"}, "calendar.time_zone"),
        ({"description": "x" * 1025}, "calendar.description"),
    ):
        seen = await refusal(server.admin.CreateCalendar(_request("b", **fields)))
        assert seen.fields == [field]
    bad = admin_pb.CreateCalendarRequest(parent=PARENT, calendar_name="A B")
    assert (await refusal(server.admin.CreateCalendar(bad))).fields == ["calendar_name"]
    gone = admin_pb.GetCalendarRequest(name=f"{PARENT}/calendars/none")
    assert (await refusal(server.admin.GetCalendar(gone))).reason == "CALENDAR_NOT_FOUND"


async def test_a_creation_that_is_sent_again_gets_the_first_answer(
    server: DefinitionServer,
) -> None:
    first = await server.admin.CreateCalendar(_request(request_id="r1"))
    assert await server.admin.CreateCalendar(_request(request_id="r1")) == first
    other = _request(request_id="r1", dates=["2027-01-01"])
    assert (await refusal(server.admin.CreateCalendar(other))).reason == "REQUEST_ID_REUSED"


async def test_a_calendar_that_jobs_name_stays(server: DefinitionServer) -> None:
    missing = await refusal(create(server, _excluded_job("holidays")))
    assert (missing.reason, missing.resource) == ("CALENDAR_NOT_FOUND", HOLIDAYS)
    await server.admin.CreateCalendar(_request())
    await create(server, _excluded_job("holidays"))
    assert list((await read(server)).schedule.exclude_calendars) == ["holidays"]
    used = await refusal(_delete(server))
    assert (used.reason, used.metadata["jobs"]) == ("CALENDAR_IN_USE", "a")
    unknown = await refusal(update(server, _excluded_job("none"), "schedule"))
    assert unknown.reason == "CALENDAR_NOT_FOUND"
    before = (await read(server)).next_run_at
    await update(server, _excluded_job(), "schedule.exclude_calendars")
    # Naming calendars is no time rule: the next fire stays.
    assert (await read(server)).next_run_at == before
    await _delete(server)
    await server.admin.CreateCalendar(_request())
    await update(server, _excluded_job("holidays"), "schedule")
    await server.jobs.DeleteJob(job_pb.DeleteJobRequest(name=NAME))
    await _delete(server)


async def test_a_batch_refuses_only_the_entry_whose_calendar_is_missing(
    server: DefinitionServer,
) -> None:
    await server.admin.CreateCalendar(_request())
    answer = await server.jobs.BatchCreateJobs(
        job_pb.BatchCreateJobsRequest(
            parent=PARENT,
            requests=[
                job_pb.CreateJobRequest(job_name=name, job=_excluded_job(calendar))
                for name, calendar in (("a", "holidays"), ("b", "none"))
            ],
        )
    )
    assert [each.HasField("problem") for each in answer.outcomes] == [False, True]
    rows = await server.query("SELECT has_calendars FROM fencepost.job_schedules")
    assert [row["has_calendars"] for row in rows] == [True]


async def test_calendars_do_not_go_with_a_single_fire(server: DefinitionServer) -> None:
    await server.admin.CreateCalendar(_request())
    job = yearly_job("")
    job.schedule.once.delay.FromSeconds(60)
    job.schedule.exclude_calendars.append("holidays")
    assert (await refusal(create(server, job))).fields == ["job.schedule.exclude_calendars"]


async def test_the_preview_shows_excluded_fires_with_their_calendar(
    server: DefinitionServer,
) -> None:
    await server.admin.CreateCalendar(_request())
    request = job_pb.PreviewScheduleRequest(
        parent=PARENT, schedule=_excluded_job("holidays").schedule, count=3
    )
    request.after.FromJsonString("2027-12-24T00:00:00Z")
    fires = (await server.jobs.PreviewSchedule(request)).fires
    assert [(each.local_time[:10], each.skip_reason) for each in fires] == [
        ("2027-12-24", schedule_pb2.SKIP_REASON_UNSPECIFIED),
        ("2027-12-25", schedule_pb2.SKIP_REASON_EXCLUDED),
        ("2027-12-26", schedule_pb2.SKIP_REASON_UNSPECIFIED),
    ]
    assert "holidays" in fires[1].note


async def test_an_interval_after_completion_shows_its_next_fire_only(
    server: DefinitionServer,
) -> None:
    job = yearly_job("")
    job.schedule.interval.every.FromSeconds(3600)
    job.schedule.interval.after_completion = True
    job.schedule.interval.anchor.FromJsonString("2030-01-01T00:00:00Z")
    await create(server, job)
    stored = await read(server)
    assert stored.schedule.interval.after_completion
    assert stored.next_run_at == job.schedule.interval.anchor
    request = job_pb.PreviewScheduleRequest(parent=PARENT, job_name="a", count=3)
    [fire] = (await server.jobs.PreviewSchedule(request)).fires
    assert fire.scheduled_at == stored.next_run_at
    assert "end of its run" in fire.note


async def test_an_edit_while_a_run_is_live_still_waits_for_its_end(
    server: DefinitionServer,
) -> None:
    job = yearly_job("")
    job.schedule.interval.every.FromSeconds(3600)
    job.schedule.interval.after_completion = True
    made = await create(server, job)
    assert made.state == job_pb2.JOB_STATE_ACTIVE
    await server.query(
        "INSERT INTO fencepost.run_queue (job_id, scheduled_at, available_at, created_at,"
        " tenant_id, queue_id, kind_id, version, state, origin, priority, lease_s,"
        " cancel_grace_s, attempt_timeout_s)"
        " SELECT job_id, next_run_at, next_run_at, now(), tenant_id, queue_id, kind_id, 1,"
        " 'queued', 'schedule', 0, 30, 30, 3600 FROM fencepost.job_schedules"
    )
    await server.query(
        "UPDATE fencepost.job_schedules SET last_scheduled_at = next_run_at,"
        " next_run_at = NULL, awaits_end = true"
    )
    assert (await read(server)).state == job_pb2.JOB_STATE_ACTIVE
    job.schedule.interval.every.FromSeconds(7200)
    await update(server, job, "schedule")
    [row] = await server.query("SELECT awaits_end, every_s FROM fencepost.job_schedules")
    assert (row["awaits_end"], row["every_s"]) == (True, 7200)
    await update(server, yearly_job(), "schedule")
    [row] = await server.query("SELECT awaits_end, next_run_at FROM fencepost.job_schedules")
    assert not row["awaits_end"]
    assert row["next_run_at"] is not None
    job.schedule.interval.every.FromSeconds(1800)
    await update(server, job, "schedule")
    await server.jobs.DeleteJob(job_pb.DeleteJobRequest(name=NAME))
    [row] = await server.query("SELECT awaits_end, next_run_at FROM fencepost.job_schedules")
    assert (row["awaits_end"], row["next_run_at"]) == (False, None)


# Fires -----------------------------------------------------------------------------------


async def _excluding(world: World, dates: tuple[str, ...], minutes: int = 1, **fields: int) -> str:
    """A job that fires every so many minutes, and names a calendar."""
    store = CalendarStore(database=world.database)
    settings = CalendarSettings(description="", content=CalendarContent(dates=dates))
    made = await store.create(world.tenant_id, "holidays", settings, now=world.now)
    assert made is not None
    assert not isinstance(made, bytes)
    schedule = every(minutes * MINUTE, exclude_calendars=("holidays",), **fields)
    job = await world.add_job(spec=job_spec(schedule), next_run_at=NOON)
    async with world.database.requests.transaction() as connection:
        await set_job_calendars(connection, {job: [made.calendar_id]}, is_new=True)
    return job


async def _set_dates(world: World, *dates: str) -> None:
    def change(_: object) -> CalendarSettings:
        return CalendarSettings(description="", content=CalendarContent(dates=dates))

    store = CalendarStore(database=world.database)
    await store.update(world.tenant_id, "holidays", change, now=world.now)


async def test_excluded_fires_are_skipped_and_an_edit_counts_from_its_commit_on(
    world: World,
) -> None:
    job = await _excluding(world, ("2026-12-01",))
    await world.scheduler.fire_due()
    await world.move(MINUTE)
    await world.scheduler.fire_due()
    assert await world.runs_of(job) == []
    assert await world.skips_of(job) == [(0, 60, "excluded", None)]
    await _set_dates(world, "2026-12-02")
    await world.move(MINUTE)
    await world.scheduler.fire_due()
    assert await world.runs_of(job) == [(120, "queued", "schedule")]
    await _set_dates(world, "2026-12-01")
    await world.move(MINUTE)
    await world.scheduler.fire_due()
    assert await world.skips_of(job) == [(0, 60, "excluded", None), (180, 180, "excluded", None)]


async def test_excluded_fires_do_not_count_to_the_limit(world: World) -> None:
    job = await _excluding(world, ("2026-12-01",), max_fires=1)
    await world.scheduler.fire_due()
    count = "SELECT fire_count FROM fencepost.job_schedules WHERE job_id = $1::uuid"
    assert await world.value(count, job) == 0
    assert await world.next_of(job) == 60
    await _set_dates(world, "2026-12-02")
    await world.move(MINUTE)
    await world.scheduler.fire_due()
    assert await world.value(count, job) == 1
    assert await world.next_of(job) is None


async def test_after_an_outage_each_fire_has_its_own_reason(world: World) -> None:
    job = await _excluding(world, ("2026-12-02",), minutes=6 * 60)
    await world.move_to(NOON + 48 * 60 * MINUTE)
    await world.scheduler.fire_due()
    # Noon and six in the evening, then a whole day that is excluded, then the day after.
    assert await world.skips_of(job) == [
        (0, 6 * 3600, "misfire", 42 * 3600),
        (12 * 3600, 30 * 3600, "excluded", None),
        (36 * 3600, 36 * 3600, "misfire", 42 * 3600),
    ]
    assert [at for at, _, _ in await world.runs_of(job)] == [42 * 3600, 48 * 3600]


async def test_excluded_fires_of_a_paused_job_are_excluded_at_its_resume(world: World) -> None:
    job = await _excluding(world, ("2026-12-01",), minutes=6 * 60)
    await world.query("UPDATE fencepost.job_schedules SET paused = true")
    await world.move_to(NOON + 24 * 60 * MINUTE)
    await world.settle([job], resuming=True)
    assert await world.skips_of(job) == [
        (0, 6 * 3600, "excluded", None),
        (12 * 3600, 12 * 3600, "paused", 18 * 3600),
    ]
    assert [at for at, _, _ in await world.runs_of(job)] == [18 * 3600, 24 * 3600]


async def test_a_job_without_calendars_stays_on_the_fast_path(world: World) -> None:
    await _excluding(world, ("2026-12-01",))
    fast = await world.add_job("fast", job_spec(cron()), next_run_at=NOON)
    assert await world.scheduler.fire_due() == 2
    assert await world.runs_of(fast) == [(0, "queued", "schedule")]
    at = await world.value("SELECT max(decided_at) FROM fencepost.fire_skips")
    assert at == to_datetime(NOON)


async def test_a_deletion_and_a_job_that_names_the_calendar_never_both_succeed(
    server: DefinitionServer,
) -> None:
    for number in range(8):
        await server.admin.CreateCalendar(_request())
        request = job_pb.CreateJobRequest(
            parent=PARENT, job_name=f"job{number}", job=_excluded_job("holidays")
        )
        made, gone = await asyncio.gather(
            server.jobs.CreateJob(request), _delete(server), return_exceptions=True
        )
        failures = [each for each in (made, gone) if isinstance(each, BaseException)]
        assert len(failures) == 1, failures
        if isinstance(made, BaseException):
            continue
        await server.jobs.DeleteJob(job_pb.DeleteJobRequest(name=f"{PARENT}/jobs/job{number}"))
        await _delete(server)
