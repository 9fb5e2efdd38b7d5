"""JobService: requests checked and turned into calls of the engine, answers written back."""

from typing import Any, TypeAlias, cast

import grpc.aio
from fencepost.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc, schedule_pb2

from fencepost_server.api import validate
from fencepost_server.api.fire_calls import FireCalls
from fencepost_server.api.job_filter import read_filter
from fencepost_server.api.limits import MESSAGE_BYTES_MAX
from fencepost_server.api.masks import merged
from fencepost_server.api.page_tokens import PageTokens, query_hash
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.status import to_problem
from fencepost_server.api.trace_context import read_trace_context
from fencepost_server.api.wire_job import (
    DEFINITION_FIELDS,
    REASON_BYTES_MAX,
    read_job,
    write_definition,
    write_job,
)
from fencepost_server.api.wire_schedule import read_schedule
from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.clock import Instant
from fencepost_server.domain.names import (
    JobName,
    check_job_name,
    format_run,
    parse_job,
    parse_tenant,
)
from fencepost_server.engine.definition import Definition
from fencepost_server.engine.job_creation import CreatedJob, JobEntry, Origin, Outcome
from fencepost_server.engine.job_update import JobUpdate
from fencepost_server.engine.jobs import Jobs
from fencepost_server.engine.preview import PreviewRange
from fencepost_server.errors import FencepostError, InvalidField
from fencepost_server.store.jobs import JobRecord

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# Of the 4 MiB that any client receives.
ANSWER_BYTES_MAX = MESSAGE_BYTES_MAX * 3 // 4
PREVIEW_COUNT_DEFAULT = 10
PREVIEW_COUNT_MAX = 100
VERSION_MAX = 2**31 - 1
ETAG_CHARS_MAX = 64
_PAUSING = "no pausing: PauseJob and ResumeJob change it"
_ELSEWHERE = {"paused": _PAUSING, "pause_reason": _PAUSING}


