"""Zone data that differs between servers or from what stored fires were computed with.

The newest data wins: whoever has it stores it, and brings the next fires of changed zones to
it, page by page and safe to repeat. Whoever has older data does not fire those zones.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from fencepost_server.clock import SECOND, Clock, Duration, Instant
from fencepost_server.domain.job import LAST_INSTANT, JobSpec
from fencepost_server.domain.schedule import CronSpec, spec_from_json
from fencepost_server.errors import FencepostError
from fencepost_server.policy.cron import CronRule, compile_cron
from fencepost_server.policy.schedule import BoundedRule
from fencepost_server.policy.zone_move import StoredZones, decided_until
from fencepost_server.policy.zone_source import ZoneSource
from fencepost_server.store.database import Database, Row
from fencepost_server.store.statements import load

_SQL = load("tzdata")
_log = structlog.get_logger("tzdata")

# Older servers look once a minute and may store a fire by their data until then.
MOVING: Duration = 150 * SECOND
_SCAN = 10_000
_BATCH = 200
_FIRST_ID = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """One interned rule by the data before and by the newest."""

    old: CronRule
    new: CronRule
    moved_until: Instant


@dataclass(slots=True)
class TzdataFollower:
    """Keeps stored fires and this process's zone data together."""

    database: Database
    clock: Clock
    zones: ZoneSource
    _told: str = field(default="", init=False)

    async def follow(self) -> list[int]:
        """Adopt, move what is to be moved, and say which schedules this process must not fire."""
        changed = await self._adopt()
        if changed:
            _log.info("tzdata_adopted", version=self.zones.version)
        stored = await self.database.requests.fetch_one(_SQL["stored_tzdata"])
        assert stored is not None, "shard_state has its one row since the first migration"
        version = stored["tzdata_version"]
        if version != self.zones.version:
            return await self._withheld(version)
        self._told = ""
        if stored["is_moving"]:
            await self._move()
        return []

    async def _adopt(self) -> bool:
        """Whether the data of this process is newer than any before."""
        pool = self.database.requests
        async with pool.transaction() as connection:
            row = await connection.fetch_one(_SQL["adopt_tzdata"], version=self.zones.version)
            stored = await connection.fetch_one(_SQL["stored_tzdata"])
            assert row is not None
            assert stored is not None
            is_ours = stored["tzdata_version"] == self.zones.version
            if row["changed"] or (is_ours and not stored["has_zones"]):
                rows = await connection.fetch(_SQL["zone_digests"])
                names = await asyncio.to_thread(
                    _differing, self.zones, {each["name"]: each["digest"] for each in rows}
                )
                # What was moved before moves again, from where it is now.
                await connection.execute(_SQL["forget_moves"])
                await connection.execute(
                    _SQL["store_zones"],
                    names=names,
                    contents=[self.zones.content(name) for name in names],
                    moved_until=self.clock.now() + MOVING,
                )
        return bool(row["changed"])

    async def _withheld(self, version: str) -> list[int]:
        rows = await self.database.requests.fetch(_SQL["zone_digests"])
        digests = {row["name"]: row["digest"] for row in rows}
        names = await asyncio.to_thread(_differing, self.zones, digests)
        gone = sorted(digests.keys() - self.zones.names)
        found = await self.database.requests.fetch(
            _SQL["schedules_in_zones"], zones=sorted({*names, *gone})
        )
        if self._told != version:
            self._told = version
            _log.warning(
                "tzdata_older",
                version=self.zones.version,
                newest=version,
                zones=len(names) + len(gone),
                schedules=len(found),
            )
        return sorted(row["schedule_id"] for row in found)

    async def _move(self) -> None:
        """One walk over all jobs; the last one that begins after everybody knows ends it."""
        now = self.clock.now()
        rules = await self._changed_rules()
        moved, after = 0, _FIRST_ID
        while rules:
            page = await self.database.requests.fetch_one(
                _SQL["scan_fires"],
                after=after,
                scan_max=_SCAN,
                schedule_ids=sorted(rules),
                now=now,
            )
            assert page is not None
            candidates = _candidates(page, rules)
            for start in range(0, len(candidates), _BATCH):
                moved += await self._move_batch(candidates[start : start + _BATCH], rules)
            if page["scanned"] < _SCAN:
                break
            after = str(page["last_scanned"])
        await self.database.requests.execute(_SQL["end_moves"], now=now)
        if moved:
            _log.info("fires_moved", jobs=moved, version=self.zones.version)

    async def _changed_rules(self) -> dict[int, _Rules]:
        zones = await self.database.requests.fetch(_SQL["moved_zones"])
        before = {row["name"]: row["previous"] for row in zones if row["previous"] is not None}
        until = {row["name"]: row["moved_until"] for row in zones}
        old = StoredZones(before, version="before")
        rows = await self.database.requests.fetch(_SQL["schedules_in_zones"], zones=sorted(before))
        rules: dict[int, _Rules] = {}
        for row in rows:
            spec = spec_from_json(row["rule"])
            assert isinstance(spec, CronSpec), "only cron rules have zones"
            try:
                rules[row["schedule_id"]] = _Rules(
                    old=compile_cron(spec, zones=old),
                    new=compile_cron(spec, zones=self.zones),
                    moved_until=until[spec.time_zone],
                )
            except FencepostError as error:
                # Its jobs keep what is stored; those of other rules must move.
                _log.error("rule_refused", schedule_id=row["schedule_id"], error=repr(error))
        return rules

    async def _move_batch(self, job_ids: Sequence[str], rules: Mapping[int, _Rules]) -> int:
        async with self.database.requests.transaction() as connection:
            rows = await connection.fetch(
                _SQL["lock_fires_to_move"], job_ids=list(job_ids), now=self.clock.now()
            )
            nexts: dict[str, Instant | None] = {}
            for row in rows:
                found = rules.get(row["schedule_id"])
                # What was defined since then was computed with the newest data.
                if found is None or row["created_at"] > found.moved_until - MOVING:
                    continue
                until = decided_until(found.old, found.new, row["next_run_at"])
                if until is not None:
                    nexts[str(row["job_id"])] = _next_run_at(row, found.new, until)
            if nexts:
                await connection.execute(
                    _SQL["move_fires"],
                    job_ids=sorted(nexts),
                    next_run_ats=[nexts[job] for job in sorted(nexts)],
                )
        return len(nexts)


