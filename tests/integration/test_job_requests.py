"""Calls that are sent again: the first answer, and only one job."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.clock import HOUR, SECOND, monotonic

from tests.integration.definition_calls import PARENT, a_job, a_request, count_jobs
from tests.integration.definition_server import DefinitionServer, refusal, serving


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


async def test_a_call_sent_again_gets_the_first_answer(server: DefinitionServer) -> None:
    request = a_request("a", a_job("@daily"), request_id="r-1")
    first = await server.jobs.CreateJob(request)
    await server.jobs.PauseJob(pb.PauseJobRequest(name=first.job.name))
    assert await server.jobs.CreateJob(request) == first
    other = a_request("b", a_job("@daily"), request_id="r-1")
    seen = await refusal(server.jobs.CreateJob(other))
    assert (seen.reason, seen.fields) == ("REQUEST_ID_REUSED", ["request_id"])
    assert await count_jobs(server) == 1


async def test_a_refused_call_may_be_sent_again(server: DefinitionServer) -> None:
    await server.jobs.CreateJob(a_request("a"))
    request = a_request("a", a_job(env="x"), request_id="r-1")
    assert (await refusal(server.jobs.CreateJob(request))).reason == "JOB_ALREADY_EXISTS"
    await server.jobs.DeleteJob(pb.DeleteJobRequest(name=f"{PARENT}/jobs/a"))
    assert (await server.jobs.CreateJob(request)).job.labels == {"env": "x"}


async def test_the_memory_answers_even_what_would_now_be_refused(
    server: DefinitionServer,
) -> None:
    job = a_job("* * * * * *")
    job.schedule.end_at.seconds = server.now() // SECOND + 3600
    request = a_request("a", job, request_id="r-1")
    first = await server.jobs.CreateJob(request)
    # As if two hours had passed: only this process's idea of now moves.
    at = monotonic()
    later = server.now() + 2 * HOUR
    server.database.clock.sample(asked_at=at, answered_at=at, database_at=later)
    assert await server.jobs.CreateJob(request) == first


async def test_a_forgotten_id_is_free(server: DefinitionServer) -> None:
    await server.jobs.CreateJob(a_request("a", request_id="r-1"))
    await server.query("UPDATE fencepost.requests SET expires_at = now() - interval '1 s'")
    created = (await server.jobs.CreateJob(a_request("b", request_id="r-1"))).job
    assert created.name == f"{PARENT}/jobs/b"
    rows = await server.query("SELECT expires_at > now() AS kept FROM fencepost.requests")
    assert [row["kept"] for row in rows] == [True]


async def test_two_calls_with_one_id_at_once_make_one_job(server: DefinitionServer) -> None:
    for round_number in range(5):
        request = a_request("", a_job("@daily"), request_id=f"r-{round_number}")
        answers = await asyncio.gather(*(server.jobs.CreateJob(request) for _ in range(5)))
        assert all(answer == answers[0] for answer in answers)
    assert await count_jobs(server) == 5
