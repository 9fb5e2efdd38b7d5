"""PreviewSchedule over gRPC and a real database."""

from collections.abc import AsyncIterator

import pytest
from fencepost.v1 import job_service_pb2 as pb
from fencepost.v1 import schedule_pb2

from tests.integration.definition_calls import PARENT, create, yearly_job
from tests.integration.definition_server import DefinitionServer, refusal, serving


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


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
    job = yearly_job("H * * * *")
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
    await create(server, yearly_job(""))
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
