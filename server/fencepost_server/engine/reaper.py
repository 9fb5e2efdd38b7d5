"""Takes back what nobody renews: lost leases, attempts past their timeout, cancels past
their grace; and ends runs that are out of time. And the lease keeper, which makes it pause
after heartbeats could not be stored.

Without the pause one outage of the database would expire every lease and double all work.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

import structlog

from fencepost_server.clock import SECOND, Clock, Duration, Instant
from fencepost_server.domain.run import AttemptOutcome, RunKey
from fencepost_server.engine.attempts import Effects, Ended, end_attempts
from fencepost_server.engine.ending import EndedAttempt, EndedRun, end_runs, record_attempts
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.specs import SpecCache, SpecKey
from fencepost_server.engine.verdicts import TIMEOUT_CODE
from fencepost_server.engine.wake import Affected
from fencepost_server.errors import StorageUnavailable
from fencepost_server.policy.outcome import (
    Cancelled,
    Ending,
    Failed,
    LeaseLost,
    OutOfTime,
    Released,
    expire,
)
from fencepost_server.store.database import ConflictError, Database, Row
from fencepost_server.store.statements import load

_SQL = load("leases")
_log = structlog.get_logger("reaper")

_BATCH = 500
_GAP_S = 10
QUEUE_TIMEOUT_CODE = "QUEUE_TIMEOUT"
TOTAL_TIMEOUT_CODE = "TOTAL_TIMEOUT"

# One transaction over what is found, or over some of it; how many it dealt with.
_Take = Callable[[list[RunKey], Collection[RunKey] | None], Awaitable[int]]


class LeaseKeeper:
    """Tells the database every second that heartbeats can be stored."""

    def __init__(self, *, database: Database, clock: Clock, lifecycle: Lifecycle) -> None:
        self._database = database
        self._clock = clock
        self._lifecycle = lifecycle

    async def run(self, *, interval: Duration) -> None:
        """Tick until cancelled."""
        while True:
            try:
                await self.tick()
            except StorageUnavailable as error:
                self._lifecycle.heartbeats_failed = True
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            await asyncio.sleep(interval / SECOND)

    async def tick(self) -> None:
        """One tick; after a failure or a gap it stores how long no lease may be lost."""
        was_away = self._lifecycle.heartbeats_failed
        await self._database.hot.fetch_one(
            _SQL["tick_heartbeats"], now=self._clock.now(), gap_s=_GAP_S, was_away=was_away
        )
        if was_away:
            self._lifecycle.heartbeats_failed = False
            _log.info("reaper_paused")


class Reaper:
    """Looks for lost leases at its own pace; several may run, rows are locked SKIP LOCKED."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        lifecycle: Lifecycle,
        specs: SpecCache,
        heartbeat_interval: Duration,
        failures: Mapping[str, bytes],
    ) -> None:
        """`failures` are the serialized failures that the server itself records, by code:
        TIMEOUT_CODE for an attempt, QUEUE_TIMEOUT_CODE and TOTAL_TIMEOUT_CODE for a run.
        """
        self._database = database
        self._clock = clock
        self._lifecycle = lifecycle
        self._specs = specs
        self._heartbeat_interval = heartbeat_interval
        self._failures = failures
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True

    async def run(self, *, interval: Duration) -> None:
        """Reap until cancelled."""
        while True:
            try:
                if self.is_trusted():
                    await self.reap()
                    await self.expire()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            await asyncio.sleep(interval / SECOND)

    async def reap(self) -> int:
        """Everything that is lost or overdue now; the number of attempts taken back."""
        return await self._all(self._take_back)

    async def expire(self) -> int:
        """Ends every waiting run that is out of time; how many there were."""
        return await self._all(self._expire)

    async def _all(self, take: _Take) -> int:
        taken = 0
        while True:
            batch = await self._batch(take)
            taken += batch
            if batch < _BATCH:
                return taken

    async def _batch(self, take: _Take, only: Collection[RunKey] | None = None) -> int:
        """One transaction, over all that is found or `only` over some of it."""
        found: list[RunKey] = []
        try:
            return await take(found, only)
        except ConflictError as error:
            # A key that is in history already is a bug; it must not hold up the other runs.
            keys = sorted(found)
            if len(keys) == 1:
                _log.error("end_refused_by_history", run=str(keys[0]), error=str(error))
                return 0
            middle = len(keys) // 2
            return await self._batch(take, keys[:middle]) + await self._batch(take, keys[middle:])

    async def _take_back(self, found: list[RunKey], only: Collection[RunKey] | None) -> int:
        async with self._database.hot.transaction() as connection:
            now = self._clock.now()
            lost = await connection.fetch(
                _SQL["lock_lost_leases"], runs_max=_BATCH, gap_s=_GAP_S, now=now
            )
            overrun = await connection.fetch(
                _SQL["lock_overrun_attempts"],
                runs_max=_BATCH,
                heartbeat_s=self._heartbeat_interval // SECOND,
                gap_s=_GAP_S,
                now=now,
            )
            taken = {_key(row): self._overrun(row, now) for row in overrun}
            taken |= {_key(row): self._lost(row, now) for row in lost}
            ended = [each for key, each in taken.items() if only is None or key in only]
            found += [_key(each.row) for each in ended]
            if not ended:
                return 0
            policies = await self._specs.policies(
                {SpecKey(str(each.row["job_id"]), each.row["version"]) for each in ended},
                connection=connection,
            )
            effects = await end_attempts(connection, ended, policies, now=now)
        effects.affected |= {_affected(each.row) for each in ended if not _may_go_on(each, effects)}
        self._lifecycle.spread(effects, now=now)
        for each in ended:
            _log.info(
                _EVENTS[type(each.ending)],
                run=str(_key(each.row)),
                attempt=each.row["attempt"],
                worker_id=str(each.row["worker_id"]),
            )
        return len(ended)

    def _lost(self, row: Row, now: Instant) -> Ended:
        """A run that a broken stream may never have delivered goes back without a mark, and
        one that is out of time does not go on."""
        if row["undelivered"]:
            return Ended(row=row, ending=Released(undelivered=True))
        if _is_out_of_time(row, now):
            return self._overrun(row, now)
        return Ended(row=row, ending=LeaseLost())

    def _overrun(self, row: Row, now: Instant) -> Ended:
        ending: Ending
        if row["cancel_requested"]:
            return Ended(row=row, ending=Cancelled(forced=True))
        if _is_out_of_time(row, now):
            ending, code = OutOfTime(), TOTAL_TIMEOUT_CODE
        else:
            ending, code = Failed(code=TIMEOUT_CODE, timed_out=True), TIMEOUT_CODE
        return Ended(row=row, ending=ending, failure=self._failures[code], failure_code=code)

    async def _expire(self, found: list[RunKey], only: Collection[RunKey] | None) -> int:
        async with self._database.hot.transaction() as connection:
            now = self._clock.now()
            rows = await connection.fetch(
                _SQL["lock_expired_runs"], runs_max=_BATCH, gap_s=_GAP_S, now=now
            )
            rows = [row for row in rows if only is None or _key(row) in only]
            found += [_key(row) for row in rows]
            open_rows = [row for row in rows if row["attempt_open"]]
            await end_runs(connection, [self._expired(row) for row in rows], now=now)
            await record_attempts(connection, [_closed(row) for row in open_rows], now=now)
        effects = Effects(
            serial_jobs={str(row["job_id"]) for row in rows if row["serial"]},
            affected={_affected(row) for row in open_rows},
        )
        self._lifecycle.spread(effects, now=now)
        for row in rows:
            _log.info("run_expired", run=str(_key(row)), attempt=row["attempt"])
        return len(rows)

    def _expired(self, row: Row) -> EndedRun:
        expiry = expire(attempt=row["attempt"], waited_out=row["waited_out"])
        dead, skipped = expiry.dead_reason, expiry.skip_reason
        code = failure = None
        # What an attempt failed with says more than that nobody came for the next one.
        if dead is not None and not row["has_failed"]:
            code = QUEUE_TIMEOUT_CODE if row["waited_out"] else TOTAL_TIMEOUT_CODE
            failure = self._failures[code]
        return EndedRun(
            key=_key(row),
            attempt=row["attempt"],
            state=expiry.state,
            failure_count=row["failure_count"],
            lost_lease_count=row["lost_lease_count"],
            dead_reason=None if dead is None else dead.name.lower(),
            skip_reason=None if skipped is None else skipped.name.lower(),
            # A closed attempt had its word; only an open one is ended over its worker's head.
            forced=row["attempt_open"],
            failure=failure,
            failure_code=code,
        )


_EVENTS: dict[type[Ending], str] = {
    LeaseLost: "lease_lost",
    Released: "undelivered",
    Failed: "attempt_timed_out",
    Cancelled: "cancel_forced",
    OutOfTime: "run_timed_out",
}


def _key(row: Row) -> RunKey:
    return RunKey(str(row["job_id"]), row["scheduled_at"])


def _is_out_of_time(row: Row, now: Instant) -> bool:
    return row["total_until"] is not None and row["total_until"] <= now


def _may_go_on(each: Ended, effects: Effects) -> bool:
    """Whether the worker of a lost lease may still report."""
    return isinstance(each.ending, LeaseLost) and effects.states[_key(each.row)].is_live


def _affected(row: Row) -> Affected:
    return Affected(str(row["worker_id"]), _key(row), row["attempt"])


def _closed(row: Row) -> EndedAttempt:
    worker_id = row["worker_id"]
    return EndedAttempt(
        key=_key(row),
        attempt=row["attempt"],
        outcome=AttemptOutcome.LEASE_EXPIRED,
        late=False,
        worker_id=None if worker_id is None else str(worker_id),
        claimed_at=row["claimed_at"],
    )
