"""`fencepost dead`: dead letters are listed, and grouped by what killed them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli import bulk
from fencepost_server.cli.failure import note
from fencepost_server.cli.options import (
    FilterOption,
    JobOption,
    KindOption,
    LimitOption,
    QueueOption,
    option,
)
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect, join_filter
from fencepost_server.cli.run_view import show_runs
from fencepost_server.cli.runs import since_instant
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.tables import instant, one_line, print_json, print_rows
from fencepost_server.cli.values import job_path, last_part, short_run

if TYPE_CHECKING:
    from fencepost.v1.run_service_pb2 import DeadLetterGroup, ListDeadLetterGroupsResponse

app = typer.Typer(help="Dead letters: list, group, replay, discard.", no_args_is_help=True)
app.command("replay")(bulk.replay)
app.command("discard")(bulk.discard)


@app.command("list")
@calls_server
def list_dead(
    settings: Settings,
    filter: FilterOption = None,
    job: JobOption = None,
    kind: KindOption = None,
    queue: QueueOption = None,
    error: bulk.ErrorOption = None,
    since: bulk.SinceOption = None,
    discarded: Annotated[bool, option("--discarded", help="Also those given up.")] = False,
    limit: LimitOption = LIMIT_DEFAULT,
) -> None:
    """List dead letters, the newest due instant first.

    Examples:

      fencepost dead list

      fencepost dead list --kind invoice.send --error SMTP --since 6h

      fencepost dead list --job invoice -o json
    """
    from fencepost.v1.run_service_pb2 import ListRunsRequest

    from fencepost_server.cli.connection import connected

    conditions = _conditions(filter, kind, queue, error, since, state="DEAD")
    parent = settings.parent if job is None else job_path(settings.tenant, job)
    with connected(settings) as server:

        def fetch(size: int, token: str) -> tuple[Any, str]:
            request = ListRunsRequest(
                parent=parent, page_size=size, page_token=token, filter=conditions
            )
            page = server.call(server.runs.ListRuns, request, what="list dead letters")
            kept = [run for run in page.runs if discarded or not run.HasField("discarded_at")]
            return kept, page.next_page_token

        runs = collect(fetch, limit=limit)
    show_runs(settings, runs, conditions=conditions)


@app.command("groups")
@calls_server
def groups(
    settings: Settings,
    filter: FilterOption = None,
    job: JobOption = None,
    kind: KindOption = None,
    queue: QueueOption = None,
    error: bulk.ErrorOption = None,
    since: bulk.SinceOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100, help="Groups at most.")] = 20,
) -> None:
    """Group dead letters by job, kind, failure code and reason; the newest death first.

    Examples:

      fencepost dead groups

      fencepost dead groups --since 24h

      fencepost dead groups --job invoice -o json
    """
    from fencepost.v1.run_service_pb2 import ListDeadLetterGroupsRequest

    from fencepost_server.cli.connection import connected

    request = ListDeadLetterGroupsRequest(
        parent=settings.parent if job is None else job_path(settings.tenant, job),
        filter=_conditions(filter, kind, queue, error, since),
        page_size=limit,
    )
    with connected(settings) as server:
        answer = server.call(
            server.runs.ListDeadLetterGroups, request, what="group dead letters", timeout_s=35
        )
    if settings.json:
        print_json(answer)
    elif not answer.groups:
        note(
            "no dead letters" if not request.filter else f"no dead letter matches {request.filter}"
        )
    else:
        _show_groups(answer)


def _show_groups(answer: "ListDeadLetterGroupsResponse") -> None:
    print_rows(
        ("COUNT", "JOB", "KIND", "FAILURE", "REASON", "FIRST", "LAST", "SAMPLE", "MESSAGE"),
        [
            (
                str(each.count),
                last_part(each.job),
                each.kind,
                each.failure_code,
                _reason(each),
                instant(each, "oldest_ended_at"),
                instant(each, "newest_ended_at"),
                short_run(each.sample_run),
                one_line(each.sample_message),
            )
            for each in answer.groups
        ],
    )
    if answer.total_groups > len(answer.groups):
        note(f"the first {len(answer.groups)} of {answer.total_groups} groups; more with --limit")
    note("replay a group: fencepost dead replay --job JOB --error CODE --canary 1%")


def _reason(group: "DeadLetterGroup") -> str:
    from fencepost.v1.run_pb2 import DeadReason

    if group.dead_reason not in DeadReason.values():
        return str(group.dead_reason)
    name = DeadReason.Name(group.dead_reason).removeprefix("DEAD_REASON_")
    return name.lower().replace("_", " ")


def _conditions(
    filter: str | None,
    kind: str | None,
    queue: str | None,
    error: str | None,
    since: str | None,
    *,
    state: str | None = None,
) -> str:
    return join_filter(
        filter,
        [
            ("state", state),
            ("kind", kind),
            ("queue", queue),
            ("last_failure.code", error),
            ("ended_at>", since_instant(since)),
        ],
    )
