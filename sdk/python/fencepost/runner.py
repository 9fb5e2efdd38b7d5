"""Calls handlers: async ones in the user's event loop, sync ones in threads, and cancels them.

The engine starts and cancels; whatever a handler ends with is reported back to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import Context as Variables
from contextvars import copy_context
from typing import Any

from fencepost.context import Context, _current
from fencepost.endings import Ending, Plain
from fencepost.held import Held
from fencepost.outcome import RunCancelled, refuse, set_error, set_result
from fencepost.payload import PayloadError, decode_payload
from fencepost.threads import Threads

End = tuple[Held, Ending]
"""A handler that has ended."""
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
        self._threads = Threads(slots, lambda held: Variables().run(self._run_sync, held))
        self._turns: deque[Held] = deque()
        self._dealing = False
        self._waiting_kinds: set[str] = set()
        self._started: set[asyncio.Task[None]] = set()  # a loop keeps only weak references
        self._ends: list[End] = []
        self.max_result_bytes = 256 * 1024

    def start(self, runs: list[Held]) -> None:
        """Calls the handlers of these runs, in this order."""
        in_loop = [held for held in runs if held.handler.is_async]
        if in_loop:
            self._post(self._start_async, in_loop)
        if len(in_loop) < len(runs):
            self._threads.submit([held for held in runs if not held.handler.is_async])

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

    # In the handlers' loop.

    def _start_async(self, runs: list[Held]) -> None:
        self._turns.extend(runs)
        if not self._dealing:
            self._deal()

    def _deal(self) -> None:
        """Makes an asyncio task for each run whose handler will wait, going by the last time."""
        turns = self._turns
        self._dealing = bool(turns)
        if turns:
            waiting = sum(held.handler.kind in self._waiting_kinds for held in turns)
            for _ in range(max(1, waiting)):
                self._started.add(self._loop.create_task(self._take_turns()))
            # By then they have all begun: were some handlers misjudged, turns are left.
            self._loop.call_soon(self._deal)

    async def _take_turns(self) -> None:
        """Calls handlers one after the other, until one of them has to wait.

        That one keeps this asyncio task to itself: a handler that waits is alone in its
        asyncio task, those that never do share one.
        """
        own = asyncio.current_task()
        assert own is not None
        turns = self._turns
        # A handler may have cancelled the asyncio task it is in: no other is to feel it.
        while turns and not own.cancelling():
            held = turns.popleft()
            variables = copy_context()
            handling = self._run_async(held)
            try:
                waits_for = variables.run(handling.send, None)
            except StopIteration:
                self._waiting_kinds.discard(held.handler.kind)
                continue
            held.task = own
            self._waiting_kinds.add(held.handler.kind)
            await _Rest(handling, variables, waits_for)
            break
        self._started.discard(own)

    def _cancel_async(self, held: Held) -> None:
        # One that does not wait has not begun, and will see its context, or has ended.
        if held.task is not None:
            held.task.cancel()

    async def _run_async(self, held: Held) -> None:
        context = held.context
        if context.cancelled:
            self._end(held, Plain.STOPPED)
            return
        _current.set(context)
        try:
            if self._around:
                with self._surroundings(context):
                    result = await held.handler.function(*_arguments(held))
            else:
                result = await held.handler.function(*_arguments(held))
        except GeneratorExit as error:
            if self._loop.is_closed():
                raise  # and with the loop everyone to tell
            self._end(held, self._failed(held, error))
        except BaseException as error:  # noqa: BLE001 - the edge of user code
            self._end(held, self._failed(held, error))
        else:
            self._end(held, self._returned(held, result))

    def _end(self, held: Held, ending: Ending) -> None:
        # Handlers that end in one turn of the loop share one wake-up of the session thread.
        self._ends.append((held, ending))
        if len(self._ends) == 1:
            self._loop.call_soon(self._report_ends)

    def _report_ends(self) -> None:
        ends, self._ends = self._ends, []
        self._report(ends)

    # In threads of their own.

    def _run_sync(self, held: Held) -> None:
        context = held.context
        if context.cancelled:
            self._report([(held, Plain.STOPPED)])
            return
        _current.set(context)
        try:
            with self._surroundings(context):
                result = held.handler.function(*_arguments(held))
        except BaseException as error:  # noqa: BLE001 - the edge of user code
            ending = self._failed(held, error)
        else:
            ending = self._returned(held, result)
        self._report([(held, ending)])

    # In either.

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

    def _returned(self, held: Held, result: object) -> Ending:
        if result is None:
            return Plain.RETURNED
        completion = held.new_completion()
        set_result(completion, result, self.max_result_bytes)
        return completion

    def _failed(self, held: Held, error: BaseException) -> Ending:
        obeys = isinstance(error, asyncio.CancelledError | RunCancelled)
        if obeys and held.context.cancelled:
            return Plain.STOPPED
        completion = held.new_completion()
        if isinstance(error, _InputError):
            text = f"input of {held.handler.kind!r}: {error}"
            refuse(completion, "PAYLOAD_UNDECODABLE", text)
        else:
            set_error(completion, error)
        return completion


class _Rest:
    """What is left of a coroutine that has begun outside of `await`, with its own variables."""

    __slots__ = ("_coroutine", "_variables", "_waits_for")

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], variables: Variables, waits_for: object
    ) -> None:
        self._coroutine = coroutine
        self._variables = variables
        self._waits_for = waits_for

    def __await__(self) -> Generator[object, object, None]:
        run, coroutine = self._variables.run, self._coroutine
        waits_for = self._waits_for
        while True:
            try:
                try:
                    value = yield waits_for
                except BaseException as error:  # noqa: BLE001 - handed on, not caught
                    waits_for = run(coroutine.throw, error)
                else:
                    waits_for = run(coroutine.send, value)
            except StopIteration:
                return


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
