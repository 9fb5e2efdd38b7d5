"""Two thousand jobs of three tenants in twelve zones for two minutes, while one worker is
killed and another one frozen; then every fire is accounted for by an independent calculation.
"""

import asyncio
import json
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import grpc.aio
import pytest
from fencepost.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    payload_pb2,
    schedule_pb2,
)

from tests.checker import invariants
from tests.checker.expected_fires import MINUTE_RULES, CronJob, IntervalJob
from tests.checker.history import History, read_history
from tests.checker.recorder import record
from tests.checker.worker_log import handled_as_recorded, read_worker_logs
from tests.e2e.fleet import Process, Server, fleet, start_worker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TENANTS = ["north", "south", "west"]
ZONES = [
    "UTC", "Europe/Berlin", "America/New_York", "America/Los_Angeles", "America/St_Johns",
    "America/Sao_Paulo", "Africa/Cairo", "Asia/Kolkata", "Asia/Kathmandu", "Asia/Tokyo",
    "Australia/Lord_Howe", "Pacific/Chatham",
]  # fmt: skip
JOBS = 2000
SECONDS = 120
KILL_AT, FREEZE_AT, FROZEN_FOR = 20, 45, 40


async def test_every_fire_of_two_thousand_jobs_is_answered_through_a_kill_and_a_freeze(
    database_url: str, tmp_path: Path
) -> None:
    await record(database_url)
    with fleet() as processes:
        server = Server(database_url)
        processes.append(server)
        expected = await _create_jobs(server.address)
        await _abuse_workers(database_url, server, processes, tmp_path)
        stopped_at = await _pause_everything(database_url, server.address)
        await _until_all_ended(database_url)
        for process in processes[::-1]:
            if process.popen.poll() is None:
                assert process.stop() == 0, "\n".join(process.lines[-20:])
    history = await read_history(database_url)
    assert invariants.always(history) == []
    assert invariants.all_ended(history) == []
    assert handled_as_recorded(history, read_worker_logs(tmp_path)) == []
    await _check(database_url, history, expected, stopped_at)


async def _create_jobs(address: str) -> dict[str, CronJob | IntervalJob]:
    """Jobs by id, with what they must do."""
    expected: dict[str, CronJob | IntervalJob] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        jobs = job_service_pb2_grpc.JobServiceStub(channel)
        for number, tenant in enumerate(TENANTS):
            await admin.CreateTenant(admin_service_pb2.CreateTenantRequest(tenant_name=tenant))
            wanted = [_job(n) for n in range(number, JOBS, len(TENANTS))]
            requests = [
                job_service_pb2.CreateJobRequest(job_name=f"job-{place}", job=job)
                for place, (job, _) in enumerate(wanted)
            ]
            answer = await jobs.BatchCreateJobs(
                job_service_pb2.BatchCreateJobsRequest(
                    parent=f"tenants/{tenant}", requests=requests
                )
            )
            for (_, cron), outcome in zip(wanted, answer.outcomes, strict=True):
                assert outcome.HasField("response"), outcome
                made = outcome.response.job
                expected[made.job_id] = cron or IntervalJob(
                    seconds=made.schedule.interval.every.seconds,
                    first=_rounded_up(made.created_at.ToDatetime(tzinfo=UTC)),
                )
    assert len(expected) == JOBS
    return expected


def _job(number: int) -> tuple[job_pb2.Job, CronJob | None]:
    """Every third job fires every few seconds, the others by the minute of some zone."""
    schedule = schedule_pb2.Schedule(
        overlap_policy=schedule_pb2.OVERLAP_POLICY_ALLOW
        if number % 2
        else schedule_pb2.OVERLAP_POLICY_SKIP
    )
    cron = None
    if number % 3 == 0:
        schedule.interval.every.FromSeconds(3 + number % 9)
    else:
        rules = list(MINUTE_RULES)
        cron = CronJob(minute_rule=rules[number % len(rules)], zone=ZONES[number % len(ZONES)])
        schedule.cron.expressions.append(f"{cron.minute_rule} * * * *")
        schedule.cron.time_zone = cron.zone
    kind = "slow" if number % 10 == 0 else "quick"
    return job_pb2.Job(target=job_pb2.Target(kind=kind), schedule=schedule), cron


async def _abuse_workers(
    database_url: str, server: Server, processes: list[Process], logs: Path
) -> None:
    """Two minutes: one worker killed and later replaced, the other frozen in between."""
    killed, frozen = (
        start_worker(server.address, TENANTS, logs / name) for name in ("killed", "frozen")
    )
    processes += [killed, frozen]
    await _until_they_hold_runs(database_url, workers=2)
    started = time.monotonic()

    async def until(second: float) -> None:
        # The scenario's own timetable, not a wait for the product.
        await asyncio.sleep(max(0.0, started + second - time.monotonic()))

    await until(KILL_AT)
    await _until_they_hold_runs(database_url, workers=2)
    killed.send(signal.SIGKILL)
    killed.popen.wait()
    await until(FREEZE_AT)
    frozen.send(signal.SIGSTOP)
    await until(FREEZE_AT + 10)
    processes.append(start_worker(server.address, TENANTS, logs / "third"))
    await until(FREEZE_AT + FROZEN_FOR)
    frozen.send(signal.SIGCONT)
    await until(SECONDS)


