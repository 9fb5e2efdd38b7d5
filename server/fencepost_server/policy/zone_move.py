"""Where a stored next fire belongs under other zone data: each local time is fired once."""

from collections.abc import Mapping
from importlib.resources.abc import Traversable
from io import BytesIO
from pathlib import Path
from zoneinfo import ZoneInfo

from fencepost_server.clock import SECOND, Instant
from fencepost_server.policy.cron import CronRule
from fencepost_server.policy.recurrence import to_second
from fencepost_server.policy.zone_source import ZoneSource

_NOWHERE: Traversable = Path()


class StoredZones(ZoneSource):
    """Zones whose compiled bytes are at hand."""

    def __init__(self, contents: Mapping[str, bytes], *, version: str) -> None:
        super().__init__(_NOWHERE, version=version)
        self._contents = dict(contents)
        # Takes the place of what a folder would be searched for.
        self.names = frozenset(self._contents)

    def content(self, name: str) -> bytes:
        """The compiled zone of a name out of `names`."""
        return self._contents[name]

    def read(self, name: str) -> ZoneInfo:
        """The zone of a name out of `names`."""
        return ZoneInfo.from_file(BytesIO(self._contents[name]), key=name)


def decided_until(old: CronRule, new: CronRule, next_run_at: Instant) -> Instant | None:
    """The instant by `new` up to which local times were decided, when `next_run_at` was the
    next fire by `old`: fires later than it are still to come. None: it is no fire by `old`.
    """
    if not old.matches(next_run_at):
        return None
    last = old.prev_before(next_run_at)
    if last is None:
        return 0
    second = last // SECOND
    wall = second + old.zone.stretch(second).offset
    return to_second(new.zone, wall) * SECOND
