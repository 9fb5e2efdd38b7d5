"""`fencepost dev`: Postgres, schema, server and demo, started in order, stopped in reverse."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import asyncpg

from fencepost_server.dev.component import Components
from fencepost_server.dev.errors import DevError
from fencepost_server.dev.places import accepts, data_dir, take_address
from fencepost_server.dev.postgres import EmbeddedPostgres
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.migrate import MigrationError, migrate

READY_TIMEOUT_S = 60.0
# Long enough for the demo's slowest handler, short enough for somebody who waits for a prompt.
WORKER_GRACE_S = 30.0
SERVER_DRAIN_S = 10.0
_LISTEN_DEFAULT = "127.0.0.1:7600"
_NAME_WIDTH = 8
_COLOURS = {"server": 36, "worker": 32, "demo": 35}


class Development:
    """One run of `fencepost dev`, from its start to the end of its last child."""

    def __init__(self, *, listen: str, demo: bool, reset: bool) -> None:
        self._listen = listen
        self._demo = demo
        self._reset = reset
        self._signals = 0
        self._began_at = time.monotonic()
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._components = Components(self._say)

    def run(self) -> None:
        """Start everything, stay until SIGINT or SIGTERM, stop everything.

        A second signal stops without draining. Raises DevError if a part cannot start or ends
        by itself.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        address = take_address(self._listen)
        with self._database() as dsn:
            try:
                self._migrate(dsn)
                self._start(dsn, address)
                while not self._signals:
                    self._components.relay()
                    self._check()
                self._stop()
            finally:
                self._components.kill_all()
        self._tell("stopped", "nothing is left running; the data is kept")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    @contextmanager
    def _database(self) -> Iterator[str]:
        given = os.environ.get("FENCEPOST_DATABASE_URL")
        if given:
            if self._reset:
                raise DevError(
                    "will not clear the database of FENCEPOST_DATABASE_URL",
                    why="--reset is for the data that fencepost dev itself keeps",
                    hint="drop and create that database yourself, or unset the variable",
                )
            self._tell("postgres", "as FENCEPOST_DATABASE_URL says")
            yield given
            return
        began_at = time.monotonic()
        with EmbeddedPostgres(data_dir(), durable=True, reset=self._reset) as postgres:
            self._tell(
                "postgres",
                f"{postgres.origin} {postgres.version} · {postgres.dsn} · data in "
                f"{postgres.data_dir}",
                seconds=time.monotonic() - began_at,
            )
            yield postgres.dsn

    def _migrate(self, dsn: str) -> None:
        try:
            applied = asyncio.run(migrate(dsn))
        except (MigrationError, StorageUnavailable, asyncpg.PostgresError) as error:
            raise DevError(
                "cannot bring the database to the newest schema",
                why=str(error.__cause__ or error),
                hint="clear the data with --reset, or check FENCEPOST_DATABASE_URL",
            ) from error
        self._tell("schema", f"applied {', '.join(applied)}" if applied else "the newest")

    def _start(self, dsn: str, address: str) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        server = {
            "FENCEPOST_DATABASE_URL": dsn,
            "FENCEPOST_LISTEN": address,
            "FENCEPOST_ROLES": "api,scheduler",
            "FENCEPOST_REFLECTION": "true",
        }
        defaults = {
            "FENCEPOST_LOG_FORMAT": "console",
            "FENCEPOST_DRAIN_GRACE_S": f"{SERVER_DRAIN_S:g}",
        }
        python = [sys.executable, "-m"]
        self._components.start(
            "server", [*python, "fencepost_server"], env=defaults | environment | server
        )
        if not self._wait_until_it_listens(address):
            return
        self._tell("grpc", f"{address} · reflection on · no authentication, this machine only")
        if self._demo:
            demo = "fencepost_server.dev.demo"
            self._components.start("worker", [*python, demo, address], env=environment)
            self._components.start("demo", [*python, f"{demo}_jobs", address], env=environment)
            self._tell("demo", "a worker and 4 jobs: hello, flaky, slow, nightly@Europe/Berlin")
        self._tell_next(address)

    def _wait_until_it_listens(self, address: str) -> bool:
        """False: stopped while waiting."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not accepts(address):
            if self._signals:
                return False
            self._components.relay()
            self._check()
            if time.monotonic() > deadline:
                raise DevError(
                    f"the server does not listen on {address}",
                    why=f"it did not get ready within {READY_TIMEOUT_S:g} s",
                    hint="read its lines above",
                )
        return True

    def _check(self) -> None:
        """Whether everything that should run still does."""
        ended = self._components.ended()
        if ended is None or self._signals:
            return
        name, code = ended
        if name == "demo" and code == 0:
            return
        raise DevError(
            f"the {name} ended by itself",
            why=f"killed by signal {-code}" if code < 0 else f"it exited with code {code}",
            hint="read its lines above; everything else was stopped",
        )

    def _stop(self) -> None:
        """In the order that lets each part finish: who takes work, who hands it out, the data."""
        self._tell("stopping", "draining; Ctrl-C again to stop at once")
        seen = self._signals
        for name, grace in (
            ("demo", 1.0),
            ("worker", WORKER_GRACE_S),
            ("server", SERVER_DRAIN_S + 5),
        ):
            in_time = self._components.stop(
                name, timeout_s=grace, hurry=lambda: self._signals > seen
            )
            if not in_time and name != "demo":
                self._tell(name, "killed: it did not stop in time")

    def _tell_next(self, address: str) -> None:
        port = address.rpartition(":")[2]
        flag = "" if port == _LISTEN_DEFAULT.rpartition(":")[2] else f"--server {address} "
        following = (
            f"{_command()} {flag}run hello --watch"
            if self._demo
            else f"{_command()} {flag}jobs create hello --kind hello --every 30s"
        )
        took = time.monotonic() - self._began_at
        print(f"ready in {took:.1f}s · try:  {following}", flush=True)

    def _tell(self, name: str, text: str, *, seconds: float | None = None) -> None:
        took = "" if seconds is None else f"  {seconds:.1f}s"
        print(f"  {name:<{_NAME_WIDTH}}  {text}{took}", flush=True)

    def _say(self, name: str, line: str) -> None:
        """A line of a child, with its name in front."""
        label = f"{name:<{_NAME_WIDTH}}"
        if self._colour:
            label = f"\x1b[{_COLOURS.get(name, 37)}m{label}\x1b[0m"
        print(f"{label} | {line}", flush=True)


def _command() -> str:
    """`fencepost` as it can be typed here: its path where the shell would not find this one."""
    own = Path(sys.executable).with_name("fencepost")
    found = shutil.which("fencepost")
    if found is not None and Path(found).resolve() == own.resolve():
        # `make` puts the environment on the PATH of its recipes, but not of the next terminal.
        found = None if "MAKELEVEL" in os.environ else found
    if found is not None or not own.exists():
        return "fencepost"
    return os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)
