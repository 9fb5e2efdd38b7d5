"""The worker: registers handlers, and runs them until it is told to leave."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fencepost.client import Client
from fencepost.durations import Seconds, to_seconds
from fencepost.engine import Engine
from fencepost.handler import Handler, make_handler
from fencepost.leaving import leave, say_goodbye, stop_handlers
from fencepost.runner import Around
from fencepost.settings import WorkerSettings
from fencepost.signals import drain_on_signals
from fencepost.stats import Stats
from fencepost.timings import Timings

Function = TypeVar("Function", bound=Callable[..., Any])


class Worker:
    """Takes runs from queues and hands them to handlers.

    `queues` are names, or full resource names; `slots` is how many runs are handled at once
    (1 to 5000), `prefetch` how many more may wait here for a slot, `grace` how long running
    handlers may go on once the worker is asked to leave (seconds or timedelta).
    """

    def __init__(
        self,
        client: Client,
        queues: Sequence[str] = ("default",),
        slots: int = 10,
        grace: Seconds = 25.0,
        *,
        prefetch: int = 0,
        display_name: str = "",
        build_id: str = "",
        labels: Mapping[str, str] | None = None,
        handle_signals: bool = True,
        timings: Timings | None = None,
    ) -> None:
        if isinstance(queues, str):
            raise TypeError(f"queues is a list of names, got the text {queues!r}")
        self._connection = client.connection
        self._settings = WorkerSettings(
            queues=tuple(queues),
            slots=slots,
            prefetch=prefetch,
            grace=to_seconds(grace),
            display_name=display_name,
            build_id=build_id,
            labels=dict(labels or {}),
            timings=timings or Timings(),
        )
        self._handle_signals = handle_signals
        self._handlers: dict[str, Handler] = {}
        self._around: list[Around] = []
        self._lock = threading.RLock()  # a signal may interrupt its own holder
        self._engine: Engine | None = None
        self._stopping = False
        self._running = False
        self.stats = Stats()
        """What this worker has counted."""

    @property
    def worker_id(self) -> str:
        """Made new for each worker of each process."""
        return self._settings.worker_id

    def handler(self, kind: str, *, input_type: Any = None) -> Callable[[Function], Function]:
        """Registers a function, sync or async, as the handler of `kind`.

        Its input is decoded to `input_type`, else to the annotation of its first argument;
        an argument annotated `Context` gets the context. Sync functions run in threads.
        """

        def register(function: Function) -> Function:
            if self._running:
                raise RuntimeError("handlers are registered before the worker runs")
            if kind in self._handlers:
                raise ValueError(f"kind {kind!r} already has a handler")
            self._handlers[kind] = make_handler(kind, function, input_type)
            return function

        return register

    def around(self, function: Around) -> Around:
        """Registers a context manager that is entered around each call of a handler.

        It gets the Context, and the handler's exceptions pass through it: the place for
        spans, transactions and log context. The first one registered is the outermost.
        """
        if self._running:
            raise RuntimeError("what goes around handlers is registered before the worker runs")
        self._around.append(function)
        return function

    def run(self) -> None:
        """Works until SIGTERM, SIGINT or `stop`; raises what no reconnect can repair.

        The first signal drains, a second one ends the process at once.
        """
        loop = asyncio.new_event_loop()
        signals = drain_on_signals(self.stop) if self._handle_signals else None
        with signals or contextlib.nullcontext():
            try:
                asyncio.set_event_loop(loop)
                loop.run_until_complete(self.run_async())
            finally:
                _close(loop)
                asyncio.set_event_loop(None)

    async def run_async(self) -> None:
        """As `run`, in the caller's event loop and without signal handlers.

        Async handlers run in this loop. Cancelling it gives all runs back without grace.
        """
        if not self._handlers:
            raise RuntimeError("a worker needs at least one handler")
        if self._running:
            raise RuntimeError("this worker has already been run")
        self._running = True
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        thread = threading.Thread(
            target=self._session_thread, args=(loop, ended), name="fencepost-session", daemon=True
        )
        thread.start()
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._stop(grace=0.0)
            await asyncio.wait({ended})
            ended.exception()  # the cancel comes first
            raise
        finally:
            if ended.done():
                thread.join()

    def stop(self) -> None:
        """Drains the worker, as SIGTERM does. Returns at once; from any thread."""
        self._stop(grace=self._settings.grace)

    def _stop(self, grace: float) -> None:
        with self._lock:
            self._stopping = True
            engine = self._engine
        if engine is not None:
            # The session thread may just have ended by itself.
            with contextlib.suppress(RuntimeError):
                engine.loop.call_soon_threadsafe(engine.stop, grace)

    def _session_thread(
        self, user_loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]
    ) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._work(user_loop))
        except BaseException as failure:  # noqa: BLE001 - carried over to the caller's thread
            error = failure

        def settle() -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        with contextlib.suppress(RuntimeError):
            user_loop.call_soon_threadsafe(settle)

    async def _work(self, user_loop: asyncio.AbstractEventLoop) -> None:
        engine = Engine(
            connection=self._connection,
            settings=self._settings,
            handlers=self._handlers,
            around=self._around,
            user_loop=user_loop,
            stats=self.stats,
        )
        with self._lock:
            self._engine = engine
            if self._stopping:
                engine.stop(self._settings.grace)
        await _live(engine)


async def _live(engine: Engine) -> None:
    link = asyncio.create_task(engine.link.keep())
    stop = asyncio.create_task(engine.stop_requested.wait())
    try:
        await asyncio.wait({link, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not link.done():
            leaving = asyncio.create_task(leave(engine))
            await asyncio.wait({link, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
        if link.done():
            await stop_handlers(engine)
            link.result()  # raises what no reconnect can repair
        link.cancel()
        await say_goodbye(engine)
    finally:
        link.cancel()
        stop.cancel()
        engine.link.abandon()
        engine.pump.stop()
        engine.deadlines.stop()
        engine.runner.close()


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Closes the loop; handlers that ignore their cancel are left behind after a second."""
    pending = asyncio.all_tasks(loop)
    for handling in pending:
        handling.cancel()
    if pending:
        loop.run_until_complete(asyncio.wait(pending, timeout=1.0))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
