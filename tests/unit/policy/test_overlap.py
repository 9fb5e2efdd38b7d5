"""What a fire becomes while runs of its job are live."""

import pytest
from fencepost_server.clock import MINUTE
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.policy.misfire import DueFire
from fencepost_server.policy.overlap import WAITING_MAX, LiveRuns, Placement, place, takes_place

from tests.factories import NOON

BUSY = LiveRuns(unblocked=1, regular=1)


def _fires(count: int, *, caught_up: bool = False) -> list[DueFire]:
    return [DueFire(at=NOON + n * MINUTE, caught_up=caught_up) for n in range(count)]


def _shape(placement: Placement) -> tuple[int, int, int]:
    return len(placement.queued), len(placement.blocked), len(placement.skipped)


def _place(
    fires: list[DueFire], live: LiveRuns, policy: OverlapPolicy, catch_up_max: int = 100
) -> tuple[int, int, int]:
    return _shape(place(fires, live, policy, catch_up_max=catch_up_max))


@pytest.mark.parametrize("policy", list(OverlapPolicy))
def test_a_fire_that_meets_nothing_runs(policy: OverlapPolicy) -> None:
    assert _place(_fires(1), LiveRuns(), policy) == (1, 0, 0)


@pytest.mark.parametrize("policy", list(OverlapPolicy))
def test_no_fires_need_no_decision(policy: OverlapPolicy) -> None:
    assert place([], BUSY, policy, catch_up_max=1) == Placement()


@pytest.mark.parametrize(
    ("policy", "shape"),
    [
        (OverlapPolicy.SKIP, (0, 0, 3)),
        (OverlapPolicy.QUEUE_ONE, (0, 1, 2)),
        (OverlapPolicy.QUEUE_ALL, (0, 3, 0)),
        (OverlapPolicy.ALLOW, (3, 0, 0)),
        (OverlapPolicy.CANCEL_PREVIOUS, (0, 1, 2)),
    ],
)
def test_fires_that_meet_a_live_run(policy: OverlapPolicy, shape: tuple[int, int, int]) -> None:
    assert _place(_fires(3), BUSY, policy) == shape


@pytest.mark.parametrize(
    ("policy", "shape"),
    [
        (OverlapPolicy.SKIP, (1, 0, 2)),
        (OverlapPolicy.QUEUE_ONE, (1, 1, 1)),
        (OverlapPolicy.QUEUE_ALL, (1, 2, 0)),
        (OverlapPolicy.CANCEL_PREVIOUS, (1, 0, 2)),
    ],
)
def test_fires_decided_together_meet_each_other(
    policy: OverlapPolicy, shape: tuple[int, int, int]
) -> None:
    assert _place(_fires(3), LiveRuns(), policy) == shape


def test_what_waits_already_takes_the_place_of_the_one_that_may() -> None:
    live = LiveRuns(unblocked=1, regular=1, waiting=1)
    assert _place(_fires(1), live, OverlapPolicy.QUEUE_ONE) == (0, 0, 1)


def test_waiting_alone_counts_as_live() -> None:
    assert _place(_fires(1), LiveRuns(waiting=1), OverlapPolicy.SKIP) == (0, 0, 1)
    assert _place(_fires(1), LiveRuns(waiting=1), OverlapPolicy.QUEUE_ALL) == (0, 1, 0)


def test_queue_all_is_bounded() -> None:
    live = LiveRuns(unblocked=1, regular=1, waiting=WAITING_MAX - 1)
    assert _place(_fires(3), live, OverlapPolicy.QUEUE_ALL) == (0, 1, 2)


def test_caught_up_fires_wait_for_each_other_even_under_skip() -> None:
    fires = _fires(4, caught_up=True)
    placement = place(fires, LiveRuns(), OverlapPolicy.SKIP, catch_up_max=100)
    assert placement.queued == (fires[0],)
    assert placement.blocked == tuple(fires[1:])


def test_caught_up_fires_that_meet_an_earlier_run_are_skipped_under_skip() -> None:
    assert _place(_fires(3, caught_up=True), BUSY, OverlapPolicy.SKIP) == (0, 0, 3)


def test_no_more_caught_up_fires_wait_than_the_cap_allows() -> None:
    fires = _fires(6, caught_up=True)
    assert _place(fires, LiveRuns(), OverlapPolicy.QUEUE_ALL, catch_up_max=3) == (1, 3, 2)


def test_a_regular_fire_waits_for_backfill_instead_of_being_skipped() -> None:
    backfill = LiveRuns(unblocked=2, regular=0)
    assert _place(_fires(2), backfill, OverlapPolicy.SKIP) == (0, 1, 1)


def test_cancel_previous_keeps_the_newest_and_cancels_what_is_live() -> None:
    fires = _fires(3)
    placement = place(fires, BUSY, OverlapPolicy.CANCEL_PREVIOUS, catch_up_max=1)
    assert placement.blocked == (fires[-1],)
    assert placement.cancel_previous
    free = place(fires, LiveRuns(), OverlapPolicy.CANCEL_PREVIOUS, catch_up_max=1)
    assert free.queued == (fires[-1],)
    assert not free.cancel_previous


@pytest.mark.parametrize("policy", list(OverlapPolicy))
@pytest.mark.parametrize("live", [LiveRuns(), BUSY, LiveRuns(unblocked=1), LiveRuns(waiting=5)])
@pytest.mark.parametrize("caught_up", [False, True])
def test_every_fire_has_exactly_one_place(
    policy: OverlapPolicy, live: LiveRuns, caught_up: bool
) -> None:
    fires = _fires(7, caught_up=caught_up)
    placement = place(fires, live, policy, catch_up_max=3)
    placed = [f.at for f in (*placement.queued, *placement.blocked)] + list(placement.skipped)
    assert sorted(placed) == [fire.at for fire in fires]


@pytest.mark.parametrize("policy", list(OverlapPolicy))
def test_a_fire_gives_its_place_to_the_parked_run_that_it_gives_way_to(
    policy: OverlapPolicy,
) -> None:
    gives_way = policy not in (OverlapPolicy.ALLOW, OverlapPolicy.CANCEL_PREVIOUS)
    parked = LiveRuns(unblocked=1, regular=1, parked=1)
    assert takes_place(_fires(1), parked, policy) is gives_way
    # Nobody gives way to nothing, and not to a parked run where another one runs.
    assert not takes_place((), parked, policy)
    assert not takes_place(_fires(1), BUSY, policy)
    assert not takes_place(_fires(1), LiveRuns(unblocked=2, regular=2, parked=1), policy)
