"""Keeps one session alive: opens it, replaces it when it ends, drains or falls silent.

Make before break: the old session goes on until its successor has been welcomed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from fencepost.errors import FencepostError
from fencepost.events import event
from fencepost.retry import Backoff
from fencepost.session import Session, Succession, Want
from fencepost.timings import Timings
from fencepost.v1 import run_service_pb2, worker_pb2

_FATAL = frozenset(
    {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)
_SLOW = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
    }
)


class Link:
    """`current` is the session to write to; it may have just ended."""

    def __init__(
        self,
        *,
        open_session: Callable[[], Session],
        make_hello: Callable[[str], worker_pb2.Hello],
        on_session: Callable[[Session], None],
        timings: Timings,
    ) -> None:
        self._open_session = open_session
        self._make_hello = make_hello
        self._on_session = on_session
        self._timings = timings
        self._backoff = Backoff(base=timings.reconnect_base, cap=timings.reconnect_cap)
        self._retiring: list[Session] = []
        self.current: Session | None = None

    async def keep(self) -> None:
        """Runs until cancelled. Raises the error that no reconnect can repair."""
        loop = asyncio.get_running_loop()
        succession: Succession | None = None
        while True:
            session = await self._open()
            self._hand_over(session, succession)
            began = loop.time()
            succession = await session.succession
            event(
                logging.INFO,
                "session.replacing",
                session_id=session.session_id,
                why=succession.want.name,
                error=succession.error or "",
            )
            if loop.time() - began >= self._timings.healthy_after:
                self._backoff.reset()
            if succession.want is Want.DRAINED:
                self._backoff.reset()
                await asyncio.sleep(succession.delay)
            else:
                await asyncio.sleep(self._delay(succession.error))

    def settle_retired(self, unanswered: Callable[[int], int]) -> None:
        """Half-closes drained sessions whose verdicts have all come."""
        for session in [s for s in self._retiring if not unanswered(s.number)]:
            self._retiring.remove(session)
            session.half_close()

    def abandon(self) -> None:
        """Ends every session at once."""
        for session in (*self._retiring, self.current):
            if session is not None:
                session.abandon()

    async def _open(self) -> Session:
        while True:
            session = self._open_session()
            previous = self.current.session_id if self.current is not None else ""
            try:
                error = await session.open(self._make_hello(previous))
            except asyncio.CancelledError:
                session.abandon()
                raise
            if error is None:
                return session
            delay = self._delay(error)
            event(logging.WARNING, "session.refused", error=error, retry_in=round(delay, 1))
            await asyncio.sleep(delay)

    def _hand_over(self, session: Session, succession: Succession | None) -> None:
        old, self.current = self.current, session
        self._on_session(session)
        if old is None:
            return
        drained = succession is not None and succession.want is Want.DRAINED
        if drained and old.live:
            if old.untold:
                old.send(run_service_pb2.WorkRequest())
            old.retire()
            self._retiring.append(old)
        else:
            old.abandon()

    def _delay(self, error: FencepostError | None) -> float:
        """Seconds until the next try; raises what is not to be retried."""
        if error is not None and error.code in _FATAL:
            raise error
        if error is not None and error.code in _SLOW:
            return self._timings.slow_retry
        return max(self._backoff.next_delay(), (error.retry_after or 0.0) if error else 0.0)
