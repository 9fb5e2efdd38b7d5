"""Which fires a job must have had, worked out without the product's code: a scan over every
minute in the zone's wall clock, or plain multiples of an interval.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

# Minute field of a cron expression, and the same rule as a person would check it.
MINUTE_RULES: dict[str, Callable[[int], bool]] = {
    "*": lambda minute: True,
    "*/2": lambda minute: minute % 2 == 0,
    "1-59/2": lambda minute: minute % 2 == 1,
    "0-29": lambda minute: minute < 30,
    "30-59": lambda minute: minute >= 30,
}


@dataclass(frozen=True)
class CronJob:
    """Fires at the minutes of every hour that its rule admits, by the wall clock of a zone."""

    minute_rule: str
    zone: str

    def fires(self, after: datetime, until: datetime) -> set[datetime]:
        """All fires in (after, until]."""
        admits = MINUTE_RULES[self.minute_rule]
        zone = ZoneInfo(self.zone)
        at = after.astimezone(UTC).replace(second=0, microsecond=0)
        found: set[datetime] = set()
        while at <= until:
            if at > after and admits(at.astimezone(zone).minute):
                found.add(at)
            at += timedelta(minutes=1)
        return found


@dataclass(frozen=True)
class IntervalJob:
    """Fires every so many seconds from its first fire on."""

    seconds: int
    first: datetime

    def fires(self, after: datetime, until: datetime) -> set[datetime]:
        """All fires in (after, until]; the first one is never left out."""
        found: set[datetime] = set()
        at = self.first
        while at <= until:
            if at > after or at == self.first:
                found.add(at)
            at += timedelta(seconds=self.seconds)
        return found
