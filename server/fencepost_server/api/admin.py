"""AdminService: tenants, queues, workers, and the server itself."""

from typing import Any, TypeAlias

import grpc.aio
from fencepost.v1 import admin_service_pb2 as pb
from fencepost.v1 import admin_service_pb2_grpc

from fencepost_server.api import validate
from fencepost_server.api.calendar_calls import CalendarCalls
from fencepost_server.api.limits import REVISION_MAX, REVISION_MIN, server_limits
from fencepost_server.api.masks import merged
from fencepost_server.api.page_tokens import PageTokens, query_hash
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.unserved import refuse_method
from fencepost_server.api.wire_admin import (
    QUEUE_FIELDS,
    TENANT_FIELDS,
    queue_etag,
    read_queue,
    read_tenant,
    tenant_etag,
    write_queue,
    write_tenant,
    write_worker,
)
from fencepost_server.api.wire_forecast import write_forecast
from fencepost_server.api.wire_time import to_duration, to_timestamp
from fencepost_server.clock import HOUR, Clock, Duration
from fencepost_server.domain.names import (
    check_queue_name,
    check_tenant_name,
    format_queue,
    format_tenant,
    format_worker,
    parse_queue,
    parse_tenant,
    parse_worker,
)
from fencepost_server.engine.forecast import Forecasts
from fencepost_server.errors import (
    EtagMismatch,
    NotImplementedYet,
    QueueAlreadyExists,
    TenantAlreadyExists,
    WorkerNotFound,
)
from fencepost_server.policy.zone import tzdata_version
from fencepost_server.store.admin import (
    AdminStore,
    QueueRecord,
    QueueSettings,
    Remember,
    TenantRecord,
    TenantSettings,
)
from fencepost_server.store.calendars import CalendarStore
from fencepost_server.store.catalogue import Catalogue, queue_not_found, tenant_not_found

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

