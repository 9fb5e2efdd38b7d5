"""Which past fires a backfill makes, and how fast.

Pure: the engine enumerates under the job's lock and carries the plan out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fencepost_server.clock import SECOND, Duration, Instant, ceil_second
from fencepost_server.domain.schedule import IntervalSpec, Schedule
from fencepost_server.policy.schedule import Rule, bounded_rule

RATE_DEFAULT, RATE_MIN, RATE_MAX = 10.0, 0.1, 1000.0
RUNS_DEFAULT, RUNS_MAX = 10_000, 1_000_000
# Fires that one step looks at, so that its transaction stays short.
STEP_FIRES_MAX = 1000
# What a step that came late may make up for.
_SLACK: Duration = SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingRun:
    """A run that a fire has already; `is_expired`: it ended without ever being claimed."""

    created_at: Instant
    is_expired: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillBounds:
    """What a fire must lie between, by the job's row and the shard's as they are now.

    Fires at `next_run_at` or later are the scheduler's, those before `floor` may have had a
    run that is forgotten, unless the job was not there (`created_at`).
    """

    next_run_at: Instant | None
    floor: Instant
    created_at: Instant

    def is_too_old(self, at: Instant) -> bool:
        """Whether a run of this fire may have existed and been forgotten."""
        return self.created_at <= at < self.floor

    def is_pending(self, at: Instant) -> bool:
        """Whether the scheduler will decide this fire."""
        return self.next_run_at is not None and at >= self.next_run_at


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What a step does: fires to make, of them those whose expired run is replaced, and counts."""

    make: list[Instant] = field(default_factory=list)
    replace: list[Instant] = field(default_factory=list)
    too_old: list[Instant] = field(default_factory=list)
    unchanged: int = 0
    position: Instant | None = None
    is_end: bool = False


def backfill_rule(
    schedule: Schedule, *, created_at: Instant, since: Instant, seed: str
) -> Rule | None:
    """The rule of fires since `since`; None if the past has none: each follows the end of a run.

    An interval without an anchor goes on backwards from the job's creation.
    """
    anchor = ceil_second(created_at)
    if isinstance(schedule.spec, IntervalSpec):
        if schedule.spec.after_completion:
            return None
        before = max(anchor - since, 0)
        anchor -= -(-before // schedule.spec.every) * schedule.spec.every
    return bounded_rule(schedule, anchor=anchor, seed=seed)


def fires_of(rule: Rule, *, since: Instant, until: Instant) -> Iterator[Instant]:
    """The fires in [since, until), oldest first."""
    at = rule.next_after(since - 1)
    while at is not None and at < until:
        yield at
        at = rule.next_after(at)


def plan_step(
    fires: Sequence[Instant],
    existing: Mapping[Instant, ExistingRun],
    bounds: BackfillBounds,
    *,
    asked_at: Instant,
    make_max: int,
) -> StepPlan:
    """Judges `fires`, the next of the range, until `make_max` are to be made.

    `fires` shorter than STEP_FIRES_MAX reach the end of the range. Runs made after
    `asked_at` have changed meanwhile and count as unchanged; older ones never matched.
    """
    plan = StepPlan()
    for at in fires:
        if len(plan.make) == make_max:
            return plan
        run = existing.get(at)
        plan.position = at
        if bounds.is_pending(at):
            plan.unchanged += 1
        elif run is not None and not run.is_expired:
            plan.unchanged += run.created_at > asked_at
        elif bounds.is_too_old(at):
            plan.too_old.append(at)
        else:
            plan.make.append(at)
            if run is not None:
                plan.replace.append(at)
    plan.is_end = len(fires) < STEP_FIRES_MAX
    return plan


def made_per_step(rate: float) -> int:
    """Runs of one step: about a second's worth, at least one."""
    return max(1, min(int(rate), STEP_FIRES_MAX))


def next_step_at(*, due_at: Instant, now: Instant, made: int, rate: float) -> Instant:
    """When the next step is due, so that no more than `rate` runs are made per second.

    A step that was taken late shortens the wait by at most a second.
    """
    return max(due_at, now - _SLACK) + int(made * SECOND / rate)
