"""Runs a real Postgres as a direct child process, for `fencepost dev` and for the tests.

It listens on loopback only and trusts whoever connects: it is for one machine and one developer.
"""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fencepost_server.dev.child import Account, run_as, start_child
from fencepost_server.dev.errors import DevError
from fencepost_server.dev.orphan import stop_orphan
from fencepost_server.dev.postgres_binaries import find_postgres, postgres_account

USER = "fencepost"
DATABASE = "fencepost"
START_TIMEOUT_S = 60.0
STOP_FAST_TIMEOUT_S = 15.0
STOP_IMMEDIATE_TIMEOUT_S = 5.0
_POLL_S = 0.02
# Longest path of a unix socket is 107 bytes on Linux, 103 on macOS.
_SOCKET_DIR_BYTES_MAX = 80
# What a start may say that goes away by itself: the rest of a killed postmaster is still
# leaving, or another process was faster to take the free port.
_PASSING = ("shared memory block", "could not bind", "Address already in use")

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}
# A crash of the machine may lose everything, and nothing else may: for data of one test run.
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}


class EmbeddedPostgres:
    """A Postgres that lives as long as its `with` block, its data in `data_dir`.

    Open and close it on the main thread: its end is tied to the thread that started it.
    Raises DevError if it cannot start, also when another process uses `data_dir`.
    """

    def __init__(
        self, data_dir: Path, *, durable: bool, port: int = 0, reset: bool = False
    ) -> None:
        """`durable=False` skips every fsync. Port 0 takes a free one at each start.

        `reset` begins with an empty data directory.
        """
        self.data_dir = data_dir.absolute()
        self.version = ""
        self.origin = ""
        self.port = port
        self._fixed_port = port
        self._durable = durable
        self._reset = reset
        self._pgdata = self.data_dir / "pgdata"
        self._log_path = self.data_dir / "postgres.log"
        self._account: Account | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None

    @property
    def dsn(self) -> str:
        """Connection string of the database `fencepost`, as superuser."""
        return self.dsn_of(DATABASE)

    def dsn_of(self, database: str) -> str:
        """Connection string of another database of this Postgres."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int:
        """Process id of the postmaster; it must have been started."""
        assert self._process is not None, "Postgres was not started"
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Make the data directory if it is empty, start, and wait until connections are taken."""
        self._account = postgres_account()
        try:
            self._take_directory()
            stop_orphan(self._pgdata)
            if self._reset and self._pgdata.exists():
                shutil.rmtree(self._pgdata)
            marker = self._pgdata / "PG_VERSION"
            major = int(marker.read_text()) if marker.exists() else None
            self._binaries = find_postgres(self._account, major=major)
            self.version, self.origin = self._binaries.version, self._binaries.origin
            if major is None:
                self._initialise()
            self._launch()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop it: fast first, then without a checkpoint, then by force. Stopped before: no-op."""
        process, self._process = self._process, None
        if process is not None:
            for number, timeout in (
                (signal.SIGINT, STOP_FAST_TIMEOUT_S),
                (signal.SIGQUIT, STOP_IMMEDIATE_TIMEOUT_S),
            ):
                process.send_signal(number)
                try:
                    process.wait(timeout)
                    break
                except subprocess.TimeoutExpired:
                    continue
            else:
                process.kill()
                process.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_directory(self) -> None:
        """Make `data_dir` and hold its lock, which the kernel drops if this process dies."""
        self.data_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        reach = run_as(self._account, ["/bin/sh", "-c", 'cd "$0"', self.data_dir])
        if reach.returncode != 0:
            assert self._account is not None
            raise DevError(
                f"cannot keep Postgres data in {self.data_dir}",
                why=f"Postgres refuses to run as root, and the user {self._account.name} that it"
                " runs as instead cannot enter that directory",
                hint="set FENCEPOST_DEV_DIR to a directory that every user can enter",
            )
        # Close-on-exec, as all files of Python: a child never holds the lock.
        self._lock = (self.data_dir / "owner.lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DevError(
                f"cannot use the data directory {self.data_dir}",
                why="another running process uses it",
                hint="stop the other one, or set FENCEPOST_DEV_DIR to another directory",
            ) from error

    def _initialise(self) -> None:
        """Make `pgdata` in one rename, so that a kill on the way leaves no half directory."""
        unfinished = self.data_dir / "pgdata.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if self._account is not None:
            os.chown(unfinished, self._account.uid, self._account.gid)
        initdb: list[str | Path] = [self._binaries.bin_dir / "initdb", "-D", unfinished, "-U", USER]
        initdb += ["-E", "UTF8", "--locale=C", "-A", "trust"]
        if not self._durable:
            initdb.append("--no-sync")
        single: list[str | Path] = [
            self._binaries.bin_dir / "postgres",
            "--single",
            "-D",
            unfinished,
            "postgres",
        ]
        for argv, statement in ((initdb, ""), (single, f"CREATE DATABASE {DATABASE}\n")):
            done = run_as(self._account, argv, env=_environment(), input_text=statement)
            if done.returncode != 0 or "ERROR:" in done.stdout:
                raise DevError(
                    f"cannot make a Postgres data directory in {self.data_dir}",
                    why=f"{argv[0]} said: {done.stdout.strip()[-1000:]}",
                    hint="set FENCEPOST_DEV_DIR to another directory, or FENCEPOST_DATABASE_URL",
                )
        unfinished.rename(self._pgdata)

    def _launch(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self.port = self._fixed_port or _free_port()
            log = self._spawn_until_ready(deadline)
            if log is None:
                return
            may_pass = any(sign in log for sign in _PASSING) and not (
                self._fixed_port and "shared memory block" not in log
            )
            if not may_pass or time.monotonic() > deadline:
                raise DevError(
                    f"Postgres did not start in {self.data_dir}",
                    why=log.strip()[-1000:] or "it said nothing",
                    hint=f"read {self._log_path}; --reset clears the data",
                )
            time.sleep(_POLL_S)

    def _spawn_until_ready(self, deadline: float) -> str | None:
        """Start the postmaster once. None: it takes connections; else what its log says."""
        with self._log_path.open("wb") as log:
            self._process = start_child(
                [self._binaries.bin_dir / "postgres", "-D", self._pgdata, *self._options()],
                # A fast shutdown: SIGTERM would wait for the clients to leave.
                death_signal=signal.SIGINT,
                env=_environment(),
                cwd=Path("/"),
                account=self._account,
                stdout=log,
            )
        while self._process.poll() is None and time.monotonic() < deadline:
            if _is_ready(self._pgdata, self._process.pid):
                return None
            time.sleep(_POLL_S)
        if self._process.poll() is not None:
            self._process = None
        return self._log_path.read_text(errors="replace")

    def _options(self) -> list[str]:
        in_reach = len(os.fsencode(self._pgdata)) <= _SOCKET_DIR_BYTES_MAX
        settings = _SETTINGS | {
            "port": str(self.port),
            "unix_socket_directories": str(self._pgdata) if in_reach else "",
        }
        if not self._durable:
            settings |= _NOT_DURABLE
        return [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]


def _environment() -> dict[str, str]:
    """This environment without what libpq and Postgres would take as settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(pgdata: Path, pid: int) -> bool:
    """Whether the lock file of this very postmaster says that it takes connections."""
    try:
        lines = (pgdata / "postmaster.pid").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"
