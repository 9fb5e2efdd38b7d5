"""What a person is shown of a schedule before or after it is stored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fencepost_server.clock import Instant
from fencepost_server.domain.calendar import NamedCalendar
from fencepost_server.domain.job import LAST_INSTANT
from fencepost_server.domain.schedule import Schedule
from fencepost_server.policy.cron import Planned
from fencepost_server.policy.describe import describe, warnings
from fencepost_server.policy.preview import preview
from fencepost_server.policy.zone import tzdata_version


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Planned fires oldest first, the rule in English, what to look at twice, zone data."""

    fires: Sequence[Planned]
    description: str
    warnings: Sequence[str]
    tzdata_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRange:
    """Which fires: at most `count` later than `after`, as seen at `now`."""

    after: Instant
    count: int
    now: Instant


# Where a next fire is not known yet.
NEVER: Instant = LAST_INSTANT


def preview_schedule(
    schedule: Schedule,
    wanted: PreviewRange,
    *,
    seed: str,
    anchor: Instant,
    fires_left: int | None,
    calendars: Sequence[NamedCalendar] = (),
) -> Preview:
    """By the evaluator that fires; see policy.preview. Raises InvalidSchedule."""
    # Later fires have no text form.
    end_at = LAST_INSTANT if schedule.end_at is None else min(schedule.end_at, LAST_INSTANT)
    return Preview(
        fires=preview(
            replace(schedule, end_at=end_at),
            after=wanted.after,
            count=wanted.count,
            anchor=anchor,
            seed=seed,
            fires_left=fires_left,
            calendars=calendars,
        ),
        description=describe(schedule, seed=seed),
        warnings=warnings(schedule, now=wanted.now, seed=seed),
        tzdata_version=tzdata_version(),
    )
