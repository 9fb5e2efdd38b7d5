"""Overlap policies under every order of a fire's statements and those of others.

`FENCEPOST_EVERY_STATEMENT=1` also gives statements a turn that nobody else can tell apart,
which takes some ten times as long (and a longer `--timeout`).
"""

from collections.abc import Sequence

import pytest
from fencepost_server.domain.schedule import OverlapPolicy

from tests.integration.overlap_scenes import backfilled, freed, idle, running, waiting
from tests.integration.world import World

SKIP, QUEUE_ONE, QUEUE_ALL, ALLOW, CANCEL_PREVIOUS = (
    OverlapPolicy.SKIP,
    OverlapPolicy.QUEUE_ONE,
    OverlapPolicy.QUEUE_ALL,
    OverlapPolicy.ALLOW,
    OverlapPolicy.CANCEL_PREVIOUS,
)
# Three acts may have hundreds of orders; so many are drawn of them, with a fixed seed, and each
# pair of the three is played in every order.
SAMPLE = 40
every_policy = pytest.mark.parametrize("policy", list(OverlapPolicy), ids=lambda p: p.name)


def under(*cases: tuple[OverlapPolicy, Sequence[str]]) -> pytest.MarkDecorator:
    """One test per policy, with acts that are played one after the other or at once."""
    names = [policy.name for policy, _ in cases]
    return pytest.mark.parametrize(("policy", "acts"), cases, ids=names)


@every_policy
async def test_a_first_fire_and_another_act(world: World, policy: OverlapPolicy) -> None:
    async with idle(world, policy) as scene:
        for act in ("fire", "enqueue", "claim", "pause", "slow down", "relabel", "delete"):
            assert await scene.play("fire", act) > 1
        assert await scene.play("fire", "fire", "claim") > 1


@every_policy
async def test_a_fire_that_meets_a_running_run_and_an_act_on_that_run(
    world: World, policy: OverlapPolicy
) -> None:
    async with running(world, policy) as scene:
        for act in ("succeed", "fail", "give up", "heartbeat", "reap", "cancel", "claim", "sweep"):
            assert await scene.play("fire", act) > 1


# How a fire and an edit lock the job is the same under all policies that need thought, so
# each edit is played under those that make the most of it.
@under(
    (SKIP, ["fire", "enqueue", "pause", "slow down"]),
    (QUEUE_ONE, ["fire", "relabel"]),
    (QUEUE_ALL, ["fire", "pause", "delete"]),
    (ALLOW, ["fire", "enqueue", "pause", "slow down", "relabel", "delete"]),
    (CANCEL_PREVIOUS, ["fire", "pause", "delete"]),
)
async def test_a_fire_that_meets_a_running_run_and_an_act_on_the_job(
    world: World, policy: OverlapPolicy, acts: Sequence[str]
) -> None:
    async with running(world, policy) as scene:
        for act in acts:
            assert await scene.play("fire", act) > 1


async def test_a_fire_the_end_of_the_run_before_it_and_the_promoter(world: World) -> None:
    async with running(world, CANCEL_PREVIOUS) as scene:
        # The fire has met each of them above.
        assert await scene.play("succeed", "sweep") > 1
        assert await scene.play("fire", "succeed", "sweep", sample=SAMPLE) > SAMPLE // 4


@under(
    (QUEUE_ONE, ["sweep", "cancel second", "cancel", "succeed"]),
    (QUEUE_ALL, ["sweep", "fire", "delete"]),
    (CANCEL_PREVIOUS, ["sweep", "fire", "give up", "cancel second"]),
)
async def test_a_fire_that_meets_a_waiting_run_and_another_act(
    world: World, policy: OverlapPolicy, acts: Sequence[str]
) -> None:
    async with waiting(world, policy) as scene:
        for act in acts:
            assert await scene.play("fire", act) > 1


@under(
    (QUEUE_ALL, ["succeed", "sweep", "claim"]),
    (CANCEL_PREVIOUS, ["succeed", "sweep", "cancel second"]),
)
async def test_the_end_of_a_run_the_promoter_and_a_third_act(
    world: World, policy: OverlapPolicy, acts: Sequence[str]
) -> None:
    async with waiting(world, policy) as scene:
        assert await scene.play(*acts) > 1


async def test_the_promoter_and_a_fire_that_meets_the_run_it_frees(world: World) -> None:
    async with freed(world, QUEUE_ONE) as scene:
        assert await scene.play("fire", "sweep") > 1


async def test_two_promoters(world: World) -> None:
    async with waiting(world, QUEUE_ALL) as scene:
        assert await scene.play("sweep", "sweep") > 1


async def test_a_waiting_run_of_a_backfill_a_fire_and_the_promoter(world: World) -> None:
    async with backfilled(world, QUEUE_ALL) as scene:
        for acts in (("fire", "succeed"), ("fire", "sweep"), ("succeed", "sweep")):
            assert await scene.play(*acts) > 1
        assert await scene.play("fire", "succeed", "sweep", sample=SAMPLE) > SAMPLE // 4
