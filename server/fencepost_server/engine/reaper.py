"""Takes back what nobody renews: lost leases, attempts past their timeout, cancels past
their grace; and ends runs that are out of time. And the lease keeper, which makes it pause
after heartbeats could not be stored.

Without the pause one outage of the database would expire every lease and double all work.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import structlog

from fencepost_server.clock import SECOND, Clock, Duration, Instant, monotonic
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
# Overdue attempts that one look over all open ones finds.
_FOUND_MAX = 2000
_GAP_S = 10
# Leases only move forward, so nothing is lost before the earliest end that a look has seen. What
# it cannot have seen ends later than this: a new claim has fifteen seconds or more, a lease that
# is cut because a stream broke has five left.
LOOK_WITHIN: Duration = 5 * SECOND
QUEUE_TIMEOUT_CODE = "QUEUE_TIMEOUT"
TOTAL_TIMEOUT_CODE = "TOTAL_TIMEOUT"

# One transaction over what is found, or over some of it; how many it dealt with.
_Take = Callable[[list[RunKey], Collection[RunKey] | None], Awaitable[int]]
_Find = Callable[[], Awaitable[Sequence[RunKey]]]


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
        # The shortest attempt is over a heartbeat after its timeout of a second.
        self._look_within = min(LOOK_WITHIN, heartbeat_interval + SECOND)
        self._look_at = monotonic()
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True

    async def run(self, *, interval: Duration) -> None:
        """Reap until cancelled."""
        while True:
            try:
                await self.tick()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            await asyncio.sleep(interval / SECOND)

    async def tick(self) -> None:
        """One pass. It reads all open attempts only when one of them may be overdue."""
        if self.is_trusted():
            await self.reap(all_open=monotonic() >= self._look_at)
            await self.expire()

    def look_soon(self) -> None:
        """The next pass looks over all open attempts: one may be asked to stop by now."""
        self._look_at = monotonic()

    async def reap(self, *, all_open: bool = True) -> int:
        """Everything that is lost or overdue now; the number of attempts taken back.

        Without `all_open` only what is over its run's total_timeout, which is found by an index.
        """
        taken = await self._take_all(self._find_out_of_time)
        return taken + (await self._take_all(self._find_overdue) if all_open else 0)

    async def expire(self) -> int:
        """Ends every waiting run that is out of time; how many there were."""
        ended = 0
        while True:
            batch = await self._batch(self._expire)
            ended += batch
            if batch < _BATCH:
                return ended

    async def _take_all(self, find: _Find) -> int:
        taken = 0
        while True:
            found = await find()
            before = taken
            for start in range(0, len(found), _BATCH):
                taken += await self._batch(self._take_back, found[start : start + _BATCH])
            # What is left after that others are at, or cannot be ended.
            if len(found) < _FOUND_MAX or taken == before:
                return taken

    async def _find_out_of_time(self) -> Sequence[RunKey]:
        rows = await self._database.hot.fetch(
            _SQL["find_attempts_out_of_time"],
            runs_max=_FOUND_MAX,
            gap_s=_GAP_S,
            now=self._clock.now(),
        )
        return [_key(row) for row in rows]

    async def _find_overdue(self) -> Sequence[RunKey]:
        """Reads all open attempts, and says until when that need not be done again."""
        asked_at = monotonic()
        # Set before, because a hint may come meanwhile.
        self._look_at = asked_at + self._look_within
        try:
            async with self._database.hot.transaction() as connection:
                now = self._clock.now()
                await connection.execute(_SQL["read_by_pages"])
                rows = await connection.fetch(
                    _SQL["find_overdue_attempts"],
                    runs_max=_FOUND_MAX,
                    heartbeat_s=self._heartbeat_interval // SECOND,
                    gap_s=_GAP_S,
                    now=now,
                )
        except StorageUnavailable:
            self.look_soon()
            raise
        # None also while the reaper pauses; then the next pass looks again.
        left = min((row["due_at"] - now for row in rows), default=0)
        self._look_at = min(self._look_at, asked_at + left)
        return [_key(row) for row in rows if row["due_at"] <= now]

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
            keys = sorted(only or ())
            rows = await connection.fetch(
                _SQL["lock_overdue_attempts"],
                job_ids=[key.job_id for key in keys],
                scheduled_ats=[key.scheduled_at for key in keys],
                heartbeat_s=self._heartbeat_interval // SECOND,
                gap_s=_GAP_S,
                now=now,
            )
            ended = [
                self._lost(row, now) if row["is_lost"] else self._overrun(row, now) for row in rows
            ]
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
