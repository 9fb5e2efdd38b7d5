"""Changes many runs: counts first, shows, asks, then begins an operation and follows it."""

from fencepost.v1.operation_pb2 import (
    OPERATION_STATE_RUNNING,
    Operation,
    OperationAction,
)
from fencepost.v1.run_service_pb2 import BatchUpdateRunsRequest, BatchUpdateRunsResponse

from fencepost_server.cli.bulk_flags import BulkFlags
from fencepost_server.cli.confirm import confirm
from fencepost_server.cli.connection import Connection, connected, new_request_id
from fencepost_server.cli.failure import CliError, ExitCode, note
from fencepost_server.cli.following import follow_operation
from fencepost_server.cli.operation_view import show_operation
from fencepost_server.cli.settings import Settings
from fencepost_server.cli.tables import print_json, short_seconds
from fencepost_server.cli.values import job_path, last_part, short_run

_COUNTED_MAX = 100_000
_RATE_DEFAULT = 50.0
# Counting reads much of a large history.
_CALL_TIMEOUT_S = 35.0


def change(settings: Settings, flags: BulkFlags) -> None:
    """The whole command. Raises CliError."""
    request = BatchUpdateRunsRequest(
        parent=settings.parent if flags.job is None else job_path(settings.tenant, flags.job),
        filter=flags.conditions,
        action=OperationAction.Value(f"OPERATION_ACTION_{flags.action.upper()}"),
        reason=flags.reason,
        rate=flags.runs_per_second,
        stop_when_failing=flags.stop_when_failing or 0.0,
        max_runs=flags.max_runs,
        use_newest_version=flags.newest_version,
    )
    with connected(settings) as server:
        preview = _call(server, flags, request, dry_run=True)
        if flags.dry_run:
            _show_preview(settings, flags, preview)
            return
        if not preview.matched:
            note(f"no run matches {request.filter}; nothing to {flags.action}")
            return
        for line in _preview_lines(preview):
            note(line)
        if flags.canary is not None:
            request.max_runs = flags.canary.of(preview.matched)
        confirm(_question(flags, request, preview.matched), yes=flags.yes)
        operation = _call(server, flags, request, dry_run=False).operation
        if flags.canary is not None:
            _finish_canary(settings, server, flags, operation, preview.matched)
            return
        if flags.watch:
            operation = follow_operation(server, operation.name, timeout=flags.timeout)
    show_operation(settings, operation)
    if not flags.watch:
        note(f"it goes on by itself; follow it: fencepost ops watch {last_part(operation.name)}")


def _call(
    server: Connection, flags: BulkFlags, request: BatchUpdateRunsRequest, *, dry_run: bool
) -> BatchUpdateRunsResponse:
    sent = BatchUpdateRunsRequest()
    sent.CopyFrom(request)
    sent.dry_run = dry_run
    if not dry_run:
        sent.request_id = new_request_id()
    answer: BatchUpdateRunsResponse = server.call(
        server.runs.BatchUpdateRuns, sent, what=f"{flags.action} runs", timeout_s=_CALL_TIMEOUT_S
    )
    return answer


def _show_preview(settings: Settings, flags: BulkFlags, preview: BatchUpdateRunsResponse) -> None:
    if settings.json:
        print_json(preview)
        return
    for line in _preview_lines(preview):
        print(line)
    if flags.canary is not None and preview.matched:
        note(f"a canary of {flags.canary.of(preview.matched)} would be replayed")
    note("nothing was changed")


def _preview_lines(preview: BatchUpdateRunsResponse) -> list[str]:
    lines = [f"{_counted(preview.matched)} match"]
    names = [short_run(name) for name in preview.samples]
    if preview.matched > len(names) > 1:
        names.insert(-1, "...")
    return lines + [f"  {name}" for name in names]


def _counted(matched: int) -> str:
    least = "at least " if matched >= _COUNTED_MAX else ""
    return f"{least}{matched:,} {'run' if matched == 1 else 'runs'}"


def _question(flags: BulkFlags, request: BatchUpdateRunsRequest, matched: int) -> str:
    count = min(matched, request.max_runs) if request.max_runs else matched
    rate = request.rate or _RATE_DEFAULT
    words = f"{flags.action} {_counted(count)}"
    if flags.action == "discard":
        words += " for good"
    return f"{words} at {rate:g} a second, about {short_seconds(count / rate)}"


def _finish_canary(
    settings: Settings, server: Connection, flags: BulkFlags, operation: Operation, matched: int
) -> None:
    """Waits until what was replayed has ended, and says how. Raises CliError if any died."""

    def has_ended(each: Operation) -> bool:
        return each.state != OPERATION_STATE_RUNNING and each.changed_ended >= each.changed

    ended = follow_operation(server, operation.name, timeout=flags.timeout, until=has_ended)
    show_operation(settings, ended)
    told = f"{ended.changed} of {_counted(matched)} replayed, {ended.changed_dead} dead again"
    go_on = f"go on with the others: {flags.without_canary()}"
    if ended.changed_dead:
        raise CliError(
            told,
            why="replays fail again",
            hint=f"see them: fencepost dead list; {go_on}",
            exit_code=ExitCode.RUN_UNSUCCESSFUL,
        )
    note(told)
    note(go_on)
