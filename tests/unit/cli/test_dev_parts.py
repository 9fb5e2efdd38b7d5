"""The parts of `fencepost dev` that need no database: its children, its places, its port."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fencepost_server.dev import places
from fencepost_server.dev.component import Components
from fencepost_server.dev.errors import DevError

from tests.processes import wait_until_gone

POLITE = (
    "import signal, sys; print('up', flush=True); signal.sigwait([signal.SIGTERM]); print('bye')"
)
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    "while True: signal.pause()"
)


class Heard:
    """What the children have said."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.components = Components(lambda name, line: self.lines.append((name, line)))

    def start(self, name: str, code: str) -> None:
        self.components.start(name, [sys.executable, "-c", code], env=dict(os.environ))

    def wait_for(self, name: str, line: str) -> None:
        while (name, line) not in self.lines:
            self.components.relay()
            assert self.components.ended() is None, "the child ended"


@pytest.fixture
def heard() -> Iterator[Heard]:
    listener = Heard()
    yield listener
    listener.components.kill_all()


def test_a_child_is_stopped_and_its_last_words_are_heard(heard: Heard) -> None:
    masked = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    heard.start("server", masked + POLITE)
    heard.wait_for("server", "up")
    assert heard.components.stop("server", timeout_s=20, hurry=lambda: False)
    assert heard.lines == [("server", "up"), ("server", "bye")]


def test_a_child_that_will_not_stop_is_killed(heard: Heard) -> None:
    heard.start("worker", STUBBORN)
    heard.wait_for("worker", "up")
    assert not heard.components.stop("worker", timeout_s=0.2, hurry=lambda: False)
    assert heard.components.ended() is None


def test_a_second_signal_hurries(heard: Heard) -> None:
    heard.start("worker", STUBBORN)
    heard.wait_for("worker", "up")
    assert not heard.components.stop("worker", timeout_s=3600, hurry=lambda: True)


def test_a_child_that_ends_by_itself_is_noticed_after_its_last_line(heard: Heard) -> None:
    heard.start("demo", "print('one'); print('two'); raise SystemExit(3)")
    ended = None
    while ended is None:
        heard.components.relay()
        ended = heard.components.ended()
    assert ended == ("demo", 3)
    assert heard.lines == [("demo", "one"), ("demo", "two")]


def test_a_talkative_child_loses_no_line(heard: Heard) -> None:
    heard.start("demo", "for n in range(5000): print(n)")
    ended = None
    while ended is None:
        heard.components.relay()
        ended = heard.components.ended()
    assert [int(line) for _, line in heard.lines] == list(range(5000))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of a parent's death")
def test_children_die_with_a_killed_parent() -> None:
    code = (
        "import os, sys, signal\n"
        "from fencepost_server.dev.component import Components\n"
        "c = Components(lambda name, line: None)\n"
        "child = [sys.executable, '-c', 'import signal; signal.pause()']\n"
        "c.start('x', child, env=dict(os.environ))\n"
        "print(c._running['x'].process.pid, flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until_gone(child)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_PORT_WAIT_S", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(DevError, match=f"port {port}: Address already in use") as caught:
            places.take_address(f"127.0.0.1:{port}")
        assert places.accepts(f"127.0.0.1:{port}")
    assert f"--listen 127.0.0.1:{port + 1}" in caught.value.hint


@pytest.mark.parametrize(
    ("listen", "words"),
    [("0.0.0.0:7600", "only this machine"), ("7600", "host:port"), ("localhost:x", "'x'")],
)
def test_a_wrong_address_is_refused(listen: str, words: str) -> None:
    with pytest.raises(DevError, match=words):
        places.take_address(listen)


def test_port_0_becomes_a_free_port() -> None:
    host, port = places.take_address("127.0.0.1:0").split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_the_data_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FENCEPOST_DEV_DIR", str(tmp_path))
    assert places.data_dir() == tmp_path
    monkeypatch.delenv("FENCEPOST_DEV_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert places.data_dir() == Path("/var/lib/fencepost/dev")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert places.data_dir() == tmp_path / "fencepost" / "dev"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert places.data_dir() == Path("/home/somebody/.local/share/fencepost/dev")
