"""Which runs a change to many of them is about: found oldest first, page by page, and the form
in which an operation keeps its filter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fencepost_server.clock import Instant
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.runs import EVER, FOREVER, RunQuery
from fencepost_server.store.statements import load

_SQL = load("dead_letters")
_FIRST = RunKey("00000000-0000-0000-0000-000000000000", EVER)
_BOUNDS = (
    "scheduled_from",
    "scheduled_before",
    "created_from",
    "created_before",
    "ended_from",
    "ended_before",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """How many match, the first and the last of their keys, oldest first.

    `frontier`: the look ended early at this key; what lies behind it was not looked at.
    """

    count: int
    keys: Sequence[RunKey]
    last: RunKey | None
    frontier: RunKey | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchScope:
    """Where to look: one job or all of a tenant, and only for what matched at an instant."""

    tenant_id: int
    job_id: str | None
    matched_at: Instant
    after: RunKey | None = None


async def find(
    connection: Connection,
    query: RunQuery,
    scope: MatchScope,
    *,
    matches_max: int,
    keys_max: int,
    scan_max: int | None,
) -> Matches:
    """Matches after `scope.after`, of at most `scan_max` rows that are looked at.

    A query whose only state is DEAD is asked of the dead letters that nobody discarded, any
    other of the live runs in its states.
    """
    values = {
        **_bounds(query),
        "tenant_id": scope.tenant_id,
        "job_id": scope.job_id,
        "after_at": (scope.after or _FIRST).scheduled_at,
        "after_id": (scope.after or _FIRST).job_id,
        "matched_at": scope.matched_at,
        "matches_max": matches_max,
        "keys_max": keys_max,
        "scan_max": scan_max,
    }
    if query.states == {RunState.DEAD}:
        row = await connection.fetch_one(_SQL["match_dead_letters"], **values)
    else:
        states = sorted(state.name.lower() for state in query.states)
        row = await connection.fetch_one(_SQL["match_live_runs"], states=states, **values)
    assert row is not None, "matches are always one row"
    frontier = None if scan_max is None else _key(row, "frontier")
    keys = zip(row["job_ids"], row["scheduled_ats"], strict=True)
    return Matches(
        count=row["matched"],
        keys=[RunKey(str(job_id), at) for job_id, at in keys],
        last=_key(row, "last"),
        frontier=frontier,
    )


async def groups(
    connection: Connection,
    query: RunQuery,
    *,
    tenant_id: int,
    job_id: str | None,
    matches_max: int,
    groups_max: int,
) -> Sequence[Row]:
    """Groups of the newest `matches_max` dead letters that match, as rows."""
    return await connection.fetch(
        _SQL["group_dead_letters"],
        **_bounds(query),
        tenant_id=tenant_id,
        job_id=job_id,
        matches_max=matches_max,
        groups_max=groups_max,
    )


def query_to_json(query: RunQuery) -> dict[str, Any]:
    """What an operation keeps of a query whose job is known by its id."""
    return {
        "states": sorted(state.name for state in query.states),
        "conditions": [dict(each) for each in query.conditions],
        **{name: getattr(query, name) for name in _BOUNDS if getattr(query, name) is not None},
    }


def query_from_json(data: Mapping[str, Any]) -> RunQuery:
    """The reverse of `query_to_json`."""
    return RunQuery(
        states=frozenset(RunState[name] for name in data["states"]),
        conditions=tuple(data["conditions"]),
        **{name: data[name] for name in _BOUNDS if name in data},
    )


def _bounds(query: RunQuery) -> dict[str, Any]:
    return {
        "from_at": EVER if query.scheduled_from is None else query.scheduled_from,
        "before_at": FOREVER if query.scheduled_before is None else query.scheduled_before,
        "created_from": query.created_from,
        "created_before": query.created_before,
        "ended_from": query.ended_from,
        "ended_before": query.ended_before,
        "conditions": list(query.conditions),
    }


def _key(row: Row, name: str) -> RunKey | None:
    job_id = row[f"{name}_id"]
    return None if job_id is None else RunKey(str(job_id), row[f"{name}_at"])
