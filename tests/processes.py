"""Looks at processes from outside: who started whom, and whether they are gone."""

import time
from pathlib import Path


def wait_until_gone(pid: int, *, seconds: float = 20) -> None:
    """Return when the process has ended; AssertionError if it has not after `seconds`."""
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs after {seconds} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not waited for does not."""
    return _stat(pid)[0] not in ("", "Z", "X")


def descendants(pid: int) -> dict[int, str]:
    """All processes that `pid` started, and those that they started, with their names."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parents[int(entry.name)] = int(_stat(int(entry.name))[1] or 0)
    found: dict[int, str] = {}
    grown = True
    while grown:
        new = [
            child
            for child, parent in parents.items()
            if child not in found and (parent == pid or parent in found)
        ]
        found |= {child: _name(child) for child in new}
        grown = bool(new)
    return found


def _stat(pid: int) -> tuple[str, str]:
    """State and parent of a process; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, parent


def _name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return " ".join(words).strip()
