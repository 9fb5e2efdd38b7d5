"""The producer's side: define jobs, enqueue runs, wait for them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType

import grpc
import grpc.aio

from fencepost.calls import Response, call
from fencepost.connection import Connection
from fencepost.durations import Seconds, to_duration, to_seconds
from fencepost.errors import DeadlineExceeded, FencepostError, error_of_problem
from fencepost.new_run import NewRun, OnConflict, UniqueKey
from fencepost.payload import encode_payload
from fencepost.retry import CallRetry
from fencepost.v1 import (
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    run_pb2,
    run_service_pb2,
    run_service_pb2_grpc,
    schedule_pb2,
)

MAX_BATCH = 1000
MAX_BATCH_BYTES = 3 * 1024 * 1024
_DEADLINE = 10.0
_BATCH_DEADLINE = 30.0
_POLL = 20.0


class Client:
    """Speaks to the server at `address` for one tenant; asyncio, one event loop.

    Opens its channel at the first call. `token` is sent as a bearer token;
    `channel_credentials` turn TLS on. Every call raises a FencepostError when it fails.
    """

    def __init__(
        self,
        address: str = "localhost:7600",
        tenant: str = "default",
        *,
        channel_credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        retry: CallRetry | None = None,
    ) -> None:
        self.connection = Connection(
            address=address,
            tenant=tenant,
            channel_credentials=channel_credentials,
            token=token,
        )
        self._retry = retry or CallRetry()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; the client may be used again afterwards."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def create_job(
        self,
        name: str,
        *,
        kind: str,
        queue: str = "default",
        schedule: schedule_pb2.Schedule | None = None,
        payload: object = None,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
        retry_policy: job_pb2.RetryPolicy | None = None,
        limits: job_pb2.RunLimits | None = None,
        paused: bool = False,
        display_name: str = "",
        description: str = "",
    ) -> job_pb2.Job:
        """Creates a job; without a schedule it runs only when enqueued.

        `name` is the last part of its resource name, empty: the server picks one. `schedule`
        comes from `cron`, `every` or `once`. AlreadyExists if the name is taken.
        """
        job = job_pb2.Job(
            display_name=display_name,
            description=description,
            labels=dict(labels or {}),
            target=job_pb2.Target(
                queue=self.connection.queue_name(queue), kind=kind, priority=priority
            ),
            schedule=schedule,
            payload=encode_payload(payload),
            retry_policy=retry_policy,
            limits=limits,
            paused=paused,
        )
        request = job_service_pb2.CreateJobRequest(
            parent=self.connection.parent, job_name=name, job=job, request_id=_request_id()
        )
        return (await self._call(self._jobs().CreateJob, request)).job

    async def get_job(self, job: str) -> job_pb2.Job:
        """The newest version of a job, given by name or resource name."""
        request = job_service_pb2.GetJobRequest(name=self.connection.job_name(job))
        return (await self._call(self._jobs().GetJob, request)).job

    async def list_jobs(self, filter: str = "", page_size: int = 0) -> AsyncIterator[job_pb2.Job]:
        """All jobs that match, newest first, page by page; without payloads."""
        token = ""
        while True:
            request = job_service_pb2.ListJobsRequest(
                parent=self.connection.parent,
                page_size=page_size,
                page_token=token,
                filter=filter,
            )
            page = await self._call(self._jobs().ListJobs, request)
            for job in page.jobs:
                yield job
            token = page.next_page_token
            if not token:
                return

    async def pause_job(self, job: str, reason: str = "") -> job_pb2.Job:
        """Stops its fires; runs already made go on."""
        request = job_service_pb2.PauseJobRequest(name=self.connection.job_name(job), reason=reason)
        return (await self._call(self._jobs().PauseJob, request)).job

    async def resume_job(self, job: str) -> job_pb2.Job:
        """Lets it fire again."""
        request = job_service_pb2.ResumeJobRequest(name=self.connection.job_name(job))
        return (await self._call(self._jobs().ResumeJob, request)).job

    async def delete_job(
        self, job: str, *, cancel_runs: bool = False, allow_missing: bool = False
    ) -> None:
        """Removes it. Its live runs go on unless `cancel_runs`."""
        request = job_service_pb2.DeleteJobRequest(
            name=self.connection.job_name(job),
            cancel_runs=cancel_runs,
            allow_missing=allow_missing,
        )

        def forgive() -> None:
            request.allow_missing = True  # the answer to the first try may have been lost

        await self._call(self._jobs().DeleteJob, request, before_repeat=forgive)

    async def enqueue(
        self,
        job: str,
        payload: object = None,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int | None = None,
        labels: Mapping[str, str] | None = None,
        unique: str | UniqueKey | None = None,
        concurrency_key: str | None = None,
        on_conflict: OnConflict | None = None,
        keep_for: Seconds | None = None,
    ) -> run_pb2.Run:
        """Makes one run of a job, now, at `run_at` (with a time zone) or after `delay`.

        What is None is as the job says. `unique` is a business key of the job: while a run
        holds it, and `keep_for` (24 h; at most 30 d, 0 frees it at once) after that run's end,
        `on_conflict` decides: "return_existing" returns that run and makes nothing, "reject"
        raises AlreadyExists, "replace_waiting" cancels it if it was never claimed.
        """
        new = NewRun(
            job=job,
            payload=payload,
            run_at=run_at,
            delay=delay,
            priority=priority,
            labels=labels,
            unique=unique,
            concurrency_key=concurrency_key,
            on_conflict=on_conflict,
            keep_for=keep_for,
        )
        request = new.to_request(self.connection)
        return (await self._call(self._runs().EnqueueRun, request)).run

    async def enqueue_many(self, new_runs: Iterable[NewRun]) -> list[run_pb2.Run | FencepostError]:
        """Makes many runs, 1,000 to a call; entries succeed or fail alone.

        One outcome for each entry, in order. Raises only when a whole call fails.
        """
        outcomes: list[run_pb2.Run | FencepostError] = []
        batch = run_service_pb2.BatchEnqueueRunsRequest(parent=self.connection.parent)
        count = size = 0
        # One random part for all, so that their ids lie next to each other where they are kept.
        prefix = uuid.uuid4().hex[:24]
        for number, new in enumerate(new_runs):
            request = batch.requests.add()
            new.write_request(request, self.connection, request_id=f"{prefix}-{number}")
            length = request.ByteSize()
            if count >= MAX_BATCH or (count and size + length > MAX_BATCH_BYTES):
                following = run_service_pb2.BatchEnqueueRunsRequest(
                    parent=self.connection.parent, requests=[request]
                )
                del batch.requests[count]
                outcomes += await self._enqueue_batch(batch)
                batch, count, size = following, 0, 0
            count += 1
            size += length
        if count:
            outcomes += await self._enqueue_batch(batch)
        return outcomes

    async def get_run(self, run: str | run_pb2.Run) -> run_pb2.Run:
        """A run as it is now, given by resource name or as returned before."""
        request = run_service_pb2.GetRunRequest(name=_run_name(run))
        return (await self._call(self._runs().GetRun, request)).run

    async def wait(self, run: str | run_pb2.Run, timeout: Seconds | None = None) -> run_pb2.Run:
        """The run once it has ended, however it did. DeadlineExceeded after `timeout`."""
        name = _run_name(run)
        bound = float("inf") if timeout is None else to_seconds(timeout)
        clock = asyncio.get_running_loop().time
        started = clock()
        while True:
            left = bound - (clock() - started)
            poll = max(0.001, min(_POLL, left))  # 0 would mean the server's default
            request = run_service_pb2.WaitRunRequest(name=name, wait=to_duration(poll))
            answer = await self._call(self._runs().WaitRun, request, timeout=poll + _DEADLINE)
            if answer.ended:
                return answer.run
            if clock() - started >= bound:
                raise DeadlineExceeded(f"{name} had not ended after {bound:g} s")

    async def _enqueue_batch(
        self, batch: run_service_pb2.BatchEnqueueRunsRequest
    ) -> list[run_pb2.Run | FencepostError]:
        method = self._runs().BatchEnqueueRuns
        answer = await self._call(method, batch, timeout=_BATCH_DEADLINE)
        return [
            error_of_problem(outcome.problem)
            if outcome.HasField("problem")
            else outcome.response.run
            for outcome in answer.outcomes
        ]

    async def _call(
        self,
        method: Callable[..., Awaitable[Response]],
        request: object,
        timeout: float = _DEADLINE,
        before_repeat: Callable[[], None] | None = None,
    ) -> Response:
        return await call(
            method,
            request,
            connection=self.connection,
            retry=self._retry,
            timeout=timeout,
            before_repeat=before_repeat,
        )

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = self.connection.open_client_channel()
        return self._channel

    def _jobs(self) -> job_service_pb2_grpc.JobServiceAsyncStub:
        return job_service_pb2_grpc.JobServiceStub(self._open())

    def _runs(self) -> run_service_pb2_grpc.RunServiceAsyncStub:
        return run_service_pb2_grpc.RunServiceStub(self._open())


def _run_name(run: str | run_pb2.Run) -> str:
    return run if isinstance(run, str) else run.name


def _request_id() -> str:
    return str(uuid.uuid4())
