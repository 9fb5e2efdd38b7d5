"""A Postgres that a test may stop and start again on the same port and data.

It belongs to a process of its own: a process that speaks gRPC cannot fork safely, and the
test does when the time has come.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fencepost_server.dev.postgres import EmbeddedPostgres


class OwnPostgres:
    """Says "start", "stop" and "crash" to the keeper, and waits until it is so."""

    def __init__(self, data_dir: Path, *, durable: bool = False) -> None:
        """`durable`: what is committed survives a crash."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, str(data_dir), str(port), str(int(durable))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.dsn = self.start()

    def start(self) -> str:
        """Returns when connections are taken: the connection string, the same every time.

        Started before: nothing happens.
        """
        return self._say("start")

    def stop(self) -> None:
        """A fast shutdown: connections are cut, data is kept."""
        self._say("stop")

    def crash(self) -> None:
        """Ends every backend at once, without a checkpoint; the next start recovers."""
        self._say("crash")

    def close(self) -> None:
        """Stop it for good."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        code = self._keeper.wait(60)
        self._keeper.stdout.close()
        assert code == 0, f"the keeper of Postgres ended with {code}"

    def _say(self, word: str) -> str:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        print(word, file=self._keeper.stdin, flush=True)
        answer = self._keeper.stdout.readline()
        assert answer, f"the keeper of Postgres ended at {word!r}"
        return answer.strip()


@contextmanager
def own_postgres(data_dir: Path, *, durable: bool = False) -> Iterator[OwnPostgres]:
    """Started, and gone afterwards."""
    postgres = OwnPostgres(data_dir, durable=durable)
    try:
        yield postgres
    finally:
        postgres.close()


def _keep(data_dir: Path, port: int, *, durable: bool) -> None:
    postgres = EmbeddedPostgres(data_dir, durable=durable, port=port)
    was_running = False
    try:
        for word in sys.stdin:
            running = word.strip() == "start"
            if word.strip() == "crash":
                os.kill(postgres.pid, signal.SIGQUIT)
            if running != was_running:
                (postgres.start if running else postgres.stop)()
            was_running = running
            print(postgres.dsn, flush=True)  # noqa: T201 - to the test
    finally:
        postgres.stop()


if __name__ == "__main__":
    _keep(Path(sys.argv[1]), int(sys.argv[2]), durable=sys.argv[3] == "1")
