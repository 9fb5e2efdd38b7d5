"""The calls of a worker without a session: claim, lease, heartbeat, complete, release."""

import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeAlias, cast

import grpc.aio
from fencepost.v1 import run_pb2, run_service_pb2, worker_pb2

from fencepost_server.api import validate
from fencepost_server.api.limits import HELD_RUNS_MAX
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.subscriptions import read_subscriptions
from fencepost_server.api.wire_admin import pack_subscriptions
from fencepost_server.api.wire_assignment import Assignments
from fencepost_server.api.wire_worker import (
    Read,
    read_completion,
    read_held,
    read_release,
    read_run_key,
    unknown_attempt_text,
    write_notice,
    write_refusal,
    write_retry,
    write_run_key,
    write_verdict,
)
from fencepost_server.clock import SECOND, Duration
from fencepost_server.domain.names import is_uuid
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.long_poll import ClaimAsk
from fencepost_server.engine.unary_work import UnaryWork
from fencepost_server.engine.verdicts import Judged, Report, Verdict
from fencepost_server.errors import (
    FencepostError,
    InvalidField,
    RunNotFound,
    RunTerminal,
    ServerOverloaded,
    StaleAttempt,
    StorageUnavailable,
    UnknownAttempt,
)
from fencepost_server.store.catalogue import Catalogue

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Entry: TypeAlias = worker_pb2.Completion | worker_pb2.Release

WAIT_DEFAULT: Duration = 20 * SECOND
WAIT_MAX: Duration = 30 * SECOND
# Nothing is claimed for a caller whose deadline is nearer than this.
DEADLINE_LEFT_MIN: Duration = 5 * SECOND


class Workers(Protocol):
    """Who hears of workers that only use unary calls."""

    def seen_polling(
        self, *, worker_id: str, sdk: bytes, subscriptions: bytes, tenant_ids: Collection[int]
    ) -> None:
        """A worker asked for work."""
        ...


class UnaryCalls:
    """Checks requests, calls the engine, writes answers."""

    def __init__(
        self,
        *,
        work: UnaryWork,
        lifecycle: Lifecycle,
        catalogue: Catalogue,
        assignments: Assignments,
        workers: Workers,
        heartbeat_interval: Duration,
    ) -> None:
        self._work = work
        self._lifecycle = lifecycle
        self._catalogue = catalogue
        self._assignments = assignments
        self._workers = workers
        self._heartbeat_interval = heartbeat_interval

    def drain(self) -> None:
        """End all long polls."""
        self._work.drain()

    async def claim(
        self, request: run_service_pb2.ClaimRunsRequest, context: Context
    ) -> run_service_pb2.ClaimRunsResponse:
        """Up to max_runs claimed runs, or none after `wait`."""
        subscriptions, tenant_ids = await read_subscriptions(
            request.subscriptions, self._catalogue, field="subscriptions"
        )
        runs_max = validate.optional_integer(
            request.max_runs, field="max_runs", minimum=1, maximum=validate.BATCH_ENTRIES_MAX
        )
        worker_id = _worker_id(request.worker_id) or str(uuid.uuid4())
        wait = read_wait(request, context, deadline_left_min=DEADLINE_LEFT_MIN)
        request_key = read_request(request)
        self._workers.seen_polling(
            worker_id=worker_id,
            sdk=request.sdk.SerializeToString() if request.HasField("sdk") else b"",
            subscriptions=pack_subscriptions(list(request.subscriptions)),
            tenant_ids=tenant_ids,
        )
        answer = await self._work.claim(
            ClaimAsk(
                worker_id=worker_id,
                subscriptions=subscriptions,
                runs_max=runs_max or 1,
                wait=wait,
                request=request_key,
                is_alive=lambda: _is_alive(context),
            )
        )
        if answer.runs and not answer.is_repeat and context.done():
            self._work.give_back(answer.runs)
        now = self._work.now()
        response = run_service_pb2.ClaimRunsResponse(
            runs=[self._assignments.write(run, now=now) for run in answer.runs],
            worker_id=answer.worker_id,
        )
        response.heartbeat_interval.FromMicroseconds(self._heartbeat_interval)
        if answer.retry_after is not None:
            response.retry_after.FromMicroseconds(answer.retry_after)
        return response

    async def lease(
        self, request: run_service_pb2.LeaseRunRequest, context: Context
    ) -> run_service_pb2.LeaseRunResponse:
        """One named run, or why not."""
        if not request.HasField("run"):
            raise validate.missing("run", "the key of the run to take")
        key = read_run_key(request.run, field="run")
        worker_id = _worker_id(request.worker_id) or str(uuid.uuid4())
        answer = await self._work.lease(key, worker_id=worker_id, request=read_request(request))
        response = run_service_pb2.LeaseRunResponse(
            refusal=cast("run_service_pb2.LeaseRefusal.ValueType", int(answer.refusal or 0)),
            run_state=cast("run_pb2.RunState.ValueType", int(answer.state)),
            worker_id=answer.worker_id,
        )
        if answer.run is not None:
            response.assignment.CopyFrom(self._assignments.write(answer.run, now=self._work.now()))
            if not answer.is_repeat and context.done():
                self._work.give_back([answer.run])
        if answer.retry_after is not None:
            response.retry_after.FromMicroseconds(answer.retry_after)
        response.heartbeat_interval.FromMicroseconds(self._heartbeat_interval)
        return response

    async def heartbeat(
        self, request: run_service_pb2.HeartbeatRunsRequest
    ) -> run_service_pb2.HeartbeatRunsResponse:
        """Renews leases; the answer names exceptions only."""
        if not _worker_id(request.worker_id):
            raise validate.missing("worker_id", "the UUID of the worker process")
        if len(request.runs) > HELD_RUNS_MAX:
            raise validate.refused(
                "runs", f"{len(request.runs)} runs", f"at most {HELD_RUNS_MAX} runs"
            )
        held = [read_held(run, field=f"runs[{index}]") for index, run in enumerate(request.runs)]
        response = run_service_pb2.HeartbeatRunsResponse()
        response.heartbeat_interval.FromMicroseconds(self._heartbeat_interval)
        renewals = await self._lifecycle.heartbeat(held)
        for run, renewal in zip(held, renewals, strict=True):
            if renewal.notice is not None:
                response.notices.append(write_notice(renewal.notice))
            if renewal.not_renewed:
                write_run_key(run.key, response.not_renewed.add())
        return response

    async def complete(
        self, request: run_service_pb2.CompleteRunRequest
    ) -> run_service_pb2.CompleteRunResponse:
        """Ends one attempt; a refusal is a status."""
        _worker_id(request.worker_id)
        if not request.HasField("completion"):
            raise validate.missing("completion", "the end of an attempt")
        read = read_completion(request.completion)
        if isinstance(read, FencepostError):
            raise read
        (judged,) = await self._lifecycle.report([read])
        _raise_refused(read, judged)
        return run_service_pb2.CompleteRunResponse(
            verdict=write_verdict(read.key, read.attempt, judged)
        )

    async def batch_complete(
        self, request: run_service_pb2.BatchCompleteRunsRequest
    ) -> run_service_pb2.BatchCompleteRunsResponse:
        """Ends attempts; a verdict per entry."""
        _worker_id(request.worker_id)
        verdicts = await self._report(request.completions, read_completion, "completions")
        return run_service_pb2.BatchCompleteRunsResponse(verdicts=verdicts)

    async def release(
        self, request: run_service_pb2.ReleaseRunsRequest
    ) -> run_service_pb2.ReleaseRunsResponse:
        """Gives runs back; a verdict per entry."""
        _worker_id(request.worker_id)
        verdicts = await self._report(request.releases, read_release, "releases")
        return run_service_pb2.ReleaseRunsResponse(verdicts=verdicts)

    async def _report(
        self, entries: Sequence[Entry], read: Callable[..., Read], field: str
    ) -> list[worker_pb2.AttemptVerdict]:
        check_count(len(entries), field=field)
        found = [read(entry, field=f"{field}[{index}]") for index, entry in enumerate(entries)]
        reports = [each for each in found if isinstance(each, Report)]
        try:
            judged = iter(await self._lifecycle.report(reports))
        except (StorageUnavailable, ServerOverloaded):
            return [
                write_retry(entry) if isinstance(each, Report) else write_refusal(entry, each)
                for entry, each in zip(entries, found, strict=True)
            ]
        return [
            write_verdict(each.key, each.attempt, next(judged))
            if isinstance(each, Report)
            else write_refusal(entry, each)
            for entry, each in zip(entries, found, strict=True)
        ]


