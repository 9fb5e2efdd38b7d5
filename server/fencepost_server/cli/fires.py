"""`fencepost jobs fires` and `fencepost jobs backfill`: what became of a job's fires, and how to
make those that never ran."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.failure import note
from fencepost_server.cli.operation_view import show_operation
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.tables import instant, one_line, print_json, print_json_list, print_rows
from fencepost_server.cli.values import (
    job_path,
    last_part,
    parse_duration,
    parse_instant,
    short_run,
)

if TYPE_CHECKING:
    from fencepost.v1.schedule_pb2 import Fire

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name or id of the job.")]
_COUNT_CAPPED = 10_000
_CALL_TIMEOUT_S = 35.0


def _option(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


@calls_server
def fires(
    settings: Settings,
    name: JobName,
    since: Annotated[
        str | None,
        _option(
            "--since", metavar="WHEN", help="An instant, or 7d ago; default: 7d before --until."
        ),
    ] = None,
    until: Annotated[
        str | None, _option("--until", metavar="WHEN", help="An instant, or 1h ago; default: now.")
    ] = None,
    skipped: Annotated[
        bool, typer.Option("--skipped", help="Only fires that made no run.", show_default=False)
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000)] = LIMIT_DEFAULT,
) -> None:
    """Show what became of every fire of a job, newest first: its run, or why there is none.

    Examples:

      fencepost jobs fires nightly

      fencepost jobs fires nightly --since 30d --skipped

      fencepost jobs fires nightly --since 2027-03-28T00:00:00+01:00 --until 1h -o json
    """
    from fencepost.v1.job_service_pb2 import ListFiresRequest
    from fencepost.v1.schedule_pb2 import FIRE_DISPOSITION_SKIPPED

    from fencepost_server.cli.connection import connected

    request = ListFiresRequest(parent=job_path(settings.tenant, name))
    if until is not None:
        request.until.FromDatetime(parse_moment("--until", until))
    if since is not None:
        request.since.FromDatetime(parse_moment("--since", since))
    if skipped:
        request.dispositions.append(FIRE_DISPOSITION_SKIPPED)
    with connected(settings) as server:

        def fetch(size: int, token: str) -> tuple[Any, str]:
            request.page_size, request.page_token = size, token
            page = server.call(
                server.jobs.ListFires,
                request,
                what=f"list fires of job {name!r}",
                timeout_s=_CALL_TIMEOUT_S,
            )
            return page.fires, page.next_page_token

        found = collect(fetch, limit=limit)
    if settings.json:
        print_json_list("fires", found)
    elif not found:
        note("no such fires in this range; look further back with --since 30d")
    else:
        print_fires(found)


@calls_server
def backfill(
    settings: Settings,
    name: JobName,
    since: Annotated[
        str, typer.Option("--since", metavar="WHEN", help="First instant, or 7d ago.")
    ],
    until: Annotated[
        str | None,
        _option("--until", metavar="WHEN", help="End, exclusive; an instant, or 1h ago; now."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count and show, make nothing.", show_default=False)
    ] = False,
    rate: Annotated[float, _option("--rate", help="Runs made per second; default 10.")] = 0.0,
    allow_overlap: Annotated[
        bool,
        typer.Option(
            "--allow-overlap",
            help="Runs side by side, not one after the other.",
            show_default=False,
        ),
    ] = False,
    max_runs: Annotated[
        int, _option("--max-runs", help="Refuse a range with more fires; default 10000.")
    ] = 0,
    reason: Annotated[str, _option("--reason", help="Kept with the operation.")] = "",
) -> None:
    """Make the runs of past fires that have none; goes on without this command.

    Examples:

      fencepost jobs backfill nightly --since 7d --dry-run

      fencepost jobs backfill nightly --since 2027-03-01T00:00:00Z --until 2027-03-08T00:00:00Z

      fencepost jobs backfill nightly --since 7d --rate 50 --allow-overlap
    """
    from fencepost.v1.job_service_pb2 import BackfillJobRequest
    from fencepost.v1.schedule_pb2 import OVERLAP_POLICY_ALLOW, OVERLAP_POLICY_QUEUE_ALL

    from fencepost_server.cli.connection import connected, new_request_id

    request = BackfillJobRequest(
        name=job_path(settings.tenant, name),
        overlap_policy=OVERLAP_POLICY_ALLOW if allow_overlap else OVERLAP_POLICY_QUEUE_ALL,
        rate=rate,
        max_runs=max_runs,
        dry_run=dry_run,
        reason=reason,
        request_id=new_request_id(),
    )
    request.since.FromDatetime(parse_moment("--since", since))
    request.until.FromDatetime(parse_moment("--until", "0s" if until is None else until))
    with connected(settings) as server:
        answer = server.call(
            server.jobs.BackfillJob,
            request,
            what=f"backfill job {name!r}",
            timeout_s=_CALL_TIMEOUT_S,
        )
    if settings.json:
        print_json(answer)
        return
    if dry_run:
        if answer.samples:
            print_fires(answer.samples)
        note(f"{answer.matched} fires would get a run; nothing was made")
        return
    show_operation(settings, answer.operation)
    operation_id = last_part(answer.operation.name)
    note(f"{answer.matched} fires get a run; follow it: fencepost ops watch {operation_id}")


def parse_moment(flag: str, text: str) -> datetime:
    """An instant with its offset, or a duration back from now."""
    if "T" in text or "-" in text:
        return parse_instant(flag, text)
    return datetime.now(UTC) - parse_duration(flag, text)


def print_fires(found: "list[Fire]") -> None:
    """A line for each entry; local times are those of the schedule's zone."""
    print_rows(
        ("LOCAL TIME", "DISPOSITION", "FIRES", "UNTIL", "RUN", "VERSION", "NOTE"),
        [
            (
                fire.local_time,
                disposition_of(fire),
                f"{fire.count}+" if fire.count >= _COUNT_CAPPED else str(fire.count),
                instant(fire, "last_scheduled_at"),
                short_run(fire.run_name),
                str(fire.job_version),
                one_line(fire.detail, 100),
            )
            for fire in found
        ],
    )


def disposition_of(fire: "Fire") -> str:
    """What became of it in words: "fired", "skipped (overlap)"."""
    from fencepost.v1.schedule_pb2 import FireDisposition, SkipReason

    said = FireDisposition.Name(fire.disposition).removeprefix("FIRE_DISPOSITION_").lower()
    words = said.replace("_", " ")
    if not fire.skip_reason:
        return words
    reason = SkipReason.Name(fire.skip_reason).removeprefix("SKIP_REASON_").lower()
    return f"{words} ({reason.replace('_', ' ')})"
