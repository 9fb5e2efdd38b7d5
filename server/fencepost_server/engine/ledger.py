"""The ledger of fires: every nominal fire of a job in a range, with what became of it.

Nothing is stored for it: runs, skipped stretches, the scheduling state and the rule
itself are read and laid out anew for each page.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fencepost_server.clock import Instant
from fencepost_server.domain.calendar import NamedCalendar
from fencepost_server.domain.fire import Fire, FireDisposition
from fencepost_server.domain.names import JobName
from fencepost_server.domain.schedule import Schedule, SkipReason
from fencepost_server.engine.job_access import job_not_found
from fencepost_server.policy.calendar import excludes, zone_of
from fencepost_server.policy.clock_changes import clock_change_fires
from fencepost_server.policy.due import counts_from_ends
from fencepost_server.policy.ledger import (
    Stretch,
    Suppressed,
    counted,
    lay_out,
    local_time,
    was_suppressed,
)
from fencepost_server.policy.schedule import Rule, bounded_rule, unanchored
from fencepost_server.store.calendars import calendars_of
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.statements import load

_SQL = load("ledger")

# Rows of one place that a round reads, and rounds of one page of a sparse filter.
_ROWS_MAX = 1000
_ROUNDS_MAX = 20
# Fires that one page counts; it ends early when they are used up.
COUNTED_MAX = 50_000
_DISPOSITIONS = {
    "schedule": FireDisposition.FIRED,
    "catch_up": FireDisposition.CAUGHT_UP,
    "backfill": FireDisposition.BACKFILLED,
}

# Where a page goes on: instants before the first, and what was suppressed at it if the
# second is 1.
Place = tuple[Instant, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FireQuery:
    """Fires in [since, until); no `dispositions` and no `reasons`: all of them."""

    since: Instant
    until: Instant
    dispositions: frozenset[FireDisposition] = frozenset()
    reasons: frozenset[SkipReason] = frozenset()

    def within(self, *, since: Instant, until: Instant) -> "FireQuery":
        """The same filters over another range."""
        return replace(self, since=since, until=until)

    def wants(self, fire: Fire) -> bool:
        """Whether an entry fits; reasons ask for SKIPPED ones."""
        if self.dispositions and fire.disposition not in self.dispositions:
            return False
        if not self.reasons:
            return True
        return fire.disposition is FireDisposition.SKIPPED and fire.reason in self.reasons

    @property
    def wants_regular(self) -> bool:
        """Whether runs that fires made in the ordinary way may fit."""
        if self.reasons:
            return False
        regular = {FireDisposition.FIRED, FireDisposition.CAUGHT_UP}
        return not self.dispositions or bool(self.dispositions & regular)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirePage:
    """Entries newest first, the part of run names that means the job, and the next place."""

    fires: Sequence[Fire]
    job: str
    following: Place | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Whose ledger it is; `deleted_at` ends what the rule alone says."""

    job_id: str
    name: str
    seed: str
    created_at: Instant
    deleted_at: Instant | None
    pause_reason: str
    # As they are now, read when an excluded fire is shown.
    calendars: list[NamedCalendar] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Rows:
    """One round's rows; nothing older than `floor` is known yet."""

    floor: Instant
    runs: list[Fire] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    # The last fire of a job that has used its limit of fires up.
    finished_at: Instant | None = None
    newest_version: int = 0
    next_run_at: Instant | None = None
    is_paused: bool = False


