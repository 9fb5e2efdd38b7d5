"""`fencepost relay`: runs for applications that write what they want into an outbox."""

import os
from typing import Annotated

import typer

from fencepost_server.cli.failure import CliError, ExitCode, note, usage
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.values import parse_duration

_DATABASE = "FENCEPOST_OUTBOX_DATABASE_URL"
_LEVELS, _FORMATS = ("debug", "info", "warning", "error"), ("auto", "console", "json")


@calls_server
def relay(
    settings: Settings,
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database-url",
            metavar="URL",
            help=f"The application's Postgres; else {_DATABASE}.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, max=1000, help="Rows taken at once.")
    ] = 500,
    poll: Annotated[
        str, typer.Option("--poll", metavar="DURATION", help="How often an empty outbox is read.")
    ] = "1s",
    once: Annotated[
        bool, typer.Option("--once", help="End when nothing is due.", show_default=False)
    ] = False,
    print_ddl: Annotated[
        bool,
        typer.Option("--print-ddl", help="Print the table's SQL and end.", show_default=False),
    ] = False,
) -> None:
    """Make the runs that an application asks for in its table fencepost_outbox.

    Runs until SIGTERM or Ctrl-C. Safe to start twice, and to kill at any moment.

    Examples:

      fencepost relay --print-ddl | psql "$APP_DATABASE_URL"

      fencepost relay --database-url "$APP_DATABASE_URL" --tenant acme

      fencepost relay --database-url "$APP_DATABASE_URL" --once
    """
    if print_ddl:
        from fencepost_server.store.outbox import outbox_table

        print(outbox_table(), end="")
        return
    dsn = database_url or os.environ.get(_DATABASE)
    if not dsn:
        raise usage(
            "which database is the outbox in?",
            why=f"neither --database-url nor {_DATABASE} says it",
            hint="fencepost relay --database-url postgresql://app@localhost/app",
        )
    poll_s = parse_duration("--poll", poll).total_seconds()
    if not 0.01 <= poll_s <= 3600:
        raise usage(f"--poll {poll!r} is out of range", why="it is 10ms to 1h")
    _log_as_servers_do()
    _relay(settings, dsn, batch=batch, poll_s=poll_s, once=once)


def _relay(settings: Settings, dsn: str, *, batch: int, poll_s: float, once: bool) -> None:
    import uvloop

    from fencepost_server.cli.relaying import RelayOptions
    from fencepost_server.cli.relaying import relay as relay_rows
    from fencepost_server.store.outbox import OutboxUnusable

    options = RelayOptions(database_url=dsn, batch=batch, poll_s=poll_s, once=once)
    try:
        tally = uvloop.run(relay_rows(settings, options))
    except OutboxUnusable as error:
        raise CliError(
            "cannot use the outbox",
            why=str(error),
            hint='is the table there? fencepost relay --print-ddl | psql "$APP_DATABASE_URL"',
        ) from error
    if not once:
        return
    note(f"{tally.sent} sent · {tally.failed} failed · {tally.put_off} put off")
    if tally.away:
        raise CliError(
            "cannot relay all rows",
            why=tally.away,
            hint="they stay in the outbox; try again",
            exit_code=ExitCode.UNREACHABLE,
        )
    if tally.failed:
        raise CliError(
            f"{tally.failed} rows were refused",
            hint="see them: SELECT id, job, failure FROM fencepost_outbox "
            "WHERE failed_at IS NOT NULL",
        )


def _log_as_servers_do() -> None:
    from fencepost_server.telemetry import configure_logging

    level = os.environ.get("FENCEPOST_LOG_LEVEL") or "info"
    style = os.environ.get("FENCEPOST_LOG_FORMAT") or "auto"
    for name, value, allowed in (
        ("FENCEPOST_LOG_LEVEL", level, _LEVELS),
        ("FENCEPOST_LOG_FORMAT", style, _FORMATS),
    ):
        if value not in allowed:
            raise usage(f"{name}={value} is not known", why=f"it is one of {', '.join(allowed)}")
    configure_logging(level=level, style=style)
