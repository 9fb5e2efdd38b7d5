"""Makes jobs, one or a thousand in one transaction; each entry succeeds or fails alone.

What can be said without locks is said first; names, request ids and first fires are
settled in the transaction, set by set.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fencepost_server.clock import Instant
from fencepost_server.domain.job import LAST_INSTANT, make_job_id, partition_of
from fencepost_server.domain.names import format_job
from fencepost_server.domain.run import Lane, RunKey
from fencepost_server.domain.schedule import CronSpec, Schedule, spec_to_json
from fencepost_server.engine.definition import Definition
from fencepost_server.engine.settle import settle
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import (
    FencepostError,
    InvalidSchedule,
    JobAlreadyExists,
)
from fencepost_server.policy.schedule import first_fire, interned_spec, validate
from fencepost_server.store import jobs as store
from fencepost_server.store import requests
from fencepost_server.store.calendars import (
    calendar_not_found,
    hold_found,
    set_job_calendars,
)
from fencepost_server.store.catalogue import Catalogue, queue_not_found
from fencepost_server.store.database import Connection, Database
from fencepost_server.store.job_settings import JobSettings, NewJob
from fencepost_server.store.jobs import JobRecord
from fencepost_server.store.requests import RequestKey, RequestScope


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEntry:
    """A job to make; no name: one is picked."""

    job_name: str
    definition: Definition
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedJob:
    """A job made, and its run if the first fire was due in the same commit."""

    job: JobRecord
    run: RunKey | None


# A job made, the stored answer of an earlier call with the same request id, or a refusal.
Outcome: TypeAlias = CreatedJob | bytes | FencepostError
Encode: TypeAlias = Callable[[CreatedJob], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose call it is: the tenant, the trace it belongs to, and when it came."""

    tenant: str
    now: Instant
    trace_context: Mapping[str, str] | None = None


class _TakenBack(Exception):
    """Ends a transaction that was only to see what would be stored."""


@dataclass(slots=True)
class _Batch:
    """Entries by position on their way to an outcome."""

    tenant: str
    tenant_id: int
    names: list[str]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    rows: dict[int, NewJob] = field(default_factory=dict)
    lanes: set[Lane] = field(default_factory=set)


