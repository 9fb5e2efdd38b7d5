"""Runs of every kind in every place a run can be in, as rows and as what tests expect of them."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import asyncpg
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND, Instant, to_datetime

LIVE = ("queued", "blocked", "running", "retrying")
ENDED = ("succeeded", "cancelled", "skipped")
WORKERS = ("0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42", "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e43")
CODES = ("TIMEOUT", "BAD_ADDRESS")
# Days before now that the population covers.
DAYS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job with the labels of each of its versions."""

    job_id: str
    tenant: str
    name: str
    queue: str
    kind: str
    versions: tuple[dict[str, str], ...] = ({},)
    is_deleted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One run as it is stored; `labels` None: those of the job's version."""

    job: Job
    scheduled_at: Instant
    place: str
    state: str
    origin: str
    version: int
    created_at: Instant
    ended_at: Instant | None = None
    worker: str | None = None
    labels: dict[str, str] | None = None
    failure_code: str | None = None
    skip_reason: str | None = None
    dead_reason: str | None = None
    cancel_cause: str | None = None
    unique_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Instant, str]:
        """As lists are ordered."""
        return self.scheduled_at, self.job.job_id

    @property
    def all_labels(self) -> dict[str, str]:
        """What applies."""
        return self.job.versions[self.version - 1] if self.labels is None else self.labels


def _id(number: int) -> str:
    return f"0197a4c2-7d1e-7b1a-9c55-{number:012x}"


JOBS = (
    Job(job_id=_id(1), tenant="default", name="mail", queue="default", kind="mail.send",
        versions=({"team": "web"}, {"team": "db", "tier": "1"})),
    Job(job_id=_id(2), tenant="default", name="mail-2", queue="bulk", kind="mail.send"),
    Job(job_id=_id(3), tenant="default", name="sms", queue="bulk", kind="sms.send",
        versions=({}, {"team": "web"})),
    Job(job_id=_id(4), tenant="default", name="mail", queue="default", kind="mail.open",
        versions=({"team": "web"},), is_deleted=True),
    Job(job_id=_id(5), tenant="default", name="rare", queue="rare", kind="rare.kind"),
    Job(job_id=_id(6), tenant="other", name="mail", queue="default", kind="mail.send",
        versions=({"team": "web"},)),
)  # fmt: skip


def make_population(now: Instant, *, count: int, seed: int = 7) -> list[Stored]:
    """`count` runs around `now`, many of which share their instants with others."""
    rng = random.Random(seed)
    runs: dict[tuple[Instant, str], Stored] = {}
    while len(runs) < count:
        job = rng.choices(JOBS, (30, 20, 20, 10, 1, 10))[0]
        run = _run(rng, job, now)
        runs[run.key] = run
    return list(runs.values())


def _run(rng: random.Random, job: Job, now: Instant) -> Stored:
    place = rng.choices(("queue", "dead", "history", "stray"), (20, 15, 60, 5))[0]
    minute = now // MINUTE * MINUTE
    at = minute - rng.randrange(DAYS * 24) * HOUR - rng.randrange(3) * MINUTE
    if place == "queue" and rng.random() < 0.3:
        at = minute + rng.randrange(1, 400) * DAY
    elif place in ("dead", "stray") and rng.random() < 0.3:
        at = minute - rng.randrange(40, 400) * DAY
    origin = rng.choices(("schedule", "catch_up", "backfill", "enqueue"), (60, 10, 5, 25))[0]
    if origin == "enqueue":
        at += 1
    run = Stored(
        job=job,
        scheduled_at=at,
        place=place,
        state={"queue": rng.choice(LIVE), "dead": "dead"}.get(place) or rng.choice(ENDED),
        origin=origin,
        version=rng.randint(1, len(job.versions)),
        created_at=at - rng.choice((0, 0, 2 * HOUR, 3 * DAY)),
        worker=rng.choice((*WORKERS, None)),
        failure_code=rng.choice((*CODES, None, None, None)),
        unique_key=f"order-{rng.randrange(20)}" if origin == "enqueue" else None,
        labels=rng.choice((None, None, {"team": "web", "customer": "c1"}, {"customer": "c2"}, {})),
    )
    if place != "queue":
        run = replace(run, ended_at=at + rng.choice((SECOND, HOUR, 2 * DAY)))
    if run.state == "skipped":
        run = replace(run, skip_reason=rng.choice(("expired", "misfire")), worker=None)
    if run.state == "dead":
        run = replace(run, dead_reason=rng.choice(("max_failures", "not_retryable")))
    if run.state == "cancelled" or rng.random() < 0.05:
        run = replace(run, cancel_cause=rng.choice(("requested", "overlap")))
    return run


