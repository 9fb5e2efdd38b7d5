"""Changes to every run that matches a filter: what they change, how fast, when they stop."""

import asyncio
from typing import Any

import pytest
from fencepost_server.clock import MINUTE, SECOND, format_instant
from fencepost_server.domain.operation import OperationAction, OperationState, StopCause
from fencepost_server.errors import JobNotFound, RequestIdReused
from fencepost_server.store.requests import RequestKey

from tests.integration.dead_letter_desk import DeadLetterDesk
from tests.integration.world import World

CANCEL, REPLAY, DISCARD = OperationAction.CANCEL, OperationAction.REPLAY, OperationAction.DISCARD
DONE, RUNNING, STOPPED = OperationState.DONE, OperationState.RUNNING, OperationState.STOPPED


@pytest.fixture
def desk(world: World) -> DeadLetterDesk:
    return DeadLetterDesk(world)


async def replays_of(world: World) -> list[int]:
    """How often each run was replayed, wherever it is."""
    rows = await world.query(
        "SELECT replay_count FROM fencepost.run_queue UNION ALL "
        "SELECT replay_count FROM fencepost.dead_letters UNION ALL "
        "SELECT replay_count FROM fencepost.job_runs"
    )
    return sorted(row["replay_count"] for row in rows)


def counts(found: Any) -> tuple[Any, ...]:
    return (found.state, found.matched, found.changed, found.unchanged, found.failed)


async def test_a_dry_run_counts_and_shows_and_stores_nothing(
    world: World, desk: DeadLetterDesk
) -> None:
    keys = await desk.dead(9)
    seen = await desk.ask(REPLAY, dry_run=True)
    assert (seen.operation, seen.matched) == (None, 9)
    assert [record.key for record in seen.samples] == [*keys[:5], keys[-1]]
    assert await world.value("SELECT count(*) FROM fencepost.operations") == 0
    assert not await desk.steps.step()
    third = format_instant(keys[2].scheduled_at)
    few = await desk.ask(REPLAY, f"scheduled_at<={third}", dry_run=True)
    assert [record.key for record in few.samples] == keys[:3]


async def test_replays_go_oldest_first_at_their_rate(world: World, desk: DeadLetterDesk) -> None:
    keys = await desk.dead(25)
    name = await desk.start(REPLAY, rate=10.0, reason="the mail server is back")
    await desk.run_steps()
    assert await desk.replayed() == keys[:10]
    # The second is used up, for every process.
    await desk.run_steps(desk.new_steps())
    assert await desk.replayed() == keys[:10]
    assert counts(await desk.get(name)) == (RUNNING, 25, 10, 0, 0)
    await world.move(SECOND)
    await desk.run_steps()
    assert await desk.replayed() == keys[:20]
    ended = await desk.finish(name)
    assert counts(ended) == (DONE, 25, 25, 0, 0)
    assert (ended.reason, ended.changed_ended, ended.changed_dead) == (
        "the mail server is back",
        0,
        0,
    )
    assert await desk.replayed() == keys
    assert world.woken.lane_hints


async def test_a_canary_changes_so_many_and_ends(world: World, desk: DeadLetterDesk) -> None:
    keys = await desk.dead(30)
    name = await desk.start(REPLAY, max_runs=3)
    assert counts(await desk.finish(name)) == (DONE, 30, 3, 0, 0)
    assert await desk.replayed() == keys[:3]
    for run, ending in zip(await world.claim(3), (True, True, False), strict=True):
        if ending:
            await world.report(run)
        else:
            await desk.bury([run])
    looked = await desk.get(name)
    assert (looked.changed_ended, looked.changed_dead) == (3, 1)
    # Good enough: all the rest, with the one that died again.
    rest = await desk.finish(await desk.start(REPLAY))
    assert counts(rest) == (DONE, 28, 28, 0, 0)


