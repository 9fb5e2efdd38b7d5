"""Who gets the next run: in rotation over credit, and never more than there is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from fencepost_server.clock import DatabaseClock
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.dealing import Dealer, Subscription
from fencepost_server.engine.queue_book import QueueBook
from fencepost_server.store.database import Pool

QUEUE = 1


@dataclass(kw_only=True, eq=False)
class Taker:
    """Somebody with credit for one queue."""

    credits: int
    kind_ids: frozenset[int] | None = None
    worker_id: str = ""
    taken: list[Claimed] = field(default_factory=list)

    @property
    def subscriptions(self) -> Mapping[int, Subscription]:
        return {QUEUE: Subscription(queue_id=QUEUE, kind_ids=self.kind_ids)}

    def credit(self, queue_id: int) -> int:
        return self.credits

    def deliver(self, runs: Sequence[Claimed]) -> None:
        self.taken.extend(runs)


def make_dealer(takers: Sequence[Taker], *, batch_max: int) -> Dealer:
    pool = Pool("postgresql://", size=1, hot=True, statement_timeout=1)
    dealer = Dealer(book=QueueBook(pool=pool, clock=DatabaseClock()), batch_max=batch_max)
    for taker in takers:
        dealer.subscribe(taker)
    return dealer


def one_by_one(takers: Sequence[Taker], first: int, batch_max: int) -> list[Taker]:
    """The plain meaning of round-robin."""
    order = [taker for taker in takers if taker.credits > 0]
    order = order[first % len(order) :] + order[: first % len(order)] if order else []
    left = Counter({id(taker): taker.credits for taker in order})
    slots: list[Taker] = []
    while +left and len(slots) < batch_max:
        for taker in order:
            if left[id(taker)] > 0 and len(slots) < batch_max:
                left[id(taker)] -= 1
                slots.append(taker)
    return slots


@pytest.mark.parametrize(
    "credits",
    [[5], [0], [], [3, 3, 3], [1, 2, 3, 4], [7, 1, 1], [0, 2, 0, 9], [1000, 1], [2] * 50],
)
@pytest.mark.parametrize("batch_max", [1, 7, 10, 1000])
def test_slots_go_round(credits: list[int], batch_max: int) -> None:
    takers = [Taker(credits=each) for each in credits]
    dealer = make_dealer(takers, batch_max=batch_max)
    for first in (1, 2, 3):
        slots = dealer.deal(QUEUE, takers, [QUEUE])
        assert list(map(id, slots)) == list(map(id, one_by_one(takers, first, batch_max)))


def claim(dealer: Dealer, takers: Sequence[Taker], full: int) -> Counter[int]:
    """What one claim of a backlog gives to whom (by place), who then has less credit."""
    ready = dealer.takers(QUEUE, [(1, 0)])[frozenset([(1, 0)])]
    dealt = Counter(map(id, dealer.deal(QUEUE, ready, [QUEUE], full)))
    for taker in takers:
        taker.credits -= dealt[id(taker)]
    return Counter({place: dealt[id(taker)] for place, taker in enumerate(takers)})


def test_with_a_backlog_messages_are_whole_and_everybody_has_its_turn() -> None:
    takers = [Taker(credits=150) for _ in range(200)]
    dealer = make_dealer(takers, batch_max=500)
    seen: Counter[int] = Counter()
    for _ in range(50):
        dealt = claim(dealer, takers, full=4)
        assert sum(dealt.values()) == 500
        assert [n for n in dealt.values() if n] == [125] * 4
        seen += dealt
    assert seen == Counter(dict.fromkeys(range(200), 125))


def test_blocks_grow_with_the_evidence_of_a_backlog() -> None:
    takers = [Taker(credits=1000) for _ in range(400)]
    dealer = make_dealer(takers, batch_max=1000)
    most = [max(claim(dealer, takers, full).values()) for full in (0, 1, 2, 3, 4, 5, 10**6)]
    assert most == [3, 4, 16, 63, 125, 125, 125]


@pytest.mark.parametrize("full", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("batch_max", [1, 10, 500])
@pytest.mark.parametrize(
    "credits", [[1000, 1], [2] * 50, [300] * 9, [7, 0, 600, 3, 90, 90, 200, 200], list(range(90))]
)
def test_whatever_is_known_no_credit_is_exceeded_and_none_left_unused(
    credits: list[int], batch_max: int, full: int
) -> None:
    takers = [Taker(credits=each) for each in credits]
    dealer = make_dealer(takers, batch_max=batch_max)
    for _ in range(5):
        slots = dealer.deal(QUEUE, takers, [QUEUE], full)
        dealt = Counter(map(id, slots))
        assert len(slots) == min(batch_max, sum(credits))
        assert all(dealt[id(taker)] <= taker.credits for taker in takers)
        # Whatever part of it the claim finds goes to all who take part.
        assert len(set(map(id, slots[: len(dealt)]))) == len(dealt)


def test_credit_on_offer_is_not_dealt_again() -> None:
    takers = [Taker(credits=3), Taker(credits=1)]
    dealer = make_dealer(takers, batch_max=3)
    first = dealer.deal(QUEUE, takers, [QUEUE])
    with dealer.offered(first):
        again = dealer.deal(QUEUE, takers, [QUEUE])
        assert Counter(map(id, [*first, *again])) == {id(takers[0]): 3, id(takers[1]): 1}
        with dealer.offered(again):
            assert dealer.takers(QUEUE, [(1, 0)]) == {}
        assert dealer.takers(QUEUE, [(1, 0)]) != {}
    assert Counter(map(id, dealer.deal(QUEUE, takers, [QUEUE]))).total() == 3


def test_takers_are_grouped_by_the_lanes_they_take() -> None:
    everything, mails, calls = (
        Taker(credits=1),
        Taker(credits=1, kind_ids=frozenset({1})),
        Taker(credits=1, kind_ids=frozenset({2})),
    )
    more, none = Taker(credits=1, kind_ids=frozenset({1})), Taker(credits=0)
    dealer = make_dealer([everything, mails, calls, more, none], batch_max=10)
    groups = dealer.takers(QUEUE, [(1, 0), (1, 5)])
    assert groups == {frozenset({(1, 0), (1, 5)}): [everything, mails, more]}
    groups = dealer.takers(QUEUE, [(1, 0), (2, 0)])
    assert groups == {
        frozenset({(1, 0), (2, 0)}): [everything],
        frozenset({(1, 0)}): [mails, more],
        frozenset({(2, 0)}): [calls],
    }