def check_count(count: int, *, field: str) -> None:
    """The entries of a batch. Raises InvalidField."""
    if not 1 <= count <= validate.BATCH_ENTRIES_MAX:
        raise validate.refused(
            field, f"{count} entries", f"1 to {validate.BATCH_ENTRIES_MAX} entries"
        )


def read_wait(request: Any, context: Context, *, deadline_left_min: Duration) -> Duration:
    """How long a poll may take: `wait` (default 20 s), or less when the call's own deadline
    is nearer, because only a poll that the server ends cannot lose its answer.

    Raises InvalidField, also for a deadline that leaves no time at all.
    """
    wait = WAIT_DEFAULT
    if request.HasField("wait"):
        wait = validate.duration(
            request.wait, field="wait", minimum=0, maximum=WAIT_MAX, round_up=True
        )
    left = context.time_remaining()
    if left is None:
        return wait
    room = int(left * SECOND) - deadline_left_min
    if room <= 0:
        raise InvalidField(
            f"the call's deadline is {left:.1f} s away, want at least wait + 10 s",
            field="wait",
            deadline=f"{left:.1f} s",
        )
    return min(wait, room)


def _is_alive(context: Context) -> bool:
    left = context.time_remaining()
    return not context.done() and (left is None or left * SECOND > DEADLINE_LEFT_MIN)


def _worker_id(value: str) -> str:
    if value and not is_uuid(value):
        raise validate.refused("worker_id", value, "lower-case UUID text of 36 characters")
    return value


def _raise_refused(report: Report, judged: Judged) -> None:
    """Turns a verdict that stored nothing into a status."""
    key, state = str(report.key), "" if judged.run_state is None else judged.run_state.name
    match judged.verdict:
        case Verdict.STALE_ATTEMPT:
            raise StaleAttempt(
                f"attempt {report.attempt} of {key} was followed by attempt "
                f"{judged.current_attempt}; drop its result",
                run=key,
                attempt=str(report.attempt),
                currentAttempt=str(judged.current_attempt),
            )
        case Verdict.INVALID:
            raise UnknownAttempt(
                unknown_attempt_text(report.key, report.attempt, judged.current_attempt),
                field="completion.attempt",
                run=key,
                attempt=str(report.attempt),
                currentAttempt=str(judged.current_attempt),
            )
        case Verdict.RUN_TERMINAL:
            raise RunTerminal(f"{key} ended some other way: it is {state}", run=key, runState=state)
        case Verdict.NOT_FOUND:
            raise RunNotFound(f"{key} does not exist", run=key)
        case Verdict.RETRY:
            raise StorageUnavailable(f"{key} is being changed just now; send it again")
        case Verdict.APPLIED | Verdict.ALREADY_APPLIED:
            return