def _differing(zones: ZoneSource, stored: Mapping[str, bytes]) -> list[str]:
    """The zones of a source that are not stored like this."""
    return [
        name
        for name in sorted(zones.names)
        if hashlib.sha256(zones.content(name)).digest() != stored.get(name)
    ]


def _candidates(page: Row, rules: Mapping[int, _Rules]) -> list[str]:
    """Jobs of a page whose next fire is not where the newest data has it, or may not be."""
    places: dict[tuple[int, Instant], bool] = {}
    found = []
    for job_id, schedule_id, at in zip(
        page["job_ids"], page["schedule_ids"], page["next_run_ats"], strict=True
    ):
        key = (schedule_id, at)
        if key not in places:
            rule = rules[schedule_id]
            until = decided_until(rule.old, rule.new, at)
            places[key] = until is not None and rule.new.next_after(until) != at
        if places[key]:
            found.append(str(job_id))
    return found


def _next_run_at(row: Row, rule: CronRule, decided: Instant) -> Instant | None:
    schedule = JobSpec.from_json(row["spec"]).schedule
    assert schedule is not None, "a job with a next fire has a schedule"
    bounded = BoundedRule(rule=rule, start_at=schedule.start_at, end_at=schedule.end_at)
    after = max(decided, row["last_scheduled_at"] or 0, row["created_at"])
    found = bounded.next_after(after)
    return None if found is None or found > LAST_INSTANT else found
