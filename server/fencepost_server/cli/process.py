"""`fencepost server`, `migrate` and `dev`: commands that are processes rather than calls."""

import os
import sys
from typing import Annotated

import typer

from fencepost_server.cli.failure import CliError, ExitCode, note

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="Postgres; else FENCEPOST_DATABASE_URL.",
        show_default=False,
    ),
]


def server(
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Address of gRPC; else FENCEPOST_LISTEN, else 127.0.0.1:7600.",
            show_default=False,
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            "--roles",
            metavar="LIST",
            help="api, scheduler or both; else FENCEPOST_ROLES, else both.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that others can reach.")
    ] = False,
    reflection: Annotated[
        bool,
        typer.Option("--reflection/--no-reflection", help="Let grpcurl read the contract."),
    ] = True,
    database_url: DatabaseOption = None,
) -> None:
    """Run a server until SIGTERM or Ctrl-C, which drain it. Settings are FENCEPOST_* variables.

    Examples:

      fencepost server --database-url postgresql://fencepost@localhost/fencepost

      fencepost server --listen 127.0.0.1:7700 --roles api

      FENCEPOST_LOG_FORMAT=json fencepost server
    """
    given = {
        "LISTEN": listen,
        "ROLES": roles,
        "DATABASE_URL": database_url,
        "INSECURE": "true" if insecure else None,
        "REFLECTION": None if reflection else "false",
    }
    os.environ.update({f"FENCEPOST_{key}": value for key, value in given.items() if value})
    _check_settings()
    os.execv(sys.executable, [sys.executable, "-m", "fencepost_server"])


def migrate(database_url: DatabaseOption = None) -> None:
    """Bring the database to the newest schema; safe to repeat, and at the same time elsewhere.

    Examples:

      fencepost migrate --database-url postgresql://fencepost@localhost/fencepost

      FENCEPOST_DATABASE_URL=postgresql://localhost/fencepost fencepost migrate

      fencepost migrate && fencepost server
    """
    import asyncio

    import asyncpg

    from fencepost_server.errors import StorageUnavailable
    from fencepost_server.store import migrate as migrations

    if database_url:
        os.environ["FENCEPOST_DATABASE_URL"] = database_url
    dsn = _check_settings()
    try:
        applied = asyncio.run(migrations.migrate(dsn))
    except StorageUnavailable as error:
        raise CliError(
            "cannot migrate the database",
            why=str(error.__cause__ or error),
            hint="check that Postgres runs where the URL says",
            exit_code=ExitCode.UNREACHABLE,
        ) from error
    except (migrations.MigrationError, asyncpg.PostgresError) as error:
        raise CliError(
            "cannot migrate the database", why=str(error), exit_code=ExitCode.CONFLICT
        ) from error
    for name in applied:
        print(name)
    note(f"applied {len(applied)}" if applied else "nothing to apply: the schema is the newest")


def dev(
    demo: Annotated[bool, typer.Option("--demo", help="Also a demo worker and demo jobs.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Clear the data first.")] = False,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Address of gRPC.")
    ] = "127.0.0.1:7600",
) -> None:
    """Start everything on this machine: Postgres, server, scheduler. Ctrl-C drains and stops it.

    Data is kept in ~/.local/share/fencepost/dev, or where FENCEPOST_DEV_DIR says.
    FENCEPOST_DATABASE_URL names a running Postgres to use instead.

    Examples:

      fencepost dev --demo

      fencepost dev --listen 127.0.0.1:7700

      fencepost dev --demo --reset
    """
    argv = [sys.executable, "-m", "fencepost_server.dev", "--listen", listen]
    argv += ["--demo"] if demo else []
    argv += ["--reset"] if reset else []
    # The same process goes on as the development set-up, so signals reach it directly.
    os.execv(sys.executable, argv)


def _check_settings() -> str:
    """Refuse wrong settings before anything starts; returns the database's URL."""
    from fencepost_server.config import ConfigError, load_config

    try:
        return load_config().database_url
    except ConfigError as error:
        raise CliError(
            "the settings do not pass",
            why="; ".join(error.problems),
            hint="without a Postgres of your own: fencepost dev",
            exit_code=ExitCode.USAGE,
        ) from error
