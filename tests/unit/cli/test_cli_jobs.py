"""`fencepost jobs`: what is typed becomes the right call, what is answered the right output."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from fencepost.v1 import job_pb2, job_service_pb2, schedule_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.unit.cli.scripted import Refusal, Run, ScriptedServer


def a_job(name: str = "hello", **fields: Any) -> job_pb2.Job:
    return job_pb2.Job(
        name=f"tenants/default/jobs/{name}",
        target=job_pb2.Target(queue="tenants/default/queues/default", kind="demo.hello"),
        state=job_pb2.JOB_STATE_ACTIVE,
        **fields,
    )


def echo_create(request: job_service_pb2.CreateJobRequest) -> job_service_pb2.CreateJobResponse:
    job = job_pb2.Job()
    job.CopyFrom(request.job)
    job.name = f"{request.parent}/jobs/{request.job_name}"
    job.state = job_pb2.JOB_STATE_ACTIVE
    return job_service_pb2.CreateJobResponse(job=job)


def test_all_flags_of_a_cron_job_arrive(server: ScriptedServer, run: Run) -> None:
    server.on("CreateJob", echo_create)
    flags = "--queue mail --priority 3 --tz Europe/Berlin --dst-gap skip --dst-fold both"
    flags += " --max-failures 3 --attempt-timeout 2m --overlap queue-one --misfire catch-up"
    flags += " --misfire-threshold 90s --max-catch-up 7 --max-fires 5 --jitter 30s --paused"
    flags += " --queue-timeout 1h --total-timeout 1d"
    flags += " --label team=web --label tier=1 --end-at 2030-01-01T00:00:00+01:00"
    result = run(
        *("jobs", "create", "nightly", "--kind", "report", "--cron", "30 2 * * *", "--cron"),
        *("0 12 * * SUN", *flags.split(), "--payload", '{"a": 1.50}'),
    )
    assert result.code == 0, result.err
    request = server.requests["CreateJob"][0]
    assert (request.parent, request.job_name) == ("tenants/default", "nightly")
    assert len(request.request_id) == 36
    job = request.job
    assert job.target == job_pb2.Target(
        queue="tenants/default/queues/mail", kind="report", priority=3
    )
    assert job.payload.json == '{"a": 1.50}'
    assert dict(job.labels) == {"team": "web", "tier": "1"}
    assert job.retry_policy.max_failures == 3
    assert job.limits == job_pb2.RunLimits(
        attempt_timeout=Duration(seconds=120),
        queue_timeout=Duration(seconds=3600),
        total_timeout=Duration(seconds=86_400),
    )
    assert job.paused
    assert job.schedule == schedule_pb2.Schedule(
        cron=schedule_pb2.CronSpec(
            expressions=["30 2 * * *", "0 12 * * SUN"],
            time_zone="Europe/Berlin",
            dst_gap=schedule_pb2.DST_GAP_POLICY_SKIP,
            dst_fold=schedule_pb2.DST_FOLD_POLICY_BOTH,
        ),
        end_at=Timestamp(seconds=1893452400),
        max_fires=5,
        jitter=Duration(seconds=30),
        overlap_policy=schedule_pb2.OVERLAP_POLICY_QUEUE_ONE,
        misfire_policy=schedule_pb2.MisfirePolicy(
            action=schedule_pb2.MISFIRE_ACTION_CATCH_UP,
            threshold=Duration(seconds=90),
            max_catch_up=7,
        ),
    )


def test_other_schedules_arrive(server: ScriptedServer, run: Run) -> None:
    server.on("CreateJob", echo_create)
    create = ("jobs", "create", "a", "--kind", "k")
    assert run(*create, "--every", "1h30m", "--after-completion").code == 0
    assert run(*create, "--at", "2027-03-28T09:00:00.5Z").code == 0
    assert run(*create, "--delay", "250ms").code == 0
    result = run(*create)
    assert "fencepost run a --watch" in result.err
    every, at, delay, none = [request.job for request in server.requests["CreateJob"]]
    assert every.schedule.interval.every == Duration(seconds=5400)
    assert every.schedule.interval.after_completion
    assert at.schedule.once.at == Timestamp(seconds=1806224400, nanos=500_000_000)
    assert delay.schedule.once.delay == Duration(nanos=250_000_000)
    assert not none.HasField("schedule")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cron", "* * * * *", "--every", "5s"], "--cron and --every do not go together"),
        (["--tz", "Europe/Berlin"], "--tz has no effect"),
        (["--overlap", "skip"], "--overlap has no effect"),
        (["--every", "5"], "--every '5' is not a duration"),
        (["--every", "5 minutes"], "is not a duration"),
        (["--every", "99999999999999999999d"], "is not a duration"),
        (["--at", "2027-03-28T09:00:00"], "--at '2027-03-28T09:00:00' is not an instant"),
        (["--at", "tomorrow"], "is not an instant"),
        (["--label", "team"], "--label 'team' is not a label"),
        (["--label", "a=1", "--label", "a=2"], "--label a comes twice"),
        (["--payload", "{"], "--payload is not JSON"),
        (["--payload", "@/no/such/file"], "cannot read the payload from /no/such/file"),
        (["--payload", json.dumps("x" * 300_000)], "is too large"),
        (["--overlap", "sometimes"], "sometimes"),
        (["--priority", "high"], "--priority"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_wrong_flags_are_refused_without_a_call(
    server: ScriptedServer, run: Run, flags: list[str], words: str
) -> None:
    result = run("jobs", "create", "a", "--kind", "k", *flags)
    assert result.code == 2
    assert words in result.err
    assert result.err.startswith("error: ")
    assert result.out == ""
    assert dict(server.requests) == {}


def test_a_payload_comes_from_a_file_byte_for_byte(
    server: ScriptedServer, run: Run, tmp_path: Path
) -> None:
    server.on("CreateJob", echo_create)
    path = tmp_path / "payload.json"
    path.write_text('{"big": 12345678901234567890.10, "ä": null}\n', encoding="utf-8")
    assert run("jobs", "create", "a", "--kind", "k", "--payload", f"@{path}").code == 0
    assert server.requests["CreateJob"][0].job.payload.json == path.read_text(encoding="utf-8")
    path.write_bytes(b'"\xff"')
    result = run("jobs", "create", "a", "--kind", "k", "--payload", f"@{path}")
    assert (result.code, "not UTF-8" in result.err) == (2, True)


def test_a_list_is_a_plain_table_when_nobody_watches(server: ScriptedServer, run: Run) -> None:
    interval = schedule_pb2.Schedule(
        interval=schedule_pb2.IntervalSpec(every=Duration(seconds=300))
    )
    jobs = [
        a_job("hello", schedule=interval, next_run_at=Timestamp(seconds=1806224400)),
        a_job("x" * 63),
    ]
    server.on("ListJobs", job_service_pb2.ListJobsResponse(jobs=jobs))
    result = run("jobs", "list", "--state", "active", "--queue", "a b", "--filter", "labels.x=1")
    request = server.requests["ListJobs"][0]
    assert request.filter == 'labels.x=1 AND state=ACTIVE AND queue="a b"'
    lines = result.out.splitlines()
    assert lines[0].split() == ["NAME", "STATE", "SCHEDULE", "NEXT", "FIRE", "QUEUE", "KIND"]
    assert lines[1].split()[:4] == ["hello", "active", "every", "5m"]
    assert "2027-03-28 09:00:00+00:00" in lines[1] or "+0" in lines[1]
    assert lines[2].startswith("x" * 63)
    assert result.err == ""


def test_a_json_list_has_the_shape_of_the_call(server: ScriptedServer, run: Run) -> None:
    server.on("ListJobs", job_service_pb2.ListJobsResponse(jobs=[a_job(max_fires := "hello")]))
    result = run("jobs", "list", "-o", "json")
    job = json.loads(result.out)["jobs"][0]
    assert (job["name"], job["state"]) == (f"tenants/default/jobs/{max_fires}", "JOB_STATE_ACTIVE")


def test_an_empty_list_is_a_success_with_a_next_step(server: ScriptedServer, run: Run) -> None:
    server.on("ListJobs", job_service_pb2.ListJobsResponse())
    result = run("jobs", "list")
    assert (result.code, result.out) == (0, "")
    assert "fencepost jobs create" in result.err
    assert "no job matches queue=nope" in run("jobs", "list", "--queue", "nope").err


def test_pages_are_followed_up_to_the_limit(server: ScriptedServer, run: Run) -> None:
    def page(request: job_service_pb2.ListJobsRequest) -> job_service_pb2.ListJobsResponse:
        start = int(request.page_token or 0)
        jobs = [a_job(f"job-{start + n}") for n in range(min(request.page_size, 2))]
        return job_service_pb2.ListJobsResponse(jobs=jobs, next_page_token=str(start + len(jobs)))

    server.on("ListJobs", page)
    result = run("jobs", "list", "--limit", "5", "-o", "json")
    names = [job["name"].rpartition("/")[2] for job in json.loads(result.out)["jobs"]]
    assert names == ["job-0", "job-1", "job-2", "job-3", "job-4"]
    assert "--limit 50" in result.err


def test_pause_resume_and_delete(server: ScriptedServer, run: Run) -> None:
    server.on("PauseJob", job_service_pb2.PauseJobResponse(job=a_job()))
    server.on("ResumeJob", job_service_pb2.ResumeJobResponse(job=a_job()))
    server.on("DeleteJob", job_service_pb2.DeleteJobResponse())
    assert run("jobs", "pause", "hello", "--reason", "tired").code == 0
    assert server.requests["PauseJob"][0].reason == "tired"
    assert run("jobs", "resume", "hello", "--tenant", "acme").code == 0
    assert server.requests["ResumeJob"][0].name == "tenants/acme/jobs/hello"
    refused = run("jobs", "delete", "hello")
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert "DeleteJob" not in server.requests
    deleted = run("jobs", "delete", "hello", "--yes", "--cancel-runs")
    assert (deleted.code, deleted.out) == (0, "")
    assert server.requests["DeleteJob"][0].cancel_runs


def test_a_mistyped_name_gets_a_suggestion(server: ScriptedServer, run: Run) -> None:
    resource = "tenants/default/jobs/helo"
    missing = Refusal(
        grpc.StatusCode.NOT_FOUND, "no job helo", reason="JOB_NOT_FOUND", resource=resource
    )
    server.on("GetJob", missing)
    server.on("ListJobs", job_service_pb2.ListJobsResponse(jobs=[a_job("hello"), a_job("slow")]))
    result = run("jobs", "get", "helo")
    assert result.code == 3
    assert result.err.splitlines() == [
        "error: cannot get job 'helo'",
        "  why:    no job helo",
        "  try:    did you mean hello? All of them: fencepost jobs list",
    ]


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_SCHEDULE", 2),
        (grpc.StatusCode.NOT_FOUND, "TENANT_NOT_FOUND", 3),
        (grpc.StatusCode.UNAUTHENTICATED, "CREDENTIALS_MISSING", 4),
        (grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING", 4),
        (grpc.StatusCode.ALREADY_EXISTS, "JOB_ALREADY_EXISTS", 5),
        (grpc.StatusCode.ABORTED, "ETAG_MISMATCH", 5),
        (grpc.StatusCode.FAILED_PRECONDITION, "JOB_FINISHED", 5),
        (grpc.StatusCode.UNAVAILABLE, "STORAGE_UNAVAILABLE", 6),
        (grpc.StatusCode.INTERNAL, "INTERNAL", 1),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER_OVERLOADED", 1),
    ],
)
def test_refusals_have_their_exit_codes(
    server: ScriptedServer, run: Run, code: grpc.StatusCode, reason: str, expected: int
) -> None:
    server.on("CreateJob", Refusal(code, "the reason in words", reason=reason, request_id="r-17"))
    result = run("-v", "jobs", "create", "a", "--kind", "k")
    assert result.code == expected
    assert "why:    the reason in words" in result.err
    assert f"{code.name} · {reason} · request r-17" in result.err
    assert result.out == ""
    assert "r-17" not in run("jobs", "create", "a", "--kind", "k").err


def test_the_offending_field_is_named(server: ScriptedServer, run: Run) -> None:
    server.on(
        "CreateJob",
        Refusal(
            grpc.StatusCode.INVALID_ARGUMENT,
            "minute 61 is not in 0 to 59",
            reason="INVALID_SCHEDULE",
            field="job.schedule.cron.expressions[0]",
        ),
    )
    result = run("jobs", "create", "a", "--kind", "k", "--cron", "61 * * * *")
    assert "why:    job.schedule.cron.expressions[0]: minute 61 is not in 0 to 59" in result.err
    assert "fencepost jobs create --help" in result.err


def test_a_method_that_is_not_served_is_told(server: ScriptedServer, run: Run) -> None:
    result = run("jobs", "list")
    assert (result.code, "does not do that yet" in result.err) == (1, True)


def test_a_server_that_is_not_there_is_named(run: Run) -> None:
    result = run("jobs", "list", "--server", "127.0.0.1:1")
    assert result.code == 6
    assert "no server answers at 127.0.0.1:1" in result.err
    assert "fencepost dev" in result.err
