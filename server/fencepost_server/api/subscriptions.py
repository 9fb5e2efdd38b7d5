"""Reads what a worker listens to, for sessions and long polls alike."""

from collections.abc import Sequence

from fencepost.v1 import worker_pb2

from fencepost_server.api import validate
from fencepost_server.domain.names import parse_queue
from fencepost_server.engine.dealing import Subscription
from fencepost_server.store.catalogue import Catalogue

SUBSCRIPTIONS_MAX = 64
KINDS_MAX = 512
WEIGHT_MAX = 1000
_IN_FLIGHT_MAX = 100_000


async def read_subscriptions(
    messages: Sequence[worker_pb2.QueueSubscription], catalogue: Catalogue, *, field: str
) -> tuple[dict[int, Subscription], set[int]]:
    """Subscriptions by queue_id, and the tenants they are of.

    Raises InvalidField, TenantNotFound or QueueNotFound.
    """
    if not 1 <= len(messages) <= SUBSCRIPTIONS_MAX:
        raise validate.refused(field, len(messages), f"1 to {SUBSCRIPTIONS_MAX} queues")
    read = {}
    for place, message in enumerate(messages):
        path = f"{field}[{place}]"
        name, kinds, weight, in_flight_max = _read(message, path)
        if name in read:
            raise validate.refused(f"{path}.queue", message.queue, "each queue once")
        read[name] = (kinds, weight, in_flight_max)
    queues = await catalogue.queues(read)
    kind_ids = await catalogue.kind_ids(set().union(*(kinds for kinds, _, _ in read.values())))
    found = {
        queues[name][1]: Subscription(
            queue_id=queues[name][1],
            kind_ids=frozenset(kind_ids[kind] for kind in kinds) if kinds else None,
            in_flight_max=in_flight_max,
            weight=weight,
        )
        for name, (kinds, weight, in_flight_max) in read.items()
    }
    return found, {tenant_id for tenant_id, _ in queues.values()}


def _read(
    message: worker_pb2.QueueSubscription, path: str
) -> tuple[tuple[str, str], set[str], int, int]:
    """(tenant, queue name), kinds, weight and bound of one subscription."""
    name = parse_queue(message.queue, field=f"{path}.queue")
    if len(message.kinds) > KINDS_MAX:
        raise validate.refused(f"{path}.kinds", len(message.kinds), f"at most {KINDS_MAX} kinds")
    kinds = {validate.kind(kind, field=f"{path}.kinds") for kind in message.kinds}
    weight = validate.optional_integer(
        message.weight, field=f"{path}.weight", minimum=1, maximum=WEIGHT_MAX
    )
    in_flight_max = validate.integer(
        message.max_in_flight, field=f"{path}.max_in_flight", minimum=0, maximum=_IN_FLIGHT_MAX
    )
    return (name.tenant, name.queue_name), kinds, weight or 1, in_flight_max
