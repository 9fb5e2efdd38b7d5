"""The memory of request ids: a call that is sent again gets the first answer.

It is written in the transaction of the call's own effect, so both are kept or neither,
and two calls with one id at the same time take turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fencepost_server.clock import DAY, Duration, Instant
from fencepost_server.errors import RequestIdReused
from fencepost_server.store.database import Connection, Pool
from fencepost_server.store.statements import load

_SQL = load("requests")
REMEMBERED_FOR: Duration = DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """A request id and the hash of what was asked with it."""

    request_id: str
    body_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestScope:
    """Within which a request id means one call."""

    tenant_id: int
    method: str


async def begin(
    connection: Connection,
    scope: RequestScope,
    keys: Sequence[RequestKey],
    *,
    now: Instant,
    keep_for: Duration = REMEMBERED_FOR,
) -> dict[str, bytes | RequestIdReused]:
    """Claims distinct ids; returns the first answer, or the refusal, of those used before.

    Waits while another transaction works on one of them. Every id that is not in the
    answer is the caller's: `finish` must be called for it in the same transaction.
    """
    if not keys:
        return {}
    hashes = {key.request_id: key.body_hash for key in keys}
    assert len(hashes) == len(keys), "request ids of one call must be distinct"
    taken = await connection.fetch(
        _SQL["begin_requests"],
        tenant_id=scope.tenant_id,
        method=scope.method,
        request_ids=list(hashes),
        body_hashes=list(hashes.values()),
        expires_at=now + keep_for,
        now=now,
    )
    used = sorted(hashes.keys() - {row["request_id"] for row in taken})
    if not used:
        return {}
    # A new statement, because the snapshot of the first is older than an answer it waited for.
    return await _answers(connection, scope, {each: hashes[each] for each in used}, now=now)


async def recall(
    pool: Pool, scope: RequestScope, keys: Sequence[RequestKey], *, now: Instant
) -> dict[str, bytes | RequestIdReused]:
    """The first answers, or refusals, of those ids that were used before; waits for nobody."""
    async with pool.connection() as connection:
        hashes = {key.request_id: key.body_hash for key in keys}
        return await _answers(connection, scope, hashes, now=now)


async def finish(
    connection: Connection, scope: RequestScope, answers: Mapping[str, bytes | None]
) -> None:
    """Stores the answers to ids claimed by `begin`; None forgets the id."""
    if answers:
        await connection.execute(
            _SQL["finish_requests"],
            tenant_id=scope.tenant_id,
            method=scope.method,
            request_ids=list(answers),
            responses=list(answers.values()),
        )


async def _answers(
    connection: Connection, scope: RequestScope, hashes: Mapping[str, bytes], *, now: Instant
) -> dict[str, bytes | RequestIdReused]:
    rows = await connection.fetch(
        _SQL["read_requests"],
        tenant_id=scope.tenant_id,
        method=scope.method,
        request_ids=list(hashes),
        now=now,
    )
    return {
        row["request_id"]: row["response"]
        if row["body_hash"] == hashes[row["request_id"]]
        else reused(row["request_id"])
        for row in rows
    }


def repeated(
    keys: Sequence[RequestKey | None],
) -> tuple[dict[int, int], dict[int, RequestIdReused]]:
    """Entries of one batch that repeat an earlier one, by position of the first of them; and
    the refusals of those that repeat only its id."""
    firsts: dict[str, tuple[int, RequestKey]] = {}
    copies: dict[int, int] = {}
    refused: dict[int, RequestIdReused] = {}
    for index, key in enumerate(keys):
        if key is None:
            continue
        first, before = firsts.setdefault(key.request_id, (index, key))
        if first == index:
            continue
        if before == key:
            copies[index] = first
        else:
            refused[index] = reused(key.request_id)
    return copies, refused


def reused(request_id: str, *, field: str = "request_id") -> RequestIdReused:
    """The refusal of an id that came before with another body."""
    return RequestIdReused(
        f"{field}: {request_id!r} came before with another body; use a new id",
        field=field,
        requestId=request_id,
    )
