"""`fencepost queues`: where runs wait; read, paused, resumed and bounded."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.failure import note, usage
from fencepost_server.cli.options import LimitOption, option
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect
from fencepost_server.cli.queue_view import show_queue, show_queues
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.values import queue_path

if TYPE_CHECKING:
    from fencepost.v1.admin_pb2 import Queue

app = typer.Typer(help="Queues: list, read, pause, resume, set limits.", no_args_is_help=True)

QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")]


@app.command("list")
@calls_server
def list_queues(settings: Settings, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List queues by name, with what waits and runs.

    Examples:

      fencepost queues list

      fencepost queues list -o json

      fencepost --tenant acme queues list
    """
    from fencepost.v1.admin_service_pb2 import ListQueuesRequest

    from fencepost_server.cli.connection import connected

    with connected(settings) as server:

        def fetch(size: int, token: str) -> tuple[Any, str]:
            request = ListQueuesRequest(parent=settings.parent, page_size=size, page_token=token)
            page = server.call(server.admin.ListQueues, request, what="list queues")
            return page.queues, page.next_page_token

        queues = collect(fetch, limit=limit)
    show_queues(settings, queues)


@app.command("get")
@calls_server
def get(settings: Settings, name: QueueName) -> None:
    """Show one queue.

    Examples:

      fencepost queues get default

      fencepost queues get default -o json

      fencepost --tenant acme queues get mail
    """
    from fencepost.v1.admin_service_pb2 import GetQueueRequest

    from fencepost_server.cli.connection import connected

    request = GetQueueRequest(name=queue_path(settings.tenant, name))
    with connected(settings) as server:
        answer = server.call(server.admin.GetQueue, request, what=f"get queue {name!r}")
    show_queue(settings, answer.queue)


@app.command("create")
@calls_server
def create(
    settings: Settings,
    name: QueueName,
    max_in_flight: Annotated[
        int | None, option("--max-in-flight", help="Runs at once; 0: no limit.")
    ] = None,
    max_in_flight_per_key: Annotated[
        int | None, option("--max-in-flight-per-key", help="The same per concurrency key.")
    ] = None,
    rate_limit: Annotated[
        float | None, option("--rate-limit", help="Claims per second; 0: no limit.")
    ] = None,
) -> None:
    """Add a queue. Jobs may name one before it is there.

    Examples:

      fencepost queues create mail

      fencepost queues create billing --max-in-flight 10

      fencepost queues create partner-api --rate-limit 5 --max-in-flight-per-key 1
    """
    from fencepost.v1.admin_service_pb2 import CreateQueueRequest

    from fencepost_server.cli.connection import connected, new_request_id

    request = CreateQueueRequest(
        parent=settings.parent, queue_name=name, request_id=new_request_id()
    )
    _limits(request.queue, max_in_flight, max_in_flight_per_key, rate_limit)
    with connected(settings) as server:
        answer = server.call(server.admin.CreateQueue, request, what=f"create queue {name!r}")
    show_queue(settings, answer.queue)


@app.command("pause")
@calls_server
def pause(
    settings: Settings,
    name: QueueName,
    reason: Annotated[str, option("--reason", help="For people; shown by runs why.")] = "",
) -> None:
    """Claim nothing more from a queue; what runs goes on, and fires go on making runs.

    Examples:

      fencepost queues pause mail

      fencepost queues pause mail --reason "the provider is down"

      fencepost --tenant acme queues pause mail -o json
    """
    from fencepost.v1.admin_pb2 import Queue

    _update(settings, name, Queue(paused=True, pause_reason=reason), ["paused", "pause_reason"])
    note(f"let it go on: fencepost queues resume {name}")


@app.command("resume")
@calls_server
def resume(settings: Settings, name: QueueName) -> None:
    """Let a paused queue go on.

    Examples:

      fencepost queues resume mail

      fencepost queues resume mail -o json

      fencepost --tenant acme queues resume mail
    """
    from fencepost.v1.admin_pb2 import Queue

    _update(settings, name, Queue(), ["paused", "pause_reason"])


@app.command("set")
@calls_server
def set_limits(
    settings: Settings,
    name: QueueName,
    max_in_flight: Annotated[
        int | None, option("--max-in-flight", help="Runs at once; 0: no limit.")
    ] = None,
    max_in_flight_per_key: Annotated[
        int | None, option("--max-in-flight-per-key", help="The same per concurrency key.")
    ] = None,
    rate_limit: Annotated[
        float | None, option("--rate-limit", help="Claims per second; 0: no limit.")
    ] = None,
) -> None:
    """Change the limits of a queue; they hold from the next claim on, and what runs goes on.

    Examples:

      fencepost queues set billing --max-in-flight 10

      fencepost queues set partner-api --rate-limit 5 --max-in-flight-per-key 1

      fencepost queues set billing --max-in-flight 0
    """
    from fencepost.v1.admin_pb2 import Queue

    queue = Queue()
    paths = _limits(queue, max_in_flight, max_in_flight_per_key, rate_limit)
    if not paths:
        raise usage(
            "nothing to set",
            why="no flag says what",
            hint="--max-in-flight N, --max-in-flight-per-key N or --rate-limit N",
        )
    _update(settings, name, queue, paths)


def _limits(
    queue: "Queue",
    max_in_flight: int | None,
    max_in_flight_per_key: int | None,
    rate_limit: float | None,
) -> list[str]:
    """Sets what is given, and returns the names of those fields."""
    given = {
        "max_in_flight": max_in_flight,
        "max_in_flight_per_key": max_in_flight_per_key,
        "rate_limit": rate_limit,
    }
    paths = [field for field, value in given.items() if value is not None]
    for field in paths:
        try:
            setattr(queue, field, given[field])
        except ValueError as error:
            flag = "--" + field.replace("_", "-")
            raise usage(f"{flag} {given[field]} is out of range", why=str(error)) from error
    return paths


def _update(settings: Settings, name: str, queue: "Queue", paths: list[str]) -> None:
    from fencepost.v1.admin_service_pb2 import UpdateQueueRequest

    from fencepost_server.cli.connection import connected

    queue.name = queue_path(settings.tenant, name)
    request = UpdateQueueRequest(queue=queue)
    request.update_mask.paths.extend(paths)
    with connected(settings) as server:
        answer = server.call(server.admin.UpdateQueue, request, what=f"change queue {name!r}")
    show_queue(settings, answer.queue)
