"""Starts servers and workers as real processes, for tests that kill and freeze them."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WORKER = Path(__file__).with_name("soak_worker.py")


class Process:
    """A child whose standard error is read line by line; ended by `stop`."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self.lines: list[str] = []
        self._arrived: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.popen = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, *, seconds: float = 60) -> str:
        """The first line from here on that contains `text`."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                line = self._arrived.get(timeout=max(0.0, left))
            except queue.Empty:
                shown = "\n".join(self.lines[-50:])
                raise AssertionError(
                    f"no line contains {text!r} after {seconds} s:\n{shown}"
                ) from None
            if text in line:
                return line

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.popen.send_signal(number)

    def stop(self, *, seconds: float = 60) -> int:
        """SIGTERM, and the exit code; a process that does not leave is killed and an error."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise AssertionError("\n".join(["did not leave:", *self.lines[-50:]])) from None
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr:
            for line in self.popen.stderr:
                self.lines.append(line.rstrip())
                self._arrived.put(line.rstrip())


class Server(Process):
    """A server process on a free port."""

    def __init__(self, database_url: str, *, listen: str = "127.0.0.1:0", **settings: str) -> None:
        super().__init__(
            [sys.executable, "-m", "fencepost_server"],
            FENCEPOST_DATABASE_URL=database_url,
            FENCEPOST_LISTEN=listen,
            FENCEPOST_LOG_FORMAT="json",
            **settings,
        )
        started = json.loads(self.wait_for('"event": "serving"'))
        self.address = f"127.0.0.1:{started['port']}"


@contextmanager
def fleet() -> Iterator[list[Process]]:
    """A list to put processes into; all of them are gone afterwards, the newest first."""
    processes: list[Process] = []
    try:
        yield processes
    finally:
        for process in reversed(processes):
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGCONT)
                process.popen.kill()
                process.popen.wait()


def start_worker(address: str, tenants: list[str], log: Path) -> Process:
    """A worker of tests/e2e/soak_worker.py, which writes what it does to `log`."""
    return Process([sys.executable, str(WORKER), address, ",".join(tenants), str(log)])
