"""What measurements stand on: a durable Postgres of their own and real server processes."""

import asyncio
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
from fencepost_server.dev.postgres import EmbeddedPostgres
from fencepost_server.store.migrate import migrate


@contextmanager
def postgres(settings: Mapping[str, str] | None = None) -> Any:
    """A cluster with fsync and synchronous_commit on; the connection string.

    A fresh one, unless FENCEPOST_BENCH_DATA names a folder: its data stays there, and large
    tables that one benchmark has filled are found by the next. `settings` are of Postgres.
    """
    kept = os.environ.get("FENCEPOST_BENCH_DATA")
    folder = Path(kept or tempfile.mkdtemp(prefix="fencepost-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711)
    try:
        with EmbeddedPostgres(folder, durable=True) as running:
            configuration = folder / "pgdata" / "postgresql.auto.conf"
            lines = configuration.read_text().splitlines()
            present = dict(line.split(" = ", 1) for line in lines if " = " in line)
            wanted = {name: f"'{value}'" for name, value in (settings or {}).items()}
            if wanted.items() - present.items():
                running.stop()
                with configuration.open("a") as file:
                    file.writelines(f"{name} = {value}\n" for name, value in wanted.items())
                running.start()
            yield running.dsn
    finally:
        if not kept:
            shutil.rmtree(folder)


async def empty_database(dsn: str, name: str) -> str:
    """A new database in the cluster, with nothing in it."""
    admin = await asyncpg.connect(dsn)
    try:
        await admin.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        await admin.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        # Room for the load between two checkpoints, as on a server that is sized for it.
        await admin.execute("ALTER SYSTEM SET max_wal_size = '8GB'")
        await admin.execute("SELECT pg_reload_conf()")
    finally:
        await admin.close()
    return dsn.rsplit("/", 1)[0] + f"/{name}"


async def fresh_database(dsn: str, name: str) -> str:
    """A migrated, empty database in the cluster."""
    url = await empty_database(dsn, name)
    await migrate(url)
    return url


@asynccontextmanager
async def server(database_url: str, **settings: str) -> AsyncIterator[tuple[str, int]]:
    """A server process on a free port; its address and pid."""
    reader, writer = os.pipe()
    script = (
        "import asyncio, os, uvloop;"
        "from fencepost_server.app import serve;"
        "from fencepost_server.config import load_config;"
        "from fencepost_server.telemetry import configure_logging;"
        "configure_logging(level='warning', style='console');"
        f"told = lambda port: os.write({writer}, b'%d\\n' % port);"
        "uvloop.run(serve(load_config(), started=told))"
    )
    environment = {
        **os.environ,
        "FENCEPOST_DATABASE_URL": database_url,
        "FENCEPOST_LISTEN": "127.0.0.1:0",
        **settings,
    }
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, pass_fds=[writer])
    os.close(writer)
    try:
        line = await asyncio.to_thread(os.read, reader, 32)
        if not line:
            raise RuntimeError("the server did not start; its output is above")
        yield f"127.0.0.1:{int(line)}", process.pid
    finally:
        os.close(reader)
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 60)


def cpu_seconds(pid: int) -> float:
    """What a process and its children that have ended used so far; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)
