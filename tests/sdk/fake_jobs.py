"""A JobService that keeps jobs in a dictionary and refuses when scripted to."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from fencepost.status import StatusDetails
from fencepost.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc

from tests.sdk.fake_session import Refusal

Context = grpc.aio.ServicerContext[Any, Any]
PAGE = 2


class FakeJobs(job_service_pb2_grpc.JobServiceServicer):
    """Jobs by resource name, pages of two."""

    def __init__(self) -> None:
        self.jobs: dict[str, job_pb2.Job] = {}
        self.requests: list[Any] = []
        self.lose_answers = 0
        """This many changes are carried out and answered with UNAVAILABLE."""

    async def CreateJob(
        self, request: job_service_pb2.CreateJobRequest, context: Context
    ) -> job_service_pb2.CreateJobResponse:
        """Repeats with one request id get the first answer."""
        name = f"{request.parent}/jobs/{request.job_name}"
        repeated = request.request_id in {getattr(r, "request_id", "") for r in self.requests}
        if name in self.jobs and not repeated:
            details = StatusDetails(reason="JOB_ALREADY_EXISTS", metadata={"job": name})
            await Refusal(code=grpc.StatusCode.ALREADY_EXISTS, details=details).abort(context)
        job = self.jobs[name] = request.job
        job.name = name
        await self._record(request, context)
        return job_service_pb2.CreateJobResponse(job=job)

    async def GetJob(
        self, request: job_service_pb2.GetJobRequest, context: Context
    ) -> job_service_pb2.GetJobResponse:
        """NOT_FOUND with a reason when there is none."""
        return job_service_pb2.GetJobResponse(job=await self._find(request.name, context))

    async def ListJobs(
        self, request: job_service_pb2.ListJobsRequest, context: Context
    ) -> job_service_pb2.ListJobsResponse:
        """The page token is the number of jobs told before."""
        self.requests.append(request)
        at = int(request.page_token or 0)
        page = list(self.jobs.values())[at : at + PAGE]
        more = at + PAGE < len(self.jobs)
        return job_service_pb2.ListJobsResponse(
            jobs=page, next_page_token=str(at + PAGE) if more else ""
        )

    async def PauseJob(
        self, request: job_service_pb2.PauseJobRequest, context: Context
    ) -> job_service_pb2.PauseJobResponse:
        """By nature repeatable."""
        job = await self._find(request.name, context)
        job.paused, job.pause_reason = True, request.reason
        return job_service_pb2.PauseJobResponse(job=job)

    async def ResumeJob(
        self, request: job_service_pb2.ResumeJobRequest, context: Context
    ) -> job_service_pb2.ResumeJobResponse:
        """By nature repeatable."""
        job = await self._find(request.name, context)
        job.paused = False
        return job_service_pb2.ResumeJobResponse(job=job)

    async def DeleteJob(
        self, request: job_service_pb2.DeleteJobRequest, context: Context
    ) -> job_service_pb2.DeleteJobResponse:
        """NOT_FOUND unless allow_missing."""
        if not request.allow_missing:
            await self._find(request.name, context)
        self.jobs.pop(request.name, None)
        await self._record(request, context)
        return job_service_pb2.DeleteJobResponse()

    async def _find(self, name: str, context: Context) -> job_pb2.Job:
        if name not in self.jobs:
            details = StatusDetails(reason="JOB_NOT_FOUND", metadata={"job": name})
            await Refusal(code=grpc.StatusCode.NOT_FOUND, details=details).abort(context)
        return self.jobs[name]

    async def _record(self, request: Any, context: Context) -> None:
        copy = type(request)()
        copy.CopyFrom(request)
        self.requests.append(copy)
        if self.lose_answers:
            self.lose_answers -= 1
            await Refusal(code=grpc.StatusCode.UNAVAILABLE).abort(context)
