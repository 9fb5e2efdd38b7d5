"""Puts the commands together; importing this must stay cheap, so nothing here needs gRPC."""

from typing import TYPE_CHECKING, Annotated

import typer
import typer.main

from fencepost_server.cli import (
    bulk,
    calendars,
    dead,
    explain,
    fires,
    forecast,
    jobs,
    ops,
    process,
    queues,
    relay,
    runs,
    steer,
    tail,
    tenants,
    tz_diff,
    why,
    workers,
)
from fencepost_server.cli.settings import (
    Given,
    OutputOption,
    ServerOption,
    TenantOption,
    VerboseOption,
)

if TYPE_CHECKING:
    from typer._click import Command


def build() -> "Command":
    """The whole tree."""
    app = typer.Typer(
        name="fencepost",
        help="Fencepost: a distributed job scheduler.",
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_globals)
    app.command("dev")(process.dev)
    app.command("server")(process.server)
    app.command("migrate")(process.migrate)
    app.command("run")(runs.run_job)
    app.command("explain")(explain.explain)
    app.command("tz-diff")(tz_diff.tz_diff)
    app.command("forecast")(forecast.forecast)
    app.command("relay")(relay.relay)
    jobs.app.command("fires")(fires.fires)
    jobs.app.command("backfill")(fires.backfill)
    runs.app.command("why")(why.why)
    runs.app.command("tail")(tail.tail)
    runs.app.command("cancel")(steer.cancel)
    runs.app.command("replay")(steer.replay)
    runs.app.command("discard")(steer.discard)
    runs.app.add_typer(bulk.app, name="bulk")
    app.add_typer(jobs.app, name="jobs")
    app.add_typer(runs.app, name="runs")
    app.add_typer(dead.app, name="dead")
    app.add_typer(queues.app, name="queues")
    app.add_typer(calendars.app, name="calendars")
    app.add_typer(tenants.app, name="tenants")
    app.add_typer(workers.app, name="workers")
    app.add_typer(ops.app, name="ops")
    return typer.main.get_command(app)


def _globals(
    context: typer.Context,
    server: ServerOption = None,
    tenant: TenantOption = None,
    output: OutputOption = None,
    verbose: VerboseOption = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    context.obj = Given(server=server, tenant=tenant, output=output, verbose=verbose)
