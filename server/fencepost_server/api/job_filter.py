"""The filter of ListJobs: its fields, and the query that its conditions add up to."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fencepost_server.api.filters import (
    INSTANT,
    LABELS,
    LABELS_FIELD,
    PREFIX_TEXT,
    TEXT,
    Condition,
    FieldKind,
    Op,
    enum_names,
    parse,
)
from fencepost_server.clock import Instant
from fencepost_server.domain.job import JobState
from fencepost_server.errors import FilterNotSupported
from fencepost_server.store.jobs import JobQuery

FIELDS: Mapping[str, FieldKind] = {
    "job_name": PREFIX_TEXT,
    "state": enum_names({state.name: int(state) for state in JobState}),
    "queue": TEXT,
    "kind": PREFIX_TEXT,
    "created_at": INSTANT,
    "next_run_at": INSTANT,
    LABELS_FIELD: LABELS,
}


def read_filter(text: str) -> JobQuery:
    """The query of a filter text. Raises FilterNotSupported."""
    query = JobQuery()
    for condition in parse(text, FIELDS):
        query = _narrowed(query, condition)
    return query


def _narrowed(query: JobQuery, condition: Condition) -> JobQuery:
    match condition.field:
        case "created_at":
            low, high = _bounds(condition)
            return replace(
                query,
                created_from=_latest(query.created_from, low),
                created_before=_earliest(query.created_before, high),
            )
        case "next_run_at":
            low, high = _bounds(condition)
            return replace(
                query,
                next_from=_latest(query.next_from, low),
                next_before=_earliest(query.next_before, high),
            )
        case "job_name" if condition.op is Op.EQ and not condition.prefixes:
            names = {str(value) for value in condition.values}
            known = names if query.names is None else names & set(query.names)
            return replace(query, names=tuple(sorted(known)))
        case _:
            return replace(query, conditions=(*query.conditions, _as_json(condition)))


def _bounds(condition: Condition) -> tuple[Instant | None, Instant | None]:
    """The half-open range that a condition on an instant stands for."""
    at = condition.values[0]
    assert isinstance(at, int), "the values of instants are numbers"
    match condition.op:
        case Op.LT:
            return None, at
        case Op.LE:
            return None, at + 1
        case Op.GT:
            return at + 1, None
        case Op.GE:
            return at, None
        case Op.EQ if len(condition.values) == 1:
            return at, at + 1
        case _:
            raise FilterNotSupported(
                f"filter: {condition.field} takes one instant with = < <= > >=",
                field="filter",
                filterField=condition.field,
            )


def _as_json(condition: Condition) -> dict[str, Any]:
    return {
        "field": condition.field,
        "key": condition.key,
        "negated": condition.op is Op.NE,
        "has_key": condition.op is Op.HAS_KEY,
        "values": [str(value) for value in condition.values],
        "prefixes": list(condition.prefixes),
    }


def _latest(*instants: Instant | None) -> Instant | None:
    return max(_known(instants), default=None)


def _earliest(*instants: Instant | None) -> Instant | None:
    return min(_known(instants), default=None)


def _known(instants: Iterable[Instant | None]) -> list[Instant]:
    return [at for at in instants if at is not None]
