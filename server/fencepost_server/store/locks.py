"""Tells a statement that gave up on somebody's row lock from a database that is away."""

from fencepost_server.errors import StorageUnavailable

_LOCK_NOT_AVAILABLE = "55P03"


def was_locked_out(error: StorageUnavailable) -> bool:
    """Whether a row lock was held for longer than the statement would wait; nothing was written."""
    return getattr(error.__cause__, "sqlstate", None) == _LOCK_NOT_AVAILABLE
