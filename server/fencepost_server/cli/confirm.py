"""Asks before a command that cannot be taken back."""

import sys

import typer

from fencepost_server.cli.failure import CliError, ExitCode


def confirm(what: str, *, yes: bool) -> None:
    """Returns if `yes` or if a person agrees. Raises CliError: no terminal to ask on, or a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CliError(
            f"will not {what} without being asked",
            why="there is no terminal to ask on",
            hint="say --yes",
            exit_code=ExitCode.USAGE,
        )
    if not typer.confirm(f"{what}?", err=True):
        raise CliError("nothing was changed", why="you said no")
