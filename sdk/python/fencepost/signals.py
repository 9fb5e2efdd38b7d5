"""SIGTERM and SIGINT for `Worker.run`: the first drains, the second ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def drain_on_signals(drain: Callable[[], None]) -> Iterator[None]:
    """Installed for the length of the block; nothing happens outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            os._exit(128 + number)
        seen = True
        drain()

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
