"""Who is served next when several tenants share workers: weighted fair queueing in memory.

Every run that is handed out moves its tenant's and its queue's mark forward, by less the
greater the weight; the lowest mark goes first. Nobody saves up turns while it has nothing.
"""

from collections.abc import Iterable, Mapping


class Turns:
    """The marks of tenants and queues, as far as they are ahead of those that wait."""

    def __init__(self) -> None:
        self._tenants = _Marks()
        self._queues: dict[int, _Marks] = {}

    def order(self, queues: Mapping[int, int]) -> list[int]:
        """The queue_ids that have something to give, whose turn it is first.

        `queues` maps each of them to its tenant_id.
        """
        by_tenant: dict[int, list[int]] = {}
        for queue_id, tenant_id in queues.items():
            by_tenant.setdefault(tenant_id, []).append(queue_id)
        order: list[int] = []
        for tenant_id in self._tenants.order(by_tenant):
            own = self._queues.setdefault(tenant_id, _Marks())
            order += own.order(by_tenant[tenant_id])
        for tenant_id in [each for each in self._queues if each not in by_tenant]:
            del self._queues[tenant_id]
        return order

    def shares(
        self, credit: int, queues: Mapping[int, int], weights: Mapping[int, tuple[int, int]]
    ) -> dict[int, int]:
        """How much of `credit` each of some queues may use now; together it is all of it.

        The queues are among those of the last `order`. `weights`: the worker's own weight of a
        queue and its tenant's. A tenant's queues share what is the tenant's.
        """
        by_tenant: dict[int, list[int]] = {}
        for queue_id, tenant_id in queues.items():
            by_tenant.setdefault(tenant_id, []).append(queue_id)
        of_tenants = self._tenants.fill(
            credit,
            {
                tenant_id: weights[own[0]][1] * sum(weights[each][0] for each in own) / len(own)
                for tenant_id, own in by_tenant.items()
            },
        )
        shares: dict[int, int] = {}
        for tenant_id, own in by_tenant.items():
            marks = self._queues.setdefault(tenant_id, _Marks())
            shares |= marks.fill(of_tenants[tenant_id], {each: weights[each][0] for each in own})
        return shares

    def charge(
        self, queue_id: int, tenant_id: int, runs: int, *, weight: int, tenant_weight: int
    ) -> None:
        """`runs` of the queue went to somebody who gives it `weight`."""
        self._tenants.charge(tenant_id, runs / (weight * tenant_weight))
        self._queues.setdefault(tenant_id, _Marks()).charge(queue_id, runs / weight)


class _Marks:
    def __init__(self) -> None:
        self._marks: dict[int, float] = {}
        # When each was served last, for those with equal marks.
        self._served: dict[int, int] = {}
        self._floor = 0.0
        self._count = 0

    def order(self, waiting: Iterable[int]) -> list[int]:
        """By mark. Whoever was not here the last time joins at the lowest mark of the others."""
        names = list(waiting)
        known = [self._marks[name] for name in names if name in self._marks]
        if known:
            self._floor = max(self._floor, min(known))
        # Those that wait for nothing are forgotten, except what they have had too much of.
        kept = {name: mark for name, mark in self._marks.items() if mark > self._floor}
        self._marks = kept | {name: max(self._floor, kept.get(name, 0.0)) for name in names}
        self._served = {name: turn for name, turn in self._served.items() if name in self._marks}
        return sorted(names, key=self._place)

    def fill(self, credit: int, weights: Mapping[int, float]) -> dict[int, int]:
        """Whole shares that bring the lowest marks up to one level, as near as can be."""
        names = sorted(weights, key=self._place)
        total = height = level = 0.0
        for place, name in enumerate(names):
            total += weights[name]
            height += weights[name] * self._marks.get(name, self._floor)
            level = (credit + height) / total
            if place + 1 < len(names) and level > self._marks.get(names[place + 1], self._floor):
                continue
            break
        exact = {
            name: max(0.0, weights[name] * (level - self._marks.get(name, self._floor)))
            for name in names
        }
        shares = {name: int(part) for name, part in exact.items()}
        left = credit - sum(shares.values())
        # Sorting is stable: of equal remainders the lowest mark comes first.
        for name in sorted(names, key=lambda name: round(shares[name] - exact[name], 9))[:left]:
            shares[name] += 1
        return shares

    def charge(self, name: int, cost: float) -> None:
        self._count += 1
        self._served[name] = self._count
        self._marks[name] = self._marks.get(name, self._floor) + cost

    def _place(self, name: int) -> tuple[float, int]:
        return self._marks.get(name, self._floor), self._served.get(name, 0)
