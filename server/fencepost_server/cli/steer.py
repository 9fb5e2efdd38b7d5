"""`fencepost runs cancel`, `replay` and `discard`: one run is steered by hand."""

from typing import Annotated

from fencepost_server.cli.choices import RunState
from fencepost_server.cli.failure import note, usage
from fencepost_server.cli.options import ReasonOption, RunName, TimeoutOption, YesOption, option
from fencepost_server.cli.run_view import show_run, state_of
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.values import parse_duration, read_payload, run_path, short_run


@calls_server
def cancel(
    settings: Settings,
    name: RunName,
    grace: Annotated[
        str | None,
        option(
            "--grace",
            metavar="DURATION",
            help="How long a running handler may take to stop, 0s to 1h; default: the job's.",
        ),
    ] = None,
    reason: ReasonOption = "",
) -> None:
    """Ask a run to stop: at once if it waits, by its worker if it runs, by force after the grace.

    Examples:

      fencepost runs cancel nightly/2026-12-01T02:30:00Z

      fencepost runs cancel nightly/2026-12-01T02:30:00Z --reason "wrong input"

      fencepost runs cancel nightly/2026-12-01T02:30:00Z --grace 0s
    """
    from fencepost.v1.run_service_pb2 import CancelRunRequest

    from fencepost_server.cli.connection import connected

    request = CancelRunRequest(name=run_path(settings.tenant, name), reason=reason)
    if grace is not None:
        request.grace.FromTimedelta(parse_duration("--grace", grace))
    with connected(settings) as server:
        run = server.call(server.runs.CancelRun, request, what=f"cancel run {name!r}").run
    show_run(settings, run)
    state = state_of(run)
    if run.cancel_requested:
        note(f"asked to stop; follow it: fencepost runs watch {short_run(run.name)}")
    elif state != RunState.CANCELLED:
        note(f"it had ended before: {state}")


@calls_server
def replay(
    settings: Settings,
    name: RunName,
    payload: Annotated[
        str | None, option("--payload", metavar="JSON", help="In place of the run's: JSON, @file.")
    ] = None,
    payload_file: Annotated[
        str | None, option("--payload-file", metavar="FILE", help="The same from a file; -: stdin.")
    ] = None,
    newest_version: Annotated[
        bool, option("--newest-version", help="As the job is now, not as it was.")
    ] = False,
    reason: ReasonOption = "",
    watch: Annotated[
        bool, option("--watch", "-w", help="Follow it to its end; exits 0, 7 or 8.")
    ] = False,
    timeout: TimeoutOption = None,
) -> None:
    """Run a dead letter again, under its run key and with a fresh budget.

    Examples:

      fencepost runs replay invoice/2026-12-01T02:30:00Z

      fencepost runs replay invoice/2026-12-01T02:30:00Z --newest-version --watch

      fencepost runs replay invoice/2026-12-01T02:30:00Z --payload '{"region": "eu"}'
    """
    from fencepost.v1.payload_pb2 import Payload
    from fencepost.v1.run_service_pb2 import ReplayRunRequest

    from fencepost_server.cli.connection import connected, new_request_id
    from fencepost_server.cli.following import follow_run

    if payload is not None and payload_file is not None:
        raise usage("--payload and --payload-file do not go together", why="a run has one payload")
    given = f"@{payload_file}" if payload_file is not None else payload
    request = ReplayRunRequest(
        name=run_path(settings.tenant, name),
        request_id=new_request_id(),
        use_newest_version=newest_version,
        reason=reason,
    )
    if given is not None:
        request.payload.CopyFrom(Payload(json=read_payload(given)))
    with connected(settings) as server:
        run = server.call(server.runs.ReplayRun, request, what=f"replay run {name!r}").run
        if watch:
            follow_run(settings, server, run.name, timeout)
            return
    show_run(settings, run)
    note(f"follow it: fencepost runs watch {short_run(run.name)}")


@calls_server
def discard(
    settings: Settings, name: RunName, reason: ReasonOption = "", yes: YesOption = False
) -> None:
    """Give a dead letter up: it can never be replayed, and goes with the history.

    Examples:

      fencepost runs discard invoice/2026-12-01T02:30:00Z --reason "paid by hand"

      fencepost runs discard invoice/2026-12-01T02:30:00Z --yes

      fencepost --tenant acme runs discard invoice/2026-12-01T02:30:00Z --yes -o json
    """
    from fencepost.v1.run_service_pb2 import DiscardRunRequest

    from fencepost_server.cli.confirm import confirm
    from fencepost_server.cli.connection import connected

    path = run_path(settings.tenant, name)
    confirm(f"discard run {short_run(path)} of tenant {settings.tenant} for good", yes=yes)
    request = DiscardRunRequest(name=path, reason=reason)
    with connected(settings) as server:
        run = server.call(server.runs.DiscardRun, request, what=f"discard run {name!r}").run
    show_run(settings, run)
