"""The calls of AdminService about exclusion calendars."""

from fencepost.v1 import admin_service_pb2 as pb

from fencepost_server.api import validate
from fencepost_server.api.masks import merged
from fencepost_server.api.page_tokens import PageTokens, query_hash
from fencepost_server.api.request_ids import read_request
from fencepost_server.api.wire_calendar import CALENDAR_FIELDS, read_calendar, write_calendar
from fencepost_server.clock import Clock
from fencepost_server.domain.names import (
    check_calendar_name,
    format_calendar,
    parse_calendar,
    parse_tenant,
)
from fencepost_server.errors import CalendarAlreadyExists, EtagMismatch
from fencepost_server.store.admin import Remember
from fencepost_server.store.calendars import (
    CalendarRecord,
    CalendarSettings,
    CalendarStore,
    calendar_not_found,
)
from fencepost_server.store.catalogue import Catalogue

ETAG_CHARS_MAX = 64


class CalendarCalls:
    """Serves the five methods; AdminServicer hands them on."""

    def __init__(
        self, *, store: CalendarStore, catalogue: Catalogue, clock: Clock, page_tokens: PageTokens
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._clock = clock
        self._page_tokens = page_tokens

    async def create(self, request: pb.CreateCalendarRequest) -> pb.CreateCalendarResponse:
        """Adds a calendar. Raises CalendarAlreadyExists."""
        tenant = parse_tenant(request.parent, field="parent")
        name = check_calendar_name(request.calendar_name, field="calendar_name")
        now = self._clock.now()
        settings = read_calendar(request.calendar, now=now)
        key = read_request(request)

        def answer(made: CalendarRecord) -> pb.CreateCalendarResponse:
            return pb.CreateCalendarResponse(calendar=write_calendar(made, tenant=tenant))

        made = await self._store.create(
            await self._catalogue.tenant_id(tenant),
            name,
            settings,
            now=now,
            remember=None
            if key is None
            else Remember(request=key, encode=lambda each: answer(each).SerializeToString()),
        )
        if made is None:
            full = format_calendar(tenant, name)
            raise CalendarAlreadyExists(f"{full} exists already", resource=full, name=full)
        if isinstance(made, bytes):
            return pb.CreateCalendarResponse.FromString(made)
        return answer(made)

    async def get(self, request: pb.GetCalendarRequest) -> pb.GetCalendarResponse:
        """Reads a calendar. Raises CalendarNotFound."""
        name = parse_calendar(request.name, field="name")
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        found = await self._store.read(tenant_id, name.calendar_name)
        if found is None:
            raise calendar_not_found(name.tenant, name.calendar_name)
        return pb.GetCalendarResponse(calendar=write_calendar(found, tenant=name.tenant))

    async def list(self, request: pb.ListCalendarsRequest) -> pb.ListCalendarsResponse:
        """Reads a page of calendars, by name, without their ICS text."""
        tenant = parse_tenant(request.parent, field="parent")
        size = validate.page_size(request.page_size)
        hashed = query_hash(request)
        after = None
        if request.page_token:
            after = str(self._page_tokens.read(request.page_token, query=hashed)[0])
        found = await self._store.list(
            await self._catalogue.tenant_id(tenant), after=after, limit=size + 1
        )
        more = self._page_tokens.make([found[size - 1].name], query=hashed) if found[size:] else ""
        return pb.ListCalendarsResponse(
            calendars=[write_calendar(each, tenant=tenant) for each in found[:size]],
            next_page_token=more,
        )

    async def update(self, request: pb.UpdateCalendarRequest) -> pb.UpdateCalendarResponse:
        """Changes the masked fields. Raises CalendarNotFound and EtagMismatch."""
        name = parse_calendar(request.calendar.name, field="calendar.name")
        etag = _read_etag(request.calendar.etag, "calendar.etag")
        now = self._clock.now()

        def change(stored: CalendarRecord) -> CalendarSettings:
            _check_etag(etag, stored, str(name))
            wanted = merged(
                write_calendar(stored, tenant=name.tenant),
                request.calendar,
                request.update_mask,
                changeable=CALENDAR_FIELDS,
            )
            return read_calendar(wanted, now=now)

        changed = await self._store.update(
            await self._catalogue.tenant_id(name.tenant), name.calendar_name, change, now=now
        )
        if changed is None:
            raise calendar_not_found(name.tenant, name.calendar_name)
        return pb.UpdateCalendarResponse(calendar=write_calendar(changed, tenant=name.tenant))

    async def delete(self, request: pb.DeleteCalendarRequest) -> pb.DeleteCalendarResponse:
        """Removes a calendar that no job names. Raises CalendarInUse and EtagMismatch, and
        CalendarNotFound unless allow_missing.
        """
        name = parse_calendar(request.name, field="name")
        etag = _read_etag(request.etag, "etag")
        gone = await self._store.delete(
            name.tenant,
            await self._catalogue.tenant_id(name.tenant),
            name.calendar_name,
            lambda stored: _check_etag(etag, stored, str(name)),
        )
        if not gone and not request.allow_missing:
            raise calendar_not_found(name.tenant, name.calendar_name)
        return pb.DeleteCalendarResponse()


def _read_etag(etag: str, field: str) -> str:
    return validate.ascii_text(etag, field=field, chars_max=ETAG_CHARS_MAX)


def _check_etag(sent: str, stored: CalendarRecord, name: str) -> None:
    if sent and sent != stored.etag:
        raise EtagMismatch(
            f"{name} has changed since it was read; read it again (its etag is {stored.etag})",
            field="etag",
            resource=name,
            name=name,
            currentEtag=stored.etag,
        )
