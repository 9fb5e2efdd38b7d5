"""Subscribers of a dispatcher that remember what they were given, and dispatchers to hold in
the hand.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fencepost_server.clock import HOUR
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.dealing import Subscription
from fencepost_server.engine.dispatcher import Dispatcher

from tests.integration.world import World


@dataclass(kw_only=True)
class Taker:
    """A subscriber with credit in hand that remembers what it was given."""

    subscriptions: Mapping[int, Subscription]
    credits: int = 1_000_000
    worker_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    taken: list[Claimed] = field(default_factory=list)
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def credit(self, queue_id: int) -> int:
        return self.credits

    def deliver(self, runs: Sequence[Claimed]) -> None:
        self.credits -= len(runs)
        self.taken.extend(runs)
        self.event.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.taken) < count:
                self.event.clear()
                await self.event.wait()


def make_dispatcher(world: World, *, batch_max: int = 100, poll: int = HOUR) -> Dispatcher:
    return Dispatcher(
        pool=world.database.hot,
        clock=world.database.clock,
        claimer=world.claimer,
        batch_max=batch_max,
        poll=poll,
    )


async def make_taker(
    world: World, *queues: str, kind: str | None = None, credits: int = 10**6
) -> Taker:
    kinds = None if kind is None else frozenset((await world.catalogue.kind_ids([kind])).values())
    ids = [await world.queue_id(queue) for queue in queues or ("default",)]
    return Taker(
        subscriptions={i: Subscription(queue_id=i, kind_ids=kinds) for i in ids}, credits=credits
    )


async def drain(dispatcher: Dispatcher) -> int:
    await dispatcher.scan()
    total = 0
    while claimed := await dispatcher.dispatch():
        total += claimed
    return total


@asynccontextmanager
async def running(dispatcher: Dispatcher) -> AsyncIterator[None]:
    loop = asyncio.create_task(dispatcher.run())
    try:
        yield
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
