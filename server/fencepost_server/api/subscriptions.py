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
    found: dict[int, Subscription] = {}
    tenant_ids: set[int] = set()
    for place, message in enumerate(messages):
        path = f"{field}[{place}]"
        name = parse_queue(message.queue, field=f"{path}.queue")
        if len(message.kinds) > KINDS_MAX:
            raise validate.refused(
                f"{path}.kinds", len(message.kinds), f"at most {KINDS_MAX} kinds"
            )
        kinds = {validate.kind(kind, field=f"{path}.kinds") for kind in message.kinds}
        weight = validate.optional_integer(
            message.weight, field=f"{path}.weight", minimum=1, maximum=WEIGHT_MAX
        )
        in_flight_max = validate.integer(
            message.max_in_flight, field=f"{path}.max_in_flight", minimum=0, maximum=_IN_FLIGHT_MAX
        )
        queue_id = await catalogue.queue_id(name.tenant, name.queue_name)
        if queue_id in found:
            raise validate.refused(f"{path}.queue", message.queue, "each queue once")
        kind_ids = await catalogue.kind_ids(kinds) if kinds else None
        found[queue_id] = Subscription(
            queue_id=queue_id,
            kind_ids=None if kind_ids is None else frozenset(kind_ids.values()),
            in_flight_max=in_flight_max,
            weight=weight or 1,
        )
        tenant_ids.add(await catalogue.tenant_id(name.tenant))
    return found, tenant_ids
