"""Explains why a run has not started: gathers the facts, the policy says which of them hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from fencepost_server.clock import MINUTE, SECOND, Clock, Duration, Instant
from fencepost_server.domain.names import (
    RunName,
    format_job,
    format_queue,
    format_run,
    format_tenant,
)
from fencepost_server.domain.run import AttemptOutcome, RunState
from fencepost_server.engine.claims import AGEING_S
from fencepost_server.engine.run_reads import RunReads
from fencepost_server.policy.explain_run import (
    RUNS_AHEAD_MAX,
    Cap,
    Hold,
    HoldCode,
    Listener,
    Rate,
    WaitingRun,
    holds_of,
)
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.runs import RunRecord
from fencepost_server.store.statements import load

_SQL = load("explain")

# A worker that polls is heard of at each call, which may wait for 30 s.
_HEARD_WITHIN: Duration = MINUTE
_WORKERS_MAX = 5_000
_LANES_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Listens:
    """One queue that a worker takes runs from, as a resource name; no kinds: all of them."""

    queue: str
    kinds: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A run with what holds it; nothing holds one that does not wait."""

    run: RunRecord
    holds: Sequence[Hold]
    evaluated_at: Instant


class RunExplanations:
    """What ExplainRun asks. `subscriptions_of` reads what a worker's row keeps as bytes."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        reads: RunReads,
        subscriptions_of: Callable[[bytes | None], Sequence[Listens]],
    ) -> None:
        self._database = database
        self._clock = clock
        self._reads = reads
        self._subscriptions_of = subscriptions_of

    async def explain(self, name: RunName) -> Explanation:
        """The run as it is now, and its holds. Raises TenantNotFound or RunNotFound."""
        run = await self._reads.get(name, full=False)
        now = self._clock.now()
        if not run.state.is_live or run.state is RunState.RUNNING:
            return Explanation(run=run, holds=(), evaluated_at=now)
        async with self._database.requests.connection() as connection:
            row = await connection.fetch_one(
                _SQL["read_waiting_run"],
                job_id=run.key.job_id,
                scheduled_at=run.key.scheduled_at,
            )
            if row is not None:
                facts = await self._facts(connection, run, row, now)
        if row is None:
            # It was claimed or ended between the two reads.
            run = await self._reads.get(name, full=False)
            return Explanation(run=run, holds=(), evaluated_at=now)
        return Explanation(run=run, holds=holds_of(facts, now=now), evaluated_at=now)

    async def _facts(
        self, connection: Connection, run: RunRecord, row: Row, now: Instant
    ) -> WaitingRun:
        queue = format_queue(run.tenant, run.queue_name)
        outcome = row["last_outcome"]
        listeners, kinds = await self._listeners(connection, run, row["tenant_id"], queue, now)
        return WaitingRun(
            state=RunState.of(row["state"]),
            available_at=row["available_at"],
            queue=queue,
            kind=run.kind,
            parked_ahead=await _parked_ahead(connection, run, row),
            attempt=row["attempt"],
            attempt_open=row["attempt_open"],
            last_outcome=None if outcome is None else AttemptOutcome[outcome.upper()],
            blocked_by=_blocked_by(run),
            queue_paused=row["paused"],
            pause_reason=row["pause_reason"],
            caps=await _caps(connection, run, row),
            rate=_rate(row),
            listeners=listeners,
            runs_ahead=await _runs_ahead(connection, run, row, kinds, now),
        )

    async def _listeners(
        self, connection: Connection, run: RunRecord, tenant_id: int, queue: str, now: Instant
    ) -> tuple[list[Listener], frozenset[str] | None]:
        """Who listens on the queue, and the kinds that those who take this run take besides;
        None: all kinds."""
        rows = await connection.fetch(
            _SQL["listening_workers"],
            since=now - _HEARD_WITHIN,
            tenant_id=tenant_id,
            workers_max=_WORKERS_MAX,
        )
        listeners: list[Listener] = []
        kinds: frozenset[str] | None = frozenset()
        for row in rows:
            for each in self._subscriptions_of(row["subscriptions"]):
                if each.queue != queue:
                    continue
                takes_kind = not each.kinds or run.kind in each.kinds
                if takes_kind and kinds is not None:
                    kinds = kinds | each.kinds if each.kinds else None
                listeners.append(
                    Listener(
                        takes_kind=takes_kind,
                        polls=row["state"] == "polling",
                        slots=row["slots"],
                        held_runs=row["held_runs"],
                        free_credits=row["free_credits"],
                    )
                )
        return listeners, kinds


async def _caps(connection: Connection, run: RunRecord, row: Row) -> list[Cap]:
    """The caps over the run with what is in use of them."""
    limits = {
        "tenant": row["tenant_cap"],
        "queue": row["queue_cap"],
        "job": row["job_cap"],
        "key": row["key_cap"] if row["concurrency_key"] is not None else None,
    }
    if all(limit is None for limit in limits.values()):
        return []
    rows = await connection.fetch(
        _SQL["places_taken"],
        all_queues=limits["tenant"] is not None or limits["job"] is not None,
        tenant_id=row["tenant_id"],
        queue_id=row["queue_id"],
        job_id=run.key.job_id,
        concurrency_key=row["concurrency_key"],
    )
    queue = format_queue(run.tenant, run.queue_name)
    scopes = {
        "tenant": (HoldCode.TENANT_LIMIT, format_tenant(run.tenant)),
        "queue": (HoldCode.QUEUE_LIMIT, queue),
        "job": (HoldCode.JOB_LIMIT, format_job(run.tenant, _job(run))),
        "key": (HoldCode.KEY_LIMIT, queue),
    }
    caps: list[Cap] = []
    for scope, (code, subject) in scopes.items():
        limit = limits[scope]
        if limit is None:
            continue
        taken = [each for each in rows if each["scope"] == scope]
        caps.append(
            Cap(
                code=code,
                subject=subject,
                used=taken[0]["used"] if taken else 0,
                limit=limit,
                holders=tuple(
                    format_run(run.tenant, each["job"], each["scheduled_at"]) for each in taken
                ),
            )
        )
    return caps


async def _parked_ahead(connection: Connection, run: RunRecord, row: Row) -> int | None:
    if not row["parked"]:
        return None
    counted = await connection.fetch_one(
        _SQL["count_parked_ahead"],
        tenant_id=row["tenant_id"],
        job_id=run.key.job_id,
        scheduled_at=run.key.scheduled_at,
        runs_max=RUNS_AHEAD_MAX,
    )
    assert counted is not None
    ahead: int = counted["ahead"]
    return ahead


async def _runs_ahead(
    connection: Connection, run: RunRecord, row: Row, kinds: frozenset[str] | None, now: Instant
) -> int:
    if row["state"] == "blocked" or row["available_at"] > now:
        return 0
    counted = await connection.fetch_one(
        _SQL["count_runs_ahead"],
        queue_id=row["queue_id"],
        kinds=None if kinds is None else sorted(kinds),
        scheduled_at=run.key.scheduled_at,
        available_at=row["available_at"],
        priority=row["priority"],
        ageing_s=AGEING_S,
        runs_max=RUNS_AHEAD_MAX,
        lanes_max=_LANES_MAX,
        now=now,
    )
    assert counted is not None
    ahead: int = counted["ahead"]
    return ahead


def _rate(row: Row) -> Rate | None:
    """The queue's rate limit and when the next token is whole."""
    per_second, tokens = row["rate_limit"], row["tokens"]
    if per_second is None or tokens is None:
        return None
    missing = max(0.0, 1 - tokens - 1e-9)
    return Rate(per_second=per_second, clears_in=ceil(missing / per_second * SECOND))


def _job(run: RunRecord) -> str:
    return run.key.job_id if run.job_is_deleted else run.job_name


def _blocked_by(run: RunRecord) -> str:
    return "" if run.blocked_by is None else format_run(run.tenant, _job(run), run.blocked_by)
