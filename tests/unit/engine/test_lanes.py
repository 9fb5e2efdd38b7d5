"""What a process knows of ready lanes, between hints, claims and scans."""

from fencepost_server.domain.run import Lane
from fencepost_server.engine.lanes import Lanes

A, B, OTHER = Lane(1, 1, 0), Lane(1, 2, 5), Lane(2, 1, 0)


def _scanned(*found: tuple[Lane, int]) -> Lanes:
    lanes = Lanes()
    lanes.begin()
    lanes.replace(found)
    return lanes


def test_a_lane_is_ready_from_its_earliest_run_on() -> None:
    lanes = _scanned((A, 100), (OTHER, 0))
    assert lanes.ready(1, 99) == set()
    assert lanes.ready(1, 100) == {(1, 0)}
    assert lanes.ready(2, 0) == {(1, 0)}
    assert lanes.ready(3, 10**9) == set()


def test_the_earliest_of_several_hints_counts() -> None:
    lanes = Lanes()
    lanes.hint([A], 500)
    lanes.hint([A], 100)
    lanes.hint([A], 300)
    assert lanes.next_at([1], 0) == 100


def test_a_drained_lane_is_forgotten_until_a_hint_comes() -> None:
    lanes = _scanned((A, 0), (B, 0))
    lanes.begin()
    lanes.drained(1, [(1, 0)])
    assert lanes.ready(1, 10) == {(2, 5)}
    lanes.hint([A], 0)
    assert lanes.ready(1, 10) == {(1, 0), (2, 5)}


def test_a_hint_that_came_during_the_claim_outlives_it() -> None:
    lanes = _scanned((A, 0))
    lanes.begin()
    lanes.hint([A], 0)
    lanes.drained(1, [(1, 0)])
    assert lanes.ready(1, 0) == {(1, 0)}


def test_a_hint_that_came_during_a_scan_outlives_it() -> None:
    lanes = _scanned((A, 0))
    lanes.begin()
    lanes.hint([OTHER], 7)
    lanes.replace([(B, 0)])
    assert lanes.ready(1, 0) == {(2, 5)}
    assert lanes.ready(2, 7) == {(1, 0)}


def test_a_scan_replaces_what_was_known_before_it() -> None:
    lanes = Lanes()
    lanes.hint([A], 0)
    lanes.begin()
    lanes.replace([])
    assert lanes.ready(1, 10) == set()


def test_the_next_instant_leaves_out_what_is_ready_and_other_queues() -> None:
    lanes = _scanned((A, 5), (B, 50), (OTHER, 20))
    assert lanes.next_at([1], 10) == 50
    assert lanes.next_at([1, 2], 10) == 20
    assert lanes.next_at([3], 10) is None


def test_full_claims_of_a_lane_are_counted_until_one_gives_less() -> None:
    lanes = _scanned((A, 0), (B, 0), (OTHER, 0))
    assert lanes.full_claims(1, [(1, 0), (2, 5)]) == 0
    lanes.gave(1, [(1, 0)], is_full=True)
    lanes.gave(1, [(1, 0), (2, 5)], is_full=True)
    assert lanes.full_claims(1, [(1, 0)]) == 2
    assert lanes.full_claims(1, [(2, 5)]) == 1
    assert lanes.full_claims(1, [(2, 5), (1, 0)]) == 2
    assert lanes.full_claims(2, [(1, 0)]) == 0
    lanes.gave(1, [(1, 0)], is_full=False)
    assert lanes.full_claims(1, [(1, 0), (2, 5)]) == 1


def test_a_lane_that_a_scan_no_longer_finds_has_no_backlog() -> None:
    lanes = _scanned((A, 0), (B, 0))
    lanes.gave(1, [(1, 0), (2, 5)], is_full=True)
    lanes.begin()
    lanes.replace([(B, 0)])
    assert lanes.full_claims(1, [(1, 0)]) == 0
    assert lanes.full_claims(1, [(2, 5)]) == 1
