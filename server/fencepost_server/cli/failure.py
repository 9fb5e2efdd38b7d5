"""How a command ends other than well: an error in its parts, and an exit code for its kind."""

import sys
from enum import IntEnum


class ExitCode(IntEnum):
    """What a script can tell from the end of a command."""

    DONE = 0
    FAILED = 1
    # The command was typed wrong, or the server refused a value that was typed.
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    # It exists already, or has changed underneath.
    CONFLICT = 5
    # The server cannot be reached, or did not answer in time.
    UNREACHABLE = 6
    # The run that was waited for ended, and not well.
    RUN_UNSUCCESSFUL = 7
    # Gave up waiting; the run goes on.
    STILL_RUNNING = 8
    # What was compared is not the same.
    DIFFERENT = 9
    INTERRUPTED = 130


class CliError(Exception):
    """What failed, why, and what to try; `status` is shown with -v only."""

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        hint: str = "",
        exit_code: ExitCode = ExitCode.FAILED,
        status: str = "",
        reason: str = "",
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint
        self.exit_code = exit_code
        self.status = status
        self.reason = reason


def usage(what: str, *, why: str, hint: str = "") -> CliError:
    """The error for a value that was typed wrong."""
    return CliError(what, why=why, hint=hint, exit_code=ExitCode.USAGE)


def show(error: CliError, *, verbose: bool = False) -> None:
    """Print the parts that are set to standard error."""
    lines = [f"error: {error.what}"]
    parts = [("why", error.why), ("try", error.hint)]
    if verbose:
        parts.append(("status", error.status))
    lines += [f"  {name + ':':<8}{text}" for name, text in parts if text]
    print("\n".join(lines), file=sys.stderr)


def note(text: str) -> None:
    """Progress and hints go to standard error: standard output is data only."""
    print(text, file=sys.stderr, flush=True)
