"""The filter of ListRuns: its fields, and the query that its conditions add up to."""

from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
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
from fencepost_server.domain.names import is_uuid
from fencepost_server.domain.run import CancelCause, DeadReason, RunOrigin, RunState
from fencepost_server.domain.schedule import SkipReason
from fencepost_server.errors import FilterNotSupported
from fencepost_server.store.runs import RunQuery

_ENUMS: Mapping[str, type[IntEnum]] = {
    "state": RunState,
    "origin": RunOrigin,
    "skip_reason": SkipReason,
    "dead_reason": DeadReason,
    "cancel_cause": CancelCause,
}
_RANGES: Mapping[str, tuple[str, str]] = {
    "scheduled_at": ("scheduled_from", "scheduled_before"),
    "created_at": ("created_from", "created_before"),
    "ended_at": ("ended_from", "ended_before"),
}
FIELDS: Mapping[str, FieldKind] = {
    **{
        name: enum_names({each.name: int(each) for each in values})
        for name, values in _ENUMS.items()
    },
    **dict.fromkeys(_RANGES, INSTANT),
    "job": PREFIX_TEXT,
    "queue": TEXT,
    "kind": PREFIX_TEXT,
    "worker": TEXT,
    "last_failure.code": TEXT,
    "unique_key": TEXT,
    LABELS_FIELD: LABELS,
}


def read_filter(text: str, *, job: str | None) -> RunQuery:
    """The query of a filter text over all jobs, or over one given by name or id.

    Raises FilterNotSupported.
    """
    query = RunQuery(job=job)
    for condition in parse(text, FIELDS):
        query = _narrowed(query, condition)
    return query


def _narrowed(query: RunQuery, condition: Condition) -> RunQuery:
    name = condition.field
    if name in _RANGES:
        return _bounded(query, condition)
    if name == "state":
        asked = frozenset(RunState(int(value)) for value in condition.values)
        return replace(
            query,
            states=query.states - asked if condition.op is Op.NE else query.states & asked,
        )
    if name == "job":
        return _of_job(query, condition)
    values: list[str] = [str(value) for value in condition.values]
    if name in _ENUMS:
        of = _ENUMS[name]
        values = [of(int(value)).name.lower() for value in condition.values]
    elif name in ("queue", "worker"):
        # Full resource names are as good as their last part.
        values = [value.rpartition("/")[2] for value in values]
    return _tested(query, condition, name, values)


def _of_job(query: RunQuery, condition: Condition) -> RunQuery:
    values = [str(value).rpartition("/")[2] for value in condition.values]
    by_id = [value for value in values if is_uuid(value)]
    if by_id and (len(by_id) < len(values) or condition.prefixes):
        raise FilterNotSupported(
            "filter: job takes names or ids, not both in one condition",
            field="filter",
            filterField="job",
        )
    is_one = condition.op is Op.EQ and len(values) == 1 and not condition.prefixes
    if is_one and query.job is None:
        return replace(query, job=values[0])
    return _tested(query, condition, "job_id" if by_id else "job", values)


def _tested(query: RunQuery, condition: Condition, name: str, values: list[str]) -> RunQuery:
    wanted: dict[str, Any] = {
        "field": name,
        "key": condition.key,
        "negated": condition.op is Op.NE,
        "has_key": condition.op is Op.HAS_KEY,
        "values": values,
        "prefixes": list(condition.prefixes),
    }
    return replace(query, conditions=(*query.conditions, wanted))


def _bounded(query: RunQuery, condition: Condition) -> RunQuery:
    at = condition.values[0]
    assert isinstance(at, int), "the values of instants are numbers"
    low: Instant | None = None
    high: Instant | None = None
    match condition.op:
        case Op.LT:
            high = at
        case Op.LE:
            high = at + 1
        case Op.GT:
            low = at + 1
        case Op.GE:
            low = at
        case Op.EQ if len(condition.values) == 1:
            low, high = at, at + 1
        case _:
            raise FilterNotSupported(
                f"filter: {condition.field} takes one instant with = < <= > >=",
                field="filter",
                filterField=condition.field,
            )
    from_name, before_name = _RANGES[condition.field]
    known_low, known_high = getattr(query, from_name), getattr(query, before_name)
    bounds: dict[str, Any] = {}
    if low is not None:
        bounds[from_name] = low if known_low is None else max(low, known_low)
    if high is not None:
        bounds[before_name] = high if known_high is None else min(high, known_high)
    return replace(query, **bounds)