class JobServicer(job_service_pb2_grpc.JobServiceServicer):
    """Serves JobService."""

    def __init__(self, *, jobs: Jobs, fires: FireCalls, page_tokens: PageTokens) -> None:
        self._jobs = jobs
        self._fires = fires
        self._page_tokens = page_tokens

    async def CreateJob(
        self, request: job_service_pb2.CreateJobRequest, context: Context
    ) -> job_service_pb2.CreateJobResponse:
        """Makes one job."""
        tenant = parse_tenant(request.parent, field="parent")
        now = self._jobs.now()
        entry = _read_entry(request, tenant=tenant, now=now)
        (outcome,) = await self._jobs.create(
            Origin(tenant=tenant, now=now, trace_context=read_trace_context(context)),
            [entry],
            encode=lambda created: _created(created, tenant).SerializeToString(),
            validate_only=request.validate_only,
        )
        if isinstance(outcome, FencepostError):
            raise outcome
        return _write_outcome(outcome, tenant)

    async def BatchCreateJobs(
        self, request: job_service_pb2.BatchCreateJobsRequest, context: Context
    ) -> job_service_pb2.BatchCreateJobsResponse:
        """Makes up to 1,000 jobs, each of which succeeds or fails alone."""
        tenant = parse_tenant(request.parent, field="parent")
        count = len(request.requests)
        if not 1 <= count <= validate.BATCH_ENTRIES_MAX:
            allowed = f"1 to {validate.BATCH_ENTRIES_MAX} entries"
            raise validate.refused("requests", f"{count} entries", allowed)
        now = self._jobs.now()
        origin = Origin(tenant=tenant, now=now, trace_context=read_trace_context(context))
        outcomes: dict[int, Outcome] = {}
        entries: dict[int, JobEntry] = {}
        checks: dict[int, JobEntry] = {}
        for index, each in enumerate(request.requests):
            try:
                entry = _read_batch_entry(each, parent=request.parent, tenant=tenant, now=now)
            except FencepostError as error:
                outcomes[index] = error
            else:
                (checks if each.validate_only else entries)[index] = entry
        for chosen, validate_only in ((entries, False), (checks, True)):
            if chosen:
                made = await self._jobs.create(
                    origin,
                    list(chosen.values()),
                    encode=lambda created: _created(created, tenant).SerializeToString(),
                    validate_only=validate_only,
                )
                outcomes.update(zip(chosen, made, strict=True))
        answer = job_service_pb2.BatchCreateJobsResponse(
            outcomes=[_write_batch_outcome(outcomes[index], tenant) for index in range(count)]
        )
        if answer.ByteSize() > ANSWER_BYTES_MAX:
            # The caller knows the payloads, and could not receive an answer that large.
            for outcome in answer.outcomes:
                if outcome.HasField("response"):
                    outcome.response.job.ClearField("payload")
        return answer

    async def GetJob(
        self, request: job_service_pb2.GetJobRequest, context: Context
    ) -> job_service_pb2.GetJobResponse:
        """Reads one job, or an older version of it."""
        name = parse_job(request.name, field="name")
        version = validate.optional_integer(
            request.version, field="version", minimum=1, maximum=VERSION_MAX
        )
        record = await self._jobs.get(name, version=version)
        return job_service_pb2.GetJobResponse(job=write_job(record, tenant=name.tenant))

    async def ListJobs(
        self, request: job_service_pb2.ListJobsRequest, context: Context
    ) -> job_service_pb2.ListJobsResponse:
        """Reads a page of jobs, newest first."""
        tenant = parse_tenant(request.parent, field="parent")
        page_size = validate.page_size(request.page_size)
        query = read_filter(request.filter)
        hashed = query_hash(request)
        before = None
        if request.page_token:
            before = str(self._page_tokens.read(request.page_token, query=hashed)[0])
        records, following = await self._jobs.list(
            tenant, query, before=before, page_size=page_size
        )
        jobs = _fitting([write_job(record, tenant=tenant) for record in records])
        if len(jobs) < len(records):
            following = records[len(jobs) - 1].job_id
        return job_service_pb2.ListJobsResponse(
            jobs=jobs,
            next_page_token=(
                "" if following is None else self._page_tokens.make([following], query=hashed)
            ),
        )

    async def UpdateJob(
        self, request: job_service_pb2.UpdateJobRequest, context: Context
    ) -> job_service_pb2.UpdateJobResponse:
        """Changes the masked fields of a job, or makes it."""
        name = parse_job(request.job.name, field="job.name")
        now = self._jobs.now()

        def change(stored: JobRecord) -> Definition:
            return _changed(request, stored, tenant=name.tenant, now=now)

        def create() -> Definition:
            return read_job(request.job, tenant=name.tenant, now=now)

        if request.allow_missing:
            check_job_name(name.job, field="job.name")
        updated = await self._jobs.update(
            Origin(tenant=name.tenant, now=now, trace_context=read_trace_context(context)),
            JobUpdate(
                name=name,
                change=change,
                etag=validate.ascii_text(
                    request.job.etag, field="job.etag", chars_max=ETAG_CHARS_MAX
                ),
                create=create if request.allow_missing else None,
                request=read_request(request),
                validate_only=request.validate_only,
            ),
            encode=lambda job, created: _updated(job, created, name).SerializeToString(),
        )
        if isinstance(updated, bytes):
            return job_service_pb2.UpdateJobResponse.FromString(updated)
        return _updated(*updated, name)

    async def DeleteJob(
        self, request: job_service_pb2.DeleteJobRequest, context: Context
    ) -> job_service_pb2.DeleteJobResponse:
        """Removes a job and frees its name."""
        await self._jobs.delete(
            parse_job(request.name, field="name"),
            etag=validate.ascii_text(request.etag, field="etag", chars_max=ETAG_CHARS_MAX),
            allow_missing=request.allow_missing,
            cancel_runs=request.cancel_runs,
            now=self._jobs.now(),
        )
        return job_service_pb2.DeleteJobResponse()

    async def PauseJob(
        self, request: job_service_pb2.PauseJobRequest, context: Context
    ) -> job_service_pb2.PauseJobResponse:
        """Stops fires."""
        name = parse_job(request.name, field="name")
        reason = validate.text(request.reason, field="reason", bytes_max=REASON_BYTES_MAX)
        record = await self._jobs.pause(name, reason=reason, now=self._jobs.now())
        return job_service_pb2.PauseJobResponse(job=write_job(record, tenant=name.tenant))

    async def ResumeJob(
        self, request: job_service_pb2.ResumeJobRequest, context: Context
    ) -> job_service_pb2.ResumeJobResponse:
        """Lets fires be made again."""
        name = parse_job(request.name, field="name")
        record = await self._jobs.resume(name, now=self._jobs.now())
        return job_service_pb2.ResumeJobResponse(job=write_job(record, tenant=name.tenant))

    async def PreviewSchedule(
        self, request: job_service_pb2.PreviewScheduleRequest, context: Context
    ) -> job_service_pb2.PreviewScheduleResponse:
        """Computes fires, of a stored schedule or of one that is only sent."""
        tenant = parse_tenant(request.parent, field="parent")
        now = self._jobs.now()
        after = now
        if request.HasField("after"):
            after = validate.instant(request.after, field="after", round_up=True)
        schedule = None
        if request.HasField("schedule"):
            schedule = read_schedule(request.schedule, now=now, field="schedule")
        elif not request.job_name:
            raise validate.missing("schedule", "a schedule, or job_name of a job that has one")
        if request.job_name:
            check_job_name(request.job_name, field="job_name")
        count = validate.optional_integer(
            request.count, field="count", minimum=1, maximum=PREVIEW_COUNT_MAX
        )
        shown = await self._jobs.preview(
            tenant,
            job_name=request.job_name,
            schedule=schedule,
            wanted=PreviewRange(after=after, count=count or PREVIEW_COUNT_DEFAULT, now=now),
        )
        return job_service_pb2.PreviewScheduleResponse(
            fires=[
                schedule_pb2.PlannedFire(
                    scheduled_at=to_timestamp(fire.at),
                    local_time=fire.local_time,
                    skip_reason=cast(
                        "schedule_pb2.SkipReason.ValueType", int(fire.skip_reason or 0)
                    ),
                    note=fire.note,
                )
                for fire in shown.fires
            ],
            description=shown.description,
            warnings=shown.warnings,
            tzdata_version=shown.tzdata_version,
        )

    async def BackfillJob(
        self, request: job_service_pb2.BackfillJobRequest, context: Context
    ) -> job_service_pb2.BackfillJobResponse:
        """Makes the runs of a past range that have none."""
        return await self._fires.backfill(request)

    async def ListFires(
        self, request: job_service_pb2.ListFiresRequest, context: Context
    ) -> job_service_pb2.ListFiresResponse:
        """Reads a page of the ledger, newest first."""
        return await self._fires.list_fires(request)


