"""UpdateJob, PauseJob, ResumeJob, DeleteJob and PreviewSchedule over a real database."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from fencepost.v1 import job_pb2, schedule_pb2
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.clock import SECOND
from google.protobuf.field_mask_pb2 import FieldMask

from tests.integration.definition_server import DefinitionServer, refusal, serving

PARENT = "tenants/default"
NAME = f"{PARENT}/jobs/a"


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


def a_job(cron: str = "0 3 1 1 *") -> job_pb2.Job:
    job = job_pb2.Job(name=NAME, target=job_pb2.Target(kind="report.make"))
    if cron:
        job.schedule.cron.expressions.append(cron)
    return job


async def create(server: DefinitionServer, job: job_pb2.Job | None = None) -> job_pb2.Job:
    request = pb.CreateJobRequest(parent=PARENT, job_name="a", job=a_job() if job is None else job)
    return (await server.jobs.CreateJob(request)).job


async def update(
    server: DefinitionServer, job: job_pb2.Job, *paths: str, **rest: bool
) -> pb.UpdateJobResponse:
    request = pb.UpdateJobRequest(job=job, update_mask=FieldMask(paths=paths))
    for name, value in rest.items():
        setattr(request, name, value)
    return await server.jobs.UpdateJob(request)


async def read(server: DefinitionServer) -> job_pb2.Job:
    return (await server.jobs.GetJob(pb.GetJobRequest(name=NAME))).job


async def make_due(server: DefinitionServer, seconds_ago: int) -> int:
    """Moves the next fire into the past, as if nobody had handled it; returns the second."""
    at = server.now() // SECOND - seconds_ago
    await server.query(
        "UPDATE fencepost.job_schedules SET next_run_at = to_timestamp($1::bigint)", at
    )
    return at


async def runs(server: DefinitionServer) -> list[tuple[str, str, int, int]]:
    rows = await server.query(
        "SELECT state, origin, version, extract(epoch FROM scheduled_at)::bigint AS at"
        " FROM fencepost.run_queue ORDER BY scheduled_at"
    )
    return [(row["state"], row["origin"], row["version"], row["at"]) for row in rows]


async def skips(server: DefinitionServer) -> list[str]:
    rows = await server.query("SELECT reason FROM fencepost.fire_skips ORDER BY first_at")
    return [row["reason"] for row in rows]


async def test_a_change_of_the_definition_is_a_new_version(server: DefinitionServer) -> None:
    first = await create(server)
    wanted = job_pb2.Job(name=NAME, labels={"env": "prod"}, etag=first.etag)
    wanted.limits.max_in_flight = 3
    changed = (await update(server, wanted)).job
    assert (changed.version, changed.limits.max_in_flight) == (2, 3)
    assert changed.labels == {"env": "prod"}
    assert changed.next_run_at == first.next_run_at
    assert changed.schedule == first.schedule
    assert changed.etag != first.etag
    assert await read(server) == changed
    old = await server.jobs.GetJob(pb.GetJobRequest(name=NAME, version=1))
    assert (old.job.version, dict(old.job.labels)) == (1, {})
    assert old.job.etag == changed.etag
    row = (await server.query("SELECT version, max_in_flight FROM fencepost.job_schedules"))[0]
    assert (row["version"], row["max_in_flight"]) == (2, 3)
    assert (await server.query("SELECT has_capped_jobs FROM fencepost.queues"))[0][0]


async def test_an_identical_update_changes_nothing(server: DefinitionServer) -> None:
    job = a_job("*/5 * * * *")
    job.payload.json = "[1]"
    job.limits.lease_ttl.seconds = 20
    first = await create(server, job)
    for mask in ((), ("*",), ("schedule.cron.expressions", "payload")):
        assert (await update(server, job, *mask)).job == first
    # What was read can be sent back as it is.
    assert (await update(server, first)).job == first
    assert (await update(server, first, "*")).job == first
    assert len(await server.query("SELECT FROM fencepost.job_versions")) == 1


async def test_an_anchorless_interval_keeps_its_beat(server: DefinitionServer) -> None:
    job = a_job("")
    job.schedule.interval.every.seconds = 3600
    first = await create(server, job)
    # As if the job were 90 minutes old.
    await server.query("UPDATE fencepost.jobs SET created_at = created_at - interval '90 min'")
    job.schedule.interval.every.seconds = 7200
    changed = (await update(server, job, "schedule")).job
    # It still counts from its creation: the second beat is half an hour away.
    assert changed.next_run_at.seconds == first.next_run_at.seconds + 1800
    assert (await update(server, job, "schedule")).job == changed


async def test_an_etag_makes_an_update_conditional(server: DefinitionServer) -> None:
    first = await create(server)
    await update(server, job_pb2.Job(name=NAME, display_name="x", etag=first.etag))
    stale = job_pb2.Job(name=NAME, display_name="y", etag=first.etag)
    seen = await refusal(update(server, stale))
    assert (seen.code, seen.reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")
    assert seen.metadata["currentEtag"] == (await read(server)).etag
    assert (await read(server)).display_name == "x"


async def test_an_etag_of_a_namesake_does_not_match(server: DefinitionServer) -> None:
    first = await create(server)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME))
    await create(server)
    stale = job_pb2.Job(name=NAME, display_name="y", etag=first.etag)
    assert (await refusal(update(server, stale))).reason == "ETAG_MISMATCH"


async def test_updates_at_once_lose_nothing(server: DefinitionServer) -> None:
    await create(server)
    paths = ("display_name", "description", "labels", "limits.max_in_flight")
    wanted = job_pb2.Job(name=NAME, display_name="n", description="d", labels={"a": "b"})
    wanted.limits.max_in_flight = 2
    await asyncio.gather(*(update(server, wanted, path) for path in paths))
    stored = await read(server)
    assert (stored.display_name, stored.description) == ("n", "d")
    assert dict(stored.labels) == {"a": "b"}
    assert (stored.limits.max_in_flight, stored.version) == (2, 5)


async def test_wrong_updates_are_refused(server: DefinitionServer) -> None:
    await create(server)
    bad = a_job("61 * * * *")
    lost = job_pb2.Job(name=NAME, target=job_pb2.Target(queue=f"{PARENT}/queues/no", kind="k"))
    for job, paths, reason in (
        (bad, (), "INVALID_SCHEDULE"),
        (lost, (), "QUEUE_NOT_FOUND"),
        (a_job(), ("paused",), "INVALID_FIELD"),
        (a_job(), ("nope",), "INVALID_FIELD"),
        (job_pb2.Job(name=NAME), ("*",), "INVALID_FIELD"),
        (job_pb2.Job(name=NAME), ("target.kind",), "INVALID_FIELD"),
        (job_pb2.Job(name=f"{PARENT}/jobs/b"), (), "JOB_NOT_FOUND"),
        (job_pb2.Job(), (), "INVALID_FIELD"),
    ):
        assert (await refusal(update(server, job, *paths))).reason == reason
    assert (await read(server)).version == 1


async def test_a_check_changes_nothing(server: DefinitionServer) -> None:
    first = await create(server)
    wanted = job_pb2.Job(name=NAME, display_name="x")
    shown = (await update(server, wanted, validate_only=True)).job
    assert (shown.display_name, shown.version) == ("x", 2)
    assert await read(server) == first
    missing = a_job()
    missing.name = f"{PARENT}/jobs/b"
    answer = await update(server, missing, allow_missing=True, validate_only=True)
    assert answer.created
    assert len(await server.query("SELECT FROM fencepost.jobs")) == 1


async def test_apply_makes_the_job_and_then_changes_it(server: DefinitionServer) -> None:
    job = a_job()
    made = await update(server, job, allow_missing=True)
    assert (made.created, made.job.version) == (True, 1)
    again = await update(server, job, allow_missing=True)
    assert (again.created, again.job) == (False, made.job)
    job.description = "d"
    changed = await update(server, job, allow_missing=True)
    assert (changed.created, changed.job.version) == (False, 2)


async def test_applies_at_once_make_one_job(server: DefinitionServer) -> None:
    answers = await asyncio.gather(*(update(server, a_job(), allow_missing=True) for _ in range(5)))
    assert sorted(answer.created for answer in answers) == [False, False, False, False, True]
    assert {answer.job.job_id for answer in answers} == {answers[0].job.job_id}


async def test_an_update_sent_again_gets_the_first_answer(server: DefinitionServer) -> None:
    first = await create(server)
    request = pb.UpdateJobRequest(
        job=job_pb2.Job(name=NAME, display_name="x", etag=first.etag), request_id="u-1"
    )
    answer = await server.jobs.UpdateJob(request)
    # The etag is stale by now, but the call is the same.
    assert await server.jobs.UpdateJob(request) == answer
    request.job.display_name = "y"
    assert (await refusal(server.jobs.UpdateJob(request))).reason == "REQUEST_ID_REUSED"
    made = pb.UpdateJobRequest(
        job=job_pb2.Job(name=f"{PARENT}/jobs/b", target=job_pb2.Target(kind="k")),
        allow_missing=True,
        request_id="u-2",
    )
    assert (await server.jobs.UpdateJob(made)).created
    assert (await server.jobs.UpdateJob(made)).created
    assert (await read(server)).version == 2


async def test_a_new_time_rule_settles_what_the_old_one_owes(server: DefinitionServer) -> None:
    await create(server)
    due = await make_due(server, 5)
    changed = (await update(server, a_job("0 4 1 1 *"), "schedule")).job
    assert await runs(server) == [("queued", "schedule", 1, due)]
    assert changed.last_scheduled_at.seconds == due
    assert changed.next_run_at.seconds % 86_400 == 4 * 3600
    assert changed.fire_count == 1
    assert len(server.woken.lane_hints) == 1


async def test_a_change_of_something_else_leaves_the_next_fire_alone(
    server: DefinitionServer,
) -> None:
    await create(server)
    due = await make_due(server, 5)
    changed = (await update(server, job_pb2.Job(name=NAME, description="d"))).job
    assert changed.next_run_at.seconds == due
    assert await runs(server) == []


async def test_a_new_rule_of_a_paused_job_skips_what_passed(server: DefinitionServer) -> None:
    await create(server)
    await server.jobs.PauseJob(pb.PauseJobRequest(name=NAME))
    await make_due(server, 500)
    changed = (await update(server, a_job("0 4 1 1 *"), "schedule")).job
    assert await runs(server) == []
    assert await skips(server) == ["paused"]
    assert changed.next_run_at.seconds > server.now() // SECOND
    assert changed.state == job_pb2.JOB_STATE_PAUSED


async def test_a_finished_job_fires_again_with_a_new_one_off(server: DefinitionServer) -> None:
    job = a_job("")
    job.schedule.once.at.seconds = server.now() // SECOND - 1
    finished = await create(server, job)
    assert finished.state == job_pb2.JOB_STATE_FINISHED
    job.schedule.once.at.seconds = server.now() // SECOND + 3600
    again = (await update(server, job, "schedule")).job
    assert again.state == job_pb2.JOB_STATE_ACTIVE
    job.schedule.once.at.seconds = finished.last_scheduled_at.seconds - 60
    behind = (await update(server, job, "schedule")).job
    assert behind.state == job_pb2.JOB_STATE_FINISHED
    assert len(await runs(server)) == 1


async def test_a_job_without_its_schedule_waits(server: DefinitionServer) -> None:
    await create(server)
    changed = (await update(server, job_pb2.Job(name=NAME), "schedule")).job
    assert changed.state == job_pb2.JOB_STATE_ACTIVE
    assert not changed.HasField("next_run_at")
    assert not changed.HasField("schedule")


async def test_the_limit_of_fires_counts_from_the_creation(server: DefinitionServer) -> None:
    await create(server)
    await make_due(server, 5)
    job = a_job()
    job.schedule.max_fires = 1
    changed = (await update(server, job, "schedule")).job
    assert (changed.fire_count, changed.state) == (1, job_pb2.JOB_STATE_FINISHED)
    job.schedule.max_fires = 2
    assert (await update(server, job, "schedule")).job.state == job_pb2.JOB_STATE_ACTIVE


async def test_pausing_and_resuming(server: DefinitionServer) -> None:
    await create(server)
    paused = (await server.jobs.PauseJob(pb.PauseJobRequest(name=NAME, reason="r"))).job
    assert (paused.state, paused.pause_reason) == (job_pb2.JOB_STATE_PAUSED, "r")
    again = (await server.jobs.PauseJob(pb.PauseJobRequest(name=NAME, reason="other"))).job
    assert again == paused
    resumed = (await server.jobs.ResumeJob(pb.ResumeJobRequest(name=NAME))).job
    assert (resumed.state, resumed.pause_reason) == (job_pb2.JOB_STATE_ACTIVE, "")
    assert resumed.version == 1
    assert (await server.jobs.ResumeJob(pb.ResumeJobRequest(name=NAME))).job == resumed
    assert len(server.woken.partitions) >= 2


async def test_resume_lets_the_misfire_policy_pick(server: DefinitionServer) -> None:
    job = a_job("* * * * * *")
    job.paused = True
    await create(server, job)
    await make_due(server, 600)
    resumed = (await server.jobs.ResumeJob(pb.ResumeJobRequest(name=NAME))).job
    made = await runs(server)
    assert made, "the newest missed fire stands in for the others"
    assert "paused" in await skips(server)
    assert resumed.next_run_at.seconds > resumed.last_scheduled_at.seconds
    assert resumed.state == job_pb2.JOB_STATE_ACTIVE


async def test_a_finished_job_cannot_be_paused_or_resumed(server: DefinitionServer) -> None:
    job = a_job("")
    job.schedule.once.SetInParent()
    await create(server, job)
    for call in (
        server.jobs.PauseJob(pb.PauseJobRequest(name=NAME)),
        server.jobs.ResumeJob(pb.ResumeJobRequest(name=NAME)),
    ):
        seen = await refusal(call)
        assert (seen.code, seen.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "JOB_FINISHED")


async def test_a_deleted_job_frees_its_name_and_leaves_a_tombstone(
    server: DefinitionServer,
) -> None:
    first = await create(server)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME, etag=first.etag))
    by_id = f"{PARENT}/jobs/{first.job_id}"
    for name in (NAME, by_id):
        assert (await refusal(server.jobs.GetJob(pb.GetJobRequest(name=name)))).reason == (
            "JOB_NOT_FOUND"
        )
        gone = pb.DeleteJobRequest(name=name)
        assert (await refusal(server.jobs.DeleteJob(gone))).reason == "JOB_NOT_FOUND"
        gone.allow_missing = True
        await server.jobs.DeleteJob(gone)
    row = (
        await server.query(
            "SELECT deleted_at IS NOT NULL AS gone, next_run_at"
            " FROM fencepost.jobs JOIN fencepost.job_schedules USING (job_id)"
        )
    )[0]
    assert (row["gone"], row["next_run_at"]) == (True, None)
    second = await create(server)
    assert second.job_id != first.job_id
    assert second.job_id[-2:] == first.job_id[-2:]
    listed = await server.jobs.ListJobs(pb.ListJobsRequest(parent=PARENT))
    assert [job.job_id for job in listed.jobs] == [second.job_id]


async def test_a_stale_etag_deletes_nothing(server: DefinitionServer) -> None:
    first = await create(server)
    await update(server, job_pb2.Job(name=NAME, description="d"))
    seen = await refusal(server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME, etag=first.etag)))
    assert seen.reason == "ETAG_MISMATCH"
    assert (await read(server)).description == "d"


@pytest.mark.parametrize("cancel_runs", [False, True])
async def test_runs_of_a_deleted_job_go_on_unless_asked(
    server: DefinitionServer, cancel_runs: bool
) -> None:
    job = a_job("")
    job.schedule.once.SetInParent()
    await create(server, job)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME, cancel_runs=cancel_runs))
    assert len(await runs(server)) == (0 if cancel_runs else 1)


async def test_deleting_a_paused_job_records_what_it_passed_by(server: DefinitionServer) -> None:
    job = a_job()
    job.paused = True
    await create(server, job)
    await make_due(server, 100)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME))
    assert await runs(server) == []
    assert await skips(server) == ["paused"]


async def test_a_schedule_is_previewed_before_it_is_stored(server: DefinitionServer) -> None:
    request = pb.PreviewScheduleRequest(parent=PARENT, count=3)
    request.schedule.cron.expressions.append("30 2 * * *")
    request.schedule.cron.time_zone = "Europe/Paris"
    request.after.seconds = 1_805_932_800  # 2027-03-24T12:00:00Z, four days before the gap
    request.count = 5
    shown = await server.jobs.PreviewSchedule(request)
    assert [fire.local_time for fire in shown.fires] == [
        "2027-03-25T02:30:00+01:00",
        "2027-03-26T02:30:00+01:00",
        "2027-03-27T02:30:00+01:00",
        "2027-03-28T03:00:00+02:00",
        "2027-03-29T02:30:00+02:00",
    ]
    assert shown.fires[3].note != ""
    assert shown.description != ""
    assert shown.tzdata_version.startswith("20")
    assert await server.query("SELECT FROM fencepost.jobs") == []


async def test_skipped_fires_are_shown_with_their_reason(server: DefinitionServer) -> None:
    request = pb.PreviewScheduleRequest(parent=PARENT, count=1)
    request.schedule.cron.expressions.append("30 2 28 3 *")
    request.schedule.cron.time_zone = "Europe/Paris"
    request.schedule.cron.dst_gap = schedule_pb2.DST_GAP_POLICY_SKIP
    request.after.seconds = 1_805_932_800
    fire = (await server.jobs.PreviewSchedule(request)).fires[0]
    assert fire.skip_reason == schedule_pb2.SKIP_REASON_DST_GAP
    assert fire.local_time == "2027-03-28T02:30:00"


async def test_a_stored_schedule_is_previewed_by_name(server: DefinitionServer) -> None:
    job = a_job("H * * * *")
    job.schedule.max_fires = 2
    created = await create(server, job)
    shown = await server.jobs.PreviewSchedule(
        pb.PreviewScheduleRequest(parent=PARENT, job_name="a")
    )
    assert [fire.scheduled_at.seconds for fire in shown.fires] == [
        created.next_run_at.seconds,
        created.next_run_at.seconds + 3600,
    ]


async def test_wrong_previews_are_refused(server: DefinitionServer) -> None:
    await create(server, a_job(""))
    bad = pb.PreviewScheduleRequest(parent=PARENT)
    bad.schedule.cron.expressions.append("x")
    for request, reason, fields in (
        (bad, "INVALID_SCHEDULE", ["schedule.cron.expressions[0]"]),
        (pb.PreviewScheduleRequest(parent=PARENT), "INVALID_FIELD", ["schedule"]),
        (pb.PreviewScheduleRequest(parent=PARENT, job_name="a"), "INVALID_FIELD", ["schedule"]),
        (pb.PreviewScheduleRequest(parent=PARENT, job_name="b"), "JOB_NOT_FOUND", []),
        (
            pb.PreviewScheduleRequest(parent=PARENT, job_name="a", count=101),
            "INVALID_FIELD",
            ["count"],
        ),
        (pb.PreviewScheduleRequest(parent="tenants/no", job_name="a"), "TENANT_NOT_FOUND", []),
    ):
        seen = await refusal(server.jobs.PreviewSchedule(request))
        assert (seen.reason, seen.fields) == (reason, fields)
