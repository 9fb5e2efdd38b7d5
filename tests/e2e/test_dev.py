"""`fencepost dev --demo` as a person starts it: first run, Ctrl-C, kill -9, and data that stays."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import descendants, is_running, wait_until_gone

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

FENCEPOST = [sys.executable, "-m", "fencepost_server.cli"]
FIRST_RUN = re.compile(r"first run succeeded: hello/\S+Z")


class Dev:
    """One `fencepost dev` process and the lines it prints."""

    def __init__(self, data_dir: Path, port: int, *flags: str, database_url: str = "") -> None:
        self.server = f"127.0.0.1:{port}"
        environment = os.environ | {
            "FENCEPOST_DEV_DIR": str(data_dir),
            "FENCEPOST_DATABASE_URL": database_url,
        }
        self.process = subprocess.Popen(
            [*FENCEPOST, "dev", "--listen", self.server, *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: "str | re.Pattern[str]", *, seconds: float = 90) -> str:
        """The first line from here on that matches."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._arrived.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                pytest.fail(f"no line matches {pattern!r}:\n" + "\n".join(self.lines))
            if re.search(pattern, line):
                return line

    def end(self, *, seconds: float = 60) -> int:
        """Its exit code."""
        code = self.process.wait(seconds)
        self._reader.join()
        return code

    def call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """A command against its server."""
        return subprocess.run(
            [*FENCEPOST, "--server", self.server, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.lines.append(line.rstrip())
                self._arrived.put(line.rstrip())
        self._arrived.put(None)


@contextmanager
def dev(data_dir: Path, port: int, *flags: str, database_url: str = "") -> Iterator[Dev]:
    """A development set-up that is gone at the end of the block, whatever happened in it."""
    started = Dev(data_dir, port, *flags, database_url=database_url)
    try:
        yield started
    finally:
        children = descendants(started.process.pid)
        started.process.kill()
        started.end()
        for pid in children:
            wait_until_gone(pid)


@pytest.fixture
def port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        taken: int = probe.getsockname()[1]
        return taken


def test_demo_runs_is_listed_drains_and_keeps_its_data(postgres_dir: Path, port: int) -> None:
    with dev(postgres_dir, port, "--demo") as first:
        first.wait_for(rf"ready in .*fencepost --server 127.0.0.1:{port} run hello --watch")
        first.wait_for(FIRST_RUN)
        listed = first.call("jobs", "list", "-o", "json")
        assert listed.returncode == 0, listed.stderr
        names = {job["name"].rpartition("/")[2]: job for job in json.loads(listed.stdout)["jobs"]}
        assert set(names) == {"hello", "flaky", "slow", "nightly"}
        assert names["nightly"]["schedule"]["cron"]["timeZone"] == "Europe/Berlin"
        watched = first.call("run", "hello", "--watch", "--timeout", "30s")
        assert watched.returncode == 0, watched.stderr
        assert "succeeded" in watched.stdout
        created = first.call("jobs", "create", "mine", "--kind", "demo.hello", "--every", "1h")
        assert created.returncode == 0, created.stderr
        own = first.call("run", "mine", "--watch", "--timeout", "30s")
        assert own.returncode == 0, f"a job without a payload: {own.stdout}{own.stderr}"
        assert first.call("jobs", "delete", "mine", "--yes").returncode == 0
        run_name = json.loads(first.call("runs", "list", "hello", "-o", "json").stdout)
        shown = first.call("runs", "get", run_name["runs"][-1]["name"])
        assert shown.returncode == 0, shown.stderr
        assert "succeeded" in shown.stdout.splitlines()[-1]
        workers = json.loads(first.call("workers", "list", "-o", "json").stdout)["workers"]
        assert [worker["displayName"] for worker in workers] == ["demo"]
        children = descendants(first.process.pid)
        assert len(children) >= 3

        first.process.send_signal(signal.SIGINT)
        assert first.end() == 0, "\n".join(first.lines)
        assert {pid: name for pid, name in children.items() if is_running(pid)} == {}
        assert not any("killed: it did not stop in time" in line for line in first.lines)

    with dev(postgres_dir, port, "--demo") as second:
        second.wait_for("the demo jobs are there")
        second.wait_for(FIRST_RUN)
        versions = json.loads(second.call("jobs", "list", "-o", "json").stdout)["jobs"]
        assert {job["version"] for job in versions} == {"1"}
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == 0, "\n".join(second.lines)


def test_kill_9_blocks_nothing(postgres_dir: Path, port: int) -> None:
    with dev(postgres_dir, port, "--demo") as first:
        first.wait_for(FIRST_RUN)
        children = descendants(first.process.pid)
        first.process.kill()
        # The next start does not wait for what is left of this one.
        with dev(postgres_dir, port, "--demo") as second:
            second.wait_for("the demo jobs are there")
            second.wait_for(FIRST_RUN)
            for pid in children:
                wait_until_gone(pid)
            second.process.send_signal(signal.SIGINT)
            assert second.end() == 0, "\n".join(second.lines)


def test_a_second_dev_is_refused_and_harms_nothing(postgres_dir: Path, port: int) -> None:
    with dev(postgres_dir, port) as first:
        first.wait_for("ready in")
        with dev(postgres_dir, port) as same_port:
            assert same_port.end() == 1
            assert any(f"port {port}: Address already in use" in line for line in same_port.lines)
        with dev(postgres_dir, 0) as same_data:
            assert same_data.end() == 1
            assert any("another running process uses it" in line for line in same_data.lines)
        assert first.call("jobs", "list").returncode == 0
        first.process.send_signal(signal.SIGINT)
        assert first.end() == 0
    with dev(postgres_dir, port, "--reset") as clean:
        clean.wait_for("applied 0001")


def test_a_database_of_ones_own_is_taken_and_never_cleared(
    tmp_path: Path, port: int, empty_database_url: str
) -> None:
    with dev(tmp_path, port, "--reset", database_url=empty_database_url) as refused:
        assert refused.end() == 1
        assert any("will not clear the database" in line for line in refused.lines)
    with dev(tmp_path, port, database_url=empty_database_url) as started:
        started.wait_for("as FENCEPOST_DATABASE_URL says")
        started.wait_for("ready in")
        assert started.call("jobs", "create", "a", "--kind", "k").returncode == 0
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == 0
    assert list(tmp_path.iterdir()) == []
