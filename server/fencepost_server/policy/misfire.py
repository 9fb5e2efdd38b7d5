"""What becomes of the fires of one job that are due: run on time, run late, or skipped.

The engine calls `judge` for the rows that need thought and carries the decision out. Cost
is bounded by the policy's caps, not by how much was missed.
"""

from dataclasses import dataclass

from fencepost_server.clock import Instant
from fencepost_server.domain.schedule import MisfireAction, MisfirePolicy, SkipReason
from fencepost_server.policy.schedule import Rule

# Regular fires of one decision. A rule of every second under a long threshold may have more
# that are due; the rest stays pending for the next decision.
REGULAR_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DueFire:
    """A fire to make a run of; `caught_up` says that it was a misfire."""

    at: Instant
    caught_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStretch:
    """All fires from `first` to `last`, both included, that make no run.

    `stand_in` is the caught-up fire that runs in their stead, under RUN_ONCE.
    """

    first: Instant
    last: Instant
    reason: SkipReason
    stand_in: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What to do: runs to make and stretches to record, oldest first, and what is next.

    `next_run_at` is the first fire not judged here. It is not later than now when a limit
    cut the decision short: carry it out, then judge again. None: the schedule has ended.
    """

    fires: tuple[DueFire, ...]
    skips: tuple[SkipStretch, ...]
    next_run_at: Instant | None


def judge(
    rule: Rule,
    policy: MisfirePolicy,
    *,
    next_run_at: Instant,
    now: Instant,
    fires_left: int | None = None,
    reason: SkipReason = SkipReason.MISFIRE,
    regular_max: int = REGULAR_MAX,
) -> Judgement:
    """Judges every fire from `next_run_at`, itself a fire whatever the rule says, to `now`.

    Later than the policy's threshold makes a misfire; exactly the threshold does not.
    `fires_left` bounds the runs (1 or more; None: no bound), `reason` is written to what is
    skipped: PAUSED at a resume.
    """
    assert fires_left is None or fires_left > 0, "a job without fires left is finished"
    if next_run_at > now:
        return Judgement(fires=(), skips=(), next_run_at=next_run_at)
    newest = _latest(rule, next_run_at, now - policy.threshold)
    skips: tuple[SkipStretch, ...] = ()
    kept: list[Instant] = []
    pending: Instant | None = next_run_at
    if newest is not None:
        kept = _keep(rule, policy, next_run_at, newest, now)
        skips = _skip_rest(rule, policy, next_run_at, newest, kept, reason)
        pending = rule.next_after(newest)
    if fires_left is not None and len(kept) > fires_left:
        pending, kept = kept[fires_left], kept[:fires_left]
        regular_max = 0
    elif fires_left is not None:
        regular_max = min(regular_max, fires_left - len(kept))
    fires = [DueFire(at=at, caught_up=True) for at in kept]
    while pending is not None and pending <= now and regular_max > 0:
        fires.append(DueFire(at=pending, caught_up=False))
        pending = rule.next_after(pending)
        regular_max -= 1
    return Judgement(fires=tuple(fires), skips=skips, next_run_at=pending)


def _keep(
    rule: Rule, policy: MisfirePolicy, first: Instant, newest: Instant, now: Instant
) -> list[Instant]:
    """The misfires in [first, newest] that are run after all, oldest first."""
    keep_from = first if policy.window is None else max(first, now - policy.window)
    if policy.action is MisfireAction.SKIP or newest < keep_from:
        return []
    limit = 1 if policy.action is MisfireAction.RUN_ONCE else policy.max_catch_up
    kept = [newest]
    while len(kept) < limit:
        earlier = _latest(rule, first, kept[-1])
        if earlier is None or earlier < keep_from:
            break
        kept.append(earlier)
    kept.reverse()
    return kept


def _skip_rest(
    rule: Rule,
    policy: MisfirePolicy,
    first: Instant,
    newest: Instant,
    kept: list[Instant],
    reason: SkipReason,
) -> tuple[SkipStretch, ...]:
    """The misfires before the kept ones, as one stretch; all of them if none was kept."""
    last: Instant | None = newest
    if kept:
        last = None if kept[0] == first else _latest(rule, first, kept[0])
    if last is None:
        return ()
    stands_in = bool(kept) and policy.action is MisfireAction.RUN_ONCE
    return (
        SkipStretch(
            first=first, last=last, reason=reason, stand_in=kept[-1] if stands_in else None
        ),
    )


def _latest(rule: Rule, first: Instant, before: Instant) -> Instant | None:
    """The last fire in [first, before), where `first` is one; None if that is empty."""
    if first >= before:
        return None
    found = rule.prev_before(before)
    return first if found is None else max(first, found)
