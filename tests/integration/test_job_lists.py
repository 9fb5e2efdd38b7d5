"""ListJobs: pages, filters, and what they refuse."""

from collections.abc import AsyncIterator

import pytest
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.engine import jobs as engine_jobs

from tests.integration.definition_calls import PARENT, a_job, a_request
from tests.integration.definition_server import DefinitionServer, refusal, serving


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


async def list_all(
    server: DefinitionServer, filter_text: str = "", page_size: int = 50
) -> tuple[list[str], int]:
    names, pages = [], 0
    request = pb.ListJobsRequest(parent=PARENT, page_size=page_size, filter=filter_text)
    while True:
        answer = await server.jobs.ListJobs(request)
        pages += 1
        assert len(answer.jobs) <= page_size
        names += [job.name.rpartition("/")[2] for job in answer.jobs]
        if not answer.next_page_token:
            return names, pages
        request.page_token = answer.next_page_token


async def test_pages_show_every_job_once_newest_first(server: DefinitionServer) -> None:
    for number in range(7):
        await server.jobs.CreateJob(a_request(f"j{number}"))
    wanted = [f"j{number}" for number in range(6, -1, -1)]
    names, pages = await list_all(server, page_size=3)
    # Ids of one millisecond have no order among themselves.
    assert (sorted(names), pages) == (sorted(wanted), 3)
    assert await list_all(server, page_size=7) == (names, 1)


async def test_lists_leave_payloads_away(server: DefinitionServer) -> None:
    job = a_job()
    job.payload.json = "1"
    await server.jobs.CreateJob(a_request("a", job))
    answer = await server.jobs.ListJobs(pb.ListJobsRequest(parent=PARENT))
    assert not answer.jobs[0].HasField("payload")


async def test_filters(server: DefinitionServer) -> None:
    paused = a_job("@daily", env="prod", team="a b")
    paused.paused = True
    done = a_job(env="dev")
    done.schedule.once.SetInParent()
    done.target.kind = "mail.send"
    await server.jobs.CreateJob(a_request("paused", paused))
    await server.jobs.CreateJob(a_request("done", done))
    await server.jobs.CreateJob(a_request("plain"))
    for text, names in {
        "state:PAUSED": {"paused"},
        "state:ACTIVE,FINISHED": {"plain", "done"},
        "state!=ACTIVE": {"paused", "done"},
        "kind:mail.*": {"done"},
        "kind!=mail.*": {"paused", "plain"},
        "job_name:plain": {"plain"},
        "job_name:(plain OR done) state:ACTIVE": {"plain"},
        "job_name:p*": {"paused", "plain"},
        "job_name!=plain": {"paused", "done"},
        "job_name:plain job_name:done": set(),
        "queue:default": {"paused", "plain", "done"},
        "queue:other": set(),
        "labels:env": {"paused", "done"},
        "labels.env:*": {"paused", "done"},
        "labels.env:prod": {"paused"},
        "labels.env!=prod": {"plain", "done"},
        'labels.team:"a b" AND labels.env:prod,dev': {"paused"},
        "created_at>2020-01-01T00:00:00Z": {"paused", "plain", "done"},
        "created_at<2020-01-01T00:00:00Z": set(),
        "next_run_at>=2020-01-01T00:00:00Z": {"paused"},
        "next_run_at<9999-01-01T00:00:00Z kind:report.make": {"paused"},
    }.items():
        found, _ = await list_all(server, text)
        assert set(found) == names, text


async def test_a_filtered_page_looks_at_a_bounded_number_of_jobs(
    server: DefinitionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_jobs, "LIST_SCAN_MAX", 4)
    batch = [a_request(f"j{i}", a_job(odd=str(i % 2), first=str(i == 0))) for i in range(10)]
    await server.jobs.BatchCreateJobs(pb.BatchCreateJobsRequest(parent=PARENT, requests=batch))
    names, pages = await list_all(server, "labels.odd:1")
    assert sorted(names) == ["j1", "j3", "j5", "j7", "j9"]
    assert pages == 3
    assert (await list_all(server, "labels.first:True"))[0] == ["j0"]


async def test_wrong_lists_are_refused(server: DefinitionServer) -> None:
    for name in ("a", "b"):
        await server.jobs.CreateJob(a_request(name))
    request = pb.ListJobsRequest(parent=PARENT, page_size=1)
    token = (await server.jobs.ListJobs(request)).next_page_token
    for change, reason in (
        ({"page_size": -1}, "INVALID_FIELD"),
        ({"page_token": "x"}, "INVALID_PAGE_TOKEN"),
        ({"page_token": token, "filter": "kind:x"}, "INVALID_PAGE_TOKEN"),
        ({"filter": "nope:1"}, "FILTER_NOT_SUPPORTED"),
        ({"filter": "created_at!=2020-01-01T00:00:00Z"}, "FILTER_NOT_SUPPORTED"),
        ({"filter": "kind:a\x00"}, "FILTER_NOT_SUPPORTED"),
        ({"parent": "tenants/none"}, "TENANT_NOT_FOUND"),
    ):
        wrong = pb.ListJobsRequest(parent=PARENT)
        for name, value in change.items():
            setattr(wrong, name, value)
        assert (await refusal(server.jobs.ListJobs(wrong))).reason == reason


async def test_a_page_is_never_larger_than_a_message(server: DefinitionServer) -> None:
    job = a_job()
    job.description = "x" * 4096
    for round_number in range(2):
        batch = [a_request(f"j{round_number}-{i}", job) for i in range(500)]
        await server.jobs.BatchCreateJobs(pb.BatchCreateJobsRequest(parent=PARENT, requests=batch))
    names, pages = await list_all(server, page_size=1000)
    assert len(set(names)) == len(names) == 1000
    assert pages == 2
