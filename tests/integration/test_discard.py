"""Dead letters that are given up, every order of those who decide about one, and groups."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import pytest
from fencepost_server.api.run_filter import read_filter
from fencepost_server.clock import MINUTE, SECOND, to_datetime
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import DeadReason, RunKey, RunState
from fencepost_server.engine.dead_letters import DeadLetterGroups, DeadLetters, ReplayAsked
from fencepost_server.engine.replay import ReplayOptions
from fencepost_server.errors import FencepostError, JobNotFound, RunDiscarded, RunNotFound
from fencepost_server.store.statements import load

from tests.factories import every, job_spec
from tests.integration.dead_letter_desk import DeadLetterDesk, name_of
from tests.integration.gated_engine import Engine, engines
from tests.integration.interleavings import Actor, Interleavings, Stage
from tests.integration.saved_rows import restore_rows, save_rows
from tests.integration.world import World

_UPKEEP = load("upkeep")


@pytest.fixture
def desk(world: World) -> DeadLetterDesk:
    return DeadLetterDesk(world)


async def test_a_discarded_run_stays_dead_for_good(world: World, desk: DeadLetterDesk) -> None:
    [key] = await desk.dead()
    await world.move(MINUTE)
    record = await desk.discard(key, "a test order")
    assert (record.state, record.discarded_at) == (RunState.DEAD, world.now)
    row = await world.ended(key, "dead_letters")
    assert row["discard_reason"] == "a test order"
    # Once more: what was stored stands.
    await world.move(MINUTE)
    again = await desk.discard(key, "another reason")
    assert again.discarded_at == record.discarded_at
    assert await world.ended(key, "dead_letters") == row
    with pytest.raises(RunDiscarded):
        await desk.replay(key)
    with pytest.raises(RunNotFound):
        await desk.discard(RunKey(key.job_id, key.scheduled_at + 1))
    # The job is gone, the dead letter can still be given up.
    [other] = await desk.dead(name="other")
    await world.raw.execute("UPDATE fencepost.jobs SET deleted_at = now()")
    assert (await desk.discard(other)).discarded_at == world.now


# Every order -----------------------------------------------------------------------------------


class Scene:
    """A job that fires each minute, and its first run, which is dead."""

    def __init__(self, world: World, key: RunKey) -> None:
        self.world = world
        self.key = key

    def letters(self, engine: Engine) -> DeadLetters:
        return DeadLetters(
            database=engine.database,
            catalogue=engine.catalogue,
            specs=self.world.specs,
            wake=self.world.woken,
        )

    async def replay(self, engine: Engine) -> str:
        asked = ReplayAsked(
            name=name_of(self.key), options=ReplayOptions(), reason="", request=None
        )
        try:
            await self.letters(engine).replay(asked, now=self.world.now, encode=lambda _: b"")
        except FencepostError as error:
            return error.reason
        return "replayed"

    async def discard(self, engine: Engine) -> str:
        try:
            await self.letters(engine).discard(name_of(self.key), reason="", now=self.world.now)
        except FencepostError as error:
            return error.reason
        return "discarded"

    async def prune(self, engine: Engine) -> str:
        await engine.database.requests.execute(
            _UPKEEP["prune_discarded"], before=self.world.now + SECOND, rows_max=10
        )
        return "pruned"

    async def play(self, *acts: str) -> list[tuple[str, ...]]:
        """The answers of the acts, in every order of their statements."""
        told: list[tuple[str, ...]] = []

        async def prepare() -> None:
            await restore_rows(self.world.raw)

        async def finish(answers: Mapping[str, object]) -> None:
            await self.check_end()
            told.append(tuple(str(answers[f"{act} {n}"]) for n, act in enumerate(acts)))

        async with engines(self.world, len(acts)) as each:
            actors = [
                Actor(name=f"{act} {n}", gate=each[n].gate, body=self._body(act, each[n]))
                for n, act in enumerate(acts)
            ]
            stage = Stage(prepare=prepare, observe=self.check, finish=finish)
            await Interleavings(monitor=self.world.raw).explore(actors, stage)
        return told

    def _body(self, act: str, engine: Engine) -> Callable[[], Awaitable[object]]:
        async def body() -> object:
            match act:
                case "replay":
                    return await self.replay(engine)
                case "discard":
                    return await self.discard(engine)
                case "prune":
                    return await self.prune(engine)
                case "claim":
                    return [run.attempt for run in await engine.claim()]
                case "fire":
                    return await engine.fire()
                case _:
                    await engine.delete()
                    return "deleted"

        return body

    async def check(self) -> None:
        """The run is in at most one place, and no attempt of it is open twice."""
        places = await self.world.query(
            "SELECT 'live', attempt FROM fencepost.run_queue WHERE scheduled_at = $1 UNION ALL "
            "SELECT 'dead', attempt FROM fencepost.dead_letters WHERE scheduled_at = $1 UNION ALL "
            "SELECT 'ended', attempt FROM fencepost.job_runs WHERE scheduled_at = $1",
            to_datetime(self.key.scheduled_at),
        )
        assert len(places) <= 1, f"in two places: {places}"

    async def check_end(self) -> None:
        """Nothing outlives a job whose deletion cancels all runs."""
        await self.check()
        left = await self.world.value(
            "SELECT count(*) FROM fencepost.run_queue AS q JOIN fencepost.jobs USING (job_id) "
            "WHERE deleted_at IS NOT NULL AND NOT q.cancel_requested"
        )
        assert left == 0, "a run outlives its job"


@pytest.fixture
async def scene(world: World, desk: DeadLetterDesk) -> Scene:
    await world.add_job(spec=job_spec(every(MINUTE)), next_run_at=world.now)
    await world.scheduler.fire_due()
    [run] = await world.claim()
    await desk.bury([run])
    await world.move(MINUTE)
    await save_rows(world.raw)
    return Scene(world, run.key)


async def test_two_replays_at_once(scene: Scene) -> None:
    told = await scene.play("replay", "replay")
    assert set(told) == {("replayed", "RUN_NOT_DEAD"), ("RUN_NOT_DEAD", "replayed")}


async def test_a_replay_and_a_discard_at_once(scene: Scene) -> None:
    told = await scene.play("replay", "discard")
    assert set(told) == {("replayed", "RUN_NOT_DEAD"), ("RUN_DISCARDED", "discarded")}


async def test_a_replay_while_retention_prunes_what_was_given_up(scene: Scene) -> None:
    assert set(await scene.play("replay", "prune")) == {("replayed", "pruned")}
    told = await scene.play("replay", "discard", "prune")
    assert set(told) == {
        ("replayed", "RUN_NOT_DEAD", "pruned"),
        ("RUN_DISCARDED", "discarded", "pruned"),
        ("RUN_NOT_FOUND", "discarded", "pruned"),
        ("RUN_NOT_FOUND", "RUN_NOT_FOUND", "pruned"),
        ("RUN_DISCARDED", "RUN_NOT_FOUND", "pruned"),
    }


async def test_a_replay_among_those_who_make_and_take_runs(scene: Scene) -> None:
    for acts in (("replay", "claim"), ("replay", "fire"), ("replay", "delete")):
        answers = {answer[0] for answer in await scene.play(*acts)}
        assert answers <= {"replayed", "JOB_NOT_FOUND"}
        assert "replayed" in answers


# Groups ----------------------------------------------------------------------------------------


async def _groups(desk: DeadLetterDesk, text: str = "", **more: int) -> DeadLetterGroups:
    query = replace(read_filter(text, job=None), states=frozenset((RunState.DEAD,)))
    return await desk.letters.groups(
        JobName(tenant="default", job=""), query, groups_max=more.get("groups_max", 20)
    )


async def test_groups_say_what_is_dead_the_newest_first(world: World, desk: DeadLetterDesk) -> None:
    first = await desk.dead(3, name="one", code="SMTP")
    await world.move(SECOND)
    await desk.dead(2, name="two", spec=job_spec(kind="other"), code="SMTP")
    await world.move(SECOND)
    job = first[0].job_id
    late = await world.enqueue(job, 2)
    await desk.bury(await world.claim(1), code="SMTP")
    await desk.bury(await world.claim(1), code="OTHER")
    found = await _groups(desk)
    shown = [
        (group.job, group.kind, group.failure_code, group.dead_reason, group.count)
        for group in found.groups
    ]
    why = DeadReason.NOT_RETRYABLE
    assert set(shown[:2]) == {
        ("one", "send", "OTHER", why, 1),
        ("one", "send", "SMTP", why, 4),
    }
    assert shown[2:] == [("two", "other", "SMTP", why, 2)]
    assert (found.grouped, found.total_groups) == (7, 3)
    [smtp] = [group for group in found.groups if group.count == 4]
    assert (smtp.oldest_at, smtp.newest_at) == (world.now - 2 * SECOND, world.now)
    assert smtp.sample.scheduled_at in {key.scheduled_at for key in late}
    # Bounded, filtered, and without what was given up.
    few = await _groups(desk, groups_max=1)
    assert (len(few.groups), few.total_groups) == (1, 3)
    assert [group.kind for group in (await _groups(desk, "kind:other")).groups] == ["other"]
    for key in first:
        await desk.discard(key)
    assert (await _groups(desk)).grouped == 4
    assert (await _groups(desk, "job:nobody")).groups == ()
    with pytest.raises(JobNotFound):
        await desk.letters.groups(
            JobName(tenant="default", job="nobody"), read_filter("", job="nobody"), groups_max=1
        )
