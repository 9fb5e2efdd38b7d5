"""What an operation is: a change to many runs that goes on without its caller."""

from enum import IntEnum

from fencepost_server.clock import Instant
from fencepost_server.domain.job import make_job_id


class OperationAction(IntEnum):
    """What it does to each run; numbers as in the contract."""

    CANCEL = 1
    REPLAY = 2
    DISCARD = 3
    BACKFILL = 4


class OperationState(IntEnum):
    """Whether it goes on; numbers as in the contract."""

    RUNNING = 1
    DONE = 2
    STOPPED = 3


class StopCause(IntEnum):
    """Why it ended early; numbers as in the contract."""

    REQUESTED = 1
    FAILING = 2
    REFUSED = 3


def make_operation_id(*, now: Instant, entropy: bytes) -> str:
    """A UUIDv7 as lower-case text, so that ids rise with creation; 10 random bytes."""
    return make_job_id(now=now, partition_id=entropy[9], entropy=entropy[:9])
