"""AdminService: tenants, queues, workers, and the server itself."""

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio
from fencepost.v1 import admin_service_pb2 as pb
from fencepost.v1 import admin_service_pb2_grpc

from fencepost_server.api import validate
from fencepost_server.api.calendar_calls import CalendarCalls
from fencepost_server.api.etags import check_etag, read_etag
from fencepost_server.api.limits import REVISION_MAX, REVISION_MIN, server_limits
from fencepost_server.api.masks import merged
from fencepost_server.api.page_tokens import PageTokens, query_hash
from fencepost_server.api.queue_calls import QueueCalls
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.unserved import refuse_method
from fencepost_server.api.wire_admin import (
    TENANT_FIELDS,
    read_tenant,
    tenant_etag,
    write_tenant,
    write_worker,
)
from fencepost_server.api.wire_forecast import write_forecast
from fencepost_server.api.wire_time import to_duration, to_timestamp
from fencepost_server.clock import HOUR, Clock, Duration
from fencepost_server.domain.names import (
    check_tenant_name,
    format_tenant,
    format_worker,
    parse_tenant,
    parse_worker,
)
from fencepost_server.engine.forecast import Forecasts
from fencepost_server.errors import (
    NotImplementedYet,
    TenantAlreadyExists,
    WorkerNotFound,
)
from fencepost_server.policy.zone import tzdata_version
from fencepost_server.store.admin import (
    AdminStore,
    Remember,
    TenantRecord,
    TenantSettings,
)
from fencepost_server.store.calendars import CalendarStore
from fencepost_server.store.catalogue import Catalogue, tenant_not_found

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

FORECAST_HOURS_DEFAULT = 24
FORECAST_HOURS_MAX = 168
_ALL_TENANTS = "tenants/-"


class AdminServicer(admin_service_pb2_grpc.AdminServiceServicer):
    """Serves AdminService. `version` is the server's own; ended runs stay for `history_kept`.

    `queue_changed()` is called after limits or pauses may have changed.
    """

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
        queue_changed: Callable[[], None] | None = None,
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._clock = clock
        self._page_tokens = page_tokens
        self._forecasts = forecasts
        self._calendars = CalendarCalls(
            store=calendars, catalogue=catalogue, clock=clock, page_tokens=page_tokens
        )
        self._queues = QueueCalls(
            store=store,
            catalogue=catalogue,
            clock=clock,
            page_tokens=page_tokens,
            changed=self._limits_changed,
        )
        self._version = version
        self._history_kept = history_kept
        self._queue_changed = queue_changed

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
        etag = read_etag(request.tenant.etag, "tenant.etag")

        def change(stored: TenantRecord) -> TenantSettings:
            check_etag(etag, tenant_etag(stored), format_tenant(name))
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
        self._limits_changed()
        return pb.UpdateTenantResponse(tenant=write_tenant(changed))

    async def CreateQueue(
        self, request: pb.CreateQueueRequest, context: Context
    ) -> pb.CreateQueueResponse:
        """Adds a queue."""
        return await self._queues.create(request)

    async def GetQueue(self, request: pb.GetQueueRequest, context: Context) -> pb.GetQueueResponse:
        """Reads a queue."""
        return await self._queues.get(request)

    async def ListQueues(
        self, request: pb.ListQueuesRequest, context: Context
    ) -> pb.ListQueuesResponse:
        """Reads a page of queues, by name."""
        return await self._queues.list(request)

    async def UpdateQueue(
        self, request: pb.UpdateQueueRequest, context: Context
    ) -> pb.UpdateQueueResponse:
        """Changes the masked settings of a queue; pausing is one of them."""
        return await self._queues.update(request)

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

    def _limits_changed(self) -> None:
        if self._queue_changed is not None:
            self._queue_changed()

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