class Ledger:
    """Serves ListFires."""

    def __init__(self, *, database: Database, catalogue: Catalogue) -> None:
        self._database = database
        self._catalogue = catalogue

    def now(self) -> Instant:
        """The database clock's instant."""
        return self._database.clock.now()

    async def page(
        self, name: JobName, query: FireQuery, *, after: Place | None, page_size: int, now: Instant
    ) -> FirePage:
        """At most `page_size` entries older than the place `after`; fewer do not mean the end.

        A fire that is due at `now` is the newest there can be. Raises TenantNotFound, or
        JobNotFound; the id of a deleted job is good.
        """
        tenant_id = await self._catalogue.tenant_id(name.tenant)
        place = (min(query.until, now + 1), 0) if after is None else after
        found: list[Fire] = []
        async with self._database.requests.connection() as connection:
            job = await _find(connection, tenant_id, name)
            budget = COUNTED_MAX
            for _ in range(_ROUNDS_MAX):
                rows = await _read(connection, job, query, place)
                rules = await _Rules.read(connection, job, rows, query.since, place[0])
                entries = lay_out(
                    rows.runs,
                    [*rows.stretches, *rules.pending(rows, now=now)],
                    rules.suppressed(rows, place, now=now),
                    rules.of,
                    first=rows.floor,
                    until=place[0],
                )
                for fire in entries:
                    if len(found) == page_size or budget <= 0:
                        return FirePage(fires=found, job=job.name, following=place)
                    place = (fire.first, 0 if was_suppressed(fire) else 1)
                    if query.wants(fire):
                        whole = counted(fire, rules.of(fire.version, fire.first))
                        budget -= whole.count
                        if fire.reason is SkipReason.EXCLUDED and not job.calendars:
                            named = await calendars_of(connection, [job.job_id])
                            job.calendars.extend(named.get(job.job_id, ()))
                        found.append(rules.noted(whole))
                        # Counting holds the loop for a moment; others take turns.
                        await asyncio.sleep(0)
                place = (rows.floor, 0)
                if rows.floor <= query.since:
                    return FirePage(fires=found, job=job.name, following=None)
        return FirePage(fires=found, job=job.name, following=place)


class _Rules:
    """The schedules of a job's versions, and what clock changes did to their fires."""

    def __init__(self, job: _Job, rows: Sequence[Row]) -> None:
        self._job = job
        self._schedules: Mapping[int, Schedule] = {
            row["version"]: Schedule.from_json(row["schedule"])
            for row in rows
            if row["schedule"] is not None
        }
        self._since = [(row["created_at"], row["version"]) for row in rows]
        self._notes: dict[tuple[Instant, int], str] = {}

    @classmethod
    async def read(
        cls, connection: Connection, job: _Job, rows: _Rows, since: Instant, until: Instant
    ) -> "_Rules":
        """Those that the rows name, and those in force in the range."""
        versions = {run.version for run in rows.runs} | {s.version for s in rows.stretches}
        versions.add(rows.newest_version)
        found = await connection.fetch(
            _SQL["schedules_in_force"],
            job_id=job.job_id,
            versions=sorted(versions),
            since=max(since, rows.floor),
            until=until + 1,
        )
        return cls(job, found)

    def of(self, version: int, at: Instant) -> Rule | None:
        """The rule of a version, where `at` is a fire of it; None if it is not known."""
        schedule = self._schedules.get(version)
        if schedule is None:
            return None
        if counts_from_ends(schedule):
            # Those that made no run count from themselves.
            schedule = unanchored(schedule)
        return bounded_rule(schedule, anchor=at, seed=self._job.seed)

    def pending(self, rows: _Rows, *, now: Instant) -> list[Stretch]:
        """The fires that are due and not handled: late, or of a paused job."""
        first = rows.next_run_at
        if first is None or first > now:
            return []
        rule = self.of(rows.newest_version, first)
        last = None if rule is None else rule.prev_before(now + 1)
        return [
            Stretch(
                first=first,
                last=first if last is None else max(first, last),
                disposition=FireDisposition.PENDING,
                reason=SkipReason.PAUSED if rows.is_paused else None,
                version=rows.newest_version,
                detail=self._job.pause_reason if rows.is_paused else "",
            )
        ]

    def suppressed(self, rows: _Rows, place: Place, *, now: Instant) -> list[Suppressed]:
        """What clock changes ruled out since the job exists, by the version of that time."""
        end = min(place[0] + place[1], now + 1)
        if self._job.deleted_at is not None:
            end = min(end, self._job.deleted_at)
        if rows.finished_at is not None:
            end = min(end, rows.finished_at + 1)
        found: list[Suppressed] = []
        for index, (created_at, version) in enumerate(self._since):
            schedule = self._schedules.get(version)
            if schedule is None:
                continue
            until = self._since[index + 1][0] if index + 1 < len(self._since) else end
            for one in clock_change_fires(
                schedule,
                first=max(created_at, rows.floor),
                until=min(until, end),
                seed=self._job.seed,
            ):
                if one.skip_reason is None:
                    self._notes[one.at, version] = one.note
                else:
                    found.append(Suppressed(planned=one, version=version))
        return found

    def noted(self, fire: Fire) -> Fire:
        """The entry with its wall clock, and with what a clock change did to it."""
        note = self._notes.get((fire.first, fire.version), "") if fire.count == 1 else ""
        schedule = self._schedules.get(fire.version)
        if fire.reason is SkipReason.EXCLUDED and schedule is not None:
            note = excludes(self._job.calendars, fire.first, zone_of(schedule)) or ""
        return replace(
            fire,
            local_time=fire.local_time or local_time(fire.first, self.of(fire.version, fire.first)),
            detail=fire.detail or note,
        )


