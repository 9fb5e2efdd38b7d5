"""Hints that work has come: inside the process at once, to other processes by NOTIFY.

A hint is never the guarantee: schedulers and dispatchers look by themselves every second.
NOTIFY is sent on a connection of its own, never in a transaction that writes, and at most
once per interval and channel.
"""

from collections.abc import Iterable
from typing import Protocol

from fencepost_server.domain.run import Lane


class Wake(Protocol):
    """Whoever commits something that is due or ready says so here."""

    def jobs(self, partition_ids: Iterable[int]) -> None:
        """Jobs of these partitions were made or changed: their next fire may be earlier."""
        ...

    def lanes(self, lanes: Iterable[Lane]) -> None:
        """Runs of these lanes were made claimable."""
        ...
