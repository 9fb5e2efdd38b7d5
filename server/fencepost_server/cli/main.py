"""The command `fencepost`: the tree of commands, and the one place where their errors end."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer.exceptions import TyperException

    from fencepost_server.cli.failure import CliError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        # Scripts ask this often, and it needs nothing of what is below.
        from importlib import metadata

        print(f"fencepost {metadata.version('fencepost-server')}")
        return 0
    return _run(arguments)


def _run(arguments: list[str]) -> int:
    import typer.exceptions

    from fencepost_server.cli.failure import CliError, ExitCode, show
    from fencepost_server.cli.tree import build

    verbose = "-v" in arguments or "--verbose" in arguments
    command = build()
    try:
        code = command.main(arguments, prog_name="fencepost", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else ExitCode.DONE
    except CliError as error:
        show(error, verbose=verbose)
        return error.exit_code
    except typer.exceptions.TyperException as error:
        show(_in_parts(error), verbose=verbose)
        return ExitCode.USAGE
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader left (head, less); the interpreter must not try to flush to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE


def _in_parts(error: "TyperException") -> "CliError":
    from fencepost_server.cli.failure import usage

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "fencepost"
    return usage(f"{path}: {error.format_message()}", why="", hint=f"{path} --help")