_TABLES = {
    "queue": "run_queue",
    "dead": "dead_letters",
    "history": "job_runs",
    "stray": "job_runs_stray",
}


async def store(raw: "asyncpg.Connection[asyncpg.Record]", runs: Sequence[Stored]) -> None:
    """Jobs, and the rows of these runs; the day tables of history exist."""
    await raw.execute(
        """
        INSERT INTO fencepost.tenants (name, created_at, updated_at)
        VALUES ('other', now(), now()) ON CONFLICT DO NOTHING;
        INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at)
        SELECT tenant_id, n, now(), now()
        FROM fencepost.tenants, unnest('{default,bulk,rare}'::text[]) AS n ON CONFLICT DO NOTHING;
        INSERT INTO fencepost.kinds (name)
        SELECT unnest('{mail.send,mail.open,sms.send,rare.kind}'::text[]) ON CONFLICT DO NOTHING;
        """
    )
    for job in JOBS:
        await raw.execute(
            "INSERT INTO fencepost.jobs "
            "(job_id, tenant_id, name, version, created_at, updated_at, deleted_at) "
            "SELECT $1, tenant_id, $2, $3, now(), now(), CASE WHEN $5 THEN now() END "
            "FROM fencepost.tenants WHERE name = $4",
            job.job_id,
            job.name,
            len(job.versions),
            job.tenant,
            job.is_deleted,
        )
        for version, labels in enumerate(job.versions, start=1):
            spec: dict[str, Any] = {"target": {"kind": job.kind, "queue_name": job.queue}}
            if labels:
                spec["labels"] = labels
            await raw.execute(
                "INSERT INTO fencepost.job_versions (job_id, version, spec, created_at) "
                "VALUES ($1, $2, $3::text::jsonb, now())",
                job.job_id,
                version,
                json.dumps(spec),
            )
    for run in runs:
        await store_run(raw, run)


async def store_run(raw: "asyncpg.Connection[asyncpg.Record]", run: Stored) -> None:
    """The row of one run, in its place."""
    at = to_datetime(run.scheduled_at)
    row: dict[str, Any] = {
        "job_id": run.job.job_id,
        "scheduled_at": at,
        "available_at": at,
        "created_at": to_datetime(run.created_at),
        "version": run.version,
        "attempt": 0 if run.state in ("skipped", "queued", "blocked") else 1,
        "failure_count": 0,
        "lost_lease_count": 0,
        "snooze_count": 0,
        "replay_count": 0,
        "state": run.state,
        "origin": run.origin,
        "priority": 0,
        "worker_id": run.worker,
        "labels": None if run.labels is None else json.dumps(run.labels),
        "failure_code": run.failure_code,
        "cancel_cause": run.cancel_cause,
        "unique_key": run.unique_key,
    }
    if run.place == "queue":
        is_open = run.state == "running"
        row |= {"attempt_open": is_open, "lease_until": at if is_open else None, "lease_s": 30}
        row |= {"cancel_grace_s": 30, "attempt_timeout_s": 3600}
    else:
        assert run.ended_at is not None
        row |= {"ended_at": to_datetime(run.ended_at)}
        row |= {"skip_reason": run.skip_reason, "dead_reason": run.dead_reason}
    columns = ", ".join(row)
    places = ", ".join(f"${number}" for number in range(1, len(row) + 1))
    await raw.execute(
        f"INSERT INTO fencepost.{_TABLES[run.place]} (tenant_id, queue_id, kind_id, {columns}) "  # noqa: S608
        f"SELECT t.tenant_id, q.queue_id, k.kind_id, {places} "
        "FROM fencepost.tenants AS t JOIN fencepost.queues AS q USING (tenant_id), "
        f"fencepost.kinds AS k WHERE t.name = ${len(row) + 1} AND q.name = ${len(row) + 2} "
        f"AND k.name = ${len(row) + 3}",
        *row.values(),
        run.job.tenant,
        run.job.queue,
        run.job.kind,
    )


async def move(raw: "asyncpg.Connection[asyncpg.Record]", run: Stored, to: Stored) -> None:
    """Takes a run out of one place and puts it into another, in one transaction."""
    assert run.key == to.key
    async with raw.transaction():
        await raw.execute(
            f"DELETE FROM fencepost.{_TABLES[run.place]} "  # noqa: S608
            "WHERE job_id = $1 AND scheduled_at = $2",
            run.job.job_id,
            to_datetime(run.scheduled_at),
        )
        await store_run(raw, to)
