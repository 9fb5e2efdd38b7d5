"""Takes back what nobody renews: lost leases, attempts past their timeout, cancels past
their grace. And the lease keeper, which makes it pause after heartbeats could not be stored.

Without the pause one outage of the database would expire every lease and double all work.
"""

import asyncio
from collections.abc import Callable, Collection

import structlog

from fencepost_server.clock import SECOND, Clock, Duration
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.attempts import Ended, end_attempts
from fencepost_server.engine.lifecycle import TIMEOUT_CODE, Lifecycle
from fencepost_server.engine.specs import SpecCache, SpecKey
from fencepost_server.errors import StorageUnavailable
from fencepost_server.policy.outcome import Cancelled, Ending, Failed, LeaseLost, Released
from fencepost_server.store.database import ConflictError, Database, Row
from fencepost_server.store.statements import load

_SQL = load("leases")
_log = structlog.get_logger("reaper")

_BATCH = 500
_GAP_S = 10


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
        failure: bytes,
    ) -> None:
        """`failure` is the serialized failure recorded for an attempt that timed out."""
        self._database = database
        self._clock = clock
        self._lifecycle = lifecycle
        self._specs = specs
        self._heartbeat_interval = heartbeat_interval
        self._failure = failure
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True

    async def run(self, *, interval: Duration) -> None:
        """Reap until cancelled."""
        while True:
            try:
                if self.is_trusted():
                    await self.reap()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            await asyncio.sleep(interval / SECOND)

    async def reap(self) -> int:
        """Everything that is lost or overdue now; the number of attempts taken back."""
        taken = 0
        while True:
            batch = await self._reap_batch()
            taken += batch
            if batch < _BATCH:
                return taken

    async def _reap_batch(self, only: Collection[RunKey] | None = None) -> int:
        """One transaction, over all that is lost or `only` over some of it."""
        ended: list[Ended] = []
        try:
            return await self._take_back(ended, only)
        except ConflictError as error:
            # A key that is in history already is a bug; it must not hold up the other runs.
            keys = sorted(_key(each.row) for each in ended)
            if len(keys) == 1:
                _log.error("end_refused_by_history", run=str(keys[0]), error=str(error))
                return 0
            middle = len(keys) // 2
            return await self._reap_batch(keys[:middle]) + await self._reap_batch(keys[middle:])

    async def _take_back(self, ended: list[Ended], only: Collection[RunKey] | None) -> int:
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
            found = {_key(row): self._overrun(row) for row in overrun}
            found |= {_key(row): Ended(row=row, ending=_loss(row)) for row in lost}
            ended += [each for key, each in found.items() if only is None or key in only]
            if not ended:
                return 0
            specs = await self._specs.get(
                {SpecKey(str(each.row["job_id"]), each.row["version"]) for each in ended},
                connection=connection,
            )
            effects = await end_attempts(connection, ended, specs, now=now)
        self._lifecycle.spread(effects, now=now)
        for each in ended:
            _log.info(
                _EVENTS[type(each.ending)],
                run=str(_key(each.row)),
                attempt=each.row["attempt"],
                worker_id=str(each.row["worker_id"]),
            )
        return len(ended)

    def _overrun(self, row: Row) -> Ended:
        ending: Ending
        if row["cancel_requested"]:
            ending = Cancelled(forced=True)
            return Ended(row=row, ending=ending)
        ending = Failed(code=TIMEOUT_CODE, timed_out=True)
        return Ended(row=row, ending=ending, failure=self._failure, failure_code=TIMEOUT_CODE)


_EVENTS: dict[type[Ending], str] = {
    LeaseLost: "lease_lost",
    Released: "undelivered",
    Failed: "attempt_timed_out",
    Cancelled: "cancel_forced",
}


def _key(row: Row) -> RunKey:
    return RunKey(str(row["job_id"]), row["scheduled_at"])


def _loss(row: Row) -> Ending:
    """A run that a broken stream may never have delivered goes back without a mark."""
    return Released(undelivered=True) if row["undelivered"] else LeaseLost()
