"""What became of a nominal fire: an entry of the ledger that ListFires shows."""

from dataclasses import dataclass
from enum import IntEnum

from fencepost_server.clock import Instant
from fencepost_server.domain.schedule import SkipReason


class FireDisposition(IntEnum):
    """What became of a fire; numbers as in the contract."""

    PENDING = 1
    FIRED = 2
    CAUGHT_UP = 3
    BACKFILLED = 4
    SKIPPED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fire:
    """One entry: `count` neighbouring fires from `first` to `last`, both included.

    `reason` goes with SKIPPED, and with PENDING while the job is paused. `run_at` names the
    run made, or the one that stands in. `version` is the one whose schedule made the fires,
    `local_time` the wall clock of `first`.
    """

    first: Instant
    last: Instant
    disposition: FireDisposition
    version: int
    reason: SkipReason | None = None
    run_at: Instant | None = None
    decided_at: Instant | None = None
    count: int = 1
    local_time: str = ""
    detail: str = ""