class JobCreation:
    """Creates jobs for CreateJob, BatchCreateJobs and UpdateJob with allow_missing."""

    def __init__(self, *, database: Database, catalogue: Catalogue, wake: Wake) -> None:
        self._database = database
        self._catalogue = catalogue
        self._wake = wake

    async def create(
        self,
        origin: Origin,
        entries: Sequence[JobEntry],
        *,
        method: str,
        encode: Encode,
        validate_only: bool = False,
    ) -> list[Outcome]:
        """One outcome per entry, in their order. `encode` makes the answer to remember.

        Raises TenantNotFound, or StorageUnavailable with nothing made.
        """
        tenant_id = await self._catalogue.tenant_id(origin.tenant)
        names = [entry.job_name or _pick_name() for entry in entries]
        batch = _Batch(tenant=origin.tenant, tenant_id=tenant_id, names=names)
        copies, refused = requests.repeated([entry.request for entry in entries])
        batch.outcomes.update(refused)
        await self._prepare(origin, entries, batch, copies)
        scope = RequestScope(tenant_id=tenant_id, method=method)
        if not validate_only:
            await self._recall_refused(scope, entries, batch, origin.now)
        if batch.rows:
            try:
                async with self._database.requests.transaction() as connection:
                    keys = {} if validate_only else _request_keys(entries, batch)
                    await _make(connection, origin, batch, scope, keys, encode)
                    if validate_only:
                        raise _TakenBack
            except _TakenBack:
                pass
            else:
                self._announce(batch)
        for index, first in copies.items():
            batch.outcomes[index] = batch.outcomes[first]
        return [batch.outcomes[index] for index in range(len(entries))]

    async def settings(self, definition: Definition, *, tenant: str, job_name: str) -> JobSettings:
        """Interns the names of one definition. Raises TenantNotFound or QueueNotFound."""
        spec = definition.spec
        queue_id = await self._catalogue.queue_id(tenant, spec.target.queue_name)
        kinds = await self._catalogue.kind_ids([spec.target.kind])
        rule = _interned_rule(spec.schedule, f"{tenant}/{job_name}")
        schedule_id = None if rule is None else (await self._catalogue.schedule_ids([rule]))[0]
        return JobSettings.of(
            spec, queue_id=queue_id, kind_id=kinds[spec.target.kind], schedule_id=schedule_id
        )

    async def _prepare(
        self, origin: Origin, entries: Sequence[JobEntry], batch: _Batch, copies: Mapping[int, int]
    ) -> None:
        """Fills `rows` with what can be inserted, and `outcomes` with what cannot."""
        first_fires: dict[int, Instant | None] = {}
        queues = await self._catalogue.find_queue_ids(
            batch.tenant_id, {entry.definition.spec.target.queue_name for entry in entries}
        )
        for index, entry in enumerate(entries):
            if index in batch.outcomes or index in copies:
                continue
            seed = f"{batch.tenant}/{batch.names[index]}"
            queue_name = entry.definition.spec.target.queue_name
            try:
                if queue_name not in queues:
                    raise queue_not_found(batch.tenant, queue_name)
                schedule = entry.definition.spec.schedule
                first_fires[index] = first_fire_of(schedule, now=origin.now, seed=seed)
            except FencepostError as error:
                batch.outcomes[index] = error
        kinds = await self._catalogue.kind_ids(
            {entries[index].definition.spec.target.kind for index in first_fires}
        )
        rules = {
            index: rule
            for index in first_fires
            if (
                rule := _interned_rule(
                    entries[index].definition.spec.schedule,
                    f"{batch.tenant}/{batch.names[index]}",
                )
            )
            is not None
        }
        ids = await self._catalogue.schedule_ids(list(rules.values())) if rules else []
        schedule_ids = dict(zip(rules, ids, strict=True))
        for index, next_run_at in first_fires.items():
            spec = entries[index].definition.spec
            settings = JobSettings.of(
                spec,
                queue_id=queues[spec.target.queue_name],
                kind_id=kinds[spec.target.kind],
                schedule_id=schedule_ids.get(index),
            )
            batch.rows[index] = _new_job(
                entries[index], batch.tenant, batch.names[index], settings, next_run_at, origin.now
            )

    async def _recall_refused(
        self, scope: RequestScope, entries: Sequence[JobEntry], batch: _Batch, now: Instant
    ) -> None:
        """A call that was answered before gets that answer, even if it would now be refused."""
        asked = {
            request.request_id: index
            for index in batch.outcomes
            if (request := entries[index].request) is not None
        }
        if not asked:
            return
        keys = [request for index in asked.values() if (request := entries[index].request)]
        answers = await requests.recall(self._database.requests, scope, keys, now=now)
        for request_id, answer in answers.items():
            batch.outcomes[asked[request_id]] = answer

    def _announce(self, batch: _Batch) -> None:
        made = [each.job for each in batch.outcomes.values() if isinstance(each, CreatedJob)]
        scheduled = {job.partition_id for job in made if job.next_run_at is not None}
        # No lanes would mean all of them.
        if scheduled:
            self._wake.jobs(scheduled)
        if batch.lanes:
            self._wake.lanes(batch.lanes)


def first_fire_of(schedule: Schedule | None, *, now: Instant, seed: str) -> Instant | None:
    """When a new job fires first; None without a schedule.

    Raises InvalidSchedule or InvalidField for a schedule that is wrong or never fires.
    """
    if schedule is None:
        return None
    validate(schedule, now, seed=seed)
    found = first_fire(schedule, now=now, seed=seed)
    if found is None or found > LAST_INSTANT:
        raise InvalidSchedule(
            "schedule: never fires between start_at and end_at from now on; move end_at or the "
            "time rule",
            field="job.schedule",
        )
    return found


def already_exists(tenant: str, job_name: str) -> JobAlreadyExists:
    """The refusal of a name that is taken."""
    name = format_job(tenant, job_name)
    return JobAlreadyExists(
        f"{name} exists already; use another job_name, or UpdateJob",
        resource=name,
        name=name,
    )


