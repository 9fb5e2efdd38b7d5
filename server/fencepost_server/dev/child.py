"""Starts processes that do not outlive this one: Linux signals them when their parent dies.

The pact is made by a few lines of Python that then become the program. Made in the child
between fork and exec it would run beside the locks of other threads (gRPC has some), and
now and then crash there.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_CANNOT_RUN = 126
# Arguments: this process, the signal, uid and gid (-1: as this user), then the program. The
# switch of user comes first, because it would clear the setting (PR_SET_PDEATHSIG is 1).
_PACT = """
import ctypes, os, sys
parent, number, uid, gid = map(int, sys.argv[1:5])
if uid >= 0:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
ctypes.CDLL(None).prctl(1, number, 0, 0, 0)
if os.getppid() != parent:
    os._exit(1)
try:
    os.execvp(sys.argv[5], sys.argv[5:])
except OSError as error:
    os.write(2, f"{error.errno} {error.strerror}".encode())
    os._exit(126)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The user that a child runs as when this process is root."""

    name: str
    uid: int
    gid: int


def start_child(
    argv: Sequence[str | Path],
    *,
    death_signal: signal.Signals,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    account: Account | None = None,
    stdout: int | IO[bytes] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `argv` in a session of its own, standard error joined to standard output.

    A session of its own keeps a terminal's Ctrl-C from reaching the child: its parent decides
    the order of the stops. `death_signal` is what the kernel sends it if this process dies
    first; it is tied to the calling *thread*, so call this from the main thread.
    """
    return subprocess.Popen(
        _with_pact(argv, death_signal, account),
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run_as(
    account: Account | None,
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    input_text: str = "",
) -> "subprocess.CompletedProcess[str]":
    """Run `argv` to its end as `account` (None: as this user) and hand back what it said.

    Raises OSError if it cannot be run at all.
    """
    ended = subprocess.run(
        _with_pact(argv, signal.SIGKILL, account),
        env=env,
        cwd="/",
        input=input_text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=120,
    )
    if ended.returncode == _CANNOT_RUN:
        number, _, text = ended.stdout.partition(" ")
        raise OSError(int(number) if number.isdigit() else 0, text, str(argv[0]))
    return ended


def _with_pact(
    argv: Sequence[str | Path], death_signal: signal.Signals, account: Account | None
) -> list[str]:
    program = [str(part) for part in argv]
    if sys.platform != "linux":
        assert account is None, "only on Linux root becomes another user"
        return program
    ids = (-1, -1) if account is None else (account.uid, account.gid)
    numbers = [str(number) for number in (os.getpid(), int(death_signal), *ids)]
    return [sys.executable, "-I", "-S", "-c", _PACT, *numbers, *program]
