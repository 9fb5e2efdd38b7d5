"""ListFires over gRPC and a real database: every fire with its answer, page by page."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from fencepost.v1 import job_pb2, schedule_pb2
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.cli.main import main
from google.protobuf.timestamp_pb2 import Timestamp

from tests.integration.definition_calls import NAME, a_job, create, make_due
from tests.integration.definition_server import DefinitionServer, refusal, serving

PARIS_GAP = datetime(2025, 3, 30, 1, tzinfo=UTC)
PARIS_FOLD = datetime(2025, 10, 26, 0, 30, tzinfo=UTC)


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


def _at(instant: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(instant)
    return stamp


async def _fires(server: DefinitionServer, **values: Any) -> list[schedule_pb2.Fire]:
    """All pages."""
    request = pb.ListFiresRequest(parent=NAME, **values)
    fires: list[schedule_pb2.Fire] = []
    while True:
        page = await server.jobs.ListFires(request)
        fires += page.fires
        if not page.next_page_token:
            return fires
        request.page_token = page.next_page_token


async def _backdate(server: DefinitionServer, to: str = "2025-01-01") -> None:
    """As if the job had been made then, and its fires up to now had been forgotten."""
    at = datetime.fromisoformat(f"{to}T00:00:00+00:00")
    await server.query("UPDATE fencepost.jobs SET created_at = $1", at)
    await server.query("UPDATE fencepost.job_versions SET created_at = $1", at)


def _paris_job(expression: str = "30 2 * * *") -> job_pb2.Job:
    job = a_job(expression)
    job.name = NAME
    job.schedule.cron.time_zone = "Europe/Paris"
    job.schedule.cron.dst_gap = schedule_pb2.DST_GAP_POLICY_SKIP
    return job


async def test_a_fire_that_clocks_jumped_over_says_so(server: DefinitionServer) -> None:
    await create(server, _paris_job())
    await _backdate(server)
    fires = await _fires(
        server,
        since=_at(datetime(2025, 3, 29, 12, tzinfo=UTC)),
        until=_at(datetime(2025, 3, 30, 12, tzinfo=UTC)),
    )
    [fire] = fires
    assert fire.disposition == schedule_pb2.FIRE_DISPOSITION_SKIPPED
    assert fire.skip_reason == schedule_pb2.SKIP_REASON_DST_GAP
    assert fire.local_time == "2025-03-30T02:30:00"
    assert fire.scheduled_at == _at(PARIS_GAP)
    assert "does not exist" in fire.detail
    assert (fire.run_name, fire.count, fire.job_version) == ("", 1, 1)


async def test_one_command_says_why_a_job_did_not_run_on_sunday_at_half_past_two(
    server: DefinitionServer, capsys: pytest.CaptureFixture[str]
) -> None:
    await create(server, _paris_job())
    await _backdate(server)
    command = ["--server", server.address, "jobs", "fires", "a", "--skipped"]
    command += ["--since", "2025-03-30T00:00:00+01:00", "--until", "2025-03-31T00:00:00+02:00"]
    assert await asyncio.to_thread(main, command) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "LOCAL"
    assert line.startswith("2025-03-30T02:30:00  skipped (dst gap)  1 ")
    assert "does not exist here: clocks jump over it, so it does not fire." in line


async def test_many_local_times_of_one_gap_are_one_entry(server: DefinitionServer) -> None:
    await create(server, _paris_job("*/10 2 * * *"))
    await _backdate(server)
    [fire] = await _fires(
        server,
        since=_at(datetime(2025, 3, 30, tzinfo=UTC)),
        until=_at(datetime(2025, 3, 30, 12, tzinfo=UTC)),
    )
    assert (fire.count, fire.local_time) == (6, "2025-03-30T02:00:00")
    assert fire.last_scheduled_at == fire.scheduled_at == _at(PARIS_GAP)


async def test_the_pass_of_a_fold_that_does_not_fire_is_an_entry(server: DefinitionServer) -> None:
    await create(server, _paris_job())
    await _backdate(server)
    fires = await _fires(
        server,
        since=_at(datetime(2025, 10, 26, tzinfo=UTC)),
        until=_at(datetime(2025, 10, 26, 12, tzinfo=UTC)),
    )
    assert [fire.skip_reason for fire in fires] == [schedule_pb2.SKIP_REASON_DST_FOLD]
    assert fires[0].local_time == "2025-10-26T02:30:00+01:00"


async def test_nothing_is_suppressed_before_the_job_was_there(server: DefinitionServer) -> None:
    await create(server, _paris_job())
    await _backdate(server, "2025-06-01")
    year = {
        "since": _at(datetime(2025, 1, 1, tzinfo=UTC)),
        "until": _at(datetime(2026, 1, 1, tzinfo=UTC)),
    }
    assert [fire.skip_reason for fire in await _fires(server, **year)] == [
        schedule_pb2.SKIP_REASON_DST_FOLD
    ]


async def test_late_and_paused_fires_are_pending(server: DefinitionServer) -> None:
    job = a_job()
    job.name = NAME
    job.schedule.interval.every.seconds = 10
    await create(server, job)
    at = await make_due(server, 35)
    [late] = await _fires(server)
    assert late.disposition == schedule_pb2.FIRE_DISPOSITION_PENDING
    assert late.skip_reason == schedule_pb2.SKIP_REASON_UNSPECIFIED
    assert (late.count, late.scheduled_at.seconds) == (4, at)
    assert not late.HasField("decided_at")
    await server.jobs.PauseJob(pb.PauseJobRequest(name=NAME, reason="the warehouse is down"))
    [paused] = await _fires(server)
    assert paused.skip_reason == schedule_pb2.SKIP_REASON_PAUSED
    assert paused.detail == "the warehouse is down"


async def test_a_deleted_job_is_read_by_its_id(server: DefinitionServer) -> None:
    job = a_job()
    job.name = NAME
    job.schedule.interval.every.seconds = 10
    job.schedule.overlap_policy = schedule_pb2.OVERLAP_POLICY_ALLOW
    made = await create(server, job)
    await make_due(server, 15)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME))
    refused = await refusal(server.jobs.ListFires(pb.ListFiresRequest(parent=NAME)))
    assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")
    by_id = f"tenants/default/jobs/{made.job_id}"
    page = await server.jobs.ListFires(pb.ListFiresRequest(parent=by_id))
    assert [fire.disposition for fire in page.fires] == [schedule_pb2.FIRE_DISPOSITION_FIRED] * 2
    assert page.fires[0].run_name.startswith(f"{by_id}/runs/")


async def test_filters_and_pages_keep_to_what_was_asked(server: DefinitionServer) -> None:
    job = a_job()
    job.name = NAME
    job.schedule.interval.every.seconds = 10
    job.schedule.overlap_policy = schedule_pb2.OVERLAP_POLICY_ALLOW
    made = await create(server, job)
    at = await make_due(server, 1000)
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=NAME))
    by_id = f"tenants/default/jobs/{made.job_id}"
    whole = (await server.jobs.ListFires(pb.ListFiresRequest(parent=by_id))).fires
    assert sum(fire.count for fire in whole) == 101
    assert min(fire.scheduled_at.seconds for fire in whole) == at
    pages: list[schedule_pb2.Fire] = []
    request = pb.ListFiresRequest(parent=by_id, page_size=1)
    for _ in range(len(whole)):
        page = await server.jobs.ListFires(request)
        pages += page.fires
        request.page_token = page.next_page_token
    assert [(f.scheduled_at, f.count) for f in pages] == [(f.scheduled_at, f.count) for f in whole]
    skipped = await server.jobs.ListFires(
        pb.ListFiresRequest(parent=by_id, skip_reasons=[schedule_pb2.SKIP_REASON_MISFIRE])
    )
    assert {fire.skip_reason for fire in skipped.fires} == {schedule_pb2.SKIP_REASON_MISFIRE}
    caught_up = await server.jobs.ListFires(
        pb.ListFiresRequest(parent=by_id, dispositions=[schedule_pb2.FIRE_DISPOSITION_CAUGHT_UP])
    )
    [stand_in] = caught_up.fires
    assert [fire.run_name for fire in skipped.fires] == [stand_in.run_name]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"since": Timestamp(seconds=20), "until": Timestamp(seconds=10)}, "since"),
        ({"since": Timestamp(seconds=10**11)}, "since"),
        ({"dispositions": [99]}, "dispositions[0]"),
        ({"skip_reasons": [1, 0]}, "skip_reasons[1]"),
        ({"dispositions": [1] * 17}, "dispositions"),
        ({"page_size": -1}, "page_size"),
    ],
)
async def test_bad_requests_name_the_field(
    server: DefinitionServer, values: dict[str, Any], field: str
) -> None:
    refused = await refusal(server.jobs.ListFires(pb.ListFiresRequest(parent=NAME, **values)))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.fields == [field]


async def test_a_token_of_another_query_is_refused(server: DefinitionServer) -> None:
    await create(server, _paris_job("* 2 * * *"))
    await _backdate(server)
    first = await server.jobs.ListFires(
        pb.ListFiresRequest(parent=NAME, since=_at(datetime(2025, 1, 1, tzinfo=UTC)), page_size=1)
    )
    assert first.next_page_token
    other = pb.ListFiresRequest(
        parent=NAME, since=_at(datetime(2025, 1, 2, tzinfo=UTC)), page_token=first.next_page_token
    )
    refused = await refusal(server.jobs.ListFires(other))
    assert refused.reason == "INVALID_PAGE_TOKEN"
