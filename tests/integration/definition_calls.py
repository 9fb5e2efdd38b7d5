"""Requests and look-ups that the tests of definitions share."""

from fencepost.v1 import job_pb2
from fencepost.v1 import job_service_pb2 as pb
from fencepost_server.clock import SECOND
from google.protobuf.field_mask_pb2 import FieldMask

from tests.integration.definition_server import DefinitionServer

PARENT = "tenants/default"
NAME = f"{PARENT}/jobs/a"


def a_job(cron: str = "", **fields: str) -> job_pb2.Job:
    job = job_pb2.Job(target=job_pb2.Target(kind="report.make"), labels=fields)
    if cron:
        job.schedule.cron.expressions.append(cron)
    return job


def yearly_job(cron: str = "0 3 1 1 *") -> job_pb2.Job:
    job = job_pb2.Job(name=NAME, target=job_pb2.Target(kind="report.make"))
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


async def create(server: DefinitionServer, job: job_pb2.Job | None = None) -> job_pb2.Job:
    request = pb.CreateJobRequest(
        parent=PARENT, job_name="a", job=yearly_job() if job is None else job
    )
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
