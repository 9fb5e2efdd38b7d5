"""The memo of next fires: each is computed once for all jobs of a rule, and where the loop has
time for it, before it is asked for.
"""

import asyncio
import heapq
from collections.abc import Collection, Iterable, Mapping
from operator import itemgetter

import structlog

from fencepost_server.clock import Instant
from fencepost_server.domain.schedule import CronSpec, spec_from_json
from fencepost_server.errors import FencepostError
from fencepost_server.policy.cron import CronRule, compile_cron
from fencepost_server.policy.zone_source import ZoneSource
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

_SQL = load("firing")
_log = structlog.get_logger("firing")

_RULES_MAX = 50_000
_NEXTS_MAX = 50_000
# A rule takes 20 microseconds or more; other loops get their turn in between.
_COMPUTED_AT_ONCE = 100
_LEARNED_AT_ONCE = 2000

# A schedule_id and an instant at which it fires.
_Fire = tuple[int, Instant]


class NextFires:
    """Computes next fires and keeps them where the statement that fires reads them."""

    def __init__(self, *, database: Database, zones: ZoneSource) -> None:
        self._database = database
        self._zones = zones
        self._rules: dict[int, CronRule] = {}
        # What was computed lately; the database may have lost it, and is told again.
        self._nexts: dict[_Fire, Instant | None] = {}
        self._expected: set[_Fire] = set()

    async def learn(self, fires: Collection[_Fire]) -> bool:
        """Compute what follows these fires of schedules. False: none of the rules is usable."""
        pairs = sorted(set(fires))
        rules = await self._load_rules([schedule for schedule, _ in pairs])
        pairs = [pair for pair in pairs if pair[0] in rules]
        nexts: list[Instant | None] = []
        if len(self._nexts) + len(pairs) > _NEXTS_MAX:
            self._nexts.clear()
        for number, pair in enumerate(pairs, start=1):
            if pair not in self._nexts:
                self._nexts[pair] = rules[pair[0]].next_after(pair[1])
            nexts.append(self._nexts[pair])
            if number % _COMPUTED_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._database.hot.execute(
            _SQL["remember_fires"],
            schedule_ids=[schedule for schedule, _ in pairs],
            scheduled_ats=[at for _, at in pairs],
            next_ats=nexts,
            tzdata=self._zones.version,
        )
        return bool(pairs)

    def expect(self, fires: Iterable[_Fire]) -> None:
        """These fires come soon; `learn_expected` computes what follows them."""
        if len(self._expected) < _NEXTS_MAX:
            self._expected.update(fires)

    async def learn_expected(self) -> None:
        """Compute what follows the fires that were expected and are not known yet."""
        self._expected -= self._nexts.keys()
        # The soonest; the loop must be there again when the next second begins.
        fires = heapq.nsmallest(_LEARNED_AT_ONCE, self._expected, key=itemgetter(1))
        if fires:
            self._expected.difference_update(fires)
            await self.learn(fires)

    async def forget(self, before: Instant) -> None:
        """Keep the memo small: drop what follows fires before an instant."""
        await self._database.requests.execute(_SQL["forget_fires"], before=before)

    async def _load_rules(self, schedules: Collection[int]) -> Mapping[int, CronRule]:
        missing = {schedule for schedule in schedules if schedule not in self._rules}
        if missing:
            if len(self._rules) + len(missing) > _RULES_MAX:
                self._rules.clear()
            rows = await self._database.requests.fetch(
                _SQL["schedule_rules"], schedule_ids=sorted(missing | set(schedules))
            )
            for row in rows:
                try:
                    spec = spec_from_json(row["rule"])
                    assert isinstance(spec, CronSpec), "only cron rules are interned"
                    rule = compile_cron(spec, zones=self._zones)
                except (FencepostError, KeyError, ValueError) as error:
                    # Its jobs stay due; those of other rules must fire.
                    _log.error("rule_refused", schedule_id=row["schedule_id"], error=repr(error))
                    continue
                self._rules[row["schedule_id"]] = rule
        return self._rules
