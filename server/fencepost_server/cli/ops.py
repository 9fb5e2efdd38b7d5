"""`fencepost ops`: operations are listed, read, watched and stopped."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.choices import OperationState
from fencepost_server.cli.failure import CliError, ExitCode, note
from fencepost_server.cli.operation_view import (
    progress_of,
    show_operation,
    show_operations,
    state_of,
)
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect, join_filter
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.values import parse_duration

if TYPE_CHECKING:
    from fencepost.v1.operation_pb2 import Operation

app = typer.Typer(help="Operations: list, read, watch, stop.", no_args_is_help=True)

OperationId = Annotated[
    str, typer.Argument(metavar="OPERATION", help="Its id, as ops list shows it.")
]
_POLL_S = 1.0


@app.command("list")
@calls_server
def list_operations(
    settings: Settings,
    state: Annotated[
        list[OperationState] | None,
        typer.Option("--state", help="May be repeated.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000)] = LIMIT_DEFAULT,
) -> None:
    """List operations, newest first.

    Examples:

      fencepost ops list

      fencepost ops list --state running

      fencepost --tenant acme ops list -o json
    """
    from fencepost.v1.run_service_pb2 import ListOperationsRequest

    from fencepost_server.cli.connection import connected

    conditions = join_filter(None, [("state", [each.upper() for each in state or ()])])
    with connected(settings) as server:

        def fetch(size: int, token: str) -> tuple[Any, str]:
            request = ListOperationsRequest(
                parent=settings.parent, page_size=size, page_token=token, filter=conditions
            )
            page = server.call(server.runs.ListOperations, request, what="list operations")
            return page.operations, page.next_page_token

        operations = collect(fetch, limit=limit)
    show_operations(settings, operations)


@app.command("get")
@calls_server
def get(settings: Settings, name: OperationId) -> None:
    """Show one operation.

    Examples:

      fencepost ops get 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42

      fencepost ops get 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42 -o json

      fencepost --tenant acme ops get 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42
    """
    from fencepost_server.cli.connection import connected

    with connected(settings) as server:
        show_operation(settings, _read(server, settings, name))


@app.command("watch")
@calls_server
def watch(
    settings: Settings,
    name: OperationId,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout",
            metavar="DURATION",
            help="Give up waiting after this long (exit 8); default: never.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Follow an operation to its end; leaving does not stop it.

    Examples:

      fencepost ops watch 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42

      fencepost ops watch 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42 --timeout 10m

      fencepost --tenant acme ops watch 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42
    """
    from fencepost.v1.operation_pb2 import OPERATION_STATE_RUNNING

    from fencepost_server.cli.connection import connected

    limit = None if timeout is None else parse_duration("--timeout", timeout).total_seconds()
    begun, said = time.monotonic(), ""
    with connected(settings) as server:
        while True:
            operation = _read(server, settings, name)
            progress = progress_of(operation)
            if progress != said:
                note(f"  {progress}")
                said = progress
            if operation.state != OPERATION_STATE_RUNNING:
                break
            if limit is not None and time.monotonic() - begun >= limit:
                raise CliError(
                    f"gave up waiting for operation {name}",
                    why=f"it is {state_of(operation)} after {timeout}",
                    hint=f"it goes on; follow it: fencepost ops watch {name}",
                    exit_code=ExitCode.STILL_RUNNING,
                )
            time.sleep(_POLL_S)
    show_operation(settings, operation)


@app.command("stop")
@calls_server
def stop(settings: Settings, name: OperationId) -> None:
    """End an operation before its next run; what was changed stays changed.

    Examples:

      fencepost ops stop 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42

      fencepost ops stop 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42 -o json

      fencepost --tenant acme ops stop 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42
    """
    from fencepost.v1.run_service_pb2 import StopOperationRequest

    from fencepost_server.cli.connection import connected

    request = StopOperationRequest(name=_path(settings, name))
    with connected(settings) as server:
        answer = server.call(server.runs.StopOperation, request, what=f"stop operation {name}")
    show_operation(settings, answer.operation)


def _read(server: Any, settings: Settings, name: str) -> "Operation":
    from fencepost.v1.run_service_pb2 import GetOperationRequest

    request = GetOperationRequest(name=_path(settings, name))
    answer = server.call(server.runs.GetOperation, request, what=f"get operation {name}")
    operation: Operation = answer.operation
    return operation


def _path(settings: Settings, text: str) -> str:
    """Resource name of an operation given by id or resource name."""
    return text if text.startswith("tenants/") else f"{settings.parent}/operations/{text}"
