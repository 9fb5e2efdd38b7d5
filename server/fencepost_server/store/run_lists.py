"""Pages of runs over every place a run can be in, by conditions that indexes serve.

A page is read in one snapshot: live runs and the few that ended without a day table first, then
history in windows of time from the newest to the oldest, each with a plan made for its values,
until the page is full or the time for a page is used up.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from fencepost_server.clock import DAY, HOUR, MILLISECOND, MINUTE, Duration, Instant, monotonic
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.run_terms import parameters, resolve
from fencepost_server.store.runs import EVER, FOREVER, RunPage, RunQuery
from fencepost_server.store.statements import load

_SQL = load("run_lists")

_FIRST_ID = "00000000-0000-0000-0000-000000000000"
_LAST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"
# Windows begin small, so that a full page costs little, and grow while they come back quickly.
_WINDOW_FIRST: Duration = 4 * HOUR
_WINDOW_MIN: Duration = 10 * MINUTE
_WINDOW_MAX: Duration = 2 * DAY
_QUICK: Duration = 8 * MILLISECOND
_SLOW: Duration = 40 * MILLISECOND

_ONLY_ENDED = ("skip_reasons", "dead_reasons", "not_skip_reasons", "not_dead_reasons")
_LIVE = frozenset(state for state in RunState if state.is_live)
_ENDED = frozenset(RunState) - _LIVE


async def page(
    connection: Connection,
    query: RunQuery,
    *,
    tenant_id: int,
    job_id: str | None,
    after: RunKey | None,
    history_from: Instant,
    now: Instant,
    page_size: int,
    time_max: Duration,
) -> RunPage:
    """Keys of at most `page_size` runs, newest first.

    `connection` is in a transaction that has read nothing yet. A page that finds too little
    within `time_max` ends where it has looked, maybe with nothing. Raises FilterNotSupported
    when a condition comes down to more than JOBS_MAX jobs.
    """
    await connection.execute(_SQL["hold_snapshot"])
    await connection.execute(_SQL["plan_for_values"])
    terms = await resolve(connection, query, tenant_id)
    query = replace(query, states=query.states & terms.states)
    before = after or _top(query)
    if terms.is_empty or not query.states:
        return RunPage(keys=[], after=None)
    values = await parameters(connection, query, terms, tenant_id=tenant_id, job_id=job_id)
    values["page_max"] = page_size + 1
    reading = _Reading(
        connection=connection,
        query=query,
        values=values,
        before=before,
        from_at=EVER if query.scheduled_from is None else query.scheduled_from,
        history_from=history_from,
        now=now,
        wanted=page_size + 1,
        time_max=time_max,
    )
    keys, looked_to = await reading.keys()
    await connection.execute(_SQL["plan_as_usual"])
    if len(keys) > page_size:
        return RunPage(keys=keys[:page_size], after=keys[page_size - 1])
    return RunPage(keys=keys, after=None if looked_to is None else RunKey(_FIRST_ID, looked_to))


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One page while it is read."""

    connection: Connection
    query: RunQuery
    values: dict[str, Any]
    before: RunKey
    from_at: Instant
    history_from: Instant
    now: Instant
    wanted: int
    time_max: Duration

    async def keys(self) -> tuple[list[RunKey], Instant | None]:
        """Keys in order, and the instant down to which everything was looked at; None: the end."""
        found = await self._live() + await self._apart()
        if not self.query.wants_history:
            return _ordered(found)[: self.wanted], None
        newest, oldest = await self._edges()
        span = _WINDOW_FIRST
        # Nothing comes before the first id, so its whole instant was looked at already.
        low = self.before.scheduled_at + (self.before.job_id != _FIRST_ID)
        is_sparse = self.query.bounds_other_times
        until = monotonic() + self.time_max
        while True:
            high = low
            low = self._low_of(high, span, newest, oldest)
            began = monotonic()
            found += await self._history(low, high - 1, is_sparse=is_sparse)
            now = monotonic()
            if low <= self.history_from or sum(k.scheduled_at >= low for k in found) >= self.wanted:
                return _ordered(found)[: self.wanted], None
            if high > newest:
                # What lies ahead is little, so it says nothing about the pace.
                until = now + self.time_max
                continue
            if now >= until:
                return _ordered(key for key in found if key.scheduled_at >= low), low
            # What the newest window up to now has too little of is rare, unless all match.
            is_sparse = is_sparse or self.query.is_selective
            if now - began < _QUICK:
                span = min(4 * span, _WINDOW_MAX)
            elif now - began > _SLOW:
                span = max(span // 2, _WINDOW_MIN)

    async def _edges(self) -> tuple[Instant, Instant]:
        """Where windows are narrow: between now and the oldest day there may be much to read."""
        row = await self.connection.fetch_one(_SQL["history_days"])
        assert row is not None, "shard_state has its one row since the first migration"
        return min(row["history_until"], self.now), row["history_from"] - DAY

    def _low_of(self, high: Instant, span: Duration, newest: Instant, oldest: Instant) -> Instant:
        if high > newest:
            low = newest
        elif high <= oldest:
            low = self.history_from
        else:
            low = high - span
        return max(low, self.history_from)

    async def _live(self) -> list[RunKey]:
        live = {state for state in self.query.states if state.is_live}
        asks_end = self.query.ended_from is not None or self.query.ended_before is not None
        if not live or asks_end:
            return []
        values = {name: value for name, value in self.values.items() if name not in _ONLY_ENDED}
        rows = await self.connection.fetch(
            _SQL["page_of_live"],
            **{
                **values,
                "states": _states(live, of=_LIVE),
                "from_at": self.from_at,
                "before_at": self.before.scheduled_at,
                "before_id": self.before.job_id,
            },
        )
        return _keys(rows)

    async def _apart(self) -> list[RunKey]:
        with_dead = RunState.DEAD in self.query.states
        if not (with_dead or self.query.wants_history):
            return []
        rows = await self.connection.fetch(
            _SQL["page_of_apart"],
            **{
                **self._ended_values(),
                "with_dead": with_dead,
                "with_history": self.query.wants_history,
                "history_from": self.history_from,
                "from_at": self.from_at,
                "before_at": self.before.scheduled_at,
                "before_id": self.before.job_id,
            },
        )
        return _keys(rows)

    async def _history(self, low: Instant, high: Instant, *, is_sparse: bool) -> list[RunKey]:
        """Those with scheduled_at in [low, high]; `is_sparse`: few are expected."""
        is_first = high == self.before.scheduled_at
        rows = await self.connection.fetch(
            _SQL["page_of_sparse_history" if is_sparse else "page_of_history"],
            **{
                **self._ended_values(),
                "from_at": low,
                "before_at": high,
                # Nothing has this id, so the whole instant is inside.
                "before_id": self.before.job_id if is_first else _LAST_ID,
            },
        )
        return _keys(rows)

    def _ended_values(self) -> dict[str, Any]:
        return {
            **self.values,
            "states": _states(self.query.states & _ENDED, of=_ENDED),
            "ended_from": self.query.ended_from,
            "ended_before": self.query.ended_before,
        }


def _top(query: RunQuery) -> RunKey:
    if query.scheduled_before is None:
        return RunKey(_LAST_ID, FOREVER)
    return RunKey(_FIRST_ID, query.scheduled_before)


def _keys(rows: Sequence[Row]) -> list[RunKey]:
    return [RunKey(str(row["job_id"]), row["scheduled_at"]) for row in rows]


def _ordered(keys: Iterable[RunKey]) -> list[RunKey]:
    return sorted(keys, key=lambda key: (key.scheduled_at, key.job_id), reverse=True)


def _states(states: Set[RunState], *, of: Set[RunState]) -> list[str] | None:
    """None when nothing is left out, so that the planner need not think about it."""
    return None if states >= of else sorted(state.name.lower() for state in states)
