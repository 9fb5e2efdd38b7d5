"""Starts processes that do not outlive this one: Linux signals them when their parent dies."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1


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
        [str(part) for part in argv],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_death_pact(death_signal),
        user=None if account is None else account.uid,
        group=None if account is None else account.gid,
        extra_groups=None if account is None else [],
    )


def run_as(
    account: Account | None,
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    input_text: str = "",
) -> "subprocess.CompletedProcess[str]":
    """Run `argv` to its end as `account` (None: as this user) and hand back what it said."""
    return subprocess.run(
        [str(part) for part in argv],
        env=env,
        cwd="/",
        input=input_text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        timeout=120,
        preexec_fn=_death_pact(signal.SIGKILL),
        user=None if account is None else account.uid,
        group=None if account is None else account.gid,
        extra_groups=None if account is None else [],
    )


def _death_pact(death_signal: signal.Signals) -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        # Runs after the switch of user, which would clear the setting.
        libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
