"""Decides the due fires of jobs that need thought, under their row locks, by the policies.

The firing loop comes here with what its one statement reports; creations, edits, resumes
and deletions come here so that what was due before them is settled by the old rule, in
their own transaction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fencepost_server.clock import Instant
from fencepost_server.domain.calendar import NamedCalendar
from fencepost_server.domain.job import JobSpec
from fencepost_server.domain.run import Lane, RunKey
from fencepost_server.domain.schedule import OverlapPolicy, Schedule, SkipReason
from fencepost_server.engine.cancel import cancel_overlapped
from fencepost_server.engine.governor import PARKED_MAX
from fencepost_server.engine.wake import Affected, Wake
from fencepost_server.policy.calendar import exclusions, zone_of
from fencepost_server.policy.due import Due, counts_from_ends, judge_due, pending_skipped
from fencepost_server.policy.misfire import Judgement, SkipStretch
from fencepost_server.policy.overlap import LiveRuns, place, takes_place
from fencepost_server.policy.schedule import BoundedRule, bounded_rule, unanchored
from fencepost_server.store.calendars import calendars_of
from fencepost_server.store.database import Connection, Row
from fencepost_server.store.statements import load

_SQL = load("settle")
# Rounds of one call: what a round cannot finish (many regular fires) is left due.
_ROUNDS_MAX = 20
# Under these runs of a job wait for each other.
_SERIAL = (OverlapPolicy.QUEUE_ONE, OverlapPolicy.QUEUE_ALL, OverlapPolicy.CANCEL_PREVIOUS)


@dataclass(slots=True, kw_only=True)
class Settled:
    """What a call made and changed: runs, their lanes, the jobs that were locked, those whose
    waiting runs it cancelled, and the attempts it asked to stop."""

    made: list[RunKey] = field(default_factory=list)
    lanes: set[Lane] = field(default_factory=set)
    locked: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    affected: set[Affected] = field(default_factory=set)

    def add(self, other: "Settled") -> None:
        """What another call in the same transaction did besides."""
        self.made += other.made
        self.lanes |= other.lanes
        self.locked |= other.locked
        self.ended |= other.ended
        self.affected |= other.affected

    def announce(self, wake: Wake) -> None:
        """Say it to those who wait for it, after the commit."""
        # No lanes would mean all of them.
        if self.lanes:
            wake.lanes(self.lanes)
        wake.ends(self.ended)
        wake.attempts(self.affected)


@dataclass(slots=True, kw_only=True)
class _Writes:
    """Rows of one round, column by column."""

    fires: list[tuple[str, Instant, str, str, bool, Instant | None]] = field(default_factory=list)
    advances: list[tuple[str, Instant, Instant | None, bool, int]] = field(default_factory=list)
    skips: list[tuple[str, SkipStretch, int, Instant | None]] = field(default_factory=list)
    cancels: list[tuple[str, Instant]] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)


async def settle(
    connection: Connection,
    *,
    job_ids: Sequence[str],
    now: Instant,
    resuming: bool = False,
    deleting: bool = False,
    wait: bool = True,
    parked_before: Instant = 0,
) -> Settled:
    """Locks these jobs and decides every fire up to `now`; runs inside the caller's transaction.

    Paused jobs are left alone, except when `resuming` (the misfire policy picks, the rest
    is SKIPPED as PAUSED) or `deleting` (everything pending is SKIPPED as PAUSED). `wait`
    False leaves out jobs that another transaction holds. Fires due before `parked_before`
    are parked until the governor releases them; 0: none.
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
        calendars = await calendars_of(
            connection, [str(row["job_id"]) for row in due if row["has_calendars"]]
        )
        writes = _Writes()
        pending = []
        for row in due:
            job_id = str(row["job_id"])
            decision = _decide(
                row, now, calendars.get(job_id, ()), resuming=resuming, deleting=deleting
            )
            runs = live.get(job_id, LiveRuns())
            following = _plan(writes, row, decision, runs, now)
            on_time = [fire for fire in decision.judgement.fires if fire.at >= parked_before]
            if takes_place(on_time, runs, OverlapPolicy[row["overlap"].upper()]):
                writes.freed.append(job_id)
            if following is not None and following <= now:
                pending.append(job_id)
        await _write(connection, writes, settled, now, parked_before)
    return settled


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What is judged of one job, and by which rule."""

    schedule: Schedule
    rule: BoundedRule
    judgement: Judgement


def _decide(
    row: Row, now: Instant, calendars: Sequence[NamedCalendar], *, resuming: bool, deleting: bool
) -> _Decision:
    schedule = JobSpec.from_json(row["spec"]).schedule
    assert schedule is not None, "a job with a next fire has a schedule"
    single = counts_from_ends(schedule)
    rule = bounded_rule(
        # Skipped fires of an interval after completion count from themselves.
        unanchored(schedule) if single else schedule,
        anchor=row["next_run_at"],
        seed=f"{row['tenant_name']}/{row['name']}",
    )
    excluded = exclusions(calendars, zone_of(schedule), first=row["next_run_at"], last=now)
    due = Due(
        next_run_at=row["next_run_at"],
        now=now,
        fires_left=None if row["max_fires"] is None else row["max_fires"] - row["fire_count"],
        reason=SkipReason.PAUSED if resuming or deleting else SkipReason.MISFIRE,
    )
    if deleting and row["paused"]:
        judgement = pending_skipped(rule, due, excluded)
    else:
        due = due if resuming else replace(due, reason=SkipReason.MISFIRE)
        judgement = judge_due(rule, schedule, due, excluded)
    return _Decision(schedule=schedule, rule=rule, judgement=judgement)


def _plan(
    writes: _Writes, row: Row, decision: _Decision, live: LiveRuns, now: Instant
) -> Instant | None:
    """Turn one job's judgement into rows; returns its next fire."""
    judgement, rule = decision.judgement, decision.rule
    policy = OverlapPolicy[row["overlap"].upper()]
    placement = place(
        judgement.fires, live, policy, catch_up_max=decision.schedule.misfire.max_catch_up
    )
    job_id = str(row["job_id"])
    single = counts_from_ends(decision.schedule)
    waits = single or bool(placement.blocked) or policy in _SERIAL
    for state, fires in (("queued", placement.queued), ("blocked", placement.blocked)):
        for fire in fires:
            origin = "catch_up" if fire.caught_up else "schedule"
            # What the end of its run decides is not known yet.
            following = None if single else rule.next_after(fire.at)
            writes.fires.append((job_id, fire.at, state, origin, waits, following))
    overlapped = _overlapped(judgement, set(placement.skipped))
    made = len(placement.queued) + len(placement.blocked)
    next_run_at = judgement.next_run_at
    if single and judgement.fires and not made:
        # As would be said of those that follow it by now.
        [skipped] = overlapped
        last = rule.prev_before(now + 1) or skipped.last
        overlapped = [replace(skipped, last=max(last, skipped.last))]
        next_run_at = rule.next_after(now)
    skips = (*judgement.skips, *overlapped)
    for stretch in sorted(skips, key=lambda each: each.first):
        # Only what begins with the first fire judged here goes on where the last one ended.
        follows = row["last_scheduled_at"] if stretch.first == row["next_run_at"] else None
        writes.skips.append((job_id, stretch, row["version"], follows))
    if placement.cancel_previous:
        writes.cancels.append((job_id, judgement.fires[-1].at - 1))
    decided = [fire.at for fire in judgement.fires] + [skip.last for skip in skips]
    awaits_end = single and made > 0
    if row["max_fires"] is not None and row["fire_count"] + made >= row["max_fires"]:
        next_run_at, awaits_end = None, False
    writes.advances.append((job_id, max(decided), next_run_at, awaits_end, made))
    return next_run_at


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
            unblocked=row["unblocked"],
            regular=row["regular"],
            waiting=row["waiting"],
            parked=row["parked"],
        )
        for row in rows
    }


