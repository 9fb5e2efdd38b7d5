"""What a worker has counted since it started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Counts rise; gauges are as of the last change. Read it, do not write it."""

    received: int = 0
    """Assignments, ignored ones included."""
    ignored: int = 0
    """Duplicates and lower attempts."""
    sessions: int = 0
    """Sessions opened."""
    held: int = 0
    """Runs held now."""
    active: int = 0
    """Handlers running now."""
    unacknowledged: int = 0
    """Completions and releases without a final verdict now."""
    heartbeat_round_trip: float = 0.0
    """Seconds, newest."""
    verdicts: Counter[str] = field(default_factory=Counter)
    """By name without prefix."""
    lease_losses: Counter[str] = field(default_factory=Counter)
    """By reason, LEASE_UNCERTAIN among them."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of attempts: success, failure, snooze, cancelled, released, abandoned, lost."""
