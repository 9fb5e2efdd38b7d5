"""The feed of WatchRuns: tells the watchers of this process which runs have changed.

Statements that change runs store their keys while somebody watches (docs/adr/0039). One loop
per process keeps that going, reads the keys of transactions that have ended, in whatever
order they did, and hands them out; after the last watcher has left it asks nothing more.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import structlog

from fencepost_server.clock import MILLISECOND, MINUTE, SECOND, Clock, Duration, monotonic
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.watcher import Change, Position, Watcher
from fencepost_server.errors import QuotaExceeded, ServerDraining, StorageUnavailable
from fencepost_server.store import runs as run_store
from fencepost_server.store.database import Database, Row
from fencepost_server.store.runs import RunRecord
from fencepost_server.store.statements import load

_SQL, _UPKEEP = load("watch"), load("upkeep")
_log = structlog.get_logger("watch")

WATCHERS_MAX = 200
# How long telling goes on when nobody asks for more, and how often it is asked for.
_AHEAD_S, _MARGIN_S = 30, 5
_RENEW_EVERY: Duration = 10 * SECOND
_POLL: Duration = 250 * MILLISECOND
# After a hint, so that one look finds what several commits have changed.
_GATHER: Duration = 20 * MILLISECOND
_SETTLE_POLL: Duration = 20 * MILLISECOND
_UNSETTLED_POLL: Duration = SECOND
_STATEMENTS_MAX = 64
_PAGES_MAX = 200
KEEP: Duration = 10 * MINUTE
_PRUNE_EVERY: Duration = 30 * SECOND
_PRUNE_ROWS_MAX = 5_000


class Watches:
    """The watchers of one process. Run `run` and `prune_run` until they are cancelled."""

    def __init__(
        self, *, database: Database, clock: Clock, settle_max: Duration = 2 * SECOND
    ) -> None:
        """`settle_max`: how long the first cursor waits for older transactions to end before it
        is given out without them, and a gap follows once they have."""
        self._database = database
        self._clock = clock
        self._settle_max = settle_max
        self._watchers: list[Watcher] = []
        # What has been read; None: it begins with the next watcher.
        self._position: Position | None = None
        self._renewed_at = 0
        # Transactions older than the epoch that were still under way when it began.
        self._unsettled: set[str] = set()
        self._unsettled_at = 0
        self._busy = asyncio.Lock()
        self._woken = asyncio.Event()
        self._is_draining = False

    # What streams ask -----------------------------------------------------------------------

    async def attach(
        self, *, tenant_id: int, job_id: str | None, since: Position | None
    ) -> Watcher:
        """A watcher that hears what ends after `since`, or after now; with a gap if what came
        in between is not known any more.

        Raises StorageUnavailable, ServerDraining, or QuotaExceeded at WATCHERS_MAX.
        """
        async with self._busy:
            if self._is_draining:
                raise self._draining()
            if len(self._watchers) >= WATCHERS_MAX:
                raise QuotaExceeded(
                    f"this server has {WATCHERS_MAX} watchers of runs already; ask another one",
                    retry_after_ms=5_000,
                    limit=str(WATCHERS_MAX),
                )
            position = await self._look()
            watcher = Watcher(tenant_id=tenant_id, job_id=job_id, position=position)
            if since is not None:
                await self._resume(watcher, since, position)
            self._watchers.append(watcher)
            self._woken.set()
            return watcher

    @property
    def count(self) -> int:
        """Watchers of this process."""
        return len(self._watchers)

    def detach(self, watcher: Watcher) -> None:
        """Its stream has ended."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    async def read(self, keys: Sequence[RunKey]) -> Mapping[RunKey, RunRecord]:
        """The runs as they are now. Raises StorageUnavailable."""
        async with self._database.requests.connection() as connection:
            return await run_store.read(connection, keys, full=False)

    def check_draining(self) -> None:
        """Raises ServerDraining once the process leaves."""
        if self._is_draining:
            raise self._draining()

    def drain(self) -> None:
        """The process leaves: watchers are woken to say so."""
        self._is_draining = True
        for watcher in self._watchers:
            watcher.woken.set()

    def hint(self) -> None:
        """This process has committed changes of runs."""
        if self._watchers:
            self._woken.set()

    # The loops ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look for changes as long as somebody watches."""
        while True:
            if await self._is_idle():
                await self._woken.wait()
            else:
                await self._pause()
            self._woken.clear()
            try:
                await self.look()
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))
                await asyncio.sleep(_POLL / SECOND)

    async def prune_run(self) -> None:
        """Remove old changes, also when nobody watches any more."""
        while True:
            await asyncio.sleep(_PRUNE_EVERY / SECOND)
            try:
                while await self.prune() >= _PRUNE_ROWS_MAX:
                    pass
            except StorageUnavailable as error:
                _log.debug("storage_unavailable", error=repr(error.__cause__))

    async def look(self) -> None:
        """Hand out what has changed since the last look. Raises StorageUnavailable."""
        async with self._busy:
            if self._watchers:
                await self._look()

    async def prune(self) -> int:
        """One batch of changes that are old enough; how many statements' worth."""
        row = await self._database.requests.fetch_one(
            _UPKEEP["prune_run_changes"], before=self._clock.now() - KEEP, rows_max=_PRUNE_ROWS_MAX
        )
        assert row is not None
        gone: int = row["gone"]
        return gone

    async def _is_idle(self) -> bool:
        async with self._busy:
            if not self._watchers:
                self._position = None
            return not self._watchers

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_POLL / SECOND):
                await self._woken.wait()
            await asyncio.sleep(_GATHER / SECOND)
        except TimeoutError:
            pass

    # Looking --------------------------------------------------------------------------------

    async def _look(self) -> Position:
        """The position after one look; the caller holds the lock."""
        known = self._position
        if known is None or monotonic() - self._renewed_at >= _RENEW_EVERY:
            epoch = await self._renew()
            if known is None or known.epoch != epoch:
                return await self._begin(epoch)
        await self._check_unsettled()
        known = self._position
        assert known is not None, "it has begun"
        seen = await self._seen()
        if seen.epoch != known.epoch:
            return await self._begin(await self._renew())
        if seen.end != known.end or seen.open != known.open:
            await self._hand_out(known, seen)
        self._position = seen
        return seen

    async def _renew(self) -> int:
        row = await self._database.hot.fetch_one(
            _SQL["keep_watching"], ahead_s=_AHEAD_S, margin_s=_MARGIN_S
        )
        assert row is not None
        self._renewed_at = monotonic()
        epoch: int = row["watch_epoch"]
        return epoch

    async def _begin(self, epoch: int) -> Position:
        """Telling began with a transaction that others under way do not see: changes count as
        told from when those are over. Whoever watched before has missed something."""
        self._unsettled = await self._under_way()
        until = monotonic() + self._settle_max
        while self._unsettled and monotonic() < until:
            await asyncio.sleep(_SETTLE_POLL / SECOND)
            self._unsettled &= await self._under_way()
        self._unsettled_at = monotonic()
        position = await self._seen()
        if position.epoch != epoch:
            raise StorageUnavailable("watching has lapsed meanwhile; try again")
        for watcher in self._watchers:
            watcher.lose(until=position)
        self._position = position
        return position

    async def _check_unsettled(self) -> None:
        """What an old transaction has changed untold is known to nobody; once it is over,
        listing the runs again shows it."""
        if not self._unsettled or monotonic() - self._unsettled_at < _UNSETTLED_POLL:
            return
        self._unsettled &= await self._under_way()
        self._unsettled_at = monotonic()
        if not self._unsettled:
            position = await self._seen()
            for watcher in self._watchers:
                watcher.lose(until=position)
            self._position = position

    async def _under_way(self) -> set[str]:
        rows = await self._database.hot.fetch(_SQL["transactions_under_way"])
        return {row["name"] for row in rows}

    async def _seen(self) -> Position:
        return (await self._seen_and_pruned())[0]

    async def _seen_and_pruned(self) -> tuple[Position, int]:
        row = await self._database.hot.fetch_one(_SQL["look_at_changes"])
        assert row is not None
        return Position.of(row["snapshot"], epoch=row["watch_epoch"]), int(row["pruned_to"])

    async def _hand_out(self, since: Position, until: Position) -> None:
        watchers = list(self._watchers)
        known = await self._offer(watchers, since, until)
        for watcher in watchers:
            if known:
                watcher.offer((), until=until)
            else:
                watcher.lose(until=until)

    async def _offer(self, watchers: Sequence[Watcher], since: Position, until: Position) -> bool:
        """Offers what lies between two positions; False: not all of it is known."""
        pages = 0
        async for rows in self._pages(since, until, {each.tenant_id for each in watchers}):
            for watcher in watchers:
                watcher.offer(_changes(rows, watcher), until=since)
            pages += 1
            if pages == _PAGES_MAX:
                return False
        _, pruned_to = await self._seen_and_pruned()
        return pruned_to < since.low

    async def _resume(self, watcher: Watcher, since: Position, until: Position) -> None:
        """Offers what was told after a cursor, or a gap if that is not known."""
        if since.epoch != until.epoch or since.end > until.end:
            watcher.lose(until=until)
            return
        watcher.position = since
        if await self._offer([watcher], since, until):
            watcher.offer((), until=until)
        else:
            watcher.lose(until=until)

    async def _pages(
        self, since: Position, until: Position, tenant_ids: Iterable[int]
    ) -> AsyncIterator[Sequence[Row]]:
        after_xid, after_place = "0", "(0,0)"
        while True:
            rows = await self._database.hot.fetch(
                _SQL["read_changes"],
                since_end=str(since.end),
                since_open=[str(xid) for xid in since.open],
                until=until.snapshot,
                after_xid=after_xid,
                after_place=after_place,
                tenant_ids=sorted(tenant_ids),
                statements_max=_STATEMENTS_MAX,
            )
            if rows:
                yield rows
            if len(rows) < _STATEMENTS_MAX:
                return
            after_xid, after_place = rows[-1]["xid"], rows[-1]["place"]

    @staticmethod
    def _draining() -> ServerDraining:
        return ServerDraining(
            "the server is leaving; watch on another one with the last cursor", retry_after_ms=1000
        )


def _changes(rows: Sequence[Row], watcher: Watcher) -> list[Change]:
    """Those changes that the watcher wants, in the order they were read."""
    return [
        Change(RunKey(str(job_id), at), row["changed_at"])
        for row in rows
        if row["job_ids"] is not None
        for job_id, at, tenant_id in zip(
            row["job_ids"], row["scheduled_ats"], row["tenant_ids"], strict=True
        )
        if watcher.wants(tenant_id, str(job_id))
    ]
