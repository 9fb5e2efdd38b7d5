"""`fencepost runs` and `fencepost run`: runs are made, listed, read and watched to their end."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from fencepost_server.cli.choices import OnConflict, RunState
from fencepost_server.cli.failure import note
from fencepost_server.cli.options import (
    FilterOption,
    KindOption,
    LimitOption,
    QueueOption,
    RunName,
    TimeoutOption,
    option,
)
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect, join_filter
from fencepost_server.cli.run_view import print_attempts, show_run, show_runs, state_of
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.tables import print_json
from fencepost_server.cli.values import (
    job_path,
    parse_duration,
    parse_instant,
    parse_labels,
    read_payload,
    run_path,
    short_run,
)

app = typer.Typer(
    help="Runs: list, read, watch, explain, cancel, replay; many at once with bulk.",
    no_args_is_help=True,
)


@app.command("list")
@calls_server
def list_runs(
    settings: Settings,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Only of this job.")] = None,
    filter: FilterOption = None,
    state: Annotated[list[RunState] | None, option("--state", help="May be repeated.")] = None,
    queue: QueueOption = None,
    kind: KindOption = None,
    since: Annotated[
        str | None, option("--since", metavar="WHEN", help="Due since an instant, or 2h ago.")
    ] = None,
    limit: LimitOption = LIMIT_DEFAULT,
) -> None:
    """List runs, the newest due instant first.

    Examples:

      fencepost runs list

      fencepost runs list nightly --state dead --state retrying

      fencepost runs list --since 2h --kind invoice.send -o json
    """
    from fencepost.v1.run_service_pb2 import ListRunsRequest

    from fencepost_server.cli.connection import connected

    conditions = join_filter(
        filter,
        [
            ("state", [each.upper() for each in state or ()]),
            ("queue", queue),
            ("kind", kind),
            ("scheduled_at>", since_instant(since)),
        ],
    )
    parent = settings.parent if job is None else job_path(settings.tenant, job)
    with connected(settings) as server:

        def fetch(size: int, token: str) -> tuple[Any, str]:
            request = ListRunsRequest(
                parent=parent, page_size=size, page_token=token, filter=conditions
            )
            page = server.call(server.runs.ListRuns, request, what="list runs")
            return page.runs, page.next_page_token

        runs = collect(fetch, limit=limit)
    show_runs(settings, runs, conditions=conditions)


@app.command("get")
@calls_server
def get(settings: Settings, name: RunName) -> None:
    """Show one run with its attempts.

    Examples:

      fencepost runs get nightly/2026-12-01T02:30:00Z

      fencepost runs get nightly/2026-12-01T02:30:00Z -o json

      fencepost --tenant acme runs get nightly/2026-12-01T02:30:00Z
    """
    from fencepost.v1.run_service_pb2 import GetRunRequest, ListAttemptsRequest

    from fencepost_server.cli.connection import connected

    path = run_path(settings.tenant, name)
    with connected(settings) as server:
        what = f"get run {name!r}"
        run = server.call(server.runs.GetRun, GetRunRequest(name=path), what=what).run
        show_run(settings, run)
        if run.attempt and not settings.json:
            request = ListAttemptsRequest(parent=path)
            answer = server.call(server.runs.ListAttempts, request, what=what)
            print()
            print_attempts(answer.attempts)


@app.command("watch")
@calls_server
def watch(settings: Settings, name: RunName, timeout: TimeoutOption = None) -> None:
    """Follow a run to its end; exits 0 if it succeeds, 7 if it ends otherwise, 8 on --timeout.

    Examples:

      fencepost runs watch nightly/2026-12-01T02:30:00Z

      fencepost runs watch nightly/2026-12-01T02:30:00Z --timeout 10m

      fencepost runs watch nightly/2026-12-01T02:30:00Z -o json
    """
    from fencepost_server.cli.connection import connected
    from fencepost_server.cli.following import follow_run

    path = run_path(settings.tenant, name)
    with connected(settings) as server:
        follow_run(settings, server, path, timeout)


@calls_server
def run_job(
    settings: Settings,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name or id of the job.")],
    payload: Annotated[
        str | None, option("--payload", metavar="JSON", help="In place of the job's: JSON, @file.")
    ] = None,
    at: Annotated[
        str | None,
        option("--at", "--run-at", metavar="INSTANT", help="Due at 2027-03-28T09:00:00Z."),
    ] = None,
    delay: Annotated[
        str | None, option("--delay", metavar="DURATION", help="Due this long from now.")
    ] = None,
    unique_key: Annotated[
        str | None,
        option("--unique-key", "--unique", help="Make no second run while one holds the key."),
    ] = None,
    on_conflict: Annotated[
        OnConflict | None,
        option("--on-conflict", help="What to do if one does; default return-existing."),
    ] = None,
    keep_for: Annotated[
        str | None,
        option("--keep-for", metavar="DURATION", help="Keys stay taken after the run's end; 24h."),
    ] = None,
    concurrency_key: Annotated[
        str | None, option("--concurrency-key", help="In place of the job's.")
    ] = None,
    priority: Annotated[int | None, option("--priority", help="0 to 9.")] = None,
    label: Annotated[
        list[str] | None, option("--label", metavar="K=V", help="May be repeated.")
    ] = None,
    watch: Annotated[
        bool, option("--watch", "-w", help="Follow it to its end; exits 0, 7 or 8.")
    ] = False,
    timeout: TimeoutOption = None,
) -> None:
    """Start a run of a job now.

    Examples:

      fencepost run hello --watch

      fencepost run import --payload '{"region": "eu"}'

      fencepost run report --delay 10m --unique-key report-2026-12-01
    """
    from fencepost_server.cli.connection import connected
    from fencepost_server.cli.enqueue import UniqueFlags, build_request
    from fencepost_server.cli.following import follow_run

    request = build_request(
        job=job_path(settings.tenant, job),
        payload=None if payload is None else read_payload(payload),
        at=None if at is None else parse_instant("--at", at),
        delay=None if delay is None else parse_duration("--delay", delay),
        unique=UniqueFlags(key=unique_key, on_conflict=on_conflict, keep_for=keep_for),
        concurrency_key=concurrency_key,
        priority=priority,
        labels=parse_labels(label or ()),
    )
    with connected(settings) as server:
        answer = server.call(server.runs.EnqueueRun, request, what=f"run job {job!r}")
        if answer.existing:
            note(f"no run was made: this one holds the unique key, {state_of(answer.run)}")
        if watch:
            note(f"run {short_run(answer.run.name)}")
            follow_run(settings, server, answer.run.name, timeout)
        elif settings.json:
            print_json(answer.run)
        else:
            print(short_run(answer.run.name))
            note(f"follow it: fencepost runs watch {short_run(answer.run.name)}")


def since_instant(text: str | None) -> str | None:
    """The right side of a "since" condition: an instant, or a duration back from now."""
    if text is None:
        return None
    if "T" in text or "-" in text:
        at = parse_instant("--since", text)
    else:
        at = datetime.now(UTC) - parse_duration("--since", text)
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
