"""The memory of unary claims: the same request id gets the same still-leased runs again."""

from collections.abc import Sequence

from fencepost_server.clock import MINUTE, Clock, Duration
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.store.database import Connection
from fencepost_server.store.requests import RequestKey, reused
from fencepost_server.store.statements import load

_SQL = load("claims")
# The longest lease there is.
REMEMBERED_FOR: Duration = 10 * MINUTE


class NothingTakenError(Exception):
    """Ends a transaction that took nothing, so that its request id stays free."""


class ClaimMemory:
    """Reads and writes the rows of request ids, in the transaction of their claim."""

    def __init__(self, *, clock: Clock, claimer: Claimer) -> None:
        self._clock = clock
        self._claimer = claimer

    async def reserve(self, connection: Connection, request: RequestKey, worker_id: str) -> bool:
        """Takes an id before its claim; False if it came before. Waits for a call under way."""
        row = await connection.fetch_one(
            _SQL["reserve_claim_request"],
            request_id=request.request_id,
            worker_id=worker_id,
            body_hash=request.body_hash,
            expires_at=self._clock.now() + REMEMBERED_FOR,
        )
        return row is not None

    async def remember(
        self, connection: Connection, request: RequestKey, runs: Sequence[Claimed]
    ) -> None:
        """What the claim of a reserved id handed out."""
        await connection.execute(
            _SQL["remember_claims"],
            request_id=request.request_id,
            job_ids=[run.key.job_id for run in runs],
            scheduled_ats=[run.key.scheduled_at for run in runs],
            attempts=[run.attempt for run in runs],
        )

    async def recall(
        self, connection: Connection, request: RequestKey
    ) -> tuple[str, list[Claimed]] | None:
        """The worker of the first call with this id, and those of its runs that are still
        leased; None if the id is new. Raises RequestIdReused."""
        first = await connection.fetch_one(
            _SQL["find_claim_request"], request_id=request.request_id
        )
        if first is None:
            return None
        if first["body_hash"] != request.body_hash:
            raise reused(request.request_id)
        now = self._clock.now()
        rows = await connection.fetch(
            _SQL["claims_of_request"], request_id=request.request_id, now=now
        )
        runs = await self._claimer.assemble(rows, now=now, connection=connection)
        return str(first["worker_id"]), runs
