"""The calls about queues of AdminService."""

from collections.abc import Callable, Sequence

from fencepost.v1 import admin_pb2
from fencepost.v1 import admin_service_pb2 as pb

from fencepost_server.api import validate
from fencepost_server.api.etags import check_etag, read_etag
from fencepost_server.api.masks import merged
from fencepost_server.api.page_tokens import PageTokens, query_hash
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.wire_admin import (
    QUEUE_FIELDS,
    listeners,
    queue_etag,
    read_queue,
    write_queue,
    write_stats,
)
from fencepost_server.clock import MINUTE, Clock, Duration
from fencepost_server.domain.names import (
    check_queue_name,
    format_queue,
    parse_queue,
    parse_tenant,
)
from fencepost_server.errors import QueueAlreadyExists
from fencepost_server.store.admin import AdminStore, QueueRecord, QueueSettings, Remember
from fencepost_server.store.catalogue import Catalogue, queue_not_found

# Workers say what they hold every few seconds; whoever is silent for so long listens no more.
_LISTENS_FOR: Duration = MINUTE
_LISTENERS_MAX = 1000


class QueueCalls:
    """Checks requests, calls the store, writes answers. `changed()`: limits or pauses may have."""

    def __init__(
        self,
        *,
        store: AdminStore,
        catalogue: Catalogue,
        clock: Clock,
        page_tokens: PageTokens,
        changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._clock = clock
        self._page_tokens = page_tokens
        self._changed = changed

    async def create(self, request: pb.CreateQueueRequest) -> pb.CreateQueueResponse:
        """Adds a queue."""
        tenant = parse_tenant(request.parent, field="parent")
        name = check_queue_name(request.queue_name, field="queue_name")
        settings = read_queue(request.queue)
        key = read_request(request)
        made = await self._store.create_queue(
            await self._catalogue.tenant_id(tenant),
            name,
            settings,
            now=self._clock.now(),
            remember=None
            if key is None
            else Remember(
                request=key, encode=lambda each: _queue(each, tenant).SerializeToString()
            ),
        )
        if made is None:
            full = format_queue(tenant, name)
            raise QueueAlreadyExists(f"{full} exists already", resource=full, name=full)
        if isinstance(made, bytes):
            return pb.CreateQueueResponse.FromString(made)
        return _queue(made, tenant)

    async def get(self, request: pb.GetQueueRequest) -> pb.GetQueueResponse:
        """Reads a queue."""
        name = parse_queue(request.name, field="name")
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        found = await self._store.read_queue(tenant_id, name.queue_name)
        if found is None:
            raise queue_not_found(name.tenant, name.queue_name)
        [queue] = await self._with_stats([found], tenant=name.tenant, tenant_id=tenant_id)
        return pb.GetQueueResponse(queue=queue)

    async def list(self, request: pb.ListQueuesRequest) -> pb.ListQueuesResponse:
        """Reads a page of queues, by name."""
        tenant = parse_tenant(request.parent, field="parent")
        size = validate.page_size(request.page_size)
        hashed = query_hash(request)
        tenant_id = await self._catalogue.tenant_id(tenant)
        found = await self._store.list_queues(
            tenant_id,
            after=str(self._page_tokens.read(request.page_token, query=hashed)[0])
            if request.page_token
            else None,
            limit=size + 1,
        )
        more = self._page_tokens.make([found[size - 1].name], query=hashed) if found[size:] else ""
        return pb.ListQueuesResponse(
            queues=await self._with_stats(found[:size], tenant=tenant, tenant_id=tenant_id),
            next_page_token=more,
        )

    async def _with_stats(
        self, found: Sequence[QueueRecord], *, tenant: str, tenant_id: int
    ) -> Sequence[admin_pb2.Queue]:
        now = self._clock.now()
        numbers = await self._store.queue_stats.get([each.queue_id for each in found], now=now)
        listening = listeners(
            await self._store.list_workers(
                tenant_id=tenant_id,
                since=now - _LISTENS_FOR,
                before=None,
                limit=_LISTENERS_MAX,
            )
        )
        return [
            write_queue(
                each,
                tenant=tenant,
                stats=write_stats(
                    numbers[each.queue_id], listening.get(format_queue(tenant, each.name), ())
                ),
            )
            for each in found
        ]

    async def update(self, request: pb.UpdateQueueRequest) -> pb.UpdateQueueResponse:
        """Changes the masked settings of a queue; pausing is one of them."""
        name = parse_queue(request.queue.name, field="queue.name")
        etag = read_etag(request.queue.etag, "queue.etag")

        def change(stored: QueueRecord) -> QueueSettings:
            check_etag(etag, queue_etag(stored), str(name))
            return read_queue(
                merged(
                    write_queue(stored, tenant=name.tenant),
                    request.queue,
                    request.update_mask,
                    changeable=QUEUE_FIELDS,
                )
            )

        changed = await self._store.update_queue(
            await self._catalogue.tenant_id(name.tenant),
            name.queue_name,
            change,
            now=self._clock.now(),
        )
        if changed is None:
            raise queue_not_found(name.tenant, name.queue_name)
        self._changed()
        return pb.UpdateQueueResponse(queue=write_queue(changed, tenant=name.tenant))


def _queue(record: QueueRecord, tenant: str) -> pb.CreateQueueResponse:
    return pb.CreateQueueResponse(queue=write_queue(record, tenant=tenant))
