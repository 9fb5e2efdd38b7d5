"""Who fires which partitions.

Ownership only saves work: row locks, the advanced next fire and the run key hold without
it. `AllPartitions` is the coordinator "none": every scheduler looks at all of them.
"""

from collections.abc import Collection
from typing import Protocol

PARTITIONS = 256


class Ownership(Protocol):
    """What the scheduler asks before each pass."""

    def partitions(self) -> Collection[int]:
        """The partitions, 0 to 255, that this process fires now."""
        ...


class AllPartitions:
    """One process, or a small fleet without a coordinator."""

    def partitions(self) -> Collection[int]:
        """All of them, always."""
        return range(PARTITIONS)
