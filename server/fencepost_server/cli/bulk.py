"""`fencepost runs bulk`: cancel, replay or discard all runs that match, as an operation."""

from typing import Annotated

import typer

from fencepost_server.cli.bulk_flags import BulkFlags, Canary, read_share
from fencepost_server.cli.failure import usage
from fencepost_server.cli.options import (
    FilterOption,
    JobOption,
    KindOption,
    QueueOption,
    ReasonOption,
    TimeoutOption,
    YesOption,
    option,
)
from fencepost_server.cli.settings import Settings, calls_server

app = typer.Typer(
    help="Many runs at once: replay, cancel, discard; shows what matches and asks first.",
    no_args_is_help=True,
)

SinceOption = Annotated[
    str | None,
    option("--since", metavar="WHEN", help="Died since an instant, or 2h ago."),
]
DueSinceOption = Annotated[
    str | None,
    option("--since", metavar="WHEN", help="Due since an instant, or 2h ago."),
]
ErrorOption = Annotated[
    str | None, option("--error", metavar="CODE", help="Only with this failure code.")
]
RateOption = Annotated[
    str | None, option("--rate", metavar="N", help="Runs changed per second; default 50.")
]
MaxOption = Annotated[
    int, option("--max", metavar="N", help="Change at most so many, oldest first.")
]
DryRunOption = Annotated[bool, option("--dry-run", help="Count and show, change nothing.")]
WatchOption = Annotated[
    bool, option("--watch", "-w", help="Follow the operation; leaving does not stop it.")
]


@app.command("replay")
@calls_server
def replay(
    settings: Settings,
    filter: FilterOption = None,
    job: JobOption = None,
    kind: KindOption = None,
    queue: QueueOption = None,
    error: ErrorOption = None,
    since: SinceOption = None,
    canary: Annotated[
        str | None,
        option(
            "--canary",
            metavar="SHARE",
            help="Replay only so many, 1% or 20, wait for their ends, tell, and stop.",
        ),
    ] = None,
    rate: RateOption = None,
    max_runs: MaxOption = 0,
    stop_when_failing: Annotated[
        str | None,
        option(
            "--stop-when-failing",
            metavar="SHARE",
            help="Stop when more than 20% (or 0.2) of at least 20 that ended are dead again.",
        ),
    ] = None,
    newest_version: Annotated[
        bool, option("--newest-version", help="As the jobs are now, not as they were.")
    ] = False,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    watch: WatchOption = False,
    timeout: TimeoutOption = None,
    yes: YesOption = False,
) -> None:
    """Replay all dead letters that match; goes on without this command.

    Examples:

      fencepost runs bulk replay --kind invoice.send --error SMTP --since 6h --dry-run

      fencepost runs bulk replay --filter 'last_failure.code=SMTP' --canary 1%

      fencepost runs bulk replay --job invoice --rate 50 --stop-when-failing 20% --watch
    """
    from fencepost_server.cli.bulk_change import change

    if canary is not None and max_runs:
        raise usage("--canary and --max do not go together", why="both say how many")
    share = None if stop_when_failing is None else read_share(stop_when_failing)
    flags = BulkFlags(
        action="replay",
        filter=filter,
        job=job,
        kind=kind,
        queue=queue,
        error=error,
        since=since,
        canary=None if canary is None else Canary.read(canary),
        rate=rate,
        max_runs=max_runs,
        stop_when_failing=share,
        newest_version=newest_version,
        reason=reason,
        dry_run=dry_run,
        watch=watch,
        timeout=timeout,
        yes=yes,
    )
    change(settings, flags)


@app.command("discard")
@calls_server
def discard(
    settings: Settings,
    filter: FilterOption = None,
    job: JobOption = None,
    kind: KindOption = None,
    queue: QueueOption = None,
    error: ErrorOption = None,
    since: SinceOption = None,
    rate: RateOption = None,
    max_runs: MaxOption = 0,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    watch: WatchOption = False,
    timeout: TimeoutOption = None,
    yes: YesOption = False,
) -> None:
    """Give all dead letters up that match; none of them can be replayed afterwards.

    Examples:

      fencepost runs bulk discard --job invoice --dry-run

      fencepost runs bulk discard --job invoice --reason "paid by hand"

      fencepost runs bulk discard --filter 'last_failure.code=GONE' --yes --watch
    """
    from fencepost_server.cli.bulk_change import change

    flags = BulkFlags(
        action="discard",
        filter=filter,
        job=job,
        kind=kind,
        queue=queue,
        error=error,
        since=since,
        rate=rate,
        max_runs=max_runs,
        reason=reason,
        dry_run=dry_run,
        watch=watch,
        timeout=timeout,
        yes=yes,
    )
    change(settings, flags)


@app.command("cancel")
@calls_server
def cancel(
    settings: Settings,
    filter: FilterOption = None,
    job: JobOption = None,
    kind: KindOption = None,
    queue: QueueOption = None,
    since: DueSinceOption = None,
    rate: RateOption = None,
    max_runs: MaxOption = 0,
    reason: ReasonOption = "",
    dry_run: DryRunOption = False,
    watch: WatchOption = False,
    timeout: TimeoutOption = None,
    yes: YesOption = False,
) -> None:
    """Cancel all live runs that match: those that wait at once, those that run by their workers.

    Examples:

      fencepost runs bulk cancel --job import --dry-run

      fencepost runs bulk cancel --queue mail --filter 'state=QUEUED' --reason "sent twice"

      fencepost runs bulk cancel --filter 'labels.batch=17' --rate 200 --yes --watch
    """
    from fencepost_server.cli.bulk_change import change

    flags = BulkFlags(
        action="cancel",
        filter=filter,
        job=job,
        kind=kind,
        queue=queue,
        since=since,
        rate=rate,
        max_runs=max_runs,
        reason=reason,
        dry_run=dry_run,
        watch=watch,
        timeout=timeout,
        yes=yes,
    )
    change(settings, flags)
