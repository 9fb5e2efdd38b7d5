"""Calls the server and turns what it refuses into errors that a person can act on.

gRPC is slow to import, so commands import this module when they run, never at the top.
"""

import difflib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from fencepost.v1 import (
    admin_service_pb2_grpc,
    job_service_pb2,
    job_service_pb2_grpc,
    run_service_pb2_grpc,
)

from fencepost_server.cli.failure import CliError, ExitCode
from fencepost_server.cli.settings import Settings
from fencepost_server.cli.status import RpcStatus, read_status
from fencepost_server.cli.values import last_part

CALL_TIMEOUT_S = 15.0
# A stream on which nothing is said notices within a minute that its server has vanished.
_OPTIONS = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The three services of one server."""

    settings: Settings
    jobs: "job_service_pb2_grpc.JobServiceStub"
    runs: "run_service_pb2_grpc.RunServiceStub"
    admin: "admin_service_pb2_grpc.AdminServiceStub"

    def call(
        self,
        method: Callable[..., Any],
        request: Any,
        *,
        what: str,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """One call. Raises CliError, its first line "cannot {what}"."""
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self.explain(error, what=what) from error

    def explain(self, error: grpc.RpcError, *, what: str) -> CliError:
        """The error for a person, its first line "cannot {what}"."""
        status = read_status(error)
        hint = _HINTS.get(status.reason) or _CODE_HINTS.get(status.code, "")
        if status.reason == "JOB_NOT_FOUND":
            hint = self._nearest_job(status) or hint
        why = status.why.replace("\n", " ") or f"the server answered {status.code.name}"
        if status.code is grpc.StatusCode.UNAVAILABLE and not status.reason:
            why = f"no server answers at {self.settings.server}"
        return CliError(
            f"cannot {what}",
            why=why,
            hint=hint.format(server=self.settings.server, tenant=self.settings.tenant),
            exit_code=_EXIT_CODES.get(status.code, ExitCode.FAILED),
            status=f"{status.in_words} · {status.message}",
            reason=status.reason,
        )

    def _nearest_job(self, status: RpcStatus) -> str:
        """A suggestion when a name looks mistyped; nothing if the list cannot be had quickly."""
        wanted = last_part(status.resource)
        request = job_service_pb2.ListJobsRequest(parent=self.settings.parent, page_size=1000)
        try:
            jobs = self.jobs.ListJobs(request, timeout=2).jobs
        except grpc.RpcError:
            return ""
        near = difflib.get_close_matches(wanted, [last_part(job.name) for job in jobs], n=1)
        return f"did you mean {near[0]}? All of them: fencepost jobs list" if near else ""


@contextmanager
def connected(settings: Settings) -> Iterator[Connection]:
    """A connection for the length of the block; nothing is sent before the first call."""
    with grpc.insecure_channel(settings.server, options=_OPTIONS) as channel:
        yield Connection(
            settings=settings,
            jobs=job_service_pb2_grpc.JobServiceStub(channel),
            runs=run_service_pb2_grpc.RunServiceStub(channel),
            admin=admin_service_pb2_grpc.AdminServiceStub(channel),
        )


def new_request_id() -> str:
    """Makes a call repeatable: the server answers the same id with the first answer."""
    return str(uuid.uuid4())


_EXIT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: ExitCode.USAGE,
    grpc.StatusCode.NOT_FOUND: ExitCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED: ExitCode.NOT_ALLOWED,
    grpc.StatusCode.PERMISSION_DENIED: ExitCode.NOT_ALLOWED,
    grpc.StatusCode.ALREADY_EXISTS: ExitCode.CONFLICT,
    grpc.StatusCode.ABORTED: ExitCode.CONFLICT,
    grpc.StatusCode.FAILED_PRECONDITION: ExitCode.CONFLICT,
    grpc.StatusCode.UNAVAILABLE: ExitCode.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.UNREACHABLE,
}
_HINTS = {
    "INVALID_FIELD": "the command's --help shows what is allowed",
    "INVALID_SCHEDULE": "fencepost jobs create --help shows how schedules are written",
    "FILTER_NOT_SUPPORTED": "conditions are field=value, for example --filter 'state=RUNNING'",
    "TENANT_NOT_FOUND": "name another with --tenant or FENCEPOST_TENANT",
    "JOB_NOT_FOUND": "see all of tenant {tenant}: fencepost jobs list",
    "RUN_NOT_FOUND": "see them: fencepost runs list",
    "JOB_ALREADY_EXISTS": "choose another name, or look at it: fencepost jobs get NAME",
    "TOO_MANY_FIRES": "take a shorter range, or allow more with --max-runs",
    "NO_SCHEDULE": "give it one with UpdateJob; ad-hoc runs need none: fencepost run NAME",
    "OPERATION_NOT_FOUND": "see them: fencepost ops list",
    "QUEUE_NOT_FOUND": "see them: fencepost queues list",
    "CALENDAR_NOT_FOUND": "see them: fencepost calendars list",
    "CALENDAR_IN_USE": "take it out of the jobs that name it first",
    "RUN_NOT_DEAD": "only dead letters are replayed or discarded: fencepost dead list",
    "RUN_DISCARDED": "it was given up for good; make a new run: fencepost run JOB",
    "VERSION_NOT_KEPT": "replay it as the job is now: --newest-version",
    "ETAG_MISMATCH": "somebody changed it meanwhile; look at it and try again",
    "UNIQUE_KEY_HELD": "look at the run that holds it, or say --on-conflict return-existing",
    "QUOTA_EXCEEDED": "see the tenant's limits: fencepost tenants get {tenant}",
    "JOB_FINISHED": "it will not fire again; run it by hand: fencepost run NAME",
    "STORAGE_UNAVAILABLE": "the server runs and its database is away; try again in a moment",
    "SERVER_DRAINING": "the server is stopping; try again in a moment",
    "INTERNAL": "look into the server's log; with -v the request id is shown here",
}
_CODE_HINTS = {
    grpc.StatusCode.UNAVAILABLE: "start a server at {server}: fencepost dev; or name another with "
    "--server or FENCEPOST_SERVER",
    grpc.StatusCode.DEADLINE_EXCEEDED: "the server at {server} is slow or stuck; try again",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the server has as much as it takes; try again in a moment",
    grpc.StatusCode.UNIMPLEMENTED: "this version of the server does not do that yet",
}
