"""The loop that carries operations out: one short transaction per step, under the operation's
lock, that also stores how far it came. Any server takes the next one.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from fencepost_server.clock import MINUTE, SECOND, Clock, Duration, Instant
from fencepost_server.domain.run import Lane
from fencepost_server.engine.wake import Affected, Wake
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.statements import Statement, load

_SQL = load("operations")
_log = structlog.get_logger("operations")

_STEPS_PER_PASS = 100
_POSTPONED: Duration = MINUTE
PROBLEMS_MAX = 20


@dataclass(slots=True, kw_only=True)
class Hints:
    """What a step is to tell others once it has committed."""

    lanes: set[Lane] = field(default_factory=set)
    serial_jobs: set[str] = field(default_factory=set)
    affected: set[Affected] = field(default_factory=set)


class OperationSteps(ABC):
    """Run `run` until it is cancelled. `lease` locks one operation that is due for a step."""

    def __init__(self, *, database: Database, clock: Clock, wake: Wake, lease: Statement) -> None:
        self._database = database
        self._clock = clock
        self._wake = wake
        self._lease = lease
        # Replaced by whoever follows the clock.
        self.is_trusted: Callable[[], bool] = lambda: True

    async def run(self, *, interval: Duration) -> None:
        """Takes the steps that are due, every `interval`."""
        while True:
            try:
                for _ in range(_STEPS_PER_PASS):
                    if not self.is_trusted() or not await self.step():
                        break
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
            await asyncio.sleep(interval / SECOND)

    async def step(self) -> bool:
        """Takes one step of one operation; False if none is due."""
        now = self._clock.now()
        operation_id = ""
        hints = Hints()
        try:
            async with self._database.requests.transaction() as connection:
                row = await connection.fetch_one(self._lease, now=now)
                if row is None:
                    return False
                operation_id = str(row["operation_id"])
                hints = await self._take(connection, row, now=now)
        except StorageUnavailable:
            raise
        except Exception as error:
            if not operation_id:
                raise
            hints = Hints()
            # Other operations must go on.
            _log.exception("operation_step_failed", operation_id=operation_id, error=repr(error))
            await self._database.requests.execute(
                _SQL["postpone_operation"],
                operation_id=operation_id,
                next_step_at=now + _POSTPONED,
            )
        if hints.lanes:
            self._wake.lanes(hints.lanes)
        self._wake.ends(hints.serial_jobs)
        self._wake.attempts(hints.affected)
        return True

    @abstractmethod
    async def _take(self, connection: Connection, row: Row, *, now: Instant) -> Hints:
        """One step of a locked operation, whose progress it stores."""
