"""Calls handlers: async ones in the user's event loop, sync ones in threads, and cancels them.

The engine starts and cancels; whatever a handler ends with is reported back to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from fencepost.context import Context, _current
from fencepost.held import Held
from fencepost.outcome import RunCancelled, refuse, set_error, set_result
from fencepost.payload import PayloadError, decode_payload
from fencepost.v1 import worker_pb2

End = tuple[Held, worker_pb2.Completion | None]
"""A handler that has ended. None: it obeyed a cancel."""
Report = Callable[[list[End]], None]
"""Takes ends of handlers, from any thread."""


Around = Callable[[Context], contextlib.AbstractContextManager[object]]
"""Makes what is entered around each call of a handler, outermost first."""

_NOTHING = contextlib.nullcontext()


class Runner:
    """All methods are for the session thread."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        slots: int,
        around: Sequence[Around],
        report: Report,
    ) -> None:
        self._loop = loop
        self._report = report
        self._around = tuple(around)
        self._threads = _Threads(slots, self._run_sync)
        self._started: set[Held] = set()  # a loop keeps only weak references to its tasks
        self._ends: list[End] = []
        self.max_result_bytes = 256 * 1024

    def start(self, runs: list[Held]) -> None:
        """Calls the handlers of these runs, in this order."""
        in_loop = [held for held in runs if held.handler.is_async]
        if in_loop:
            self._post(self._start_async, in_loop)
        for held in runs:
            if not held.handler.is_async:
                self._threads.submit(held)

    def cancel(self, held: Held) -> None:
        """Asks the handler to stop; its context already says why."""
        if held.handler.is_async:
            self._post(self._cancel_async, held)

    def close(self) -> None:
        """Lets idle threads end."""
        self._threads.close()

    def _post(self, callback: Callable[..., None], argument: object) -> None:
        # A closed loop has cancelled its handlers itself.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, argument)

    def _start_async(self, runs: list[Held]) -> None:
        create = self._loop.create_task
        for held in runs:
            held.task = create(self._run_async(held))
        self._started.update(runs)

    def _cancel_async(self, held: Held) -> None:
        # A cancel before the first step would end the coroutine before it can report.
        if held.begun and held.task is not None:
            held.task.cancel()

    async def _run_async(self, held: Held) -> None:
        context = held.context
        held.begun = True
        if context.cancelled:
            self._end(held, None)
            return
        completion = held.new_completion()
        _current.set(context)
        try:
            with self._surroundings(context):
                result = await held.handler.function(*_arguments(held))
        except PayloadError as error:
            _set_payload_error(completion, held, error)
        except (asyncio.CancelledError, RunCancelled) as error:
            if context.cancelled:
                self._end(held, None)
                return
            set_error(completion, error)
        except GeneratorExit:
            raise  # the loop is gone, and with it everyone to tell
        except BaseException as error:  # noqa: BLE001 - the edge of user code
            set_error(completion, error)
        else:
            set_result(completion, result, self.max_result_bytes)
        self._end(held, completion)

    def _surroundings(self, context: Context) -> contextlib.AbstractContextManager[object]:
        if not self._around:
            return _NOTHING
        stack = contextlib.ExitStack()
        try:
            for around in self._around:
                stack.enter_context(around(context))
        except BaseException:
            stack.close()
            raise
        return stack

    def _end(self, held: Held, completion: worker_pb2.Completion | None) -> None:
        # Handlers that end in one turn of the loop share one wake-up of the session thread.
        self._started.discard(held)
        self._ends.append((held, completion))
        if len(self._ends) == 1:
            self._loop.call_soon(self._report_ends)

    def _report_ends(self) -> None:
        ends, self._ends = self._ends, []
        self._report(ends)

    def _run_sync(self, held: Held) -> None:
        context = held.context
        if context.cancelled:
            self._report([(held, None)])
            return
        completion = held.new_completion()
        token = _current.set(context)
        try:
            with self._surroundings(context):
                result = held.handler.function(*_arguments(held))
        except PayloadError as error:
            _set_payload_error(completion, held, error)
        except RunCancelled as error:
            if context.cancelled:
                self._report([(held, None)])
                return
            set_error(completion, error)
        except BaseException as error:  # noqa: BLE001 - the edge of user code
            set_error(completion, error)
        else:
            set_result(completion, result, self.max_result_bytes)
        finally:
            _current.reset(token)
        self._report([(held, completion)])


class _InputError(PayloadError):
    """The run's own payload does not fit, as opposed to one the handler tried to read."""


def _arguments(held: Held) -> tuple[object, ...]:
    handler = held.handler
    if handler.input_at is None:
        return handler.arguments(None, held.context)
    assignment = held.assignment
    payload = assignment.payload if assignment.HasField("payload") else None
    try:
        return handler.arguments(decode_payload(payload, handler.input_type), held.context)
    except PayloadError as error:
        raise _InputError(str(error)) from error


def _set_payload_error(completion: worker_pb2.Completion, held: Held, error: PayloadError) -> None:
    if isinstance(error, _InputError):
        text = f"input of {held.handler.kind!r}: {error}"
        refuse(completion, "PAYLOAD_UNDECODABLE", text)
    else:
        set_error(completion, error)


class _Threads:
    """Daemon threads, started as needed: a handler that never ends must not stop the exit."""

    def __init__(self, max_threads: int, function: Callable[[Held], None]) -> None:
        self._max_threads = max_threads
        self._function = function
        self._queue: SimpleQueue[Held | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._idle = 0

    def submit(self, held: Held) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            elif self._count < self._max_threads:
                self._count += 1
                name = f"fencepost-handler-{self._count}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        self._queue.put(held)

    def close(self) -> None:
        for _ in range(self._count):
            self._queue.put(None)

    def _work(self) -> None:
        while (held := self._queue.get()) is not None:
            self._function(held)
            with self._lock:
                self._idle += 1
