"""`fencepost workers`: who takes runs, from which queues, and how busy they are."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.failure import note
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.tables import instant, print_json_list, print_rows
from fencepost_server.cli.values import last_part

if TYPE_CHECKING:
    from fencepost.v1.admin_pb2 import Worker

app = typer.Typer(help="Workers: list.", no_args_is_help=True)


@app.command("list")
@calls_server
def list_workers(
    settings: Settings,
    filter: Annotated[
        str, typer.Option("--filter", help="Conditions: 'state=READY'.", show_default=False)
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000)] = LIMIT_DEFAULT,
) -> None:
    """List the workers seen in the last hour, the newest heartbeat first.

    Examples:

      fencepost workers list

      fencepost workers list --filter state=READY

      fencepost workers list -o json
    """
    from fencepost.v1.admin_service_pb2 import ListWorkersRequest

    from fencepost_server.cli.connection import connected

    with connected(settings) as server:

        def fetch(size: int, token: str) -> tuple[Any, str]:
            request = ListWorkersRequest(
                parent=settings.parent, page_size=size, page_token=token, filter=filter
            )
            page = server.call(server.admin.ListWorkers, request, what="list workers")
            return page.workers, page.next_page_token

        workers = collect(fetch, limit=limit)
    if settings.json:
        print_json_list("workers", workers)
        return
    if not workers:
        note("no worker was seen in the last hour: runs wait until one listens on their queue")
        return
    rows = [
        (
            last_part(worker.name),
            worker.display_name,
            _state(worker),
            " ".join(sorted({last_part(each.queue) for each in worker.subscriptions})),
            " ".join(sorted({kind for each in worker.subscriptions for kind in each.kinds})),
            f"{worker.held_runs}/{worker.slots}" if worker.slots else str(worker.held_runs),
            f"{worker.sdk.name} {worker.sdk.version}".strip(),
            instant(worker, "last_heartbeat_at"),
        )
        for worker in workers
    ]
    headings = ("WORKER", "NAME", "STATE", "QUEUES", "KINDS", "BUSY", "SDK", "LAST HEARTBEAT")
    print_rows(headings, rows)


def _state(worker: "Worker") -> str:
    from fencepost.v1.admin_pb2 import WorkerState

    return WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
