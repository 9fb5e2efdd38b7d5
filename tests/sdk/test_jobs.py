"""Jobs over the client: created once, listed to the end, changed, removed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
import pytest_asyncio
from fencepost import AlreadyExists, Client, NotFound, cron, every, once
from fencepost.retry import CallRetry

from tests.sdk.fake_server import FakeServer


@pytest_asyncio.fixture
async def client(server: FakeServer) -> AsyncIterator[Client]:
    async with Client(server.address, "acme", retry=CallRetry(base=0.01)) as made:
        yield made


async def test_a_job_is_created_as_described(server: FakeServer, client: Client) -> None:
    job = await client.create_job(
        "nightly",
        kind="report.build",
        queue="reports",
        schedule=cron("0 3 * * *", "0 15 * * *", time_zone="Europe/Paris"),
        payload={"n": 1},
        labels={"team": "billing"},
        priority=3,
    )
    assert job.name == "tenants/acme/jobs/nightly"
    assert job.target.queue == "tenants/acme/queues/reports"
    assert (job.target.kind, job.target.priority) == ("report.build", 3)
    assert list(job.schedule.cron.expressions) == ["0 3 * * *", "0 15 * * *"]
    assert job.schedule.cron.time_zone == "Europe/Paris"
    assert job.payload.json == '{"n":1}'
    assert await client.get_job("nightly") == job
    with pytest.raises(AlreadyExists) as caught:
        await client.create_job("nightly", kind="other")
    assert caught.value.reason == "JOB_ALREADY_EXISTS"


async def test_a_lost_answer_does_not_make_creation_or_removal_fail(
    server: FakeServer, client: Client
) -> None:
    server.jobs.lose_answers = 1
    await client.create_job("nightly", kind="report.build")
    assert len({request.request_id for request in server.jobs.requests}) == 1
    server.jobs.lose_answers = 1
    await client.delete_job("nightly")
    assert server.jobs.jobs == {}
    with pytest.raises(NotFound):
        await client.delete_job("nightly")
    await client.delete_job("nightly", allow_missing=True)


async def test_all_pages_of_a_list_are_read(server: FakeServer, client: Client) -> None:
    for n in range(5):
        await client.create_job(f"job-{n}", kind="noop")
    names = [job.name async for job in client.list_jobs(filter="kind:noop")]
    assert names == [f"tenants/acme/jobs/job-{n}" for n in range(5)]
    assert [r.page_token for r in server.jobs.requests[-3:]] == ["", "2", "4"]
    assert server.jobs.requests[-1].filter == "kind:noop"


async def test_a_job_is_paused_and_resumed(server: FakeServer, client: Client) -> None:
    await client.create_job("nightly", kind="noop", paused=False)
    paused = await client.pause_job("nightly", reason="holiday")
    assert (paused.paused, paused.pause_reason) == (True, "holiday")
    assert not (await client.resume_job("tenants/acme/jobs/nightly")).paused


def test_short_forms_of_schedules() -> None:
    assert every(timedelta(minutes=5)).interval.every.seconds == 300
    assert every(30, after_completion=True).interval.after_completion
    assert once(delay=1.5).once.delay.nanos == 500_000_000
    assert once(datetime(2026, 12, 1, 9, tzinfo=UTC)).once.at.seconds == 1796115600
    assert once().HasField("once")
    with pytest.raises(ValueError, match="not both"):
        once(datetime(2026, 12, 1, tzinfo=UTC), delay=1)
    with pytest.raises(ValueError, match="at least one"):
        cron()
