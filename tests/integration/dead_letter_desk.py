"""What tests of dead letters share: runs that die, single decisions and changes to many."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fencepost_server.api.run_filter import read_filter
from fencepost_server.clock import SECOND, from_datetime
from fencepost_server.domain.job import JobSpec
from fencepost_server.domain.names import JobName, OperationName, RunName
from fencepost_server.domain.operation import OperationAction, OperationState
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine.backfill import Operations
from fencepost_server.engine.bulk import Bulk, BulkAsked, BulkUpdates
from fencepost_server.engine.bulk_steps import BulkSteps
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.dead_letters import DeadLetters, ReplayAsked
from fencepost_server.engine.replay import ReplayOptions
from fencepost_server.engine.verdicts import Report, Verdict
from fencepost_server.policy.outcome import Failed
from fencepost_server.store import runs
from fencepost_server.store.operations import OperationRecord
from fencepost_server.store.requests import RequestKey
from fencepost_server.store.runs import RunRecord

from tests.integration.world import World

_STATES = {
    OperationAction.REPLAY: frozenset((RunState.DEAD,)),
    OperationAction.DISCARD: frozenset((RunState.DEAD,)),
    OperationAction.CANCEL: frozenset(state for state in RunState if state.is_live),
}


def name_of(key: RunKey) -> RunName:
    return RunName(tenant="default", job=key.job_id, scheduled_at=key.scheduled_at)


class DeadLetterDesk:
    """Decides about dead letters of a world, whose clock the test moves."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.letters = DeadLetters(
            database=world.database,
            catalogue=world.catalogue,
            specs=world.specs,
            wake=world.woken,
        )
        self.bulk = BulkUpdates(database=world.database, catalogue=world.catalogue)
        self.operations = Operations(database=world.database, catalogue=world.catalogue)
        self.steps = self.new_steps()

    def new_steps(self) -> BulkSteps:
        """The loop of one more process."""
        world = self.world
        return BulkSteps(
            database=world.database,
            clock=world.database.clock,
            wake=world.woken,
            specs=world.specs,
        )

    # Single runs ---------------------------------------------------------------------------

    async def dead(
        self, count: int = 1, *, name: str = "report", spec: JobSpec | None = None, code: str = "X"
    ) -> list[RunKey]:
        """Keys of dead letters of a new job, oldest first."""
        job_id = await self.world.add_job(name, spec)
        keys = await self.world.enqueue(job_id, count)
        claimed = await self.world.claim(
            count,
            queue="default" if spec is None else spec.target.queue_name,
            capped=spec is not None and bool(spec.limits.concurrency_key),
        )
        assert {run.key for run in claimed} == set(keys)
        await self.bury(claimed, code=code)
        return keys

    async def bury(self, claimed: Sequence[Claimed], *, code: str = "X") -> None:
        """Their handlers fail for good."""
        reports = [
            Report(
                key=run.key,
                attempt=run.attempt,
                ending=Failed(code=code, final=True),
                failure=b"",
                failure_code=code,
            )
            for run in claimed
        ]
        for judged in await self.world.lifecycle.report(reports):
            assert judged.verdict is Verdict.APPLIED

    async def replay(
        self, key: RunKey, *, request: RequestKey | None = None, **options: Any
    ) -> RunRecord:
        """The run as ReplayRun answers with it; None is never answered."""
        answers: list[RunRecord] = []

        def encode(record: RunRecord) -> bytes:
            answers.append(record)
            return str(record.key).encode()

        asked = ReplayAsked(
            name=name_of(key), options=ReplayOptions(**options), reason="fixed", request=request
        )
        encoded = await self.letters.replay(asked, now=self.world.now, encode=encode)
        assert encoded == str(key).encode()
        return answers[0] if answers else await self.read(key)

    async def discard(self, key: RunKey, reason: str = "") -> RunRecord:
        return await self.letters.discard(name_of(key), reason=reason, now=self.world.now)

    async def read(self, key: RunKey) -> RunRecord:
        async with self.world.database.requests.connection() as connection:
            return (await runs.read(connection, [key], full=True))[key]

    async def replayed(self) -> list[RunKey]:
        """Keys of queued runs that were replayed, oldest first."""
        rows = await self.world.query(
            "SELECT job_id, scheduled_at FROM fencepost.run_queue "
            "WHERE state = 'queued' AND replay_count > 0 ORDER BY scheduled_at, job_id"
        )
        return [RunKey(str(row["job_id"]), from_datetime(row["scheduled_at"])) for row in rows]

    async def states(self, keys: Sequence[RunKey]) -> list[str]:
        return [(await self.read(key)).state.name for key in keys]

    # Many runs -----------------------------------------------------------------------------

    async def ask(
        self, action: OperationAction, text: str = "kind:*", *, job: str = "", **fields: Any
    ) -> Bulk:
        answers: list[Bulk] = []

        def encode(bulk: Bulk) -> bytes:
            answers.append(bulk)
            return b"answer"

        query = read_filter(text, job=job or None)
        values: dict[str, Any] = {
            "reason": "",
            "dry_run": False,
            "rate": 10_000.0,
            "stop_when_failing": 0.0,
            "max_runs": 0,
            "use_newest_version": False,
            "request": None,
        }
        asked = BulkAsked(
            parent=JobName(tenant="default", job=job),
            query=replace(query, states=query.states & _STATES[action]),
            filter=text,
            action=action,
            **(values | fields),
        )
        await self.bulk.start(asked, now=self.world.now, encode=encode)
        return answers[0]

    async def start(
        self, action: OperationAction, text: str = "kind:*", **fields: Any
    ) -> OperationName:
        made = (await self.ask(action, text, **fields)).operation
        assert made is not None
        return OperationName(tenant="default", operation_id=made.operation_id)

    async def get(self, name: OperationName) -> OperationRecord:
        return await self.operations.get(name)

    async def run_steps(self, steps: BulkSteps | None = None) -> None:
        """Every step that is due now."""
        while await (steps or self.steps).step():
            pass

    async def finish(self, name: OperationName) -> OperationRecord:
        """Steps, a second apart, to the operation's end."""
        for _ in range(200):
            await self.run_steps()
            found = await self.get(name)
            if found.state is not OperationState.RUNNING:
                return found
            await self.world.move(SECOND)
        raise AssertionError("the operation does not end")