ETAG_CHARS_MAX = 64
FORECAST_HOURS_DEFAULT = 24
FORECAST_HOURS_MAX = 168
_ALL_TENANTS = "tenants/-"


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Serves AdminService. `version` is the server's own; ended runs stay for `history_kept`."""

    def __init__(
        self,
        *,
        store: AdminStore,
        catalogue: Catalogue,
        clock: Clock,
        page_tokens: PageTokens,
        forecasts: Forecasts,
        calendars: CalendarStore,
        version: str,
        history_kept: Duration,
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._clock = clock
        self._page_tokens = page_tokens
        self._forecasts = forecasts
        self._calendars = CalendarCalls(
            store=calendars, catalogue=catalogue, clock=clock, page_tokens=page_tokens
        )
        self._version = version
        self._history_kept = history_kept

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Versions and limits."""
        return pb.GetServerInfoResponse(
            version=self._version,
            min_revision=REVISION_MIN,
            max_revision=REVISION_MAX,
            limits=server_limits(),
            server_at=to_timestamp(self._clock.now()),
            tzdata_version=tzdata_version(),
            history_retention=to_duration(self._history_kept),
        )

    async def CreateTenant(
        self, request: pb.CreateTenantRequest, context: Context
    ) -> pb.CreateTenantResponse:
        """Adds a tenant and its queue "default"."""
        name = check_tenant_name(request.tenant_name, field="tenant_name")
        key = read_request(request)
        made = await self._store.create_tenant(
            name,
            read_tenant(request.tenant),
            now=self._clock.now(),
            remember=None
            if key is None
            else Remember(request=key, encode=lambda each: _tenant(each).SerializeToString()),
        )
        if made is None:
            full = format_tenant(name)
            raise TenantAlreadyExists(f"{full} exists already", resource=full, name=full)
        return (
            pb.CreateTenantResponse.FromString(made) if isinstance(made, bytes) else _tenant(made)
        )

    async def GetTenant(
        self, request: pb.GetTenantRequest, context: Context
    ) -> pb.GetTenantResponse:
        """Reads a tenant."""
        name = parse_tenant(request.name, field="name")
        found = await self._store.read_tenant(name)
        if found is None:
            raise tenant_not_found(name)
        return pb.GetTenantResponse(tenant=write_tenant(found))

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: Context
    ) -> pb.ListTenantsResponse:
        """Reads a page of tenants, by name."""
        size = validate.page_size(request.page_size)
        hashed = query_hash(request)
        found = await self._store.list_tenants(
            after=self._after(request.page_token, hashed), limit=size + 1
        )
        more = self._page_tokens.make([found[size - 1].name], query=hashed) if found[size:] else ""
        return pb.ListTenantsResponse(
            tenants=[write_tenant(each) for each in found[:size]], next_page_token=more
        )

    async def UpdateTenant(
        self, request: pb.UpdateTenantRequest, context: Context
    ) -> pb.UpdateTenantResponse:
        """Changes the masked settings of a tenant."""
        name = parse_tenant(request.tenant.name, field="tenant.name")
        etag = _etag(request.tenant.etag, "tenant.etag")

        def change(stored: TenantRecord) -> TenantSettings:
            _check_etag(etag, tenant_etag(stored), format_tenant(name))
            return read_tenant(
                merged(
                    write_tenant(stored),
                    request.tenant,
                    request.update_mask,
                    changeable=TENANT_FIELDS,
                )
            )

        changed = await self._store.update_tenant(name, change, now=self._clock.now())
        if changed is None:
            raise tenant_not_found(name)
        return pb.UpdateTenantResponse(tenant=write_tenant(changed))

    async def CreateQueue(
        self, request: pb.CreateQueueRequest, context: Context
    ) -> pb.CreateQueueResponse:
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

    async def GetQueue(self, request: pb.GetQueueRequest, context: Context) -> pb.GetQueueResponse:
        """Reads a queue."""
        name = parse_queue(request.name, field="name")
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        found = await self._store.read_queue(tenant_id, name.queue_name)
        if found is None:
            raise queue_not_found(name.tenant, name.queue_name)
        return pb.GetQueueResponse(queue=write_queue(found, tenant=name.tenant))

    async def ListQueues(
        self, request: pb.ListQueuesRequest, context: Context
    ) -> pb.ListQueuesResponse:
        """Reads a page of queues, by name."""
        tenant = parse_tenant(request.parent, field="parent")
        size = validate.page_size(request.page_size)
        hashed = query_hash(request)
        found = await self._store.list_queues(
            await self._catalogue.tenant_id(tenant),
            after=self._after(request.page_token, hashed),
            limit=size + 1,
        )
        more = self._page_tokens.make([found[size - 1].name], query=hashed) if found[size:] else ""
        return pb.ListQueuesResponse(
            queues=[write_queue(each, tenant=tenant) for each in found[:size]],
            next_page_token=more,
        )

    async def UpdateQueue(
        self, request: pb.UpdateQueueRequest, context: Context
    ) -> pb.UpdateQueueResponse:
        """Changes the masked settings of a queue; pausing is one of them."""
        name = parse_queue(request.queue.name, field="queue.name")
        etag = _etag(request.queue.etag, "queue.etag")

        def change(stored: QueueRecord) -> QueueSettings:
            _check_etag(etag, queue_etag(stored), str(name))
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
        return pb.UpdateQueueResponse(queue=write_queue(changed, tenant=name.tenant))

    async def GetWorker(
        self, request: pb.GetWorkerRequest, context: Context
    ) -> pb.GetWorkerResponse:
        """Reads a worker."""
        worker_id = parse_worker(request.name, field="name")
        found = await self._store.read_worker(worker_id)
        if found is None:
            full = format_worker(worker_id)
            raise WorkerNotFound(f"{full} does not exist", resource=full, name=full)
        return pb.GetWorkerResponse(worker=write_worker(found, tenant=None))

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        """Reads a page of the workers heard from in the last hour, newest heartbeat first."""
        if request.filter:
            raise NotImplementedYet(
                "filter: not served by this version; leave it unset", field="filter"
            )
        tenant = None
        if request.parent != _ALL_TENANTS:
            tenant = parse_tenant(request.parent, field="parent")
        tenant_id = None if tenant is None else await self._catalogue.tenant_id(tenant)
        size = validate.page_size(request.page_size)
        hashed = query_hash(request)
        before = None
        if request.page_token:
            at, worker_id = self._page_tokens.read(request.page_token, query=hashed)
            before = (int(at), str(worker_id))
        found = await self._store.list_workers(
            tenant_id=tenant_id, since=self._clock.now() - HOUR, before=before, limit=size + 1
        )
        more = ""
        if found[size:]:
            last = found[size - 1]
            more = self._page_tokens.make([last.last_heartbeat_at, last.worker_id], query=hashed)
        return pb.ListWorkersResponse(
            workers=[write_worker(each, tenant=tenant) for each in found[:size]],
            next_page_token=more,
        )

    def _after(self, token: str, query: bytes) -> str | None:
        return str(self._page_tokens.read(token, query=query)[0]) if token else None

    async def GetForecast(
        self, request: pb.GetForecastRequest, context: Context
    ) -> pb.GetForecastResponse:
        """Fires expected in each minute ahead, and the busiest minutes."""
        tenant_id = None
        if request.parent != _ALL_TENANTS:
            tenant = parse_tenant(request.parent, field="parent")
            tenant_id = await self._catalogue.tenant_id(tenant)
        hours = validate.optional_integer(
            request.hours, field="hours", minimum=1, maximum=FORECAST_HOURS_MAX
        )
        return write_forecast(
            await self._forecasts.get(tenant_id=tenant_id, hours=hours or FORECAST_HOURS_DEFAULT)
        )

    async def CreateCalendar(
        self, request: pb.CreateCalendarRequest, context: Context
    ) -> pb.CreateCalendarResponse:
        """Adds an exclusion calendar."""
        return await self._calendars.create(request)

    async def GetCalendar(
        self, request: pb.GetCalendarRequest, context: Context
    ) -> pb.GetCalendarResponse:
        """Reads a calendar."""
        return await self._calendars.get(request)

    async def ListCalendars(
        self, request: pb.ListCalendarsRequest, context: Context
    ) -> pb.ListCalendarsResponse:
        """Reads a page of calendars, by name."""
        return await self._calendars.list(request)

    async def UpdateCalendar(
        self, request: pb.UpdateCalendarRequest, context: Context
    ) -> pb.UpdateCalendarResponse:
        """Changes the masked fields of a calendar."""
        return await self._calendars.update(request)

    async def DeleteCalendar(
        self, request: pb.DeleteCalendarRequest, context: Context
    ) -> pb.DeleteCalendarResponse:
        """Removes a calendar that no job names."""
        return await self._calendars.delete(request)

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> Any:
        """Not served yet."""
        refuse_method("DrainWorker")

    async def CreateApiKey(self, request: pb.CreateApiKeyRequest, context: Context) -> Any:
        """Not served yet."""
        refuse_method("CreateApiKey")

    async def ListApiKeys(self, request: pb.ListApiKeysRequest, context: Context) -> Any:
        """Not served yet."""
        refuse_method("ListApiKeys")

    async def RevokeApiKey(self, request: pb.RevokeApiKeyRequest, context: Context) -> Any:
        """Not served yet."""
        refuse_method("RevokeApiKey")


def _tenant(record: TenantRecord) -> pb.CreateTenantResponse:
    return pb.CreateTenantResponse(tenant=write_tenant(record))


def _queue(record: QueueRecord, tenant: str) -> pb.CreateQueueResponse:
    return pb.CreateQueueResponse(queue=write_queue(record, tenant=tenant))


def _etag(etag: str, field: str) -> str:
    return validate.ascii_text(etag, field=field, chars_max=ETAG_CHARS_MAX)


def _check_etag(sent: str, current: str, name: str) -> None:
    if sent and sent != current:
        raise EtagMismatch(
            f"{name} has changed since it was read; read it again (its etag is {current})",
            field="etag",
            resource=name,
            name=name,
            currentEtag=current,
        )