async def _until_they_hold_runs(database_url: str, *, workers: int) -> None:
    connection = await asyncpg.connect(database_url)
    deadline = time.monotonic() + 60
    holders = "SELECT count(DISTINCT worker_id) FROM fencepost.run_queue WHERE state = 'running'"
    while await connection.fetchval(holders) < workers:
        assert time.monotonic() < deadline, "the workers got no runs"
        await asyncio.sleep(0.1)
    await connection.close()


async def _pause_everything(database_url: str, address: str) -> datetime:
    """No fire is decided any more when this returns; the instant up to which all were."""
    async with grpc.aio.insecure_channel(address) as channel:
        jobs = job_service_pb2_grpc.JobServiceStub(channel)
        gate = asyncio.Semaphore(16)

        async def pause(name: str) -> None:
            async with gate:
                await jobs.PauseJob(job_service_pb2.PauseJobRequest(name=name))

        connection = await asyncpg.connect(database_url)
        rows = await connection.fetch(
            "SELECT j.job_id, t.name FROM fencepost.jobs AS j "
            "JOIN fencepost.tenants AS t USING (tenant_id)"
        )
        await asyncio.gather(*(pause(f"tenants/{r['name']}/jobs/{r['job_id']}") for r in rows))
        # A paused job's last decision tells how far it came, so each is checked up to there.
        at: datetime = await connection.fetchval("SELECT fencepost.clock()")
        await connection.close()
    return at


async def _until_all_ended(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    deadline = time.monotonic() + 120
    while await connection.fetchval("SELECT EXISTS (SELECT FROM fencepost.run_queue)"):
        assert time.monotonic() < deadline, await connection.fetch(
            "SELECT state, count(*) FROM fencepost.run_queue GROUP BY state"
        )
        await asyncio.sleep(0.25)
    await connection.close()


async def _check(
    database_url: str,
    history: History,
    expected: dict[str, CronJob | IntervalJob],
    stopped_at: datetime,
) -> None:
    connection = await asyncpg.connect(database_url)
    jobs = await connection.fetch(
        "SELECT s.job_id, j.created_at, s.next_run_at "
        "FROM fencepost.job_schedules s JOIN fencepost.jobs j USING (job_id)"
    )
    runs = await connection.fetch("SELECT state, attempt, result FROM fencepost.job_runs")
    elsewhere = await connection.fetchval(
        "SELECT (SELECT count(*) FROM fencepost.dead_letters) "
        "     + (SELECT count(*) FROM fencepost.job_runs_stray)"
    )
    skips = await connection.fetch("SELECT job_id, first_at, last_at FROM fencepost.fire_skips")
    lost = await connection.fetchval(
        "SELECT count(*) FROM fencepost.run_attempts WHERE outcome = 'lease_expired'"
    )
    await connection.close()
    stretches: dict[str, list[tuple[datetime, datetime]]] = {}
    for skip in skips:
        stretches.setdefault(str(skip["job_id"]), []).append((skip["first_at"], skip["last_at"]))
    wanted: dict[str, set[datetime]] = {}
    skipped: dict[str, set[datetime]] = {}
    for job in jobs:
        job_id = str(job["job_id"])
        possible = expected[job_id].fires(job["created_at"], stopped_at)
        # A paused job is decided up to its next fire, exclusive.
        wanted[job_id] = {at for at in possible if at < job["next_run_at"]}
        skipped[job_id] = {
            at
            for first, last in stretches.get(job_id, [])
            for at in possible
            if first <= at <= last
        }
    assert invariants.everything_answered(history, wanted, skipped) == []
    assert {run["state"] for run in runs} == {"succeeded"}
    assert elsewhere == 0
    stale = [
        run
        for run in runs
        if json.loads(payload_pb2.Payload.FromString(run["result"]).json)["attempt"]
        != run["attempt"]
    ]
    assert stale == []
    again = sum(run["attempt"] > 1 for run in runs)
    print(
        f"\n{sum(map(len, wanted.values()))} fires checked: {len(runs)} runs, "
        f"{sum(map(len, skipped.values()))} skipped by overlap, "
        f"{lost} leases lost, {again} runs with a second attempt"
    )
    assert len(runs) > 8_000
    assert lost > 0, "no lease was lost: the faults did not bite"
    assert again > 0, "no run was claimed twice: the faults did not bite"


def _rounded_up(at: datetime) -> datetime:
    whole = at.replace(microsecond=0)
    return whole if whole == at else whole + timedelta(seconds=1)
