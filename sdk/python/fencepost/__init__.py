"""Fencepost for Python: `Client` defines jobs and enqueues runs, `Worker` carries runs out.

Names are imported when first used, so that the generated messages alone stay cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fencepost.client import Client
    from fencepost.context import Cause, Context, current_context
    from fencepost.errors import (
        Aborted,
        AlreadyExists,
        Cancelled,
        DataLoss,
        DeadlineExceeded,
        FailedPrecondition,
        FencepostError,
        Internal,
        InvalidArgument,
        NotFound,
        OutOfRange,
        PermissionDenied,
        ResourceExhausted,
        Unauthenticated,
        Unavailable,
        Unimplemented,
        Unknown,
    )
    from fencepost.new_run import NewRun, UniqueKey
    from fencepost.outcome import Fatal, Retryable, RunCancelled, Snooze
    from fencepost.payload import Payload, PayloadError, decode_payload, encode_payload
    from fencepost.retry import CallRetry
    from fencepost.run_key import RunKey
    from fencepost.schedules import Schedule, cron, every, once
    from fencepost.stats import Stats
    from fencepost.status import FieldViolation
    from fencepost.timings import Timings
    from fencepost.worker import Worker

_HOMES = {
    "client": ("Client",),
    "context": ("Cause", "Context", "current_context"),
    "errors": (
        "Aborted",
        "AlreadyExists",
        "Cancelled",
        "DataLoss",
        "DeadlineExceeded",
        "FailedPrecondition",
        "FencepostError",
        "Internal",
        "InvalidArgument",
        "NotFound",
        "OutOfRange",
        "PermissionDenied",
        "ResourceExhausted",
        "Unauthenticated",
        "Unavailable",
        "Unimplemented",
        "Unknown",
    ),
    "new_run": ("NewRun", "UniqueKey"),
    "outcome": ("Fatal", "Retryable", "RunCancelled", "Snooze"),
    "payload": ("Payload", "PayloadError", "decode_payload", "encode_payload"),
    "retry": ("CallRetry",),
    "run_key": ("RunKey",),
    "schedules": ("Schedule", "cron", "every", "once"),
    "stats": ("Stats",),
    "status": ("FieldViolation",),
    "timings": ("Timings",),
    "worker": ("Worker",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Aborted",
    "AlreadyExists",
    "CallRetry",
    "Cancelled",
    "Cause",
    "Client",
    "Context",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Fatal",
    "FencepostError",
    "FieldViolation",
    "Internal",
    "InvalidArgument",
    "NewRun",
    "NotFound",
    "OutOfRange",
    "Payload",
    "PayloadError",
    "PermissionDenied",
    "ResourceExhausted",
    "Retryable",
    "RunCancelled",
    "RunKey",
    "Schedule",
    "Snooze",
    "Stats",
    "Timings",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "UniqueKey",
    "Unknown",
    "Worker",
    "cron",
    "current_context",
    "decode_payload",
    "encode_payload",
    "every",
    "once",
]


def __getattr__(name: str) -> object:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'fencepost' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"fencepost.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
