"""BatchCreateJobs over gRPC and a real database."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from fencepost.v1 import job_service_pb2 as pb

from tests.integration.definition_calls import PARENT, a_job, a_request, count_jobs
from tests.integration.definition_server import DefinitionServer, refusal, serving


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


async def test_a_thousand_jobs_are_one_call(server: DefinitionServer) -> None:
    requests = [
        pb.CreateJobRequest(job_name=f"j-{i}", job=a_job("0 3 * * *"), request_id=f"r-{i}")
        for i in range(1000)
    ]
    batch = pb.BatchCreateJobsRequest(parent=PARENT, requests=requests)
    answer = await server.jobs.BatchCreateJobs(batch)
    names = [outcome.response.job.name for outcome in answer.outcomes]
    assert names == [f"{PARENT}/jobs/j-{i}" for i in range(1000)]
    assert len(await server.query("SELECT FROM fencepost.schedules")) == 1
    assert await server.jobs.BatchCreateJobs(batch) == answer
    assert await count_jobs(server) == 1000


async def test_entries_fail_alone_with_what_a_single_call_would_say(
    server: DefinitionServer,
) -> None:
    await server.jobs.CreateJob(a_request("taken"))
    lost = a_job()
    lost.target.queue = f"{PARENT}/queues/none"
    due = a_job()
    due.schedule.once.SetInParent()
    wrong_parent = a_request("p")
    wrong_parent.parent = "tenants/other"
    entries = [
        a_request("good"),
        a_request("taken"),
        a_request("BAD"),
        a_request("lost", lost),
        a_request("good"),
        a_request("due", due, request_id="one"),
        a_request("due", due, request_id="one"),
        a_request("other", request_id="one"),
        wrong_parent,
    ]
    answer = await server.jobs.BatchCreateJobs(
        pb.BatchCreateJobsRequest(parent=PARENT, requests=entries)
    )
    reasons = [outcome.problem.reason for outcome in answer.outcomes]
    assert reasons == [
        "",
        "JOB_ALREADY_EXISTS",
        "INVALID_FIELD",
        "QUEUE_NOT_FOUND",
        "JOB_ALREADY_EXISTS",
        "",
        "",
        "REQUEST_ID_REUSED",
        "INVALID_FIELD",
    ]
    assert answer.outcomes[5] == answer.outcomes[6]
    assert answer.outcomes[5].response.run_name != ""
    assert await count_jobs(server) == 3
    for index in (1, 2, 3):
        problem = answer.outcomes[index].problem
        single = await refusal(server.jobs.CreateJob(entries[index]))
        assert (problem.reason, problem.message) == (single.reason, single.message)
        assert (problem.code, dict(problem.metadata)) == (single.code.value[0], single.metadata)


async def test_an_entry_of_a_batch_is_the_same_request_as_a_single_call(
    server: DefinitionServer,
) -> None:
    single = await server.jobs.CreateJob(a_request("a", request_id="r"))
    entry = pb.CreateJobRequest(job_name="a", job=a_job(), request_id="r")
    answer = await server.jobs.BatchCreateJobs(
        pb.BatchCreateJobsRequest(parent=PARENT, requests=[entry])
    )
    assert answer.outcomes[0].response == single


@pytest.mark.parametrize("count", [0, 1001])
async def test_batches_are_bounded(server: DefinitionServer, count: int) -> None:
    batch = pb.BatchCreateJobsRequest(parent=PARENT, requests=[a_request("")] * count)
    assert (await refusal(server.jobs.BatchCreateJobs(batch))).fields == ["requests"]


async def test_batches_that_meet_share_the_names_between_them(server: DefinitionServer) -> None:
    names = [f"j-{i:03}" for i in range(200)]

    async def create(order: list[str]) -> int:
        batch = pb.BatchCreateJobsRequest(
            parent=PARENT, requests=[a_request(name) for name in order]
        )
        answer = await server.jobs.BatchCreateJobs(batch)
        problems = {each.problem.reason for each in answer.outcomes if each.HasField("problem")}
        assert problems <= {"JOB_ALREADY_EXISTS"}
        return sum(each.HasField("response") for each in answer.outcomes)

    made = await asyncio.gather(*(create(names[::step]) for step in (1, -1, 1, -1)))
    assert sum(made) == len(names)
    assert await count_jobs(server) == len(names)


async def test_an_answer_is_never_larger_than_a_message(server: DefinitionServer) -> None:
    job = a_job()
    job.payload.json = "x" * 200_000
    requests = [a_request(f"j{i}", job) for i in range(19)]
    answer = await server.jobs.BatchCreateJobs(
        pb.BatchCreateJobsRequest(parent=PARENT, requests=[*requests, a_request("j0")])
    )
    assert answer.outcomes[0].response.job.name == f"{PARENT}/jobs/j0"
    assert answer.outcomes[19].problem.reason == "JOB_ALREADY_EXISTS"
    stored = await server.jobs.GetJob(pb.GetJobRequest(name=f"{PARENT}/jobs/j18"))
    assert stored.job.payload == job.payload
