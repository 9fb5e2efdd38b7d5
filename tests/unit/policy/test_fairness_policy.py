"""Turns among tenants and queues, and shares of a worker's credit."""

import random

from fencepost_server.policy.fairness import Turns


def _served(
    tenants: dict[int, int],
    weights: dict[int, tuple[int, int]],
    *,
    rounds: int,
    credit: int,
    turns: Turns | None = None,
) -> dict[int, int]:
    """Runs per queue when each of them always has more; `credit` is new in each round."""
    turns = Turns() if turns is None else turns
    served = dict.fromkeys(tenants, 0)
    for _ in range(rounds):
        order = turns.order(tenants)
        shares = turns.shares(credit, tenants, weights)
        assert sum(shares.values()) == credit
        for queue_id in order:
            given = shares[queue_id]
            if given:
                own, of_tenant = weights[queue_id]
                turns.charge(
                    queue_id, tenants[queue_id], given, weight=own, tenant_weight=of_tenant
                )
            served[queue_id] += given
    return served


def test_credit_that_comes_one_by_one_goes_to_everybody() -> None:
    tenants = {queue_id: queue_id for queue_id in range(50)}
    served = _served(tenants, dict.fromkeys(tenants, (1, 1)), rounds=500, credit=1)
    assert set(served.values()) == {10}


def test_weights_of_tenants_and_of_workers_multiply() -> None:
    tenants = {1: 1, 2: 2, 3: 3}
    weights = {1: (1, 1), 2: (1, 2), 3: (3, 2)}
    for credit in (1, 4, 90):
        served = _served(tenants, weights, rounds=3600 // credit, credit=credit)
        assert abs(served[2] / served[1] - 2) < 0.05
        assert abs(served[3] / served[1] - 6) < 0.15


def test_a_tenant_gains_nothing_by_having_more_queues() -> None:
    tenants = {1: 1, 2: 2, 3: 2, 4: 2}
    for credit in (1, 5, 60):
        served = _served(tenants, dict.fromkeys(tenants, (1, 1)), rounds=600, credit=credit)
        others = served[2] + served[3] + served[4]
        assert abs(served[1] / others - 1) < 0.05
        assert max(served[2], served[3], served[4]) - min(served[2], served[3], served[4]) <= credit


def test_nobody_saves_up_turns_while_it_has_nothing() -> None:
    turns = Turns()
    weights = {1: (1, 1), 2: (1, 1)}
    _served({1: 1}, weights, rounds=1000, credit=1, turns=turns)
    served = _served({1: 1, 2: 2}, weights, rounds=100, credit=1, turns=turns)
    assert abs(served[1] - served[2]) <= 1


def test_what_was_too_much_is_not_forgotten_by_leaving() -> None:
    turns = Turns()
    weights = {1: (1, 1), 2: (1, 1)}
    turns.order({1: 1, 2: 2})
    turns.charge(1, 1, 10, weight=1, tenant_weight=1)
    turns.charge(2, 2, 1, weight=1, tenant_weight=1)
    turns.order({2: 2})
    served = _served({1: 1, 2: 2}, weights, rounds=9, credit=1, turns=turns)
    assert served == {1: 0, 2: 9}


def test_order_names_each_queue_once_whoever_comes_and_goes() -> None:
    rng = random.Random(7)
    turns = Turns()
    for _ in range(500):
        present = {q: q % 5 for q in rng.sample(range(20), rng.randint(0, 20))}
        order = turns.order(present)
        assert sorted(order) == sorted(present)
        for queue_id in order[:3]:
            turns.charge(queue_id, present[queue_id], rng.randint(0, 9), weight=1, tenant_weight=1)


def test_shares_are_whole_and_use_up_the_credit() -> None:
    tenants = {1: 1, 2: 1, 3: 2}
    weights = {1: (1, 1), 2: (3, 1), 3: (1, 4)}
    turns = Turns()
    turns.order(tenants)
    assert turns.shares(120, tenants, weights) == {1: 10, 2: 30, 3: 80}
    assert turns.shares(1, tenants, weights) == {1: 0, 2: 0, 3: 1}
    assert turns.shares(0, tenants, weights) == {1: 0, 2: 0, 3: 0}
    assert turns.shares(7, {2: 1}, weights) == {2: 7}
    # Whoever is behind catches up first.
    turns.charge(3, 2, 400, weight=1, tenant_weight=4)
    assert turns.shares(120, tenants, weights) == {1: 30, 2: 90, 3: 0}
