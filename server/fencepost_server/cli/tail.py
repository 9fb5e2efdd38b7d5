"""`fencepost runs tail`: changes of runs as they happen, a line for each."""

import time
from typing import TYPE_CHECKING, Annotated

from fencepost_server.cli.choices import RunState
from fencepost_server.cli.failure import note
from fencepost_server.cli.options import FilterOption, JobOption, KindOption, QueueOption, option
from fencepost_server.cli.paging import join_filter
from fencepost_server.cli.run_view import remark, state_of
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.tables import elapsed, json_line
from fencepost_server.cli.values import job_path, last_part, parse_duration, short_run

if TYPE_CHECKING:
    from fencepost.v1.run_pb2 import RunEvent
    from fencepost.v1.run_service_pb2 import WatchRunsResponse


@calls_server
def tail(
    settings: Settings,
    filter: FilterOption = None,
    job: JobOption = None,
    state: Annotated[list[RunState] | None, option("--state", help="May be repeated.")] = None,
    queue: QueueOption = None,
    kind: KindOption = None,
    length: Annotated[
        str | None, option("--for", metavar="DURATION", help="End after so long; default: never.")
    ] = None,
) -> None:
    """Print every change of a run's state from now on, over restarts of the server.

    After a restart a change may be printed twice. Changes that were lost are said so.

    Examples:

      fencepost runs tail

      fencepost runs tail --job nightly --state dead --state retrying

      fencepost runs tail --filter 'labels.team=web' --for 60s -o json
    """
    from fencepost.v1.run_service_pb2 import WatchRunsRequest

    from fencepost_server.cli.connection import connected
    from fencepost_server.cli.tailing import messages

    conditions = join_filter(
        filter,
        [("state", [each.upper() for each in state or ()]), ("queue", queue), ("kind", kind)],
    )
    ends_at = None
    if length is not None:
        ends_at = time.monotonic() + parse_duration("--for", length).total_seconds()
    request = WatchRunsRequest(
        parent=settings.parent if job is None else job_path(settings.tenant, job),
        filter=conditions,
    )
    with connected(settings) as server:
        for message in messages(server, request, ends_at=ends_at):
            _print(settings, message)


def _print(settings: Settings, message: "WatchRunsResponse") -> None:
    if message.gap:
        note("gap: changes before the next line were lost; see the runs: fencepost runs list")
    for event in message.events:
        print(json_line(event) if settings.json else _line(event), flush=True)


def _line(event: "RunEvent") -> str:
    from datetime import UTC

    run = event.run
    at = event.changed_at.ToDatetime(tzinfo=UTC).astimezone().time()
    state = state_of(run)
    said = [remark(run)]
    if run.cancel_requested:
        said.append("asked to stop")
    if run.attempt > 1:
        said.append(f"attempt {run.attempt}")
    if state == RunState.RUNNING and run.attempt == 1 and run.HasField("first_claimed_at"):
        waited = elapsed(run.available_at, run.first_claimed_at)
        said.append(f"waited {waited}" if waited else "")
    if run.HasField("ended_at") and run.HasField("claimed_at"):
        took = elapsed(run.claimed_at, run.ended_at)
        said.append(f"took {took}" if took else "")
    parts = [
        at.isoformat(timespec="milliseconds"),
        short_run(run.name),
        run.kind,
        f"{state:<9}",
        last_part(run.worker)[:8] if state == RunState.RUNNING else "",
        " · ".join(part for part in said if part),
    ]
    return "  ".join(part for part in parts if part).rstrip()
