"""What the fleet of workers looks like, told to the database once a second.

Every Hello, heartbeat and unary claim leaves a mark here; the table is for people and
dashboards, no lease depends on it.
"""

import asyncio
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import structlog

from fencepost_server.clock import SECOND, Clock, Duration
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

_SQL = load("upkeep")
_log = structlog.get_logger("workers")

_PENDING_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMark:
    """A worker process as last heard from; `sdk` and `subscriptions` are serialized messages."""

    worker_id: str
    state: str
    display_name: str = ""
    sdk: bytes = b""
    subscriptions: bytes = b""
    tenant_ids: Collection[int] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    slots: int = 0
    held_runs: int = 0
    free_credits: int = 0
    session_id: str = ""
    server_id: str = ""


class WorkerRegistry:
    """Gathers marks and writes them. Run `run` until it is cancelled."""

    def __init__(self, *, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._pending: dict[str, WorkerMark] = {}

    def seen(self, mark: WorkerMark) -> None:
        """Remember the newest mark of a worker."""
        if mark.worker_id in self._pending or len(self._pending) < _PENDING_MAX:
            self._pending[mark.worker_id] = mark

    def seen_polling(
        self, *, worker_id: str, sdk: bytes, subscriptions: bytes, tenant_ids: Collection[int]
    ) -> None:
        """A worker that uses the unary calls only."""
        self.seen(
            WorkerMark(
                worker_id=worker_id,
                state="polling",
                sdk=sdk,
                subscriptions=subscriptions,
                tenant_ids=tenant_ids,
            )
        )

    def left(self, mark: WorkerMark) -> None:
        """Its session ended, unless a newer one has marked itself meanwhile."""
        newer = self._pending.get(mark.worker_id)
        if newer is None or newer.session_id == mark.session_id:
            self.seen(replace(mark, state="disconnected", free_credits=0, held_runs=0))

    async def run(self, *, interval: Duration) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(interval / SECOND)
            try:
                await self.write()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))

    async def write(self) -> None:
        """Write what is pending; on failure it stays pending unless newer marks came."""
        pending, self._pending = self._pending, {}
        if not pending:
            return
        marks = list(pending.values())
        try:
            await self._database.requests.execute(
                _SQL["upsert_workers"],
                worker_ids=[mark.worker_id for mark in marks],
                display_names=[mark.display_name for mark in marks],
                states=[mark.state for mark in marks],
                sdks=[mark.sdk for mark in marks],
                subscriptions=[mark.subscriptions for mark in marks],
                tenant_ids=[json.dumps(sorted(mark.tenant_ids)) for mark in marks],
                labels=[json.dumps(dict(mark.labels)) for mark in marks],
                slots=[mark.slots for mark in marks],
                held_runs=[mark.held_runs for mark in marks],
                free_credits=[mark.free_credits for mark in marks],
                session_ids=[mark.session_id for mark in marks],
                server_ids=[mark.server_id for mark in marks],
                now=self._clock.now(),
            )
        except StorageUnavailable:
            self._pending = pending | self._pending
            raise
