"""Ends that no worker reports, cancels without grace and times that are over, under every order
of their statements and of those who want the run at that moment."""

import pytest
from fencepost_server.domain.schedule import OverlapPolicy

from tests.integration.overlap_scenes import out_of_time, running, unclaimed
from tests.integration.world import World

ALLOW = OverlapPolicy.ALLOW


async def test_a_cancel_that_asks(world: World) -> None:
    async with running(world, ALLOW) as scene:
        for act in ("snooze", "give back", "give up", "heartbeat"):
            assert await scene.play("cancel", act) > 1


async def test_a_cancel_without_grace(world: World) -> None:
    async with running(world, ALLOW) as scene:
        for acts in (
            ("cancel now", "succeed"),
            ("cancel now", "fail"),
            ("cancel now", "snooze"),
            ("cancel now", "give back"),
            ("cancel now", "heartbeat"),
            ("cancel now", "reap"),
            ("cancel now", "cancel"),
            ("cancel now", "cancel now"),
        ):
            assert await scene.play(*acts) > 1


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_run_whose_time_is_over(world: World, is_lost: bool) -> None:
    end = "expire" if is_lost else "reap"
    async with out_of_time(world, ALLOW, is_lost=is_lost) as scene:
        for act in ("succeed", "fail", "snooze", "give back", "heartbeat", "cancel", "cancel now"):
            assert await scene.play(end, act) > 1
        assert await scene.play(end, end) > 1
        assert await scene.play(end, "claim") > 1
        assert await scene.play(end, "delete") > 1


async def test_a_run_that_nobody_claimed_in_time(world: World) -> None:
    async with unclaimed(world, OverlapPolicy.QUEUE_ONE) as scene:
        for acts in (
            ("expire", "claim"),
            ("expire", "expire"),
            ("expire", "fire"),
            ("expire", "sweep"),
            ("expire", "delete"),
        ):
            assert await scene.play(*acts) > 1
