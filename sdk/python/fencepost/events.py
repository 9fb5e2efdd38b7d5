"""Log lines as an event name and keys: readable as text, and structured as `extra`."""

from __future__ import annotations

import logging

_log = logging.getLogger("fencepost.worker")


def enabled(level: int) -> bool:
    """Whether a line of this level would be written at all."""
    return _log.isEnabledFor(level)


def event(level: int, name: str, **keys: object) -> None:
    """Writes one line, `name key=value ...`; every key is an attribute of the record too."""
    if _log.isEnabledFor(level):
        text = " ".join([name, *(f"{key}={value}" for key, value in keys.items() if value != "")])
        _log.log(level, "%s", text, extra=keys)
