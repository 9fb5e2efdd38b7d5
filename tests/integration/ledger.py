"""What tests read in the database: live and ended runs, skipped fires, recorded attempts."""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from fencepost_server.clock import Instant, to_datetime
from fencepost_server.domain.run import Lane, RunKey
from fencepost_server.engine.wake import Affected

from tests.factories import NOON


@dataclass(slots=True)
class Woken:
    """Remembers the hints that the engine gave; `event` is set by each."""

    partitions: list[set[int]] = field(default_factory=list)
    lane_hints: list[tuple[set[Lane], Instant]] = field(default_factory=list)
    ended_jobs: set[str] = field(default_factory=set)
    affected: set[Affected] = field(default_factory=set)
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def jobs(self, partition_ids: Iterable[int]) -> None:
        self.partitions.append(set(partition_ids))
        self.event.set()

    def lanes(self, lanes: Iterable[Lane], *, at: Instant = 0) -> None:
        known = set(lanes)
        if known:
            self.lane_hints.append((known, at))
            self.event.set()

    def ends(self, job_ids: Collection[str]) -> None:
        self.ended_jobs.update(job_ids)

    def attempts(self, affected: Collection[Affected]) -> None:
        self.affected.update(affected)


@dataclass(kw_only=True)
class Ledger:
    """Looks at rows through a connection of its own; instants are seconds after noon."""

    raw: "asyncpg.Connection[asyncpg.Record]"

    async def query(self, sql: str, *arguments: Any) -> list[asyncpg.Record]:
        rows: list[asyncpg.Record] = await self.raw.fetch(sql, *arguments)
        return rows

    async def value(self, sql: str, *arguments: Any) -> Any:
        return await self.raw.fetchval(sql, *arguments)

    async def live(self, key: RunKey) -> asyncpg.Record:
        """The row of a live run."""
        rows = await self.query(
            "SELECT * FROM fencepost.run_queue WHERE job_id = $1::uuid AND scheduled_at = $2",
            key.job_id,
            to_datetime(key.scheduled_at),
        )
        assert rows, f"{key} is not live"
        return rows[0]

    async def ended(self, key: RunKey, table: str = "job_runs") -> asyncpg.Record:
        """The row of an ended run; no live row is left."""
        rows = await self.query(
            f"SELECT * FROM fencepost.{table} "  # noqa: S608 - a table that the test names
            "WHERE job_id = $1::uuid AND scheduled_at = $2",
            key.job_id,
            to_datetime(key.scheduled_at),
        )
        assert rows, f"{key} is not in {table}"
        left = await self.value(
            "SELECT count(*) FROM fencepost.run_queue "
            "WHERE job_id = $1::uuid AND scheduled_at = $2",
            key.job_id,
            to_datetime(key.scheduled_at),
        )
        assert left == 0, f"{key} is in two places"
        return rows[0]

    async def runs_of(self, job_id: str) -> list[tuple[int, str, str]]:
        """Seconds after noon, state and origin of a job's live runs, oldest first."""
        rows = await self.query(
            "SELECT scheduled_at, state, origin FROM fencepost.run_queue "
            "WHERE job_id = $1::uuid ORDER BY scheduled_at",
            job_id,
        )
        return [(_after_noon(r["scheduled_at"]), r["state"], r["origin"]) for r in rows]

    async def skips_of(self, job_id: str) -> list[tuple[int, int, str, int | None]]:
        """First, last, reason and stand-in of a job's skipped stretches, oldest first."""
        rows = await self.query(
            "SELECT first_at, last_at, reason, stand_in_at FROM fencepost.fire_skips "
            "WHERE job_id = $1::uuid ORDER BY first_at, reason",
            job_id,
        )
        return [
            (
                _after_noon(r["first_at"]),
                _after_noon(r["last_at"]),
                r["reason"],
                None if r["stand_in_at"] is None else _after_noon(r["stand_in_at"]),
            )
            for r in rows
        ]

    async def next_of(self, job_id: str) -> int | None:
        """Seconds after noon of a job's next fire."""
        at = await self.value(
            "SELECT next_run_at FROM fencepost.job_schedules WHERE job_id = $1::uuid", job_id
        )
        return None if at is None else _after_noon(at)

    async def attempts_of(self, key: RunKey) -> list[tuple[int, str, bool]]:
        """Number, outcome and lateness of a run's recorded attempts."""
        rows = await self.query(
            "SELECT attempt, outcome, late FROM fencepost.run_attempts "
            "WHERE job_id = $1::uuid AND scheduled_at = $2 ORDER BY attempt",
            key.job_id,
            to_datetime(key.scheduled_at),
        )
        return [(r["attempt"], r["outcome"], r["late"]) for r in rows]


def _after_noon(at: Any) -> int:
    return int((at - to_datetime(NOON)).total_seconds())
