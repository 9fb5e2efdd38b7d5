"""Clears away a postmaster whose parent was killed, so that its directory is free again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fencepost_server.dev.errors import DevError

_POLL_S = 0.05
_STEPS = ((signal.SIGINT, 15.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))


def stop_orphan(pgdata: Path) -> None:
    """Stop a postmaster that still serves `pgdata`, and remove a lock file that would block.

    The caller holds the directory's lock, so a postmaster found here has no parent any more.
    Postgres itself passes over the lock file of a number that nobody has. It stops at one that
    a stranger has, or a dead process that was never waited for, so those are removed here; what
    is left of a killed postmaster's family it still finds by the shared memory.
    """
    lock_file = pgdata / "postmaster.pid"
    try:
        pid = int(lock_file.read_text(errors="replace").split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return
    if not _runs(pid) or not _serves(pid, pgdata) or _stop(pid):
        lock_file.unlink(missing_ok=True)
        return
    raise DevError(
        f"cannot use the data directory {pgdata.parent}",
        why=f"a Postgres left over from an earlier start (pid {pid}) does not end",
        hint=f"end process {pid}, or set FENCEPOST_DEV_DIR to another directory",
    )


def _stop(pid: int) -> bool:
    for number, timeout in _STEPS:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return True
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not _runs(pid):
                return True
            time.sleep(_POLL_S)
    return False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if sys.platform != "linux":
        return True
    # A process that has ended but that nobody has waited for still has its number.
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _serves(pid: int, pgdata: Path) -> bool:
    """Whether `pid` is a postmaster of `pgdata`: its working directory is the data directory."""
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/cwd").resolve(strict=True) == pgdata.resolve()
        except OSError:
            # Not ours to look at, so not ours at all.
            return False
    said = subprocess.run(
        ["ps", "-p", str(pid), "-o", "args="], capture_output=True, text=True, check=False
    )
    return f"-D {pgdata}" in said.stdout
