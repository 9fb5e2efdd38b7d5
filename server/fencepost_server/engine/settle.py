"""Decides the due fires of jobs that need thought, under their row locks, by the policies.

The firing loop comes here with what its one statement reports; creations, edits, resumes
and deletions come here so that what was due before them is settled by the old rule, in
their own transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fencepost_server.clock import Instant
from fencepost_server.domain.job import JobSpec
from fencepost_server.domain.run import Lane, RunKey
from fencepost_server.domain.schedule import OverlapPolicy, SkipReason
from fencepost_server.engine.cancel import cancel_overlapped
from fencepost_server.policy.misfire import Judgement, SkipStretch, judge
from fencepost_server.policy.overlap import LiveRuns, place
from fencepost_server.policy.schedule import bounded_rule
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.statements import load

_SQL = load("settle")
# Rounds of one call: what a round cannot finish (many regular fires) is left due.
_ROUNDS_MAX = 20


@dataclass(slots=True, kw_only=True)
class Settled:
    """What a call made and changed: runs, their lanes, and the jobs that were locked."""

    made: list[RunKey] = field(default_factory=list)
    lanes: set[Lane] = field(default_factory=set)
    locked: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class _Writes:
    """Rows of one round, column by column."""

    fires: list[tuple[str, Instant, str, str, bool]] = field(default_factory=list)
    advances: list[tuple[str, Instant, Instant | None, int]] = field(default_factory=list)
    skips: list[tuple[str, SkipStretch, int, Instant | None]] = field(default_factory=list)
    cancels: list[tuple[str, Instant]] = field(default_factory=list)


async def settle(
    connection: Connection,
    *,
    job_ids: Sequence[str],
    now: Instant,
    resuming: bool = False,
    deleting: bool = False,
    wait: bool = True,
) -> Settled:
    """Locks these jobs and decides every fire up to `now`; runs inside the caller's transaction.

    Paused jobs are left alone, except when `resuming` (the misfire policy picks, the rest
    is SKIPPED as PAUSED) or `deleting` (everything pending is SKIPPED as PAUSED). `wait`
    False leaves out jobs that another transaction holds.
    """
    settled = Settled()
    pending = sorted(set(job_ids))
    for _ in range(_ROUNDS_MAX):
        if not pending:
            break
        statement = _SQL["lock_schedules" if wait else "lock_free_schedules"]
        rows = await connection.fetch(statement, job_ids=pending)
        settled.locked.update(str(row["job_id"]) for row in rows)
        due = [
            row
            for row in rows
            if row["next_run_at"] is not None
            and row["next_run_at"] <= now
            and (resuming or deleting or not row["paused"])
        ]
        live = await _live_runs(connection, due, now)
        writes = _Writes()
        pending = []
        for row in due:
            job_id = str(row["job_id"])
            judgement = _judge(row, now, resuming=resuming, deleting=deleting)
            _plan(writes, row, judgement, live.get(job_id, LiveRuns()), resuming=resuming)
            if judgement.next_run_at is not None and judgement.next_run_at <= now:
                pending.append(job_id)
        await _write(connection, writes, settled, now)
    return settled


def _judge(row: Row, now: Instant, *, resuming: bool, deleting: bool) -> Judgement:
    spec = JobSpec.from_json(row["spec"])
    assert spec.schedule is not None, "a job with a next fire has a schedule"
    rule = bounded_rule(
        spec.schedule, anchor=row["next_run_at"], seed=f"{row['tenant_name']}/{row['name']}"
    )
    if deleting and row["paused"]:
        last = rule.prev_before(now + 1) or row["next_run_at"]
        stretch = SkipStretch(
            first=row["next_run_at"],
            last=max(last, row["next_run_at"]),
            reason=SkipReason.PAUSED,
        )
        return Judgement(fires=(), skips=(stretch,), next_run_at=rule.next_after(now))
    left = None if row["max_fires"] is None else row["max_fires"] - row["fire_count"]
    return judge(
        rule,
        spec.schedule.misfire,
        next_run_at=row["next_run_at"],
        now=now,
        fires_left=left,
        reason=SkipReason.PAUSED if resuming else SkipReason.MISFIRE,
    )


def _plan(
    writes: _Writes, row: Row, judgement: Judgement, live: LiveRuns, *, resuming: bool
) -> None:
    """Turn one job's judgement into rows."""
    spec = JobSpec.from_json(row["spec"])
    assert spec.schedule is not None
    policy = OverlapPolicy[row["overlap"].upper()]
    placement = place(
        judgement.fires, live, policy, catch_up_max=spec.schedule.misfire.max_catch_up
    )
    job_id = str(row["job_id"])
    serial = policy in (
        OverlapPolicy.QUEUE_ONE,
        OverlapPolicy.QUEUE_ALL,
        OverlapPolicy.CANCEL_PREVIOUS,
    )
    waits = serial or bool(placement.blocked)
    for state, fires in (("queued", placement.queued), ("blocked", placement.blocked)):
        for fire in fires:
            origin = "catch_up" if fire.caught_up else "schedule"
            writes.fires.append((job_id, fire.at, state, origin, waits))
    for stretch in (*judgement.skips, *_overlapped(judgement, set(placement.skipped))):
        # Only what begins with the first fire judged here goes on where the last one ended.
        follows = row["last_scheduled_at"] if stretch.first == row["next_run_at"] else None
        writes.skips.append((job_id, stretch, row["version"], follows))
    if placement.cancel_previous:
        writes.cancels.append((job_id, judgement.fires[-1].at - 1))
    decided = [fire.at for fire in judgement.fires] + [skip.last for skip in judgement.skips]
    made = len(placement.queued) + len(placement.blocked)
    next_run_at = judgement.next_run_at
    if row["max_fires"] is not None and row["fire_count"] + made >= row["max_fires"]:
        next_run_at = None
    writes.advances.append((job_id, max(decided), next_run_at, made))


