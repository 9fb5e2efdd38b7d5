"""The conditions of a list of runs as parameters of its statements: names turned into ids, each
field into the values it must, and must not, have.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fencepost_server.domain.names import is_uuid
from fencepost_server.domain.run import RunOrigin, RunState
from fencepost_server.errors import FilterNotSupported
from fencepost_server.store.database import Connection
from fencepost_server.store.runs import ALL_STATES, RunQuery
from fencepost_server.store.statements import load

_SQL = load("run_lists")

# Jobs that a filter by name, prefix or label may come down to.
JOBS_MAX = 10_000
# Parameter names of what a field must be, and must not be, by the field's name in a filter.
_TEXTS = {
    "last_failure.code": "failure_codes",
    "unique_key": "unique_keys",
    "cancel_cause": "cancel_causes",
    "skip_reason": "skip_reasons",
    "dead_reason": "dead_reasons",
}
_ORIGINS = frozenset(origin.name.lower() for origin in RunOrigin)


@dataclass(slots=True)
class Terms:
    """Per parameter, the values that all conditions together leave: None is every value."""

    wanted: dict[str, frozenset[Any]] = field(default_factory=dict)
    unwanted: dict[str, frozenset[Any]] = field(default_factory=dict)
    labels: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, name: str, values: Iterable[Any], *, negated: bool) -> None:
        """One more condition."""
        found = frozenset(values)
        if negated:
            self.unwanted[name] = self.unwanted.get(name, frozenset()) | found
        else:
            self.wanted[name] = self.wanted[name] & found if name in self.wanted else found

    @property
    def states(self) -> frozenset[RunState]:
        """The states that runs with these reasons can have."""
        if "skip_reasons" in self.wanted:
            return frozenset((RunState.SKIPPED,))
        if "dead_reasons" in self.wanted:
            return frozenset((RunState.DEAD,))
        return ALL_STATES

    @property
    def is_empty(self) -> bool:
        """Whether no run can match."""
        return any(not values for values in self.wanted.values())


async def resolve(connection: Connection, query: RunQuery, tenant_id: int) -> Terms:
    """The conditions with names turned into ids."""
    terms = Terms()
    for condition in query.conditions:
        name, negated = condition["field"], condition["negated"]
        values, prefixes = condition["values"], condition["prefixes"]
        if name == "labels":
            terms.labels.append(condition)
        elif name == "kind":
            rows = await connection.fetch(_SQL["kinds_named"], names=values, prefixes=prefixes)
            terms.add("kind_ids", (row["kind_id"] for row in rows), negated=negated)
        elif name == "queue":
            rows = await connection.fetch(_SQL["queues_named"], tenant_id=tenant_id, names=values)
            terms.add("queue_ids", (row["queue_id"] for row in rows), negated=negated)
        elif name == "job":
            terms.add("job_ids", await _jobs(connection, condition, tenant_id), negated=negated)
        elif name == "job_id":
            terms.add("job_ids", (value.lower() for value in values), negated=negated)
        elif name == "worker":
            known = (value.lower() for value in values if is_uuid(value))
            terms.add("workers", known, negated=negated)
        elif name == "origin":
            terms.add("origins", _ORIGINS - set(values) if negated else values, negated=False)
        else:
            terms.add(_TEXTS[name], values, negated=negated)
    return terms


async def _jobs(
    connection: Connection, condition: Mapping[str, Any], tenant_id: int
) -> Sequence[str]:
    rows = await connection.fetch(
        _SQL["jobs_named"],
        tenant_id=tenant_id,
        names=condition["values"],
        prefixes=condition["prefixes"],
        jobs_max=JOBS_MAX + 1,
    )
    if len(rows) > JOBS_MAX:
        raise FilterNotSupported(
            f"filter: job names more than {JOBS_MAX:,} jobs; narrow it, or filter by kind, "
            "queue or label",
            field="filter",
            filterField="job",
        )
    return [str(row["job_id"]) for row in rows]


async def parameters(
    connection: Connection,
    query: RunQuery,
    terms: Terms,
    *,
    tenant_id: int,
    job_id: str | None,
) -> dict[str, Any]:
    """What all statements of a page take; a condition that is not asked for is None."""
    values: dict[str, Any] = {
        # A job belongs to its tenant; saying both would only mislead the planner.
        "tenant_id": tenant_id if job_id is None else None,
        "job_id": job_id,
        "origins": _sorted(terms.wanted.get("origins")),
        "created_from": query.created_from,
        "created_before": query.created_before,
        "label_tests": terms.labels or None,
    }
    for name in ("job_ids", "kind_ids", "queue_ids", "workers", *_TEXTS.values()):
        values[name] = _sorted(terms.wanted.get(name))
        values[f"not_{name}"] = _sorted(terms.unwanted.get(name)) or None
    return values | await _label_values(connection, terms, tenant_id=tenant_id, job_id=job_id)


async def _label_values(
    connection: Connection, terms: Terms, *, tenant_id: int, job_id: str | None
) -> dict[str, Any]:
    """The first wanted label in a form that indexes serve: in a run's own labels, or in those
    of a version of its job. Jobs without number are not told apart by index."""
    nothing = {"own_labels": None, "own_key": None, "labelled_job_ids": None}
    wanted = [test for test in terms.labels if not test["negated"]]
    if not wanted:
        return nothing
    first = min(wanted, key=lambda test: test["has_key"])
    own: dict[str, Any] = {
        "own_labels": None
        if first["has_key"]
        else [{first["key"]: value} for value in first["values"]],
        "own_key": first["key"] if first["has_key"] else None,
    }
    rows = await connection.fetch(
        _SQL["versions_labelled"],
        tenant_id=tenant_id,
        job_id=job_id,
        jobs_max=JOBS_MAX + 1,
        **own,
    )
    if len(rows) > JOBS_MAX:
        return nothing
    return own | {"labelled_job_ids": [str(row["job_id"]) for row in rows]}


def _sorted(values: frozenset[Any] | None) -> list[Any] | None:
    return None if values is None else sorted(values)
