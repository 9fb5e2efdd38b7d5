"""Exclusion calendars and which jobs name them.

A job that is made or changed holds the calendars it names, and a deletion locks the
calendar before it looks for jobs: neither can slip past the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fencepost_server.clock import Instant
from fencepost_server.domain.calendar import CalendarContent, DateRange, NamedCalendar
from fencepost_server.domain.names import format_calendar
from fencepost_server.errors import CalendarInUse, CalendarNotFound
from fencepost_server.store.admin import Remember, make_once
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.requests import RequestScope
from fencepost_server.store.statements import load

_SQL = load("calendars")
# Names of jobs in the refusal of a deletion.
USERS_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarSettings:
    """What can change of a calendar."""

    description: str
    content: CalendarContent


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarRecord:
    """A calendar as stored."""

    calendar_id: int
    name: str
    settings: CalendarSettings
    revision: int
    created_at: Instant
    updated_at: Instant

    @property
    def etag(self) -> str:
        """Changes with every change."""
        return f"{self.calendar_id}-{self.revision}"


class CalendarStore:
    """Reads and writes for AdminService, each a transaction of its own."""

    def __init__(self, *, database: Database) -> None:
        self._pool = database.requests

    async def create(
        self,
        tenant_id: int,
        name: str,
        settings: CalendarSettings,
        *,
        now: Instant,
        remember: Remember[CalendarRecord] | None = None,
    ) -> CalendarRecord | bytes | None:
        """None if the name is taken; the stored answer if the call was answered before.

        Raises RequestIdReused.
        """

        async def make(connection: Connection) -> CalendarRecord | None:
            row = await connection.fetch_one(
                _SQL["insert_calendar"],
                tenant_id=tenant_id,
                name=name,
                now=now,
                **_values(settings),
            )
            return None if row is None else _record(row)

        scope = RequestScope(tenant_id=tenant_id, method="CreateCalendar")
        return await make_once(self._pool, scope, make, remember, now)

    async def read(self, tenant_id: int, name: str) -> CalendarRecord | None:
        """None if there is none."""
        row = await self._pool.fetch_one(_SQL["read_calendar"], tenant_id=tenant_id, name=name)
        return None if row is None else _record(row)

    async def update(
        self,
        tenant_id: int,
        name: str,
        change: Callable[[CalendarRecord], CalendarSettings],
        *,
        now: Instant,
    ) -> CalendarRecord | None:
        """Applies `change` to the locked row; the same settings change nothing.

        None if there is no such calendar. What `change` raises undoes everything.
        """
        async with self._pool.transaction() as connection:
            row = await connection.fetch_one(_SQL["lock_calendar"], tenant_id=tenant_id, name=name)
            if row is None:
                return None
            stored = _record(row)
            settings = change(stored)
            if settings == stored.settings:
                return stored
            row = await connection.fetch_one(
                _SQL["update_calendar"],
                calendar_id=stored.calendar_id,
                now=now,
                **_values(settings),
            )
        assert row is not None, "a locked row is updated"
        return _record(row)

    async def delete(
        self, tenant: str, tenant_id: int, name: str, check: Callable[[CalendarRecord], None]
    ) -> bool:
        """False if there is no such calendar. Raises CalendarInUse, and what `check` raises."""
        async with self._pool.transaction() as connection:
            row = await connection.fetch_one(_SQL["lock_calendar"], tenant_id=tenant_id, name=name)
            if row is None:
                return False
            stored = _record(row)
            check(stored)
            users = await connection.fetch(
                _SQL["calendar_users"],
                calendar_id=stored.calendar_id,
                names_max=USERS_SHOWN_MAX + 1,
            )
            if users:
                raise _in_use(format_calendar(tenant, name), [row["name"] for row in users])
            await connection.execute(_SQL["delete_calendar"], calendar_id=stored.calendar_id)
        return True

    async def find(
        self, tenant: str, tenant_id: int, names: Sequence[str]
    ) -> Sequence[NamedCalendar]:
        """The calendars of these names. Raises CalendarNotFound."""
        if not names:
            return []
        rows = await self._pool.fetch(
            _SQL["find_calendars"], tenant_id=tenant_id, names=list(names)
        )
        _check_found(tenant, names, (row["name"] for row in rows))
        return [_named(row) for row in rows]

    async def list(
        self, tenant_id: int, *, after: str | None, limit: int
    ) -> Sequence[CalendarRecord]:
        """By name, those later than `after`, without their ICS text."""
        rows = await self._pool.fetch(
            _SQL["list_calendars"], tenant_id=tenant_id, after=after, page_max=limit
        )
        return [_record(row) for row in rows]


async def hold(
    connection: Connection, tenant: str, tenant_id: int, names: Sequence[str]
) -> dict[str, int]:
    """The ids of calendars that stay until the transaction ends. Raises CalendarNotFound."""
    found = await hold_found(connection, tenant_id, names)
    _check_found(tenant, names, found)
    return found


async def hold_found(
    connection: Connection, tenant_id: int, names: Iterable[str]
) -> dict[str, int]:
    """As `hold`, of those that exist."""
    wanted = sorted(set(names))
    if not wanted:
        return {}
    rows = await connection.fetch(_SQL["hold_calendars"], tenant_id=tenant_id, names=wanted)
    return {row["name"]: row["calendar_id"] for row in rows}


async def set_job_calendars(
    connection: Connection, calendars: Mapping[str, Sequence[int]], *, is_new: bool
) -> None:
    """What these jobs name from now on, by held ids; an empty sequence: nothing."""
    if not is_new:
        await connection.execute(_SQL["forget_job_calendars"], job_ids=sorted(calendars))
    pairs = [(job, calendar) for job, each in sorted(calendars.items()) for calendar in each]
    if not pairs:
        return
    await connection.execute(
        _SQL["name_job_calendars"],
        job_ids=[job for job, _ in pairs],
        calendar_ids=[calendar for _, calendar in pairs],
    )
    if is_new:
        await connection.execute(
            _SQL["mark_jobs_with_calendars"], job_ids=sorted({job for job, _ in pairs})
        )


async def calendars_of(
    connection: Connection, job_ids: Sequence[str]
) -> dict[str, list[NamedCalendar]]:
    """What these jobs' calendars exclude now; jobs without calendars are left out."""
    if not job_ids:
        return {}
    pairs = await connection.fetch(_SQL["calendars_of_jobs"], job_ids=list(job_ids))
    wanted = sorted({row["calendar_id"] for row in pairs})
    rows = await connection.fetch(_SQL["calendars_by_id"], calendar_ids=wanted)
    by_id = {row["calendar_id"]: _named(row) for row in rows}
    found: dict[str, list[NamedCalendar]] = {}
    for row in pairs:
        found.setdefault(str(row["job_id"]), []).append(by_id[row["calendar_id"]])
    return found


