"""Flags that several commands have, spelled once."""

from typing import Annotated, Any

import typer


def option(*names: str, help: str, metavar: str | None = None) -> Any:
    """A flag whose default is not worth showing."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="JOB/SCHEDULED_AT, as runs list shows it.")
]
ReasonOption = Annotated[str, option("--reason", help="For people; kept with the run.")]
YesOption = Annotated[bool, option("--yes", "-y", help="Do not ask.")]
FilterOption = Annotated[
    str | None, option("--filter", help="""Conditions: 'state=DEAD labels.team=web'.""")
]
JobOption = Annotated[str | None, option("--job", metavar="JOB", help="Only of this job.")]
QueueOption = Annotated[str | None, option("--queue", help="Only of this queue.")]
KindOption = Annotated[str | None, option("--kind", help="Only of this handler.")]
TimeoutOption = Annotated[
    str | None,
    option(
        "--timeout",
        metavar="DURATION",
        help="Give up waiting after this long (exit 8); default: never.",
    ),
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="Lines at most.")]
