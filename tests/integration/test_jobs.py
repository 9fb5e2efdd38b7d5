"""CreateJob, BatchCreateJobs, GetJob and ListJobs over gRPC and a real database."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from fencepost.v1 import job_pb2, schedule_pb2
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.clock import HOUR, SECOND, monotonic
from fencepost_server.domain.job import partition_of, partition_of_id
from fencepost_server.engine import jobs as engine_jobs

from tests.integration.definition_server import DefinitionServer, refusal, serving

PARENT = "tenants/default"


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


def a_job(cron: str = "", **fields: str) -> job_pb2.Job:
    job = job_pb2.Job(target=job_pb2.Target(kind="report.make"), labels=fields)
    if cron:
        job.schedule.cron.expressions.append(cron)
    return job


def a_request(
    name: str, job: job_pb2.Job | None = None, *, request_id: str = ""
) -> pb.CreateJobRequest:
    return pb.CreateJobRequest(
        parent=PARENT,
        job_name=name,
        job=a_job() if job is None else job,
        request_id=request_id,
    )


async def count_jobs(server: DefinitionServer) -> int:
    rows = await server.query(
        "SELECT (SELECT count(*) FROM fencepost.jobs) AS jobs,"
        " (SELECT count(*) FROM fencepost.job_versions) AS versions,"
        " (SELECT count(*) FROM fencepost.job_schedules) AS schedules"
    )
    assert rows[0]["jobs"] == rows[0]["versions"] == rows[0]["schedules"]
    return int(rows[0]["jobs"])


async def test_a_job_is_stored_and_read_back(server: DefinitionServer) -> None:
    job = a_job("0 3 * * *", env="prod")
    job.payload.json = '{"a": "\\u0000"}'
    created = (await server.jobs.CreateJob(a_request("nightly", job))).job
    assert created.name == f"{PARENT}/jobs/nightly"
    assert partition_of_id(created.job_id) == partition_of(tenant="default", job_name="nightly")
    assert (created.version, created.state) == (1, job_pb2.JOB_STATE_ACTIVE)
    assert created.next_run_at.seconds % 86_400 == 3 * 3600
    assert created.payload.json == job.payload.json
    for last_part in ("nightly", created.job_id):
        found = await server.jobs.GetJob(pb.GetJobRequest(name=f"{PARENT}/jobs/{last_part}"))
        assert found.job == created
    assert server.woken.partitions == [{partition_of_id(created.job_id)}]
    assert await count_jobs(server) == 1


async def test_a_job_without_schedule_waits(server: DefinitionServer) -> None:
    created = (await server.jobs.CreateJob(a_request("adhoc"))).job
    assert created.state == job_pb2.JOB_STATE_ACTIVE
    assert not created.HasField("next_run_at")
    assert await count_jobs(server) == 1


async def test_the_server_picks_a_name(server: DefinitionServer) -> None:
    names = {(await server.jobs.CreateJob(a_request(""))).job.name for _ in range(3)}
    assert len(names) == 3


async def test_a_fire_that_is_due_makes_its_run_in_the_same_commit(
    server: DefinitionServer,
) -> None:
    job = a_job()
    job.schedule.once.SetInParent()
    answer = await server.jobs.CreateJob(a_request("now", job))
    rows = await server.query(
        "SELECT job_id, scheduled_at, state, version FROM fencepost.run_queue"
    )
    assert [(str(row["job_id"]), row["state"], row["version"]) for row in rows] == [
        (answer.job.job_id, "queued", 1)
    ]
    text = rows[0]["scheduled_at"].strftime("%Y-%m-%dT%H:%M:%SZ")
    assert answer.run_name == f"{PARENT}/jobs/now/runs/{text}"
    assert answer.job.state == job_pb2.JOB_STATE_FINISHED
    assert answer.job.fire_count == 1
    assert len(server.woken.lane_hints) == 1


async def test_a_paused_job_does_not_fire(server: DefinitionServer) -> None:
    job = a_job()
    job.schedule.once.SetInParent()
    job.paused, job.pause_reason = True, "not yet"
    answer = await server.jobs.CreateJob(a_request("later", job))
    assert (answer.run_name, answer.job.state) == ("", job_pb2.JOB_STATE_PAUSED)
    assert answer.job.pause_reason == "not yet"
    assert await server.query("SELECT FROM fencepost.run_queue") == []


async def test_the_trace_of_the_call_is_kept(server: DefinitionServer) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = (("traceparent", parent), ("tracestate", "a=b"), ("baggage", "x" * 3000))
    created = (await server.jobs.CreateJob(a_request("traced"), metadata=sent)).job
    assert created.trace_context.traceparent == parent
    assert created.trace_context.tracestate == "a=b"
    assert created.trace_context.baggage == ""


async def test_a_cap_makes_the_claims_of_the_queue_count(server: DefinitionServer) -> None:
    statement = "SELECT has_capped_jobs FROM fencepost.queues"
    await server.jobs.CreateJob(a_request("free"))
    assert not (await server.query(statement))[0]["has_capped_jobs"]
    job = a_job()
    job.limits.max_in_flight = 2
    await server.jobs.CreateJob(a_request("capped", job))
    assert (await server.query(statement))[0]["has_capped_jobs"]


async def test_settings_are_repeated_where_fires_find_them(server: DefinitionServer) -> None:
    job = a_job()
    job.target.priority = 4
    job.schedule.interval.every.seconds = 60
    job.schedule.max_fires = 9
    job.schedule.misfire_policy.threshold.seconds = 5
    job.schedule.misfire_policy.window.seconds = 600
    job.schedule.overlap_policy = schedule_pb2.OVERLAP_POLICY_QUEUE_ALL
    job.limits.lease_ttl.seconds = 15
    job.limits.attempt_timeout.nanos = 0
    job.limits.attempt_timeout.seconds = 77
    job.limits.cancel_grace.seconds = 5
    job.limits.concurrency_key = "k"
    await server.jobs.CreateJob(a_request("wide", job))
    row = (await server.query("SELECT * FROM fencepost.job_schedules"))[0]
    wanted = {
        "priority": 4,
        "every_s": 60,
        "schedule_id": None,
        "max_fires": 9,
        "misfire": "run_once",
        "misfire_after_s": 5,
        "misfire_window_s": 600,
        "overlap": "queue_all",
        "lease_s": 15,
        "attempt_timeout_s": 77,
        "cancel_grace_s": 5,
        "concurrency_key": "k",
        "max_in_flight": None,
        "version": 1,
    }
    assert {name: row[name] for name in wanted} == wanted


async def test_a_name_is_taken_once(server: DefinitionServer) -> None:
    await server.jobs.CreateJob(a_request("a"))
    seen = await refusal(server.jobs.CreateJob(a_request("a")))
    assert (seen.code, seen.reason) == (grpc.StatusCode.ALREADY_EXISTS, "JOB_ALREADY_EXISTS")
    assert seen.resource == f"{PARENT}/jobs/a"
    assert await count_jobs(server) == 1


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        ({"parent": "tenants/none"}, "TENANT_NOT_FOUND", None),
        ({"parent": "none"}, "INVALID_FIELD", "parent"),
        ({"parent": ""}, "INVALID_FIELD", "parent"),
        ({"job_name": "A"}, "INVALID_FIELD", "job_name"),
        ({"job_name": "a\x00"}, "INVALID_FIELD", "job_name"),
        ({"request_id": "x" * 37}, "INVALID_FIELD", "request_id"),
        ({"request_id": "a\x00"}, "INVALID_FIELD", "request_id"),
    ],
)
async def test_wrong_requests_are_refused(
    server: DefinitionServer, change: dict[str, str], reason: str, field: str | None
) -> None:
    request = a_request("a")
    for name, value in change.items():
        setattr(request, name, value)
    seen = await refusal(server.jobs.CreateJob(request))
    assert seen.reason == reason
    assert seen.fields == ([] if field is None else [field])
    assert await count_jobs(server) == 0


async def test_wrong_definitions_are_refused(server: DefinitionServer) -> None:
    lost = a_job()
    lost.target.queue = f"{PARENT}/queues/none"
    never = a_job("0 0 30 2 *")
    over = a_job("@daily")
    over.schedule.end_at.seconds = 5
    odd = a_job("* * *")
    for job, reason, fields in (
        (lost, "QUEUE_NOT_FOUND", []),
        (never, "INVALID_SCHEDULE", ["job.schedule.cron.expressions[0]"]),
        (odd, "INVALID_SCHEDULE", ["job.schedule.cron.expressions[0]"]),
        (over, "INVALID_SCHEDULE", ["job.schedule"]),
    ):
        seen = await refusal(server.jobs.CreateJob(a_request("a", job)))
        assert (seen.reason, seen.fields) == (reason, fields)
    assert (await refusal(server.jobs.CreateJob(pb.CreateJobRequest(parent=PARENT)))).fields == [
        "job"
    ]
    assert await count_jobs(server) == 0


async def test_a_check_stores_nothing(server: DefinitionServer) -> None:
    job = a_job()
    job.schedule.once.SetInParent()
    request = a_request("a", job, request_id="r")
    request.validate_only = True
    shown = (await server.jobs.CreateJob(request)).job
    assert shown.name == f"{PARENT}/jobs/a"
    assert await count_jobs(server) == 0
    for table in ("run_queue", "requests"):
        assert await server.query(f"SELECT FROM fencepost.{table}") == []
    assert server.woken.partitions == []
    await server.jobs.CreateJob(a_request("a"))
    assert (await refusal(server.jobs.CreateJob(request))).reason == "JOB_ALREADY_EXISTS"


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


async def test_missing_jobs_are_not_found(server: DefinitionServer) -> None:
    created = (await server.jobs.CreateJob(a_request("a"))).job
    for name, version in (
        (f"{PARENT}/jobs/b", 0),
        (f"{PARENT}/jobs/0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42", 0),
        (created.name, 2),
    ):
        seen = await refusal(server.jobs.GetJob(pb.GetJobRequest(name=name, version=version)))
        assert (seen.code, seen.reason) == (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")
        assert seen.resource == name


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


async def test_what_is_not_served_says_so(server: DefinitionServer) -> None:
    for call in (
        server.jobs.BackfillJob(pb.BackfillJobRequest()),
        server.jobs.ListFires(pb.ListFiresRequest()),
    ):
        seen = await refusal(call)
        assert seen.code is grpc.StatusCode.UNIMPLEMENTED
        assert "is not served by this version" in seen.message
