"""Claims of many callers become one statement, and each gets its own."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.claims import Claimed, Claimer
from fencepost_server.engine.merged_claims import MergedClaims
from fencepost_server.errors import StorageUnavailable

LANES = frozenset({(1, 0)})


class Statements:
    """Stands for the claim's statement: gives out numbered runs, one call at a time."""

    def __init__(self, runs: int) -> None:
        self.left = runs
        self.calls: list[Sequence[str]] = []
        self.gate = asyncio.Event()
        self.error: StorageUnavailable | None = None

    async def claim(self, queue_id: int, *, worker_ids: Sequence[str], **_: Any) -> list[Claimed]:
        self.calls.append(worker_ids)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        given = min(self.left, len(worker_ids))
        self.left -= given
        return [
            cast(Claimed, _Run(place=place, key=RunKey(worker_ids[place - 1], place)))
            for place in range(1, given + 1)
        ]


class _Run:
    def __init__(self, *, place: int, key: RunKey) -> None:
        self.place = place
        self.key = key


def _merged(statements: Statements, *, batch_max: int = 100) -> MergedClaims:
    return MergedClaims(claimer=cast(Claimer, statements), batch_max=batch_max)


def _ask(merged: MergedClaims, worker_id: str, wanted: int = 1) -> "asyncio.Task[list[Claimed]]":
    return asyncio.ensure_future(
        merged.claim(7, lanes=LANES, worker_id=worker_id, wanted=wanted, is_capped=False)
    )


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_comes_while_a_claim_is_under_way_shares_the_next() -> None:
    statements = Statements(100)
    merged = _merged(statements)
    first = _ask(merged, "a")
    await _settle()
    others = [_ask(merged, name) for name in "bcd"]
    await _settle()
    assert [list(each) for each in statements.calls] == [["a"]]
    statements.gate.set()
    answers = await asyncio.gather(first, *others)
    assert [list(each) for each in statements.calls] == [["a"], ["b", "c", "d"]]
    assert [[run.key.job_id for run in runs] for runs in answers] == [["a"], ["b"], ["c"], ["d"]]


async def test_few_runs_go_to_many_callers() -> None:
    statements = Statements(3)
    statements.left = 4
    merged = _merged(statements)
    first = _ask(merged, "a")
    await _settle()
    greedy, modest = _ask(merged, "b", 5), _ask(merged, "c", 2)
    await _settle()
    statements.gate.set()
    assert len(await first) == 1
    assert [len(await greedy), len(await modest)] == [2, 1]


async def test_a_statement_holds_no_more_than_its_bound() -> None:
    statements = Statements(100)
    merged = _merged(statements, batch_max=4)
    first = _ask(merged, "a")
    await _settle()
    others = [_ask(merged, name, 3) for name in "bc"]
    await _settle()
    statements.gate.set()
    await asyncio.gather(first, *others)
    assert [len(each) for each in statements.calls] == [1, 3, 3]


async def test_the_storage_away_is_told_to_all_and_the_next_claim_works() -> None:
    statements = Statements(100)
    merged = _merged(statements)
    statements.error = StorageUnavailable()
    asked = [_ask(merged, name) for name in "ab"]
    statements.gate.set()
    for each in asked:
        with pytest.raises(StorageUnavailable):
            await each
    statements.error = None
    assert len(await _ask(merged, "c")) == 1
