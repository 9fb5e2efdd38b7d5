"""What a fire becomes while runs of its job are live: a run, a waiting run, or a skip.

Pure: the engine counts live runs under the job's lock, asks here, and carries it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fencepost_server.clock import Instant
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.policy.misfire import DueFire

WAITING_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRuns:
    """Due live runs of one job: not waiting, of these not made by backfill, and waiting.

    `parked`: how many of those that do not wait have no place yet after an outage.
    """

    unblocked: int = 0
    regular: int = 0
    waiting: int = 0
    parked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`queued` and `blocked` fires become runs, `skipped` ones do not (OVERLAP).

    With `cancel_previous` the live runs made by earlier fires are to be cancelled first.
    """

    queued: tuple[DueFire, ...] = ()
    blocked: tuple[DueFire, ...] = ()
    skipped: tuple[Instant, ...] = ()
    cancel_previous: bool = False


def place(
    fires: Sequence[DueFire], live: LiveRuns, policy: OverlapPolicy, *, catch_up_max: int
) -> Placement:
    """Where each of `fires` (oldest first) goes.

    Caught-up fires of one job wait for each other even under SKIP, up to `catch_up_max`:
    they were promised one after the other, not all at once. A fire that meets only
    backfill runs waits for them instead of being skipped.
    """
    if not fires:
        return Placement()
    if policy is OverlapPolicy.ALLOW:
        return Placement(queued=tuple(fires))
    if policy is OverlapPolicy.CANCEL_PREVIOUS:
        return _newest_only(fires, live)
    busy = live.unblocked + live.waiting > 0
    waiting = live.waiting
    queued: list[DueFire] = []
    blocked: list[DueFire] = []
    skipped: list[Instant] = []
    for fire in fires:
        may_wait = _room(policy, live, fire)
        if not busy:
            queued.append(fire)
            busy = True
        elif waiting < min(may_wait, WAITING_MAX if not fire.caught_up else catch_up_max):
            blocked.append(fire)
            waiting += 1
        else:
            skipped.append(fire.at)
    return Placement(queued=tuple(queued), blocked=tuple(blocked), skipped=tuple(skipped))


def takes_place(fires: Sequence[DueFire], live: LiveRuns, policy: OverlapPolicy) -> bool:
    """Whether these fires of now, when they give way to a run that is parked, give it their
    place: else what was missed would keep the job from running until the backlog is gone."""
    gives_way = policy not in (OverlapPolicy.ALLOW, OverlapPolicy.CANCEL_PREVIOUS)
    return bool(fires) and gives_way and 0 < live.parked == live.unblocked


def _room(policy: OverlapPolicy, live: LiveRuns, fire: DueFire) -> int:
    """How many runs of the job may wait, this fire included."""
    if policy is OverlapPolicy.QUEUE_ALL:
        return WAITING_MAX
    if policy is OverlapPolicy.QUEUE_ONE:
        return 1
    only_backfill = live.unblocked > 0 and live.regular == 0 and live.waiting == 0
    if only_backfill:
        return 1
    own_batch = live.unblocked + live.waiting == 0 and fire.caught_up
    return WAITING_MAX if own_batch else 0


def _newest_only(fires: Sequence[DueFire], live: LiveRuns) -> Placement:
    newest, older = fires[-1], tuple(fire.at for fire in fires[:-1])
    if live.unblocked + live.waiting == 0:
        return Placement(queued=(newest,), skipped=older)
    return Placement(blocked=(newest,), skipped=older, cancel_previous=True)