def _fitting(jobs: list[job_pb2.Job]) -> list[job_pb2.Job]:
    """As many of the first jobs as one message holds, at least one."""
    size = 0
    for index, job in enumerate(jobs):
        size += job.ByteSize()
        if size > ANSWER_BYTES_MAX and index > 0:
            return jobs[:index]
    return jobs


def _read_entry(
    request: job_service_pb2.CreateJobRequest, *, tenant: str, now: Instant, parent: str = ""
) -> JobEntry:
    if request.job_name:
        check_job_name(request.job_name, field="job_name")
    if not request.HasField("job"):
        raise validate.missing("job", "a job with at least target.kind")
    return JobEntry(
        job_name=request.job_name,
        definition=read_job(request.job, tenant=tenant, now=now),
        request=read_request(request, parent=parent),
    )


def _read_batch_entry(
    request: job_service_pb2.CreateJobRequest, *, parent: str, tenant: str, now: Instant
) -> JobEntry:
    if request.parent not in ("", parent):
        raise InvalidField(
            f"parent: got {request.parent!r}, want it empty or {parent!r} as in the batch",
            field="parent",
            value=request.parent,
            allowed=parent,
        )
    return _read_entry(request, tenant=tenant, now=now, parent=parent)


def _changed(
    request: job_service_pb2.UpdateJobRequest, stored: JobRecord, *, tenant: str, now: Instant
) -> Definition:
    """The definition that the masked fields of the request make of the stored one."""
    wanted = merged(
        write_definition(stored.spec, stored.payload, tenant=tenant),
        request.job,
        request.update_mask,
        changeable=DEFINITION_FIELDS,
        elsewhere=_ELSEWHERE,
    )
    return read_job(wanted, tenant=tenant, now=now)


def _created(created: CreatedJob, tenant: str) -> job_service_pb2.CreateJobResponse:
    run_name = ""
    if created.run is not None:
        run_name = format_run(tenant, created.job.name, created.run.scheduled_at)
    return job_service_pb2.CreateJobResponse(
        job=write_job(created.job, tenant=tenant), run_name=run_name
    )


def _write_outcome(outcome: CreatedJob | bytes, tenant: str) -> job_service_pb2.CreateJobResponse:
    if isinstance(outcome, bytes):
        return job_service_pb2.CreateJobResponse.FromString(outcome)
    return _created(outcome, tenant)


def _write_batch_outcome(outcome: Outcome, tenant: str) -> job_service_pb2.BatchCreateJobsOutcome:
    if isinstance(outcome, FencepostError):
        return job_service_pb2.BatchCreateJobsOutcome(problem=to_problem(outcome))
    return job_service_pb2.BatchCreateJobsOutcome(response=_write_outcome(outcome, tenant))


def _updated(job: JobRecord, created: bool, name: JobName) -> job_service_pb2.UpdateJobResponse:
    return job_service_pb2.UpdateJobResponse(
        job=write_job(job, tenant=name.tenant), created=created
    )
