"""A request per served method that would do something: what hostile variants are made of."""

import uuid
from typing import Any

from fencepost.v1 import (
    admin_pb2,
    admin_service_pb2,
    job_pb2,
    job_service_pb2,
    operation_pb2,
    payload_pb2,
    run_service_pb2,
    schedule_pb2,
    worker_pb2,
)
from google.protobuf.duration_pb2 import Duration

from tests.integration.running_server import QUEUE

TENANT = "tenants/default"
JOB = f"{TENANT}/jobs/mail"
RUN = f"{JOB}/runs/2026-01-01T00:00:00Z"


def job() -> job_pb2.Job:
    """A definition with something in every part."""
    definition = job_pb2.Job(
        display_name="Mail",
        labels={"team": "web"},
        target=job_pb2.Target(queue=QUEUE, kind="mail.send", priority=3),
        schedule=schedule_pb2.Schedule(
            cron=schedule_pb2.CronSpec(expressions=["0 9 * * *"], time_zone="Europe/Berlin"),
        ),
    )
    definition.payload.json = "{}"
    definition.retry_policy.max_failures = 3
    definition.limits.lease_ttl.seconds = 30
    return definition


def calendar(name: str = "") -> schedule_pb2.Calendar:
    """Days off with something in every part."""
    return schedule_pb2.Calendar(
        name=name,
        description="Holidays",
        dates=["2027-12-25"],
        ranges=[schedule_pb2.DateRange(first_date="2027-08-01", last_date="2027-08-15")],
        time_zone="Europe/Berlin",
    )


