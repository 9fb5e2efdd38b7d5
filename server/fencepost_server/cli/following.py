"""Shows a run or an operation on its way to its end, and ends the command by how it ended."""

import time
from collections.abc import Callable

from fencepost.v1.operation_pb2 import OPERATION_STATE_RUNNING, Operation
from fencepost.v1.run_service_pb2 import GetOperationRequest

from fencepost_server.cli.choices import RunState
from fencepost_server.cli.connection import Connection
from fencepost_server.cli.failure import CliError, ExitCode, note
from fencepost_server.cli.operation_view import progress_of
from fencepost_server.cli.operation_view import state_of as operation_state
from fencepost_server.cli.run_view import describe_change, remark, show_run, state_of
from fencepost_server.cli.settings import Settings
from fencepost_server.cli.values import last_part, parse_duration, short_run
from fencepost_server.cli.watching import wait_for_end

_POLL_S = 1.0
# How long a server may be away before a watch that has begun gives up.
_AWAY_S = 60.0


def follow_run(settings: Settings, server: Connection, path: str, timeout: str | None) -> None:
    """Until the run has ended or `timeout` is over, and shows it. Raises CliError if it did not
    end, or not well."""
    limit = None if timeout is None else parse_duration("--timeout", timeout)
    run, ended = wait_for_end(
        server,
        path,
        timeout_s=None if limit is None else limit.total_seconds(),
        on_change=lambda run: note(describe_change(run)),
    )
    show_run(settings, run)
    if not ended:
        raise CliError(
            f"gave up waiting for {short_run(path)}",
            why=f"it is {state_of(run)} after {timeout}",
            hint=f"it goes on; follow it: fencepost runs watch {short_run(path)}",
            exit_code=ExitCode.STILL_RUNNING,
        )
    if state_of(run) != RunState.SUCCEEDED:
        raise CliError(
            f"run {short_run(path)} is {state_of(run)}",
            why=remark(run),
            hint=f"see its attempts: fencepost runs get {short_run(path)}",
            exit_code=ExitCode.RUN_UNSUCCESSFUL,
        )


def read_operation(server: Connection, path: str) -> Operation:
    """As it is now."""
    what = f"get operation {last_part(path)}"
    answer = server.call(server.runs.GetOperation, GetOperationRequest(name=path), what=what)
    operation: Operation = answer.operation
    return operation


def follow_operation(
    server: Connection,
    path: str,
    *,
    timeout: str | None,
    until: Callable[[Operation], bool] = lambda each: each.state != OPERATION_STATE_RUNNING,
) -> Operation:
    """The operation once `until` is true of it; says on the way how far it is.

    Raises CliError when `timeout` is over before; the operation goes on.
    """
    limit = None if timeout is None else parse_duration("--timeout", timeout).total_seconds()
    begun, said = time.monotonic(), ""
    answered_at: float | None = None
    while True:
        try:
            operation = read_operation(server, path)
            answered_at = time.monotonic()
        except CliError as error:
            # Before the first answer, a wrong address is likelier than a restart.
            lost = answered_at is None or time.monotonic() - answered_at > _AWAY_S
            if lost or error.exit_code is not ExitCode.UNREACHABLE:
                raise
            time.sleep(_POLL_S)
            continue
        progress = progress_of(operation)
        if progress != said:
            note(f"  {progress}")
            said = progress
        if until(operation):
            return operation
        if limit is not None and time.monotonic() - begun >= limit:
            raise CliError(
                f"gave up waiting for operation {last_part(path)}",
                why=f"it is {operation_state(operation)} after {timeout}",
                hint=f"it goes on; follow it: fencepost ops watch {last_part(path)}",
                exit_code=ExitCode.STILL_RUNNING,
            )
        time.sleep(_POLL_S)
