"""WatchRuns: what a watcher is told, filtered and written as messages with a cursor each."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator

from fencepost.v1 import run_pb2, run_service_pb2

from fencepost_server.api.page_tokens import PageTokens
from fencepost_server.api.run_filter import read_filter
from fencepost_server.api.run_matching import matches
from fencepost_server.api.wire_operation import read_parent
from fencepost_server.api.wire_run import write_run
from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.clock import SECOND, Duration, Instant, monotonic
from fencepost_server.domain.names import JobName, RunName
from fencepost_server.engine.run_reads import RunReads
from fencepost_server.engine.watch import Watches
from fencepost_server.engine.watcher import Change, Position, Taken, Watcher
from fencepost_server.errors import JobNotFound, RunNotFound, StorageUnavailable
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.runs import RunQuery, RunRecord

# A run in RUN_VIEW_BASIC takes 10 KiB at most, a message 4 MiB.
EVENTS_MAX = 128
# An empty message comes at least every 15 s.
_IDLE: Duration = 10 * SECOND
_RETRY: Duration = SECOND // 2


class WatchCalls:
    """Serves WatchRuns from the feed of this process."""

    def __init__(
        self, *, watches: Watches, reads: RunReads, catalogue: Catalogue, page_tokens: PageTokens
    ) -> None:
        self._watches = watches
        self._catalogue = catalogue
        self._reads = reads
        self._page_tokens = page_tokens

    def drain(self) -> None:
        """End all streams: they go on elsewhere."""
        self._watches.drain()

    async def watch(
        self, request: run_service_pb2.WatchRunsRequest
    ) -> AsyncGenerator[run_service_pb2.WatchRunsResponse, None]:
        """Messages until the caller goes or the server drains; the first comes at once.

        Raises InvalidField, FilterNotSupported, InvalidPageToken, TenantNotFound, JobNotFound,
        QuotaExceeded, StorageUnavailable, or ServerDraining.
        """
        scope = read_parent(request.parent)
        query = read_filter(request.filter, job=None)
        bound = _bound_to(request)
        since = self._read_cursor(request.cursor, bound) if request.cursor else None
        watcher = await self._watches.attach(
            tenant_id=await self._catalogue.tenant_id(scope.tenant),
            job_id=await self._job_id(scope) if scope.job else None,
            since=since,
        )
        try:
            told_at = None
            while True:
                self._watches.check_draining()
                response = await self._next(watcher, query)
                is_idle = told_at is None or monotonic() - told_at >= _IDLE
                if response.events or response.gap or is_idle:
                    response.cursor = self._cursor(watcher.position, bound)
                    yield response
                    told_at = monotonic()
                await _woken(watcher, until=(told_at or monotonic()) + _IDLE)
        finally:
            self._watches.detach(watcher)

    async def _next(self, watcher: Watcher, query: RunQuery) -> run_service_pb2.WatchRunsResponse:
        """What there is to tell now, possibly nothing; while the database is away, nothing."""
        taken = watcher.take(EVENTS_MAX)
        try:
            return await self._written(watcher, taken, query)
        except StorageUnavailable:
            watcher.put_back(taken)
            await asyncio.sleep(_RETRY / SECOND)
            return run_service_pb2.WatchRunsResponse()

    async def _written(
        self, watcher: Watcher, taken: Taken, query: RunQuery
    ) -> run_service_pb2.WatchRunsResponse:
        response = run_service_pb2.WatchRunsResponse(gap=taken.gap)
        if not taken.changes:
            return response
        found = await self._watches.read([change.key for change in taken.changes])
        for change in taken.changes:
            run = found.get(change.key)
            # Every state is remembered, told or not: one that was left and came back is news.
            if run is None or not watcher.is_news(run) or not matches(query, run):
                continue
            response.events.append(
                run_pb2.RunEvent(
                    changed_at=to_timestamp(_changed_at(change, run)),
                    run=write_run(run, full=False),
                )
            )
        return response

    async def _job_id(self, scope: JobName) -> str:
        try:
            key = await self._reads.key_of(
                RunName(tenant=scope.tenant, job=scope.job, scheduled_at=0)
            )
        except RunNotFound:
            raise JobNotFound(
                f"{scope} does not exist", resource=str(scope), name=str(scope)
            ) from None
        return key.job_id

    def _cursor(self, position: Position, bound: bytes) -> str:
        told = position.compact()
        return self._page_tokens.make(
            [told.epoch, told.low, told.end, *(xid - told.low for xid in told.open)], query=bound
        )

    def _read_cursor(self, cursor: str, bound: bytes) -> Position:
        epoch, low, end, *offsets = map(
            int, self._page_tokens.read(cursor, query=bound, field="cursor")
        )
        return Position(epoch=epoch, low=low, end=end, open=tuple(low + each for each in offsets))


def _changed_at(change: Change, run: RunRecord) -> Instant:
    """When the state that is told was stored: what is read may be newer than what was heard."""
    known = (run.created_at, run.claimed_at, run.ended_at, run.discarded_at)
    return max(change.changed_at, *(at for at in known if at is not None))


def _bound_to(request: run_service_pb2.WatchRunsRequest) -> bytes:
    """A cursor is good for the watch it came from: what it leaves out was filtered."""
    parts = (request.DESCRIPTOR.full_name, request.parent, request.filter)
    return hashlib.sha256("\x00".join(parts).encode("utf-8", "surrogatepass")).digest()


async def _woken(watcher: Watcher, *, until: int) -> None:
    try:
        async with asyncio.timeout(max(0, until - monotonic()) / SECOND):
            await watcher.woken.wait()
    except TimeoutError:
        pass
