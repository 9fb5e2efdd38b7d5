"""Where `fencepost dev` keeps its data and which port it takes."""

import os
import socket
import time
from pathlib import Path

from fencepost_server.config import is_loopback, split_address
from fencepost_server.dev.errors import DevError

# Root's home is closed to the user that Postgres then runs as.
_ROOT_DATA_DIR = Path("/var/lib/fencepost/dev")
# A server whose parent was killed a moment ago still has the port for an instant.
_PORT_WAIT_S = 3.0


def data_dir() -> Path:
    """FENCEPOST_DEV_DIR, else a place of the user's own after the XDG rules."""
    given = os.environ.get("FENCEPOST_DEV_DIR")
    if given:
        return Path(given).absolute()
    if os.geteuid() == 0:
        return _ROOT_DATA_DIR
    base = os.environ.get("XDG_DATA_HOME", "")
    home = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share"
    return home / "fencepost" / "dev"


def take_address(listen: str) -> str:
    """`listen` as host:port with a port that is free now (0 picks one).

    Raises DevError if it is not an address of this machine only, or if the port is in use.
    """
    try:
        host, port = split_address(listen)
    except ValueError as error:
        raise DevError(
            f"cannot listen on {listen!r}", why=str(error), hint="for example 127.0.0.1:7600"
        ) from error
    if not is_loopback(host):
        raise DevError(
            f"cannot listen on {listen}",
            why="callers are not authenticated, so only this machine may reach it",
            hint="use 127.0.0.1 or localhost; for others to reach: fencepost server --insecure",
        )
    deadline = time.monotonic() + _PORT_WAIT_S
    while True:
        try:
            port = _probe(host, port)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise DevError(
                    f"cannot listen on {listen}",
                    why=f"port {port}: {error.strerror}",
                    hint=f"stop what uses port {port}, or take another: --listen {host}:{port + 1}",
                ) from error
            time.sleep(0.05)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def accepts(address: str) -> bool:
    """Whether something takes connections at host:port."""
    try:
        with socket.create_connection(split_address(address), timeout=0.5):
            return True
    except OSError:
        return False


def _probe(host: str, port: int) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # Connections that ended a moment ago do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        taken: int = probe.getsockname()[1]
        return taken
