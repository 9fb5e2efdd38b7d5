"""Threads for sync handlers: as many as there are handlers that block, up to the slots.

The runner hands in runs; each is taken by a thread that is free, in the order they came.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from fencepost.held import Held


class Threads:
    """Daemon threads, started as needed: a handler that never ends must not stop the exit.

    While runs wait, one thread is on its way to them; it calls the next before it begins.
    So handlers that block get a thread each, and those that end at once share one.
    """

    def __init__(self, max_threads: int, function: Callable[[Held], None]) -> None:
        self._max_threads = max_threads
        self._function = function
        self._lock = threading.Lock()  # guards all below
        self._waiting: deque[Held] = deque()
        self._count = 0
        self._idle = 0
        self._coming = False
        """A thread was called and has not looked at what waits yet."""
        self._closed = False
        self._calls: SimpleQueue[None] = SimpleQueue()
        """One entry for each idle thread that is called."""

    def submit(self, runs: Iterable[Held]) -> None:
        """The function is to be called with each of these, in this order."""
        with self._lock:
            self._waiting.extend(runs)
            self._call_next()

    def close(self) -> None:
        """Lets threads end when nothing is left for them."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle -= 1
                self._calls.put(None)

    def _call_next(self) -> None:
        if self._coming or not self._waiting:
            return
        if self._idle > 0:
            self._idle -= 1
            self._coming = True
            self._calls.put(None)
        elif self._count < self._max_threads:
            name = f"fencepost-handler-{self._count + 1}"
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
            except RuntimeError:
                if not self._count:
                    raise
                return  # no more threads to be had: what waits is for those there are
            self._count += 1
            self._coming = True

    def _work(self) -> None:
        called = True
        while True:
            with self._lock:
                if called:
                    self._coming = called = False
                held = self._waiting.popleft() if self._waiting else None
                if held is not None:
                    self._call_next()
                elif self._closed:
                    return
                else:
                    self._idle += 1
            if held is not None:
                self._function(held)
                # Nothing may keep an ended run in memory while the thread is idle.
                held = None
            else:
                self._calls.get()
                called = True