def calendar_not_found(tenant: str, name: str) -> CalendarNotFound:
    """The one text for a calendar that this caller cannot see."""
    full = format_calendar(tenant, name)
    return CalendarNotFound(f"{full} does not exist", resource=full, name=full)


def _check_found(tenant: str, names: Sequence[str], found: Iterable[str]) -> None:
    known = set(found)
    for name in names:
        if name not in known:
            raise calendar_not_found(tenant, name)


def _in_use(full: str, jobs: Sequence[str]) -> CalendarInUse:
    shown = ", ".join(jobs[:USERS_SHOWN_MAX]) + (", …" if jobs[USERS_SHOWN_MAX:] else "")
    return CalendarInUse(
        f"{full} is named by jobs: {shown}; take it out of their exclude_calendars first",
        resource=full,
        name=full,
        jobs=shown,
    )


def _values(settings: CalendarSettings) -> dict[str, Any]:
    content = settings.content
    return {
        "description": settings.description,
        "dates": list(content.dates),
        "range_days": [day for one in content.ranges for day in (one.first_date, one.last_date)],
        "ics": content.ics,
        "time_zone": content.time_zone,
    }


def _content(row: Row) -> CalendarContent:
    days = iter(row["range_days"])
    return CalendarContent(
        dates=tuple(row["dates"]),
        ranges=tuple(
            DateRange(first_date=first, last_date=last)
            for first, last in zip(days, days, strict=True)
        ),
        ics=row["ics"],
        time_zone=row["time_zone"],
    )


def _named(row: Row) -> NamedCalendar:
    return NamedCalendar(name=row["name"], content=_content(row))


def _record(row: Row) -> CalendarRecord:
    return CalendarRecord(
        calendar_id=row["calendar_id"],
        name=row["name"],
        settings=CalendarSettings(description=row["description"], content=_content(row)),
        revision=row["revision"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
