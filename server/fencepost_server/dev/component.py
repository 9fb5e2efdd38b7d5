"""The child processes of `fencepost dev`: started, listened to, and stopped one after the other."""

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fencepost_server.dev.child import start_child

# Lines that wait to be printed; when full, a talkative child waits too.
_LINES_MAX = 1000
_POLL_S = 0.1

_LAST_WORDS_S = 2.0

Say = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    process: "subprocess.Popen[bytes]"
    reader: threading.Thread


class Components:
    """Children with one log: every line they print comes out through `say(name, line)`."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lines: queue.Queue[tuple[str, str]] = queue.Queue(_LINES_MAX)
        self._running: dict[str, _Child] = {}

    def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str]) -> None:
        """Start a child that is killed outright if this process dies without stopping it."""
        process = start_child(argv, death_signal=signal.SIGKILL, env=env, stdout=subprocess.PIPE)
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        self._running[name] = _Child(process=process, reader=reader)
        reader.start()

    def relay(self) -> None:
        """Print what was said, waiting a moment for something to be said."""
        try:
            self._say(*self._lines.get(timeout=_POLL_S))
        except queue.Empty:
            return
        self._relay_rest()

    def ended(self) -> tuple[str, int] | None:
        """Name and exit code of a child that ended since the last call; None: none did."""
        for name, child in self._running.items():
            code = child.process.poll()
            if code is not None:
                self._close(name)
                return name, code
        return None

    def stop(self, name: str, *, timeout_s: float, hurry: Callable[[], bool]) -> bool:
        """SIGTERM, and SIGKILL after `timeout_s` or when `hurry()`; False if it had to be killed.

        What it says on the way out is still printed. Not running: no-op.
        """
        if name not in self._running:
            return True
        process = self._running[name].process
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        in_time = True
        while process.poll() is None:
            if in_time and (hurry() or time.monotonic() > deadline):
                process.kill()
                in_time = False
            self.relay()
        self._close(name)
        return in_time

    def kill_all(self) -> None:
        """Nothing may outlive this process, however it ends."""
        for name, child in list(self._running.items()):
            child.process.kill()
            child.process.wait()
            self._close(name)

    def _read(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.put((name, line.decode(errors="replace").rstrip()))

    def _close(self, name: str) -> None:
        """Forget a child that has ended, after the last of its lines."""
        reader = self._running.pop(name).reader
        # Something it started may hold its output open; that is not waited for.
        deadline = time.monotonic() + _LAST_WORDS_S
        while reader.is_alive() and time.monotonic() < deadline:
            self._relay_rest()
            reader.join(0.01)
        self._relay_rest()

    def _relay_rest(self) -> None:
        while True:
            try:
                self._say(*self._lines.get_nowait())
            except queue.Empty:
                return