async def _write(
    connection: Connection, writes: _Writes, settled: Settled, now: Instant, parked_before: Instant
) -> None:
    if not writes.advances:
        return
    jobs, last, following, awaiting, fires = _columns(writes.advances, 5)
    await connection.execute(
        _SQL["advance_schedules"],
        job_ids=jobs,
        last_scheduled_ats=last,
        next_run_ats=following,
        awaits_ends=awaiting,
        fires=fires,
    )
    if writes.cancels:
        effects = await cancel_overlapped(connection, until=writes.cancels, now=now)
        settled.ended |= effects.serial_jobs
        settled.affected |= effects.affected
    if writes.fires:
        jobs, at, states, origins, serials, following = _columns(writes.fires, 6)
        rows = await connection.fetch(
            _SQL["insert_fires"],
            job_ids=jobs,
            scheduled_ats=at,
            states=states,
            origins=origins,
            serials=serials,
            following_ats=following,
            now=now,
            parked_before=parked_before,
            parked_until=now + PARKED_MAX,
        )
        for row in rows:
            settled.made.append(RunKey(str(row["job_id"]), row["scheduled_at"]))
            settled.lanes.add(Lane(row["queue_id"], row["kind_id"], row["priority"]))
    if writes.freed:
        rows = await connection.fetch(_SQL["free_parked_runs"], job_ids=writes.freed, now=now)
        settled.lanes |= {Lane(row["queue_id"], row["kind_id"], row["priority"]) for row in rows}
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
