"""Opens worker sessions (Hello, inventory, Welcome), keeps the newest of each worker, and
drains them all when the server leaves.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NoReturn

import grpc.aio
import structlog
from fencepost.v1 import run_service_pb2, worker_pb2

from fencepost_server.api import validate
from fencepost_server.api.inventory import read_inventory
from fencepost_server.api.limits import (
    HELD_RUNS_MAX,
    REVISION_MAX,
    REVISION_MIN,
    server_limits,
)
from fencepost_server.api.session import Session, SessionInfo, SessionParts
from fencepost_server.api.subscriptions import read_subscriptions
from fencepost_server.api.wire_worker import write_notice
from fencepost_server.clock import MILLISECOND, MINUTE, SECOND, Duration
from fencepost_server.domain.names import is_uuid
from fencepost_server.domain.run import stable_fraction
from fencepost_server.engine.verdicts import Held, Renewal
from fencepost_server.engine.workers import WorkerMark
from fencepost_server.errors import (
    FencepostError,
    ProtocolViolation,
    ServerDraining,
    StorageUnavailable,
    UnsupportedProtocol,
)
from fencepost_server.store.catalogue import Catalogue

_log = structlog.get_logger("work")

FEATURES: tuple[str, ...] = ()
HELLO_WAIT_S = 5
HEARTBEAT_ACK_TIMEOUT: Duration = 8 * SECOND
MAX_BUFFER_TIME: Duration = 5 * SECOND
RECONNECT_DELAY_MAX: Duration = 5 * SECOND
CLOSE_AFTER: Duration = 30 * SECOND
# A session this old is asked to move, give or take a fifth, so that load spreads.
SESSION_AGE: Duration = 25 * MINUTE
_AGE_LOOK_S = 10
_LOOK_S = 0.5
_SDK_TEXTS = [field.name for field in worker_pb2.SdkInfo.DESCRIPTOR.fields]
# Rows of an inventory that others have locked are tried so often, so long apart.
_RENEW_TRIES = 10
_RENEW_PAUSE: Duration = 100 * MILLISECOND


class WorkSessions:
    """All sessions of one server process."""

    def __init__(
        self,
        *,
        server_id: str,
        catalogue: Catalogue,
        parts: SessionParts,
        heartbeat_interval: Duration,
    ) -> None:
        self._server_id = server_id
        self._catalogue = catalogue
        self._parts = parts
        self._heartbeat_interval = heartbeat_interval
        self._sessions: dict[str, Session] = {}
        self._open: set[Session] = set()
        self._closed = asyncio.Event()
        self._closed.set()
        self._is_draining = False

    async def serve(
        self,
        requests: AsyncIterator[run_service_pb2.WorkRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        """One `Work` call, from Hello to its end. Raises what ends the stream."""
        if self._is_draining:
            raise ServerDraining("the server is leaving; connect to another one")
        first = await self._first(requests)
        session, welcome = await self._open_session(first)
        if self._is_draining:
            raise ServerDraining("the server is leaving; connect to another one")
        self._enter(session)
        writer = asyncio.create_task(session.outbox.write_to(context.write))
        try:
            session.outbox.say(run_service_pb2.WorkResponse(welcome=welcome))
            self._parts.dispatcher.subscribe(session)
            self._parts.workers.seen(session.mark("ready"))
            session.take_counters(first)
            await self._handle(session, requests, writer)
        finally:
            writer.cancel()
            self._leave(session)
            await asyncio.gather(writer, return_exceptions=True)

    def drain(self) -> None:
        """Ask every worker to move to another server; no session is opened from now on."""
        self._is_draining = True
        for session in list(self._open):
            session.drain(
                worker_pb2.SERVER_DRAIN_REASON_SHUTDOWN,
                delay=int(
                    RECONNECT_DELAY_MAX * stable_fraction(session.info.session_id, "reconnect")
                ),
                close_after=CLOSE_AFTER,
            )

    async def drained(self) -> None:
        """Until every session has ended, and what they left is settled."""
        await self._closed.wait()
        await self._parts.settle.finish()

    async def watch(self) -> None:
        """Look after all sessions, until cancelled: one timer, however many they are."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for session in list(self._open):
                session.look()

    async def rebalance(self) -> None:
        """Ask sessions that have grown old to move, until cancelled."""
        while True:
            await asyncio.sleep(_AGE_LOOK_S)
            for session in list(self._sessions.values()):
                spread = 0.8 + 0.4 * stable_fraction(session.info.session_id, "age")
                if session.age > SESSION_AGE * spread:
                    self._sessions.pop(session.worker_id, None)
                    session.drain(
                        worker_pb2.SERVER_DRAIN_REASON_REBALANCE, delay=0, close_after=CLOSE_AFTER
                    )

    async def _handle(
        self,
        session: Session,
        requests: AsyncIterator[run_service_pb2.WorkRequest],
        writer: "asyncio.Task[None]",
    ) -> None:
        """Read until the end; a stream that can no longer be written ends as well."""
        reader = asyncio.create_task(session.handle(requests))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                await _unwrapped(reader)
                await _first_of(session.outbox.flushed(), writer, timeout_s=CLOSE_AFTER / SECOND)
            if writer.done():
                error = repr(writer.exception())
                _log.info("session_not_written", session_id=session.info.session_id, error=error)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _first(
        self, requests: AsyncIterator[run_service_pb2.WorkRequest]
    ) -> run_service_pb2.WorkRequest:
        try:
            async with asyncio.timeout(HELLO_WAIT_S):
                first = await anext(requests, None)
        except TimeoutError:
            raise ProtocolViolation("hello: none came within 5 s", rule="S1") from None
        if first is None or first.WhichOneof("event") != "hello":
            raise ProtocolViolation("hello: the first message must be a Hello", rule="S1")
        return first

    async def _open_session(
        self, first: run_service_pb2.WorkRequest
    ) -> tuple[Session, worker_pb2.Welcome]:
        hello = first.hello
        self._check(hello)
        subscriptions, tenant_ids = await read_subscriptions(
            hello.subscriptions, self._catalogue, field="hello.subscriptions"
        )
        session_id = str(uuid.uuid4())
        mark = WorkerMark(
            worker_id=hello.worker_id,
            state="ready",
            display_name=hello.display_name,
            sdk=hello.sdk.SerializeToString(),
            subscriptions=run_service_pb2.ClaimRunsRequest(
                subscriptions=hello.subscriptions
            ).SerializeToString(),
            tenant_ids=tenant_ids,
            labels=dict(hello.labels),
            slots=hello.slots,
            held_runs=len(hello.inventory),
            session_id=session_id,
            server_id=self._server_id,
        )
        info = SessionInfo(
            session_id=session_id,
            worker_id=hello.worker_id,
            mark=mark,
            subscriptions=subscriptions,
        )
        welcome = worker_pb2.Welcome(
            session_id=session_id,
            server_id=self._server_id,
            revision=min(hello.max_revision, REVISION_MAX),
            features=[each for each in FEATURES if each in set(hello.features)],
            limits=server_limits(),
        )
        welcome.heartbeat_interval.FromMicroseconds(self._heartbeat_interval)
        welcome.heartbeat_ack_timeout.FromMicroseconds(HEARTBEAT_ACK_TIMEOUT)
        welcome.max_buffer_time.FromMicroseconds(MAX_BUFFER_TIME)
        held, unknown = read_inventory(hello.inventory)
        welcome.notices.extend(unknown)
        # The database away here ends the call with UNAVAILABLE: nothing was promised yet.
        for renewal in await self._renewals(held):
            if renewal.notice is not None:
                welcome.notices.append(write_notice(renewal.notice))
        return Session(info, self._parts), welcome

    async def _renewals(self, held: Sequence[Held]) -> Sequence[Renewal]:
        """An answer for every held run: what a Welcome leaves out has a fresh lease."""
        renewals = list(await self._parts.lifecycle.heartbeat(held))
        for _ in range(_RENEW_TRIES):
            left = [place for place, each in enumerate(renewals) if each.not_renewed]
            if not left:
                return renewals
            await asyncio.sleep(_RENEW_PAUSE / SECOND)
            again = await self._parts.lifecycle.heartbeat([held[place] for place in left])
            for place, renewal in zip(left, again, strict=True):
                renewals[place] = renewal
        raise StorageUnavailable("runs of the inventory could not be renewed; try again")

    def _check(self, hello: worker_pb2.Hello) -> None:
        if not is_uuid(hello.worker_id):
            raise validate.refused(
                "hello.worker_id", hello.worker_id, "lower-case UUID text of 36 characters"
            )
        validate.text(hello.display_name, field="hello.display_name", chars_max=128)
        validate.labels(hello.labels, field="hello.labels")
        for part in _SDK_TEXTS:
            validate.text(getattr(hello.sdk, part), field=f"hello.sdk.{part}", chars_max=128)
        validate.integer(hello.slots, field="hello.slots", minimum=1, maximum=HELD_RUNS_MAX)
        counts = {"inventory": (hello.inventory, HELD_RUNS_MAX), "features": (hello.features, 64)}
        for name, (entries, entries_max) in counts.items():
            if len(entries) > entries_max:
                raise validate.refused(f"hello.{name}", len(entries), f"at most {entries_max}")
        low, high = hello.min_revision, hello.max_revision
        if not 1 <= low <= high:
            raise ProtocolViolation(
                f"hello: min_revision {low} and max_revision {high} must be 1 or more and in order",
                rule="S1",
            )
        if high < REVISION_MIN or low > REVISION_MAX:
            raise UnsupportedProtocol(
                f"the server speaks revisions {REVISION_MIN} to {REVISION_MAX}, the worker {low} "
                f"to {high}",
                serverRevisions=f"{REVISION_MIN}-{REVISION_MAX}",
                workerRevisions=f"{low}-{high}",
            )

    def _enter(self, session: Session) -> None:
        older = self._sessions.get(session.worker_id)
        self._sessions[session.worker_id] = session
        self._open.add(session)
        self._parts.notices.listen(session.worker_id, session.tell)
        self._closed.clear()
        if older is not None:
            older.drain(worker_pb2.SERVER_DRAIN_REASON_REPLACED, delay=0, close_after=CLOSE_AFTER)
        _log.info("session_opened", session_id=session.info.session_id, worker_id=session.worker_id)

    def _leave(self, session: Session) -> None:
        session.end()
        self._parts.notices.leave(session.worker_id, session.tell)
        self._open.discard(session)
        if self._sessions.get(session.worker_id) is session:
            del self._sessions[session.worker_id]
        if not self._open:
            self._closed.set()
        _log.info("session_ended", session_id=session.info.session_id, worker_id=session.worker_id)


async def _first_of(
    work: Coroutine[Any, Any, None], other: "asyncio.Task[None]", *, timeout_s: float
) -> None:
    """Until `work` or `other` ends, or for `timeout_s`; `work` never goes on afterwards."""
    doing = asyncio.create_task(work)
    try:
        await asyncio.wait({doing, other}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)


async def _unwrapped(reader: "asyncio.Task[None]") -> None:
    """The reader's own end; what a group of its coroutines raised counts as one error."""
    try:
        await reader
    except BaseExceptionGroup as group:
        _raise_first(group)


def _raise_first(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    known, other = group.split(FencepostError)
    first: BaseException = known if known is not None and other is None else group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    raise first from group
