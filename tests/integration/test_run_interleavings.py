"""The life of a run, and edits of its job, under every order of the statements of those who
change them; and the runner of interleavings itself."""

import pytest
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.store.statements import Statement

from tests.integration.interleavings import Actor, Gate, GatedPool, Interleavings, Stage
from tests.integration.overlap_scenes import lost, paused, running
from tests.integration.world import World

ALLOW = OverlapPolicy.ALLOW


async def test_two_words_about_one_attempt(world: World) -> None:
    async with running(world, ALLOW) as scene:
        for acts in (
            ("succeed", "reap"),
            ("fail", "reap"),
            ("heartbeat", "reap"),
            ("reap", "reap"),
            ("succeed", "succeed"),
            ("succeed", "give up"),
            ("succeed", "cancel"),
            ("fail", "cancel"),
            ("reap", "cancel"),
            ("cancel", "cancel"),
        ):
            assert await scene.play(*acts) > 1


async def test_a_lost_attempt_that_is_still_open(world: World) -> None:
    async with lost(world, ALLOW) as scene:
        for acts in (
            ("succeed", "claim"),
            ("fail", "claim"),
            ("heartbeat", "claim"),
            ("cancel", "claim"),
            ("claim", "claim"),
            ("claim", "claim", "succeed"),
            ("succeed", "claim", "heartbeat"),
        ):
            assert await scene.play(*acts) > 1


async def test_an_edit_of_a_paused_job_that_is_due(world: World) -> None:
    async with paused(world, OverlapPolicy.QUEUE_ONE) as scene:
        for acts in (
            ("resume", "fire"),
            ("resume", "resume"),
            ("resume", "pause"),
            ("resume", "slow down"),
            ("resume", "delete"),
        ):
            assert await scene.play(*acts) > 1


async def test_deleting_a_job_while_its_run_ends(world: World) -> None:
    async with running(world, OverlapPolicy.SKIP) as scene:
        for act in ("succeed", "fail", "reap", "cancel"):
            assert await scene.play("delete", act) > 1


class _Rows:
    """Two rows in a table of their own, and transactions that lock both."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: list[str] = []

    async def lock(self, pool: GatedPool, *ids: int) -> None:
        async with pool.transaction() as connection:
            for number in ids:
                await connection.execute(_lock(number))

    async def prepare(self) -> None:
        self.seen = []

    async def observe(self) -> None:
        self.seen.append("commit")

    async def finish(self, _answers: object) -> None:
        assert self.seen == ["commit", "commit"]


def _lock(number: int) -> Statement:
    text = f"SELECT FROM public.two_rows WHERE id = {number} FOR UPDATE"
    return Statement(name=f"lock_{number}", text=text, parameters=())


async def _play_locks(world: World, first: tuple[int, ...], second: tuple[int, ...]) -> int:
    await world.raw.execute(
        "DROP TABLE IF EXISTS public.two_rows; CREATE TABLE public.two_rows (id int PRIMARY KEY); "
        "INSERT INTO public.two_rows VALUES (1), (2)"
    )
    rows = _Rows(world)
    gates = Gate(), Gate()
    stage = Stage(prepare=rows.prepare, observe=rows.observe, finish=rows.finish)
    async with (
        GatedPool(world.dsn, hot=False, gate=gates[0]) as one,
        GatedPool(world.dsn, hot=False, gate=gates[1]) as two,
    ):
        actors = [
            Actor(name="one", gate=gates[0], body=lambda: rows.lock(one, *first)),
            Actor(name="two", gate=gates[1], body=lambda: rows.lock(two, *second)),
        ]
        return await Interleavings(monitor=world.raw).explore(actors, stage)


async def test_the_runner_carries_out_every_order(world: World) -> None:
    # Two transactions of two statements and a COMMIT each, which meet at no lock.
    assert await _play_locks(world, (1, 1), (2, 2)) == 20


async def test_the_runner_waits_for_locks(world: World) -> None:
    # Whoever is second at the row stands there until the first has committed.
    assert await _play_locks(world, (1,), (1,)) == 4


async def test_the_runner_finds_a_deadlock_and_prints_its_order(world: World) -> None:
    with pytest.raises(AssertionError, match="deadlock") as failure:
        await _play_locks(world, (1, 2), (2, 1))
    told = str(failure.value)
    assert "one: lock_1" in told
    assert "two: lock_2" in told
    assert "again: only=['one', 'two'" in told
