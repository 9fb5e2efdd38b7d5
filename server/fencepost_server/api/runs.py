"""RunService: requests checked and turned into calls of the engine, answers written back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

import grpc.aio
from fencepost.v1 import run_service_pb2, run_service_pb2_grpc

from fencepost_server.api import validate
from fencepost_server.api.dead_letter_calls import DeadLetterCalls
from fencepost_server.api.explain_calls import ExplainCalls
from fencepost_server.api.operation_calls import OperationCalls
from fencepost_server.api.page_tokens import PageTokens, query_hash
from fencepost_server.api.run_filter import read_filter
from fencepost_server.api.status import to_problem
from fencepost_server.api.trace_context import read_trace_context
from fencepost_server.api.unary_calls import UnaryCalls, check_count, read_wait
from fencepost_server.api.watch_calls import WatchCalls
from fencepost_server.api.wire_job import CANCEL_GRACE_MAX, REASON_BYTES_MAX
from fencepost_server.api.wire_operation import read_parent
from fencepost_server.api.wire_run import (
    read_enqueue,
    read_remembered,
    write_attempt,
    write_enqueued,
    write_run,
)
from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.clock import SECOND, Duration
from fencepost_server.domain.names import parse_run, parse_tenant
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.enqueue import EnqueueEntry, Enqueues, Outcome
from fencepost_server.engine.job_creation import Origin
from fencepost_server.engine.run_reads import RunReads
from fencepost_server.engine.single_enqueue import SingleEnqueues
from fencepost_server.errors import FencepostError

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

FULL_PAGE_MAX = 50
# What is left of a WaitRun's own deadline when its answer is written.
_WAIT_LEFT_MIN: Duration = SECOND
_VIEWS = run_service_pb2.RunView.keys()


class Sessions(Protocol):
    """Serves `Work`."""

    async def serve(
        self, requests: AsyncIterator[run_service_pb2.WorkRequest], context: Context
    ) -> None:
        """One session, from Hello to its end."""
        ...


class RunServicer(run_service_pb2_grpc.RunServiceServicer):
    """Serves RunService."""

    def __init__(
        self,
        *,
        enqueues: Enqueues,
        singles: SingleEnqueues,
        reads: RunReads,
        unary: UnaryCalls,
        sessions: Sessions,
        operations: OperationCalls,
        dead_letters: DeadLetterCalls,
        watching: WatchCalls,
        explaining: ExplainCalls,
        page_tokens: PageTokens,
    ) -> None:
        self._enqueues = enqueues
        self._singles = singles
        self._reads = reads
        self._unary = unary
        self._sessions = sessions
        self._operations = operations
        self._watching = watching
        self._explaining = explaining
        self._dead_letters = dead_letters
        self._page_tokens = page_tokens
        self._leaving = asyncio.Event()

    def drain(self) -> None:
        """End all long polls; sessions are drained by themselves."""
        self._leaving.set()
        self._reads.wake_waiting()
        self._watching.drain()
        self._unary.drain()

    async def finish(self) -> None:
        """Until runs that are handed out with their enqueues are with their workers."""
        await self._singles.finish()

    # Making runs ----------------------------------------------------------------------------

    async def EnqueueRun(
        self, request: run_service_pb2.EnqueueRunRequest, context: Context
    ) -> run_service_pb2.EnqueueRunResponse:
        """Makes one ad-hoc run."""
        now = self._enqueues.now()
        entry = read_enqueue(request, now=now)
        origin = Origin(tenant=entry.job.tenant, now=now, trace_context=read_trace_context(context))
        answer = await self._singles.enqueue(origin, entry)
        return run_service_pb2.EnqueueRunResponse.FromString(answer)

    async def BatchEnqueueRuns(
        self, request: run_service_pb2.BatchEnqueueRunsRequest, context: Context
    ) -> run_service_pb2.BatchEnqueueRunsResponse:
        """Makes up to 1,000 ad-hoc runs, each of which succeeds or fails alone."""
        tenant = parse_tenant(request.parent, field="parent")
        check_count(len(request.requests), field="requests")
        now = self._enqueues.now()
        outcomes: dict[int, Outcome] = {}
        entries: dict[int, EnqueueEntry] = {}
        for index, each in enumerate(request.requests):
            try:
                entries[index] = read_enqueue(each, now=now, tenant=tenant)
            except FencepostError as error:
                outcomes[index] = error
        origin = Origin(tenant=tenant, now=now, trace_context=read_trace_context(context))
        made = await self._enqueues.enqueue(
            origin, list(entries.values()), encode=write_enqueued, recall=read_remembered
        )
        outcomes.update(zip(entries, made, strict=True))
        response = run_service_pb2.BatchEnqueueRunsResponse()
        for index in range(len(request.requests)):
            outcome, message = outcomes[index], response.outcomes.add()
            if isinstance(outcome, FencepostError):
                message.problem.CopyFrom(to_problem(outcome))
            else:
                message.response.ParseFromString(outcome)
        return response

    async def CancelRun(
        self, request: run_service_pb2.CancelRunRequest, context: Context
    ) -> run_service_pb2.CancelRunResponse:
        """Asks a run to stop."""
        name = parse_run(request.name, field="name")
        grace = None
        if request.HasField("grace"):
            grace = validate.duration(
                request.grace, field="grace", minimum=0, maximum=CANCEL_GRACE_MAX, round_up=True
            )
        record = await self._reads.cancel(
            name,
            reason=validate.text(request.reason, field="reason", bytes_max=REASON_BYTES_MAX),
            grace=grace,
            now=self._reads.now(),
        )
        return run_service_pb2.CancelRunResponse(run=write_run(record, full=True))

    # Reading --------------------------------------------------------------------------------

    async def GetRun(
        self, request: run_service_pb2.GetRunRequest, context: Context
    ) -> run_service_pb2.GetRunResponse:
        """Reads one run."""
        full = _is_full(request.view, default=True)
        record = await self._reads.get(parse_run(request.name, field="name"), full=full)
        return run_service_pb2.GetRunResponse(run=write_run(record, full=full))

    async def ListRuns(
        self, request: run_service_pb2.ListRunsRequest, context: Context
    ) -> run_service_pb2.ListRunsResponse:
        """Reads a page of runs, newest first."""
        scope = read_parent(request.parent)
        query = read_filter(request.filter, job=scope.job or None)
        full = _is_full(request.view, default=False)
        page_size = validate.page_size(request.page_size)
        hashed = query_hash(request)
        after = since = None
        if request.page_token:
            at, job_id, looked = self._page_tokens.read(request.page_token, query=hashed)
            after = RunKey(str(job_id), int(at))
            since = int(looked) if looked != "" else None
        page = await self._reads.list(
            scope,
            query,
            after=after,
            searched_since=since,
            page_size=min(page_size, FULL_PAGE_MAX) if full else page_size,
            full=full,
        )
        response = run_service_pb2.ListRunsResponse(
            runs=[write_run(record, full=full) for record in page.runs]
        )
        if page.searched_since is not None:
            response.searched_since.CopyFrom(to_timestamp(page.searched_since))
        if page.after is not None:
            looked = "" if page.searched_since is None else page.searched_since
            response.next_page_token = self._page_tokens.make(
                [page.after.scheduled_at, page.after.job_id, looked], query=hashed
            )
        return response

    async def ListAttempts(
        self, request: run_service_pb2.ListAttemptsRequest, context: Context
    ) -> run_service_pb2.ListAttemptsResponse:
        """Reads a page of the attempts of a run, newest first."""
        name = parse_run(request.parent, field="parent")
        page_size = validate.page_size(request.page_size)
        hashed = query_hash(request)
        before = None
        if request.page_token:
            before = int(self._page_tokens.read(request.page_token, query=hashed)[0])
        key, records, following = await self._reads.attempts(
            name, before=before, page_size=page_size
        )
        return run_service_pb2.ListAttemptsResponse(
            attempts=[write_attempt(key, record) for record in records],
            next_page_token=(
                "" if following is None else self._page_tokens.make([following], query=hashed)
            ),
        )

    async def WaitRun(
        self, request: run_service_pb2.WaitRunRequest, context: Context
    ) -> run_service_pb2.WaitRunResponse:
        """Answers when a run has ended, or after `wait`."""
        name = parse_run(request.name, field="name")
        full = _is_full(request.view, default=True)
        wait = read_wait(request, context, deadline_left_min=_WAIT_LEFT_MIN)
        record = await self._reads.wait(name, wait=wait, full=full, leaving=self._leaving)
        return run_service_pb2.WaitRunResponse(
            run=write_run(record, full=full), ended=not record.state.is_live
        )

    async def WatchRuns(
        self, request: run_service_pb2.WatchRunsRequest, context: Context
    ) -> AsyncIterator[run_service_pb2.WatchRunsResponse]:
        """Streams changes of runs."""
        async with aclosing(self._watching.watch(request)) as responses:
            async for response in responses:
                yield response

    async def ExplainRun(
        self, request: run_service_pb2.ExplainRunRequest, context: Context
    ) -> run_service_pb2.ExplainRunResponse:
        """Says what keeps a run from starting."""
        return await self._explaining.explain(request)

    # Work -----------------------------------------------------------------------------------

    async def Work(  # type: ignore[override]  # it writes through the context
        self, request_iterator: Any, context: Context
    ) -> None:
        """A worker session."""
        await self._sessions.serve(request_iterator, context)

    async def ClaimRuns(
        self, request: run_service_pb2.ClaimRunsRequest, context: Context
    ) -> run_service_pb2.ClaimRunsResponse:
        """Long poll for work."""
        return await self._unary.claim(request, context)

    async def LeaseRun(
        self, request: run_service_pb2.LeaseRunRequest, context: Context
    ) -> run_service_pb2.LeaseRunResponse:
        """Takes one named run."""
        return await self._unary.lease(request, context)

    async def HeartbeatRuns(
        self, request: run_service_pb2.HeartbeatRunsRequest, context: Context
    ) -> run_service_pb2.HeartbeatRunsResponse:
        """Renews leases."""
        return await self._unary.heartbeat(request)

    async def CompleteRun(
        self, request: run_service_pb2.CompleteRunRequest, context: Context
    ) -> run_service_pb2.CompleteRunResponse:
        """Ends one attempt."""
        return await self._unary.complete(request)

    async def BatchCompleteRuns(
        self, request: run_service_pb2.BatchCompleteRunsRequest, context: Context
    ) -> run_service_pb2.BatchCompleteRunsResponse:
        """Ends up to 1,000 attempts."""
        return await self._unary.batch_complete(request)

    async def ReleaseRuns(
        self, request: run_service_pb2.ReleaseRunsRequest, context: Context
    ) -> run_service_pb2.ReleaseRunsResponse:
        """Gives up to 1,000 runs back."""
        return await self._unary.release(request)

    # Dead letters and operations ------------------------------------------------------------

    async def ReplayRun(
        self, request: run_service_pb2.ReplayRunRequest, context: Context
    ) -> run_service_pb2.ReplayRunResponse:
        """Runs a dead letter again."""
        return await self._dead_letters.replay(request)

    async def DiscardRun(
        self, request: run_service_pb2.DiscardRunRequest, context: Context
    ) -> run_service_pb2.DiscardRunResponse:
        """Gives a dead letter up."""
        return await self._dead_letters.discard(request)

    async def ListDeadLetterGroups(
        self, request: run_service_pb2.ListDeadLetterGroupsRequest, context: Context
    ) -> run_service_pb2.ListDeadLetterGroupsResponse:
        """Says how dead letters died."""
        return await self._dead_letters.groups(request)

    async def BatchUpdateRuns(
        self, request: run_service_pb2.BatchUpdateRunsRequest, context: Context
    ) -> run_service_pb2.BatchUpdateRunsResponse:
        """Begins to change many runs."""
        return await self._operations.start(request)

    async def GetOperation(
        self, request: run_service_pb2.GetOperationRequest, context: Context
    ) -> run_service_pb2.GetOperationResponse:
        """Reads one operation."""
        return await self._operations.get(request)

    async def ListOperations(
        self, request: run_service_pb2.ListOperationsRequest, context: Context
    ) -> run_service_pb2.ListOperationsResponse:
        """Reads a page of operations, newest first."""
        return await self._operations.list(request)

    async def StopOperation(
        self, request: run_service_pb2.StopOperationRequest, context: Context
    ) -> run_service_pb2.StopOperationResponse:
        """Ends an operation early."""
        return await self._operations.stop(request)


def _is_full(view: int, *, default: bool) -> bool:
    match view:
        case run_service_pb2.RUN_VIEW_UNSPECIFIED:
            return default
        case run_service_pb2.RUN_VIEW_BASIC:
            return False
        case run_service_pb2.RUN_VIEW_FULL:
            return True
        case _:
            raise validate.refused("view", view, f"one of {', '.join(_VIEWS)}")