def _overlapped(judgement: Judgement, skipped: set[Instant]) -> list[SkipStretch]:
    """The fires that overlap skipped, neighbours as one stretch."""
    stretches: list[SkipStretch] = []
    goes_on = False
    for fire in judgement.fires:
        if fire.at not in skipped:
            goes_on = False
            continue
        first = stretches.pop().first if goes_on else fire.at
        stretches.append(SkipStretch(first=first, last=fire.at, reason=SkipReason.OVERLAP))
        goes_on = True
    return stretches


async def _live_runs(
    connection: Connection, due: Sequence[Row], now: Instant
) -> dict[str, LiveRuns]:
    """Due live runs per job, in a statement after the locks."""
    if not due:
        return {}
    rows = await connection.fetch(
        _SQL["count_live_runs"], job_ids=[row["job_id"] for row in due], now=now
    )
    return {
        str(row["job_id"]): LiveRuns(
            unblocked=row["unblocked"], regular=row["regular"], waiting=row["waiting"]
        )
        for row in rows
    }


async def _write(connection: Connection, writes: _Writes, settled: Settled, now: Instant) -> None:
    if not writes.advances:
        return
    jobs, last, following, fires = _columns(writes.advances, 4)
    await connection.execute(
        _SQL["advance_schedules"],
        job_ids=jobs,
        last_scheduled_ats=last,
        next_run_ats=following,
        fires=fires,
    )
    if writes.cancels:
        await cancel_overlapped(connection, until=writes.cancels, now=now)
    if writes.fires:
        jobs, at, states, origins, serials = _columns(writes.fires, 5)
        rows = await connection.fetch(
            _SQL["insert_fires"],
            job_ids=jobs,
            scheduled_ats=at,
            states=states,
            origins=origins,
            serials=serials,
            now=now,
        )
        for row in rows:
            settled.made.append(RunKey(str(row["job_id"]), row["scheduled_at"]))
            settled.lanes.add(Lane(row["queue_id"], row["kind_id"], row["priority"]))
    await _write_skips(connection, writes, now)


async def _write_skips(connection: Connection, writes: _Writes, now: Instant) -> None:
    """Stretches that follow the job's last one are added to it, so that a long overlap is a row."""
    if not writes.skips:
        return
    single = [s for s in writes.skips if s[1].stand_in is None and s[3] is not None]
    extended: set[str] = set()
    # Only the first stretch of a job can follow what was decided before.
    first_of_job: dict[str, tuple[str, SkipStretch, int, Instant | None]] = {}
    for skip in single:
        first_of_job.setdefault(skip[0], skip)
    if first_of_job:
        candidates = list(first_of_job.values())
        rows = await connection.fetch(
            _SQL["extend_skips"],
            job_ids=[job for job, _, _, _ in candidates],
            reasons=[stretch.reason.name.lower() for _, stretch, _, _ in candidates],
            follow_ats=[follow for _, _, _, follow in candidates],
            last_ats=[stretch.last for _, stretch, _, _ in candidates],
            versions=[version for _, _, version, _ in candidates],
            now=now,
        )
        extended = {str(row["job_id"]) for row in rows}
    rest = [s for s in writes.skips if not (s[0] in extended and first_of_job.get(s[0]) is s)]
    if rest:
        await connection.execute(
            _SQL["insert_skips"],
            job_ids=[job for job, _, _, _ in rest],
            first_ats=[stretch.first for _, stretch, _, _ in rest],
            last_ats=[stretch.last for _, stretch, _, _ in rest],
            reasons=[stretch.reason.name.lower() for _, stretch, _, _ in rest],
            stand_in_ats=[stretch.stand_in for _, stretch, _, _ in rest],
            versions=[version for _, _, version, _ in rest],
            now=now,
        )


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [[row[i] for row in rows] for i in range(width)]
