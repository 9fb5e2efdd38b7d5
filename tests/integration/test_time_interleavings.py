"""Jitter, calendars, intervals after completion, caps and parked runs under every order of
statements, and three acts at once on a running run."""

import pytest
from fencepost_server.domain.schedule import OverlapPolicy

from tests.integration.overlap_scenes import running
from tests.integration.test_overlap_interleavings import (
    ALLOW,
    CANCEL_PREVIOUS,
    QUEUE_ALL,
    SAMPLE,
    SKIP,
    every_policy,
)
from tests.integration.time_scenes import capped, excluding, following, jittered, parked
from tests.integration.world import World


@every_policy
async def test_a_fire_a_lost_lease_and_the_end_of_the_run(
    world: World, policy: OverlapPolicy
) -> None:
    async with running(world, policy) as scene:
        assert await scene.play("fire", "reap", "succeed", sample=SAMPLE) > SAMPLE // 4


async def test_a_lost_lease_and_the_end_of_a_run_that_others_wait_for(world: World) -> None:
    async with running(world, QUEUE_ALL) as scene:
        assert await scene.play("reap", "succeed") > 1


@pytest.mark.parametrize("policy", [ALLOW, QUEUE_ALL], ids=lambda p: p.name)
async def test_a_delayed_fire(world: World, policy: OverlapPolicy) -> None:
    async with jittered(world, policy) as scene:
        for act in ("fire", "claim", "succeed", "relabel"):
            assert await scene.play("fire", act) > 1


async def test_a_fire_that_a_calendar_excludes(world: World) -> None:
    # Calendars lead every policy down the path that also looks at live runs.
    async with excluding(world, SKIP) as scene:
        for act in ("open calendar", "succeed", "pause"):
            assert await scene.play("fire", act) > 1
        assert await scene.play("fire", "fire", sample=SAMPLE) > 1
        assert await scene.play("fire", "fire", "open calendar", sample=SAMPLE // 2) > 1


async def test_the_end_that_the_next_fire_waits_for(world: World) -> None:
    async with following(world) as scene:
        for act in ("succeed", "give up", "reap", "cancel", "pause", "delete", "slow down"):
            assert await scene.play("sweep ends", act) > 1
        assert await scene.play("sweep ends", "sweep ends", "succeed", sample=SAMPLE) > 1
        assert await scene.play("sweep ends", "reap", "succeed", sample=SAMPLE) > 1


async def test_claims_under_the_cap_of_a_job(world: World) -> None:
    async with capped(world) as scene:
        for act in ("claim", "fire", "succeed", "fail", "reap", "cancel", "heartbeat"):
            assert await scene.play("claim", act) > 1
        assert await scene.play("claim", "claim", "succeed", sample=SAMPLE) > 1
        assert await scene.play("claim", "reap", "fire", sample=SAMPLE) > 1


@pytest.mark.parametrize("policy", [ALLOW, SKIP, QUEUE_ALL, CANCEL_PREVIOUS], ids=lambda p: p.name)
async def test_a_fire_that_meets_a_parked_run(world: World, policy: OverlapPolicy) -> None:
    async with parked(world, policy) as scene:
        for act in ("release", "cancel first"):
            assert await scene.play("fire", act) > 1
        assert await scene.play("fire", "release", "claim", sample=SAMPLE) > SAMPLE // 4


async def test_the_release_of_a_parked_run(world: World) -> None:
    async with parked(world, ALLOW) as scene:
        for act in ("release", "cancel first", "claim", "delete"):
            assert await scene.play("release", act) > 1