async def _find(connection: Connection, tenant_id: int, name: JobName) -> _Job:
    row = await connection.fetch_one(
        _SQL["find_ledger_job"],
        tenant_id=tenant_id,
        name=name.job,
        job_id=name.job if name.is_id else None,
    )
    if row is None:
        raise job_not_found(name)
    deleted = row["deleted_at"] is not None
    return _Job(
        job_id=str(row["job_id"]),
        name=str(row["job_id"]) if deleted else row["name"],
        seed=f"{row['tenant_name']}/{row['name']}",
        created_at=row["created_at"],
        deleted_at=row["deleted_at"],
        pause_reason=row["pause_reason"],
    )


async def _read(connection: Connection, job: _Job, query: FireQuery, place: Place) -> _Rows:
    """One round: as much as is known for sure down to its floor."""
    found = await connection.fetch(
        _SQL["read_ledger"],
        job_id=job.job_id,
        since=query.since,
        before=place[0],
        with_regular=query.wants_regular,
        rows_max=_ROWS_MAX,
    )
    rows = _Rows(floor=query.since)
    for row in found:
        if row["source"] == "run":
            rows.runs.append(_run(row))
        elif row["source"] == "skip":
            rows.stretches.append(_skip(row))
        else:
            rows.newest_version = row["version"]
            rows.finished_at = row["stand_in_at"]
            rows.next_run_at = row["first_at"]
            rows.is_paused = row["state"] == "paused"
    rows.runs.sort(key=lambda run: run.first, reverse=True)
    if len(rows.runs) >= _ROWS_MAX:
        rows.floor = max(rows.floor, rows.runs[_ROWS_MAX - 1].first)
        del rows.runs[_ROWS_MAX:]
    if len(rows.stretches) == _ROWS_MAX:
        rows.floor = max(rows.floor, min(s.first for s in rows.stretches))
    return rows


def _run(row: Row) -> Fire:
    is_skipped = row["state"] == "skipped"
    return Fire(
        first=row["first_at"],
        last=row["first_at"],
        disposition=FireDisposition.SKIPPED if is_skipped else _DISPOSITIONS[row["origin"]],
        reason=SkipReason.EXPIRED if is_skipped else None,
        version=row["version"],
        run_at=row["first_at"],
        decided_at=row["decided_at"],
    )


def _skip(row: Row) -> Stretch:
    return Stretch(
        first=row["first_at"],
        last=row["last_at"],
        disposition=FireDisposition.SKIPPED,
        reason=SkipReason[row["reason"].upper()],
        version=row["version"],
        decided_at=row["decided_at"],
        stand_in=row["stand_in_at"],
    )
