"""Takes one named run: the claim of any other run, with the same caps and pauses, for this row."""

from dataclasses import dataclass
from enum import IntEnum

from fencepost_server.clock import SECOND, Clock, Duration, Instant
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine.claim_memory import ClaimMemory, NothingTakenError
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.errors import RunNotFound
from fencepost_server.store import runs as store
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.requests import RequestKey
from fencepost_server.store.statements import load

_SQL = load("unary_work")
_CAPS = load("claims")

PAUSED_RETRY_AFTER: Duration = 5 * SECOND
LIMITED_RETRY_AFTER: Duration = SECOND
_TRIES = 3


class LeaseRefusal(IntEnum):
    """Why a named run is not handed out; numbers as in the contract."""

    LEASED = 1
    ENDED = 2
    NOT_DUE = 3
    BLOCKED = 4
    LIMITED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswer:
    """The run, or why it is not handed out and how long it is no use to ask again."""

    worker_id: str
    run: Claimed | None = None
    refusal: LeaseRefusal | None = None
    state: RunState = RunState.RUNNING
    retry_after: Duration | None = None
    is_repeat: bool = False


class NamedLeases:
    """What LeaseRun asks."""

    def __init__(
        self, *, database: Database, clock: Clock, claimer: Claimer, memory: ClaimMemory
    ) -> None:
        self._database = database
        self._clock = clock
        self._claimer = claimer
        self._memory = memory

    async def take(self, key: RunKey, *, worker_id: str, request: RequestKey | None) -> LeaseAnswer:
        """The run, if it is claimable and the limits allow it.

        Raises RunNotFound, RequestIdReused or StorageUnavailable.
        """
        for _ in range(_TRIES):
            refused: LeaseAnswer | None = None
            try:
                async with self._database.hot.transaction() as connection:
                    if request is not None and not await self._memory.reserve(
                        connection, request, worker_id
                    ):
                        before = await self._memory.recall(connection, request)
                        if before is not None and before[1]:
                            return LeaseAnswer(
                                worker_id=before[0], run=before[1][0], is_repeat=True
                            )
                    target = await connection.fetch_one(
                        _SQL["lease_target"], job_id=key.job_id, scheduled_at=key.scheduled_at
                    )
                    if target is None:
                        raise NothingTakenError
                    refused = await self._refused(connection, key, target, worker_id)
                    if refused is not None:
                        raise NothingTakenError
                    run = await self._claimer.lease(connection, key, worker_id=worker_id)
                    if run is None:
                        raise NothingTakenError
                    if request is not None:
                        await self._memory.remember(connection, request, [run])
                    return LeaseAnswer(worker_id=worker_id, run=run)
            except NothingTakenError:
                if refused is not None:
                    return refused
                if target is None:
                    return LeaseAnswer(
                        worker_id=worker_id,
                        refusal=LeaseRefusal.ENDED,
                        state=await self.state_of(key),
                    )
            # Somebody changed the row between the look and the claim: look again.
        return LeaseAnswer(
            worker_id=worker_id,
            refusal=LeaseRefusal.LIMITED,
            state=await self.state_of(key),
            retry_after=LIMITED_RETRY_AFTER,
        )

    async def _refused(
        self, connection: Connection, key: RunKey, target: Row, worker_id: str
    ) -> LeaseAnswer | None:
        state = RunState.of(target["state"])
        now = self._clock.now()

        def refusal(why: LeaseRefusal, retry_after: Duration | None = None) -> LeaseAnswer:
            return LeaseAnswer(
                worker_id=worker_id, refusal=why, state=state, retry_after=retry_after
            )

        if state is RunState.RUNNING:
            return refusal(LeaseRefusal.LEASED, _left(target["lease_until"], now))
        if state is RunState.BLOCKED:
            return refusal(LeaseRefusal.BLOCKED)
        if target["available_at"] > now:
            # How soon a parked run gets its place is not known.
            left = None if target["parked"] else _left(target["available_at"], now)
            return refusal(LeaseRefusal.NOT_DUE, left)
        queue_id = target["queue_id"]
        rows = await connection.fetch(_CAPS["queue_settings"], queue_ids=[queue_id])
        if rows[0]["paused"]:
            return refusal(LeaseRefusal.LIMITED, PAUSED_RETRY_AFTER)
        if not rows[0]["is_capped"]:
            return None
        await connection.execute(_CAPS["lock_caps"], queue_id=queue_id)
        # In the next statements, whose snapshots are newer than the lock.
        allowed = await connection.fetch_one(_CAPS["claims_allowed"], queue_id=queue_id, wanted=1)
        if allowed is not None and allowed["tokens"] < 1:
            return refusal(LeaseRefusal.LIMITED, allowed["allowed_at"] - allowed["clock"] + 1)
        # A lost attempt that is still open has its place already.
        if not target["attempt_open"]:
            room = await connection.fetch_one(
                _CAPS["cap_room"],
                queue_id=queue_id,
                job_id=key.job_id,
                max_in_flight=target["max_in_flight"],
                concurrency_key=target["concurrency_key"],
            )
            assert room is not None, "cap_room always answers one row"
            if room["room"] is not None and room["room"] <= 0:
                return refusal(LeaseRefusal.LIMITED, LIMITED_RETRY_AFTER)
        # Undone with the transaction if the run turns out to be gone.
        await connection.execute(_CAPS["take_tokens"], queue_id=queue_id)
        return None

    async def state_of(self, key: RunKey) -> RunState:
        """Where a run is now. Raises RunNotFound."""
        async with self._database.requests.connection() as connection:
            found = await store.read(connection, [key], full=False)
        if key not in found:
            raise RunNotFound(f"{key} does not exist", run=str(key))
        return found[key].state


def _left(until: Instant | None, now: Instant) -> Duration:
    return max(0, (until or now) - now)
