"""Carries out changes to all runs that match a filter, and counts what became of replays.

A step finds the next matches, locks those that still are, and changes them with the functions
of the single calls. What lies behind the stored position was looked at and never is again, so
a replay that dies again is not replayed again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fencepost_server.clock import Clock, Instant
from fencepost_server.domain.operation import OperationAction
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine.cancel import cancel_locked
from fencepost_server.engine.dead_letters import discard_runs
from fencepost_server.engine.operation_steps import PROBLEMS_MAX, Hints, OperationSteps
from fencepost_server.engine.replay import ReplayOptions, lock_dead_letters, replay_locked
from fencepost_server.engine.specs import SpecCache
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import FencepostError
from fencepost_server.policy.backfill import made_per_step, next_step_at
from fencepost_server.policy.bulk import COUNTED_MAX, is_failing
from fencepost_server.store import matches
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.matches import Matches, MatchScope
from fencepost_server.store.operations import StepProblem, problems_of
from fencepost_server.store.runs import RunQuery
from fencepost_server.store.statements import load

_SQL = load("operations")
# Rows that one step looks at for its matches: more where it may change more.
_SCAN_MIN, _SCAN_MAX, _SCAN_PER_MATCH = 500, 5_000, 10
# Replays whose end one look counts.
_COUNTED_AT_ONCE = 5_000


@dataclass(slots=True, kw_only=True)
class _Changes:
    """What a step did; `unchanged` matched and were something else when they were locked."""

    changed: int = 0
    unchanged: int = 0
    refused: Mapping[RunKey, FencepostError] = field(default_factory=dict)
    hints: Hints = field(default_factory=Hints)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progress:
    """Where a step left its operation; `cause`: why it stops early."""

    position: RunKey | None = None
    state: str = "running"
    cause: str | None = None
    # Nothing is left behind the position.
    is_walked: bool = False


class BulkSteps(OperationSteps):
    """Run `run` until it is cancelled."""

    def __init__(self, *, database: Database, clock: Clock, wake: Wake, specs: SpecCache) -> None:
        super().__init__(
            database=database, clock=clock, wake=wake, lease=_SQL["lease_bulk_operation"]
        )
        self._specs = specs

    async def step(self) -> bool:
        """Takes one step of one operation and looks after the replays of another; False if
        neither was due."""
        stepped = await super().step()
        return await self.follow() or stepped

    async def follow(self) -> bool:
        """Counts replays of one operation that have ended; False if none was due for it."""
        now = self._clock.now()
        async with self._database.requests.transaction() as connection:
            row = await connection.fetch_one(_SQL["lease_followed_operation"], now=now)
            if row is None:
                return False
            await _count_ended(connection, row["operation_id"], now=now)
        return True

    async def _take(self, connection: Connection, row: Row, *, now: Instant) -> Hints:
        action = OperationAction[row["action"].upper()]
        if action is OperationAction.REPLAY:
            cause = await _replay_stop(connection, row, now=now)
            if cause is not None:
                stopped = _Progress(state="stopped", cause=cause)
                await _store(connection, row, _Changes(), stopped, now=now)
                return Hints()
        room = made_per_step(row["rate"])
        if row["max_runs"]:
            room = min(room, row["max_runs"] - row["changed"])
        query = matches.query_from_json(row["query"])
        found = await _find(connection, row, query, room)
        changes = await self._change(connection, row, action, query, found.keys, now=now)
        progress = _progress(row, found, room, changes.changed)
        await _store(connection, row, changes, progress, now=now)
        return changes.hints

    async def _change(
        self,
        connection: Connection,
        row: Row,
        action: OperationAction,
        query: RunQuery,
        keys: Sequence[RunKey],
        *,
        now: Instant,
    ) -> _Changes:
        if not keys:
            return _Changes()
        keys = sorted(keys)
        match action:
            case OperationAction.CANCEL:
                return await _cancel(connection, query, keys, reason=row["reason"], now=now)
            case OperationAction.DISCARD:
                done = await discard_runs(
                    connection, keys, reason=row["reason"], died_until=row["created_at"], now=now
                )
                return _Changes(changed=len(done), unchanged=len(keys) - len(done))
            case OperationAction.REPLAY:
                return await self._replay(connection, row, keys, now=now)
            case OperationAction.BACKFILL:
                raise AssertionError("a backfill is leased by its own steps")

    async def _replay(
        self, connection: Connection, row: Row, keys: Sequence[RunKey], *, now: Instant
    ) -> _Changes:
        locked = await lock_dead_letters(connection, keys)
        # One that was replayed and died again since it was found is another death.
        kept = [
            each
            for each in locked
            if each["discarded_at"] is None and each["ended_at"] <= row["created_at"]
        ]
        options = ReplayOptions(use_newest_version=row["use_newest_version"])
        replayed = await replay_locked(connection, kept, self._specs, options, now=now)
        if replayed.counts:
            await connection.execute(
                _SQL["remember_replays"],
                operation_id=row["operation_id"],
                job_ids=[key.job_id for key in replayed.counts],
                scheduled_ats=[key.scheduled_at for key in replayed.counts],
                replay_counts=list(replayed.counts.values()),
            )
        return _Changes(
            changed=len(replayed.counts),
            unchanged=len(keys) - len(kept),
            refused=replayed.refused,
            hints=Hints(lanes=replayed.lanes),
        )


async def _replay_stop(connection: Connection, row: Row, *, now: Instant) -> str | None:
    """Why a replay must not go on; None: it may."""
    if row["job_is_deleted"]:
        return "refused"
    if row["stop_when_failing"] > 0 and row["follow_at"] is not None and row["follow_at"] <= now:
        counted = await _count_ended(connection, row["operation_id"], now=now)
    else:
        counted = row
    failing = is_failing(
        ended=counted["ended_runs"],
        dead=counted["dead_runs"],
        threshold=row["stop_when_failing"],
    )
    return "failing" if failing else None


async def _count_ended(connection: Connection, operation_id: object, *, now: Instant) -> Row:
    row = await connection.fetch_one(
        _SQL["count_ended_replays"], operation_id=operation_id, runs_max=_COUNTED_AT_ONCE, now=now
    )
    assert row is not None, "the operation is locked"
    return row


async def _find(connection: Connection, row: Row, query: RunQuery, room: int) -> Matches:
    after = None
    if row["position_id"] is not None:
        after = RunKey(str(row["position_id"]), row["position_at"])
    return await matches.find(
        connection,
        query,
        MatchScope(
            tenant_id=row["tenant_id"],
            job_id=None if row["job_id"] is None else str(row["job_id"]),
            matched_at=row["created_at"],
            after=after,
        ),
        matches_max=room,
        keys_max=room,
        scan_max=max(_SCAN_MIN, min(_SCAN_MAX, _SCAN_PER_MATCH * room)),
    )


def _progress(row: Row, found: Matches, room: int, changed: int) -> _Progress:
    if row["max_runs"] and row["changed"] + changed >= row["max_runs"]:
        return _Progress(position=found.last, state="done")
    if found.count == room:
        return _Progress(position=found.last)
    if found.frontier is not None:
        return _Progress(position=found.frontier)
    return _Progress(position=found.last, state="done", is_walked=True)


async def _cancel(
    connection: Connection, query: RunQuery, keys: Sequence[RunKey], *, reason: str, now: Instant
) -> _Changes:
    rows = await connection.fetch(
        _SQL["lock_runs_to_cancel"],
        job_ids=[key.job_id for key in keys],
        scheduled_ats=[key.scheduled_at for key in keys],
        states=_spelled(query.states),
    )
    effects = await cancel_locked(connection, rows, reason=reason, now=now)
    return _Changes(
        changed=len(rows),
        unchanged=len(keys) - len(rows),
        hints=Hints(serial_jobs=effects.serial_jobs, affected=effects.affected),
    )


def _spelled(states: frozenset[RunState]) -> list[str]:
    return sorted(state.name.lower() for state in states)


async def _store(
    connection: Connection, row: Row, changes: _Changes, progress: _Progress, *, now: Instant
) -> None:
    problems = [*problems_of(row["problems"]), *map(_problem, changes.refused.values())]
    following = next_step_at(
        due_at=row["next_step_at"], now=now, made=changes.changed, rate=row["rate"]
    )
    position = progress.position
    await connection.execute(
        _SQL["advance_bulk_operation"],
        operation_id=row["operation_id"],
        position_at=None if position is None else position.scheduled_at,
        position_id=None if position is None else position.job_id,
        next_step_at=following,
        now=now,
        changed=changes.changed,
        unchanged=changes.unchanged,
        failed=len(changes.refused),
        problems=[asdict(each) for each in problems[:PROBLEMS_MAX]],
        state=progress.state,
        stop_cause=progress.cause,
        is_walked=progress.is_walked,
        counted_max=COUNTED_MAX,
        follows=changes.changed > 0 and row["action"] == "replay",
    )


def _problem(error: FencepostError) -> StepProblem:
    return StepProblem(
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        metadata=dict(error.metadata),
    )