def requests() -> dict[str, Any]:
    """A request per method that would do something, for methods that do anything."""
    jobs, runs, admin = job_service_pb2, run_service_pb2, admin_service_pb2
    create = jobs.CreateJobRequest(parent=TENANT, job_name="new", job=job(), validate_only=True)
    enqueue = runs.EnqueueRunRequest(job=JOB, labels={"team": "web"})
    enqueue.unique_key.key = "order-7"
    enqueue.unique_key.keep_for.seconds = 60
    subscription = worker_pb2.QueueSubscription(queue=QUEUE, kinds=["none.such"])
    run = worker_pb2.HeldRun(attempt=1)
    run.run.job_id = str(uuid.uuid4())
    run.run.scheduled_at.seconds = 1_800_000_000
    completion = worker_pb2.Completion(run=run.run, attempt=1, success=worker_pb2.Success())
    operation = f"{TENANT}/operations/{uuid.uuid4()}"
    existing = job()
    existing.name = JOB
    return {
        "JobService.CreateJob": create,
        "JobService.BatchCreateJobs": jobs.BatchCreateJobsRequest(parent=TENANT, requests=[create]),
        "JobService.GetJob": jobs.GetJobRequest(name=JOB),
        "JobService.ListJobs": jobs.ListJobsRequest(parent=TENANT),
        "JobService.UpdateJob": jobs.UpdateJobRequest(job=existing, validate_only=True),
        "JobService.DeleteJob": jobs.DeleteJobRequest(name=f"{TENANT}/jobs/none"),
        "JobService.PauseJob": jobs.PauseJobRequest(name=f"{TENANT}/jobs/none"),
        "JobService.ResumeJob": jobs.ResumeJobRequest(name=f"{TENANT}/jobs/none"),
        "JobService.BackfillJob": jobs.BackfillJobRequest(name=f"{TENANT}/jobs/none"),
        "JobService.ListFires": jobs.ListFiresRequest(parent=JOB),
        "JobService.PreviewSchedule": jobs.PreviewScheduleRequest(
            parent=TENANT, schedule=job().schedule, count=2
        ),
        "RunService.EnqueueRun": enqueue,
        "RunService.BatchEnqueueRuns": runs.BatchEnqueueRunsRequest(
            parent=TENANT, requests=[enqueue]
        ),
        "RunService.GetRun": runs.GetRunRequest(name=RUN),
        "RunService.ListRuns": runs.ListRunsRequest(parent=TENANT),
        "RunService.ListAttempts": runs.ListAttemptsRequest(parent=RUN),
        "RunService.WaitRun": runs.WaitRunRequest(name=RUN),
        "RunService.CancelRun": runs.CancelRunRequest(name=RUN),
        "RunService.ReplayRun": runs.ReplayRunRequest(
            name=RUN, payload=payload_pb2.Payload(json="{}")
        ),
        "RunService.DiscardRun": runs.DiscardRunRequest(name=RUN),
        "RunService.BatchUpdateRuns": runs.BatchUpdateRunsRequest(
            parent=TENANT,
            filter="kind:none.such",
            action=operation_pb2.OPERATION_ACTION_REPLAY,
            dry_run=True,
        ),
        "RunService.ListDeadLetterGroups": runs.ListDeadLetterGroupsRequest(parent=TENANT),
        "RunService.WatchRuns": runs.WatchRunsRequest(parent=TENANT, filter="state:DEAD"),
        "RunService.ExplainRun": runs.ExplainRunRequest(name=RUN),
        "RunService.ClaimRuns": runs.ClaimRunsRequest(
            subscriptions=[subscription], wait=Duration(nanos=1000)
        ),
        "RunService.GetOperation": runs.GetOperationRequest(name=operation),
        "RunService.ListOperations": runs.ListOperationsRequest(parent=TENANT),
        "RunService.StopOperation": runs.StopOperationRequest(name=operation),
        "RunService.LeaseRun": runs.LeaseRunRequest(run=run.run),
        "RunService.HeartbeatRuns": runs.HeartbeatRunsRequest(
            worker_id=str(uuid.uuid4()), runs=[run]
        ),
        "RunService.CompleteRun": runs.CompleteRunRequest(completion=completion),
        "RunService.BatchCompleteRuns": runs.BatchCompleteRunsRequest(completions=[completion]),
        "RunService.ReleaseRuns": runs.ReleaseRunsRequest(
            releases=[worker_pb2.Release(run=run.run, attempt=1)]
        ),
        "AdminService.CreateCalendar": admin.CreateCalendarRequest(
            parent=TENANT, calendar_name="holidays", calendar=calendar()
        ),
        "AdminService.GetCalendar": admin.GetCalendarRequest(name=f"{TENANT}/calendars/none"),
        "AdminService.ListCalendars": admin.ListCalendarsRequest(parent=TENANT),
        "AdminService.UpdateCalendar": admin.UpdateCalendarRequest(
            calendar=calendar(name=f"{TENANT}/calendars/none")
        ),
        "AdminService.DeleteCalendar": admin.DeleteCalendarRequest(name=f"{TENANT}/calendars/none"),
        "AdminService.GetServerInfo": admin.GetServerInfoRequest(),
        "AdminService.GetForecast": admin.GetForecastRequest(),
        "AdminService.CreateTenant": admin.CreateTenantRequest(tenant_name="acme"),
        "AdminService.GetTenant": admin.GetTenantRequest(name=TENANT),
        "AdminService.UpdateTenant": admin.UpdateTenantRequest(
            tenant=admin_pb2.Tenant(name="tenants/none", display_name="None")
        ),
        "AdminService.UpdateQueue": admin.UpdateQueueRequest(
            queue=admin_pb2.Queue(name=f"{TENANT}/queues/none", paused=True)
        ),
        "AdminService.ListTenants": admin.ListTenantsRequest(),
        "AdminService.CreateQueue": admin.CreateQueueRequest(parent=TENANT, queue_name="fast"),
        "AdminService.GetQueue": admin.GetQueueRequest(name=QUEUE),
        "AdminService.ListQueues": admin.ListQueuesRequest(parent=TENANT),
        "AdminService.GetWorker": admin.GetWorkerRequest(name=f"workers/{uuid.uuid4()}"),
        "AdminService.ListWorkers": admin.ListWorkersRequest(),
    }