async def test_a_restart_goes_on_where_the_last_step_came_to(
    world: World, desk: DeadLetterDesk
) -> None:
    keys = await desk.dead(20)
    name = await desk.start(REPLAY, rate=5.0)
    await desk.run_steps()
    # The next step dies before its commit, with its process.
    await world.move(SECOND)
    dying = desk.new_steps()

    async def die(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    dying._change = die  # type: ignore[method-assign, assignment]
    with pytest.raises(asyncio.CancelledError):
        await dying.step()
    assert await desk.replayed() == keys[:5]
    desk.steps = desk.new_steps()
    assert counts(await desk.finish(name)) == (DONE, 20, 20, 0, 0)
    assert await replays_of(world) == [1] * 20


async def test_two_processes_change_each_run_once(world: World, desk: DeadLetterDesk) -> None:
    await desk.dead(200)
    names = [await desk.start(REPLAY, rate=20.0), await desk.start(REPLAY, rate=30.0)]
    steps = [desk.new_steps() for _ in range(3)]
    for _ in range(12):
        await asyncio.gather(*(desk.run_steps(each) for each in steps))
        await world.move(SECOND)
    found = [await desk.get(name) for name in names]
    assert [each.state for each in found] == [DONE, DONE]
    assert sum(each.changed for each in found) == 200
    # What one operation has changed has moved on for the other.
    assert sum(each.unchanged for each in found) == 200
    assert await replays_of(world) == [1] * 200


async def test_what_dies_again_is_not_replayed_again(world: World, desk: DeadLetterDesk) -> None:
    await desk.dead(4)
    name = await desk.start(REPLAY, rate=2.0)
    await desk.run_steps()
    await desk.bury(await world.claim(2))
    ended = await desk.finish(name)
    assert counts(ended) == (DONE, 4, 4, 0, 0)
    assert (ended.changed_ended, ended.changed_dead) == (2, 2)
    assert await replays_of(world) == [1] * 4


async def test_runs_that_die_later_do_not_match(world: World, desk: DeadLetterDesk) -> None:
    await desk.dead(2, name="before")
    name = await desk.start(REPLAY, rate=1.0)
    await world.move(SECOND)
    await desk.dead(2, name="after")
    assert counts(await desk.finish(name)) == (DONE, 2, 2, 0, 0)
    assert await world.value("SELECT count(*) FROM fencepost.dead_letters") == 2


async def end(world: World, desk: DeadLetterDesk, dead: int, well: int) -> None:
    claimed = await world.claim(dead + well)
    assert len(claimed) == dead + well
    await desk.bury(claimed[:dead])
    for run in claimed[dead:]:
        await world.report(run)


async def test_failing_replays_stop_the_rest(world: World, desk: DeadLetterDesk) -> None:
    await desk.dead(100)
    name = await desk.start(REPLAY, rate=25.0, stop_when_failing=0.2)
    await desk.run_steps()
    # One in five fails, but so few say nothing yet.
    await end(world, desk, dead=4, well=15)
    await world.move(SECOND)
    await desk.run_steps()
    assert (await desk.get(name)).changed == 50
    # With the 20th end it is the share that is allowed.
    await end(world, desk, dead=0, well=1)
    await world.move(SECOND)
    await desk.run_steps()
    assert (await desk.get(name)).changed == 75
    await end(world, desk, dead=1, well=0)
    await world.move(SECOND)
    await desk.run_steps()
    found = await desk.get(name)
    assert counts(found) == (STOPPED, 100, 75, 0, 0)
    assert found.stop_cause is StopCause.FAILING
    assert (found.changed_ended, found.changed_dead) == (21, 5)
    assert found.ended_at == world.now
    # The others go on, and are counted still.
    await end(world, desk, dead=9, well=45)
    found = await desk.get(name)
    assert (found.changed_ended, found.changed_dead) == (75, 14)


async def test_what_became_of_replays_is_counted_for_ever(
    world: World, desk: DeadLetterDesk
) -> None:
    keys = await desk.dead(6)
    name = await desk.start(REPLAY)
    assert counts(await desk.finish(name)) == (DONE, 6, 6, 0, 0)
    claimed = {run.key: run for run in await world.claim(6)}
    # One is still live; the others succeed, are cancelled, die, die and succeed after another
    # replay, die and are given up.
    await world.report(claimed[keys[1]])
    await world.cancel(keys[2], grace=0)
    await desk.bury([claimed[key] for key in keys[3:]])
    await desk.replay(keys[4])
    [again] = await world.claim()
    await world.report(again)
    await desk.discard(keys[5])

    async def told() -> tuple[int, int]:
        found = await desk.get(name)
        return found.changed_ended, found.changed_dead

    assert await told() == (5, 3)
    await world.move(MINUTE)
    await desk.run_steps()
    assert await told() == (5, 3)
    # Only what goes on is remembered.
    assert await world.value("SELECT count(*) FROM fencepost.operation_runs") == 1
    await world.report(claimed[keys[0]])
    assert await told() == (6, 3)
    await world.move(MINUTE)
    await desk.run_steps()
    assert await told() == (6, 3)
    assert await world.value("SELECT count(*) FROM fencepost.operation_runs") == 0
    assert await world.value("SELECT follow_at FROM fencepost.operations") is None


async def test_what_has_moved_on_is_left_alone_and_counted(
    world: World, desk: DeadLetterDesk
) -> None:
    keys = await desk.dead(6)
    name = await desk.start(REPLAY, rate=2.0)
    await desk.run_steps()
    await desk.discard(keys[3])
    await desk.replay(keys[4])
    ended = await desk.finish(name)
    assert counts(ended) == (DONE, 6, 4, 2, 0)
    assert await desk.states(keys) == ["QUEUED"] * 3 + ["DEAD"] + ["QUEUED"] * 2


async def test_what_cannot_be_changed_is_told(world: World, desk: DeadLetterDesk) -> None:
    [key] = await desk.dead(name="gone")
    await desk.dead(2, name="kept")
    await world.raw.execute("UPDATE fencepost.jobs SET deleted_at = now() WHERE name = 'gone'")
    ended = await desk.finish(await desk.start(REPLAY))
    assert counts(ended) == (DONE, 3, 2, 0, 1)
    [problem] = ended.problems
    assert (problem.reason, problem.code) == ("JOB_NOT_FOUND", 5)
    assert key.job_id in problem.metadata["run"]
    # An operation on this job alone has nobody to work for.
    name = await desk.start(REPLAY, job=key.job_id)
    refused = await desk.finish(name)
    assert (refused.state, refused.stop_cause) == (STOPPED, StopCause.REFUSED)
    with pytest.raises(JobNotFound):
        await desk.start(REPLAY, job="gone")
    # A filter that names no job means no run.
    assert counts(await desk.finish(await desk.start(REPLAY, "job:gone"))) == (DONE, 0, 0, 0, 0)


async def test_a_stop_takes_effect_before_the_next_run(world: World, desk: DeadLetterDesk) -> None:
    await desk.dead(6)
    name = await desk.start(REPLAY, rate=2.0)
    await desk.run_steps()
    stopped = await desk.operations.stop(name, now=world.now)
    await world.move(MINUTE)
    await desk.run_steps()
    found = await desk.get(name)
    assert found == stopped
    assert counts(found) == (STOPPED, 6, 2, 0, 0)
    assert found.stop_cause is StopCause.REQUESTED
    assert len(await desk.replayed()) == 2


async def test_discards_give_up_what_matches(world: World, desk: DeadLetterDesk) -> None:
    await desk.dead(3, name="old", code="OLD")
    kept = await desk.dead(2, name="new", code="NEW")
    ended = await desk.finish(
        await desk.start(DISCARD, "last_failure.code:OLD", reason="nobody needs them")
    )
    assert counts(ended) == (DONE, 3, 3, 0, 0)
    rows = await world.query(
        "SELECT failure_code, discard_reason FROM fencepost.dead_letters ORDER BY scheduled_at"
    )
    assert {tuple(row) for row in rows} == {("OLD", "nobody needs them"), ("NEW", None)}
    # Given up is no match any more.
    assert (await desk.ask(DISCARD, "state:DEAD", dry_run=True)).matched == len(kept)


async def test_cancels_reach_what_waits_and_what_runs(world: World, desk: DeadLetterDesk) -> None:
    job = await world.add_job()
    keys = await world.enqueue(job, 5)
    [running] = await world.claim(1)
    name = await desk.start(CANCEL, rate=2.0, reason="a wrong list")
    await world.move(SECOND)
    later = await world.enqueue(job, 1)
    await desk.run_steps()
    row = await world.live(running.key)
    assert (row["cancel_requested"], row["cancel_reason"]) == (True, "a wrong list")
    ended = await desk.finish(name)
    # What was made after the operation stays.
    assert counts(ended) == (DONE, 5, 5, 0, 0)
    assert await desk.states(keys) == ["RUNNING"] + ["CANCELLED"] * 4
    assert await desk.states(later) == ["QUEUED"]
    assert {each.key for each in world.woken.affected} == {running.key}
    assert world.woken.ended_jobs == {job}
    # Asked to stop before: nothing to change.
    again = await desk.finish(await desk.start(CANCEL, "state:RUNNING"))
    assert counts(again) == (DONE, 1, 0, 1, 0)


async def test_a_repeated_request_starts_one_operation(world: World, desk: DeadLetterDesk) -> None:
    await desk.dead(2)
    request = RequestKey(request_id="once", body_hash=b"body")
    await desk.start(REPLAY, request=request)
    # Whatever has changed since: the answer of the first call, not worked out again.
    await desk.dead(2, name="more")
    with pytest.raises(IndexError):
        await desk.start(REPLAY, request=request)
    assert await world.value("SELECT count(*) FROM fencepost.operations") == 1
    other = RequestKey(request_id="once", body_hash=b"another body")
    with pytest.raises(RequestIdReused):
        await desk.start(REPLAY, request=other)


async def test_many_lists_show_both_kinds_of_operations(world: World, desk: DeadLetterDesk) -> None:
    await desk.dead(1)
    first = await desk.start(DISCARD)
    await world.move(SECOND)
    second = await desk.start(CANCEL)
    listed, following = await desk.operations.list(
        "default", states=None, actions=None, before=None, page_size=10
    )
    assert [each.operation_id for each in listed] == [second.operation_id, first.operation_id]
    assert following is None
