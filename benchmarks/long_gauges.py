"""What the long measurements read off processes and Postgres: CPU, memory, WAL, sizes, rows."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import asyncpg

from benchmarks.measure import tree_cpu_seconds

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

_QUEUE = "fencepost.run_queue"


def memory_max(pid: int) -> int:
    """The most bytes of memory a process ever had resident; 0 if it is gone."""
    return _status(pid, "VmHWM") * 1024


def memory(pid: int) -> int:
    """Bytes of memory that a process has resident now; 0 if it is gone."""
    return _status(pid, "VmRSS") * 1024


def _status(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


class Shares:
    """CPU of some processes by name, from when it was made or last asked."""

    def __init__(self, pids: Mapping[str, int], *, postmaster_pid: int) -> None:
        self._pids = dict(pids)
        self._postmaster = postmaster_pid
        self._used = self._read()
        self._at = time.monotonic()

    def _read(self) -> dict[str, float]:
        used = {name: tree_cpu_seconds(pid) for name, pid in self._pids.items()}
        return used | {"Postgres": tree_cpu_seconds(self._postmaster)}

    def since(self) -> dict[str, float]:
        """Share of one core (1.0: all of it) by name since the last call."""
        used, at = self._read(), time.monotonic()
        seconds = at - self._at
        shares = {name: (value - self._used[name]) / seconds for name, value in used.items()}
        self._used, self._at = used, at
        return shares


def shown_shares(shares: Mapping[str, float]) -> str:
    """As text: percent of one core each."""
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())


async def wal_position(connection: Connection) -> str:
    """Where the next record of the write-ahead log goes."""
    at: str = await connection.fetchval("SELECT pg_current_wal_insert_lsn()::text")
    return at


@dataclass(frozen=True, slots=True, kw_only=True)
class Wal:
    """Bytes and numbers written to the write-ahead log. Full-page images are the copies of
    pages that the first change after a checkpoint writes."""

    bytes_written: int
    records: int
    image_bytes: int

    @property
    def record_bytes(self) -> int:
        """Without full-page images."""
        return self.bytes_written - self.image_bytes


async def wal_since(connection: Connection, begin: str) -> Wal:
    """What was written since a position; the log of that time must still be there."""
    await connection.execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect")
    # Only what was flushed can be read.
    await connection.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
    row = await connection.fetchrow(
        """
        SELECT sum(w.record_size)::bigint AS record_bytes, sum(w.fpi_size)::bigint AS image_bytes,
               sum(w.count)::bigint AS records
        FROM pg_get_wal_stats($1::text::pg_lsn, pg_current_wal_flush_lsn()) AS w
        """,
        begin,
    )
    assert row is not None
    return Wal(
        bytes_written=row["record_bytes"] + row["image_bytes"],
        records=row["records"],
        image_bytes=row["image_bytes"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSize:
    """The run queue on disk: bytes of the table and of all its indexes, dead rows in it."""

    table: int
    indexes: int
    dead: int

    @property
    def total(self) -> int:
        """Table and indexes."""
        return self.table + self.indexes


async def queue_size(connection: Connection) -> QueueSize:
    """As it is now; `dead` as the statistics have it."""
    row = await connection.fetchrow(
        """
        SELECT pg_table_size(c.oid) AS table, pg_indexes_size(c.oid) AS indexes,
               pg_stat_get_dead_tuples(c.oid) AS dead
        FROM pg_class AS c WHERE c.oid = $1::text::regclass
        """,
        _QUEUE,
    )
    assert row is not None
    return QueueSize(table=row["table"], indexes=row["indexes"], dead=row["dead"])


async def table_counters(connection: Connection) -> dict[str, dict[str, int]]:
    """By table of Fencepost, what was read and written since the statistics began."""
    rows = await connection.fetch(
        """
        SELECT relname, coalesce(seq_scan, 0) AS seq_scans, coalesce(seq_tup_read, 0) AS seq_rows,
               coalesce(idx_scan, 0) AS index_scans, coalesce(idx_tup_fetch, 0) AS index_rows,
               n_tup_ins AS inserted, n_tup_upd AS updated, n_tup_hot_upd AS updated_hot,
               n_tup_del AS deleted
        FROM pg_stat_user_tables WHERE schemaname = 'fencepost'
        """
    )
    return {row["relname"]: {k: v for k, v in row.items() if k != "relname"} for row in rows}


def difference(
    after: Mapping[str, Mapping[str, int]], before: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Counter by counter, of all that changed."""
    changes = {}
    for name, counters in after.items():
        known = before.get(name, {})
        changed = {key: value - known.get(key, 0) for key, value in counters.items()}
        if any(changed.values()):
            changes[name] = changed
    return changes


async def database_counters(connection: Connection) -> dict[str, int]:
    """Transactions and buffers of this database since the statistics began."""
    row = await connection.fetchrow(
        """
        SELECT xact_commit AS commits, blks_hit + blks_read AS buffers, blks_read AS buffers_read,
               tup_returned AS rows_read
        FROM pg_stat_database WHERE datname = current_database()
        """
    )
    assert row is not None
    return dict(row)


async def watch_statements(connection: Connection) -> None:
    """`statements` counts from now on, if pg_stat_statements was loaded at the start."""
    if "pg_stat_statements" in await connection.fetchval("SHOW shared_preload_libraries"):
        await connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        await connection.execute("SELECT pg_stat_statements_reset()")


async def statements(connection: Connection) -> list[asyncpg.Record]:
    """What pg_stat_statements knows of this database, by total time; empty without it."""
    if not await connection.fetchval(
        "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_stat_statements')"
    ):
        return []
    return await connection.fetch(
        """
        SELECT coalesce(substring(query FROM '^/\\* (\\w+) \\*/'),
                        left(regexp_replace(query, '\\s+', ' ', 'g'), 40)) AS name,
               substring(query FROM '^/\\* (\\w+) \\*/') IS NOT NULL AS is_named,
               sum(calls)::bigint AS calls, sum(rows)::bigint AS rows,
               sum(total_exec_time)::float8 AS ms,
               sum(shared_blks_hit + shared_blks_read)::bigint AS buffers,
               sum(wal_bytes)::bigint AS wal
        FROM pg_stat_statements AS s
        JOIN pg_database AS d ON d.oid = s.dbid AND d.datname = current_database()
        WHERE s.toplevel
        GROUP BY 1, 2 ORDER BY ms DESC
        """
    )


def told(text: str) -> None:
    """One line at once, also into a pipe."""
    print(text, flush=True)


def shown_bytes(count: float) -> str:
    """As text, in MB."""
    return f"{count / 1e6:,.1f} MB"
