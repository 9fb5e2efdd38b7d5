"""Jobs as the table holds them, and a walk over their fires that a forecast has to equal."""

import random
from collections import Counter
from dataclasses import dataclass

from fencepost_server.clock import HOUR, MINUTE, SECOND, Instant, ceil_second, to_datetime
from fencepost_server.domain.schedule import CronSpec, IntervalSpec, OnceSpec, Spec, spec_to_json
from fencepost_server.engine.forecast import Forecast, Forecasts
from fencepost_server.policy.schedule import BoundedRule, compile_rule

from tests.integration.world import World

SPECS: tuple[Spec, ...] = (
    CronSpec(expressions=("0 0 * * *",)),
    CronSpec(expressions=("0 * * * *",), time_zone="Asia/Kolkata"),
    CronSpec(expressions=("*/5 * * * *", "3 13 * * *")),
    CronSpec(expressions=("*/20 * * * * *",)),
    CronSpec(expressions=("30 2 * * *",), time_zone="Europe/Berlin"),
    CronSpec(expressions=("0 0 29 2 *",)),
    *(IntervalSpec(every=s * SECOND) for s in (1, 7, 60, 90, 300, 3600, 5400, 86_400)),
    OnceSpec(at=0),
)


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """What the table holds of a job."""

    spec: Spec
    next_run_at: Instant
    tenant_id: int = 1
    end_at: Instant | None = None
    max_fires: int | None = None
    fire_count: int = 0
    paused: bool = False


def random_jobs(now: Instant, count: int) -> list[StoredJob]:
    drawn = random.Random(20261201)
    jobs = []
    for _ in range(count):
        spec = drawn.choice(SPECS)
        # Some are due already, some have a start bound hours ahead.
        after = now + drawn.choice((-7200, -40, 0, 0, 0, 10_000)) * SECOND
        if isinstance(spec, CronSpec):
            at = compile_rule(spec, anchor=0).next_after(after)
            assert at is not None
        else:
            at = ceil_second(after) + drawn.randrange(1, 4000) * SECOND
        jobs.append(
            StoredJob(
                spec=spec,
                next_run_at=at,
                tenant_id=drawn.choice((1, 1, 2)),
                end_at=drawn.choice((None, None, at + drawn.randrange(1, 9000) * SECOND + 1)),
                max_fires=drawn.choice((None, None, 1, 12, 10**9)),
                fire_count=0 if drawn.random() < 0.5 else 1,
                paused=drawn.random() < 0.1,
            )
        )
    # A job whose last fire is over has no next one, and is not in the table's due rows.
    return [job for job in jobs if job.max_fires is None or job.fire_count < job.max_fires]


async def store(world: World, jobs: list[StoredJob]) -> None:
    await world.raw.execute(
        "INSERT INTO fencepost.tenants (tenant_id, name, created_at, updated_at)"
        " OVERRIDING SYSTEM VALUE VALUES (2, 'other', now(), now())"
        " ON CONFLICT (tenant_id) DO NOTHING"
    )
    crons = list(dict.fromkeys(job.spec for job in jobs if isinstance(job.spec, CronSpec)))
    ids = await world.catalogue.schedule_ids([spec_to_json(spec) for spec in crons])
    rows = [
        (
            f"00000000-0000-7000-8000-{number:012x}",
            to_datetime(job.next_run_at),
            None if job.end_at is None else to_datetime(job.end_at),
            job.fire_count,
            job.max_fires,
            job.tenant_id,
            ids[crons.index(job.spec)] if isinstance(job.spec, CronSpec) else None,
            job.spec.every // SECOND if isinstance(job.spec, IntervalSpec) else None,
            job.paused,
        )
        for number, job in enumerate(jobs)
    ]
    await world.raw.executemany(
        "INSERT INTO fencepost.job_schedules (job_id, next_run_at, end_at, fire_count, max_fires,"
        " tenant_id, schedule_id, every_s, paused, queue_id, kind_id, version, partition_id)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 1, 1, 1, 0)",
        rows,
    )


def walked(jobs: list[StoredJob], start: Instant, hours: int) -> list[int]:
    """Fires of each minute, one by one."""
    minutes = Counter[int]()
    until = start + hours * HOUR
    for job in jobs:
        if job.paused:
            continue
        spec = OnceSpec(at=job.next_run_at) if isinstance(job.spec, OnceSpec) else job.spec
        rule = BoundedRule(
            rule=compile_rule(spec, anchor=job.next_run_at), start_at=None, end_at=job.end_at
        )
        left = 10**9 if job.max_fires is None else job.max_fires - job.fire_count
        at: Instant | None = job.next_run_at
        if job.end_at is not None and job.next_run_at >= job.end_at:
            at = None
        while at is not None and at < until and left:
            if at >= start:
                minutes[(at - start) // MINUTE] += 1
            at, left = rule.next_after(at), left - 1
    return [minutes[minute] for minute in range(hours * 60)]


async def compute(world: World, tenant_id: int | None = None, hours: int = 24) -> Forecast:
    return await Forecasts(database=world.database, clock=world.database.clock).get(
        tenant_id=tenant_id, hours=hours
    )