async def _make(
    connection: Connection,
    origin: Origin,
    batch: _Batch,
    scope: RequestScope,
    keys: Mapping[int, RequestKey],
    encode: Encode,
) -> None:
    """The transaction: request ids, then jobs, then first fires that are due, then answers."""
    index_of = {key.request_id: index for index, key in keys.items()}
    before = await requests.begin(connection, scope, list(keys.values()), now=origin.now)
    for request_id, answer in before.items():
        batch.outcomes[index_of[request_id]] = answer
        del batch.rows[index_of[request_id]]
    held = await _hold_calendars(connection, batch)
    made = await store.insert(
        connection,
        list(batch.rows.values()),
        tenant_id=batch.tenant_id,
        trace_context=origin.trace_context,
        now=origin.now,
    )
    named = {row.job_id: row for row in batch.rows.values() if row.job_id in made}
    await set_job_calendars(
        connection,
        {
            job_id: [held[name] for name in row.spec.schedule.exclude_calendars]
            for job_id, row in named.items()
            if row.spec.schedule is not None and row.spec.schedule.exclude_calendars
        },
        is_new=True,
    )
    due = sorted(
        row.job_id
        for row in batch.rows.values()
        if row.job_id in made
        and not row.paused
        and row.next_run_at is not None
        and row.next_run_at <= origin.now
    )
    settled = await settle(connection, job_ids=due, now=origin.now)
    batch.lanes.update(settled.lanes)
    newest_run = {run.job_id: run for run in sorted(settled.made)}
    records = await store.read(connection, sorted(made))
    for index, row in batch.rows.items():
        if row.job_id in made:
            batch.outcomes[index] = CreatedJob(
                job=records[row.job_id], run=newest_run.get(row.job_id)
            )
        else:
            batch.outcomes[index] = already_exists(batch.tenant, row.name)
    answers: dict[str, bytes | None] = {}
    for request_id, index in index_of.items():
        outcome = batch.outcomes[index]
        if request_id not in before:
            answers[request_id] = encode(outcome) if isinstance(outcome, CreatedJob) else None
    await requests.finish(connection, scope, answers)


async def _hold_calendars(connection: Connection, batch: _Batch) -> dict[str, int]:
    """The ids of all calendars that entries name; those that name others are refused."""
    wanted = {
        index: row.spec.schedule.exclude_calendars
        for index, row in batch.rows.items()
        if row.spec.schedule is not None
    }
    names = {name for each in wanted.values() for name in each}
    held = await hold_found(connection, batch.tenant_id, names)
    for index, each in wanted.items():
        missing = [name for name in each if name not in held]
        if missing:
            batch.outcomes[index] = calendar_not_found(batch.tenant, missing[0])
            del batch.rows[index]
    return held


def _request_keys(entries: Sequence[JobEntry], batch: _Batch) -> dict[int, RequestKey]:
    return {
        index: request for index in batch.rows if (request := entries[index].request) is not None
    }


def _interned_rule(schedule: Schedule | None, seed: str) -> dict[str, object] | None:
    """The rule that jobs share, as JSON; only cron rules are interned."""
    if schedule is None or not isinstance(schedule.spec, CronSpec):
        return None
    shared = interned_spec(schedule.spec, seed=seed)
    assert shared is not None, "every cron rule can be interned"
    return spec_to_json(shared)


def _new_job(
    entry: JobEntry,
    tenant: str,
    job_name: str,
    settings: JobSettings,
    next_run_at: Instant | None,
    now: Instant,
) -> NewJob:
    partition_id = partition_of(tenant=tenant, job_name=job_name)
    return NewJob(
        job_id=make_job_id(now=now, partition_id=partition_id, entropy=os.urandom(9)),
        name=job_name,
        spec=entry.definition.spec,
        payload=entry.definition.payload,
        settings=settings,
        next_run_at=next_run_at,
        paused=entry.definition.paused,
        pause_reason=entry.definition.pause_reason if entry.definition.paused else "",
        partition_id=partition_id,
    )


def _pick_name() -> str:
    return f"job-{os.urandom(8).hex()}"
