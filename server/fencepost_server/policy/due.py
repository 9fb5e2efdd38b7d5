"""What becomes of all due fires of one job: exclusion first, then the misfire policy.

Adds to `misfire.judge` what lies around it: calendars, and intervals after completion,
whose next fire only the end of a run decides.
"""

from dataclasses import dataclass

from fencepost_server.clock import Instant
from fencepost_server.domain.schedule import (
    IntervalSpec,
    MisfireAction,
    MisfirePolicy,
    Schedule,
    SkipReason,
)
from fencepost_server.policy.exclusion import (
    ExcludingRule,
    Exclusions,
    excluded_stretches,
    without,
)
from fencepost_server.policy.misfire import DueFire, Judgement, SkipStretch, judge
from fencepost_server.policy.schedule import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A job whose fire `next_run_at` is due at `now`, and what may still be run of it.

    `fires_left` None: no bound. `reason` is written to what the misfire policy skips.
    """

    next_run_at: Instant
    now: Instant
    fires_left: int | None = None
    reason: SkipReason = SkipReason.MISFIRE


def counts_from_ends(schedule: Schedule) -> bool:
    """Whether the end of each run decides the next fire."""
    return isinstance(schedule.spec, IntervalSpec) and schedule.spec.after_completion


def judge_due(rule: Rule, schedule: Schedule, due: Due, exclusions: Exclusions) -> Judgement:
    """Judges every fire from `due.next_run_at` to `due.now`; `rule` is the schedule's.

    Stretches come oldest first. Where a run of an interval after completion is to be made,
    `next_run_at` is None: its end decides.
    """
    if counts_from_ends(schedule):
        return _judge_single(rule, schedule.misfire, due, exclusions)
    if not exclusions.spans:
        return judge(
            rule,
            schedule.misfire,
            next_run_at=due.next_run_at,
            now=due.now,
            fires_left=due.fires_left,
            reason=due.reason,
        )
    return _judge_excluding(rule, schedule.misfire, due, exclusions)


def pending_skipped(rule: Rule, due: Due, exclusions: Exclusions) -> Judgement:
    """Skips every fire up to `due.now`, the excluded ones for that reason."""
    last = max(rule.prev_before(due.now + 1) or due.next_run_at, due.next_run_at)
    stretch = SkipStretch(first=due.next_run_at, last=last, reason=due.reason)
    excluded = excluded_stretches(rule, exclusions, first=due.next_run_at, last=last)
    return Judgement(
        fires=(),
        skips=_in_order(without(rule, stretch, excluded), excluded),
        next_run_at=rule.next_after(due.now),
    )


def _judge_excluding(
    rule: Rule, policy: MisfirePolicy, due: Due, exclusions: Exclusions
) -> Judgement:
    left = ExcludingRule(rule=rule, exclusions=exclusions, first=due.next_run_at, last=due.now)
    first = left.next_after(due.next_run_at - 1)
    judged = Judgement(fires=(), skips=(), next_run_at=None)
    if first is not None:
        judged = judge(
            left,
            policy,
            next_run_at=first,
            now=due.now,
            fires_left=due.fires_left,
            reason=due.reason,
        )
    until = due.now if judged.next_run_at is None else judged.next_run_at - 1
    if judged.fires and len(judged.fires) == due.fires_left:
        # Most likely the schedule's last fire: what follows is judged only if it is not.
        until = judged.fires[-1].at
    excluded = excluded_stretches(rule, exclusions, first=due.next_run_at, last=until)
    skips = [part for stretch in judged.skips for part in without(rule, stretch, excluded)]
    return Judgement(
        fires=judged.fires,
        skips=_in_order(skips, excluded),
        # Not the next that is left: until it is due, calendars may change.
        next_run_at=rule.next_after(until),
    )


def _judge_single(rule: Rule, policy: MisfirePolicy, due: Due, exclusions: Exclusions) -> Judgement:
    """One fire at most: a skipped one is followed by the next after `every`, a run by its end."""
    first = due.next_run_at
    if policy.action is MisfireAction.SKIP:
        first = max(first, due.now - policy.threshold)
    elif policy.window is not None:
        first = max(first, due.now - max(policy.window, policy.threshold))
    left = ExcludingRule(rule=rule, exclusions=exclusions, first=due.next_run_at, last=due.now)
    fire = left.next_after(first - 1)
    until = due.now if fire is None else fire - 1
    excluded = excluded_stretches(rule, exclusions, first=due.next_run_at, last=until)
    skips: list[SkipStretch] = []
    last = left.prev_before(until + 1)
    if last is not None:
        stretch = SkipStretch(first=due.next_run_at, last=last, reason=due.reason)
        skips = without(rule, stretch, excluded)
    if fire is None:
        return Judgement(
            fires=(), skips=_in_order(skips, excluded), next_run_at=rule.next_after(due.now)
        )
    made = DueFire(at=fire, caught_up=fire < due.now - policy.threshold)
    return Judgement(fires=(made,), skips=_in_order(skips, excluded), next_run_at=None)


def _in_order(one: list[SkipStretch], other: list[SkipStretch]) -> tuple[SkipStretch, ...]:
    return tuple(sorted([*one, *other], key=lambda stretch: stretch.first))
