"""`fencepost ops`: operations are listed, read, watched and stopped."""

from typing import Annotated, Any

import typer

from fencepost_server.cli.choices import OperationState
from fencepost_server.cli.operation_view import show_operation, show_operations
from fencepost_server.cli.options import LimitOption, TimeoutOption, option
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect, join_filter
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.values import operation_path

app = typer.Typer(help="Operations: list, read, watch, stop.", no_args_is_help=True)

OperationId = Annotated[
    str, typer.Argument(metavar="OPERATION", help="Its id, as ops list shows it.")
]


@app.command("list")
@calls_server
def list_operations(
    settings: Settings,
    state: Annotated[
        list[OperationState] | None, option("--state", help="May be repeated.")
    ] = None,
    limit: LimitOption = LIMIT_DEFAULT,
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
    from fencepost_server.cli.following import read_operation

    with connected(settings) as server:
        show_operation(settings, read_operation(server, operation_path(settings.tenant, name)))


@app.command("watch")
@calls_server
def watch(
    settings: Settings,
    name: OperationId,
    timeout: TimeoutOption = None,
) -> None:
    """Follow an operation to its end; leaving does not stop it.

    Examples:

      fencepost ops watch 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42

      fencepost ops watch 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42 --timeout 10m

      fencepost --tenant acme ops watch 0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42
    """
    from fencepost_server.cli.connection import connected
    from fencepost_server.cli.following import follow_operation

    with connected(settings) as server:
        operation = follow_operation(server, operation_path(settings.tenant, name), timeout=timeout)
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

    request = StopOperationRequest(name=operation_path(settings.tenant, name))
    with connected(settings) as server:
        answer = server.call(server.runs.StopOperation, request, what=f"stop operation {name}")
    show_operation(settings, answer.operation)
