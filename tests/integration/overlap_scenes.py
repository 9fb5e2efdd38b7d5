"""Scenes with one job under an overlap policy, and the acts that are played on them in every
order."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fencepost_server.clock import HOUR, MINUTE, SECOND, Instant, to_datetime
from fencepost_server.domain.run import LOST_LEASE_WAIT_MAX, RunKey
from fencepost_server.domain.schedule import OverlapPolicy
from fencepost_server.engine.backfill import BackfillAsked, Operations
from fencepost_server.engine.backfill_steps import BackfillSteps
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.verdicts import Held, Judged, Verdict
from fencepost_server.policy.outcome import Failed, Released, Snoozed

from tests.factories import NOON, every, job_spec
from tests.integration.gated_engine import NAME, Engine, engines
from tests.integration.interleavings import Actor, Interleavings, Stage
from tests.integration.run_invariants import Invariants
from tests.integration.saved_rows import restore_rows, save_rows
from tests.integration.world import World

_ACTORS_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is saved before the first order: `runs` are claimed, the oldest first."""

    world: World
    engines: Sequence[Engine]
    invariants: Invariants
    job_id: str
    runs: Sequence[Claimed]
    claims_under_caps: bool = False

    @property
    def run(self) -> Claimed:
        """The run that a worker holds."""
        return self.runs[0]

    def fired(self, number: int) -> RunKey:
        """The key of a fire, counted from 0."""
        return RunKey(self.job_id, NOON + number * MINUTE)

    async def play(
        self, *acts: str, only: Sequence[str] | None = None, sample: int | None = None
    ) -> int:
        """Every order of the statements of these acts (names in `ACTS`), or so many of them
        drawn with a fixed seed; how many there were."""
        actors = []
        for number, (act, engine) in enumerate(zip(acts, self.engines, strict=False)):
            name = act if acts.count(act) == 1 else f"{act} {number + 1}"
            actors.append(Actor(name=name, gate=engine.gate, body=self._body(act, engine)))
        assert len(actors) == len(acts), f"at most {_ACTORS_MAX} acts at once"
        orders = await Interleavings(monitor=self.world.raw).explore(
            actors,
            Stage(prepare=self._prepare, observe=self._observe, finish=self._finish),
            only=only,
            sample=sample,
        )
        assert orders > 0
        return orders

    def _body(self, act: str, engine: Engine) -> Callable[[], Awaitable[object]]:
        return lambda: ACTS[act](engine, self)

    async def _prepare(self) -> None:
        await restore_rows(self.world.raw)
        self.invariants.forget()
        await self.invariants.check()

    async def _observe(self) -> None:
        await self.invariants.check()

    async def _finish(self, answers: Mapping[str, object]) -> None:
        """A report that was applied is the run's end or its retry; any other changed nothing."""
        await self.invariants.check_end()
        for name, answer in answers.items():
            if isinstance(answer, Judged):
                await self._check_verdict(answer)
            elif isinstance(answer, bool):
                await self._check_cancel(name, was_live=answer)

    async def _check_cancel(self, name: str, *, was_live: bool) -> None:
        """Who was told that the run was live to be cancelled sees it end so, or succeed."""
        if name.startswith(("cancel first", "cancel second")):
            return
        at = self.run.key.scheduled_at
        (run,) = [run for run in await self.invariants.runs() if run.at == at]
        if not was_live:
            assert not run.is_live, f"{name} changed nothing, but {run}"
        elif name.startswith("cancel now"):
            assert run.state == "cancelled", f"{name} ended it, but {run}"
        else:
            stopping = run.is_live and run.cancel_requested
            assert stopping or run.state in ("cancelled", "succeeded"), f"{name}, but {run}"

    async def _check_verdict(self, judged: Judged) -> None:
        at = self.run.key.scheduled_at
        (run,) = [run for run in await self.invariants.runs() if run.at == at]
        if judged.verdict is Verdict.APPLIED and judged.run_state is not None:
            if not judged.run_state.is_live:
                assert run.state == judged.run_state.name.lower(), f"{judged}, but {run}"
                assert run.attempt == self.run.attempt, f"{judged}, but {run}"
        elif judged.verdict is Verdict.STALE_ATTEMPT:
            # Nobody in these scenes reports the attempt that came after it.
            assert run.is_live, f"{judged}, but {run}"
            assert run.attempt > self.run.attempt, f"{judged}, but {run}"
        else:
            assert judged.verdict in (Verdict.RETRY, Verdict.RUN_TERMINAL, Verdict.ALREADY_APPLIED)


Act = Callable[[Engine, Scene], Awaitable[object]]
ACTS: Mapping[str, Act] = {
    "fire": lambda engine, _: engine.fire(),
    "enqueue": lambda engine, _: engine.enqueue(),
    "claim": lambda engine, scene: engine.claim(capped=scene.claims_under_caps),
    "succeed": lambda engine, scene: engine.report(scene.run),
    "fail": lambda engine, scene: engine.report(scene.run, Failed(code="X")),
    "give up": lambda engine, scene: engine.report(scene.run, Failed(code="X", final=True)),
    "heartbeat": lambda engine, scene: engine.heartbeat(scene.run),
    "reap": lambda engine, _: engine.reap(),
    "expire": lambda engine, _: engine.expire(),
    "sweep": lambda engine, _: engine.sweep(),
    "sweep ends": lambda engine, _: engine.sweep_ends(),
    "open calendar": lambda engine, _: engine.open_calendar(),
    "cancel": lambda engine, scene: engine.cancel(scene.run.key),
    "cancel now": lambda engine, scene: engine.cancel(scene.run.key, grace=0),
    "snooze": lambda engine, scene: engine.report(scene.run, Snoozed(delay=SECOND)),
    "give back": lambda engine, scene: engine.report(scene.run, Released()),
    "release": lambda engine, _: engine.release(),
    "cancel first": lambda engine, scene: engine.cancel(scene.fired(0)),
    "cancel second": lambda engine, scene: engine.cancel(scene.fired(1)),
    "pause": lambda engine, _: engine.pause(),
    "resume": lambda engine, _: engine.resume(),
    "delete": lambda engine, _: engine.delete(),
    "slow down": lambda engine, _: engine.slow_down(),
    "relabel": lambda engine, _: engine.relabel(),
}


@asynccontextmanager
async def idle(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """Noon: the first fire is due and nothing runs."""
    job_id = await _add_job(world, policy)
    async with _scene(world, policy, job_id, []) as scene:
        yield scene


@asynccontextmanager
async def running(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """A minute later: the first run is with a worker that has not been heard of for longer
    than its lease, and the second fire is due."""
    job_id = await _add_job(world, policy)
    claimed = await start_first(world)
    async with _scene(world, policy, job_id, claimed) as scene:
        yield scene


@asynccontextmanager
async def waiting(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """Another minute later: what the policy makes of the second fire is made of it, and the
    third is due."""
    job_id = await _add_job(world, policy)
    claimed = await start_first(world)
    await world.scheduler.fire_due()
    await world.pass_time(MINUTE)
    async with _scene(world, policy, job_id, claimed) as scene:
        yield scene


@asynccontextmanager
async def freed(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """As `waiting`, but the first run has ended and nobody has looked at the second since."""
    job_id = await _add_job(world, policy)
    claimed = await start_first(world)
    await world.scheduler.fire_due()
    await world.pass_time(MINUTE)
    await world.report(claimed[0])
    async with _scene(world, policy, job_id, claimed) as scene:
        yield scene


@asynccontextmanager
async def lost(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """The lease of the first run is lost: it is due for another attempt, and the worker of
    the first may still report."""
    job_id = await _add_job(world, policy)
    claimed = await start_first(world)
    assert await world.reaper.reap() == 1
    await world.pass_time(LOST_LEASE_WAIT_MAX)
    async with _scene(world, policy, job_id, claimed) as scene:
        yield scene


@asynccontextmanager
async def out_of_time(
    world: World, policy: OverlapPolicy, *, is_lost: bool
) -> AsyncIterator[Scene]:
    """As `lost`, or as `running` with a lease that still holds, and the run's total_timeout is
    over."""
    job_id = await _add_job(world, policy)
    claimed = await start_first(world)
    if is_lost:
        assert await world.reaper.reap() == 1
        await world.pass_time(LOST_LEASE_WAIT_MAX)
    else:
        await world.lifecycle.heartbeat([Held(claimed[0].key, claimed[0].attempt)])
    await world.raw.execute(
        "UPDATE fencepost.run_queue SET total_until = $1", to_datetime(world.now)
    )
    async with _scene(world, policy, job_id, claimed) as scene:
        yield scene


@asynccontextmanager
async def unclaimed(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """The first run has waited a minute for a worker, longer than its queue_timeout; the second
    fire is due."""
    job_id = await _add_job(world, policy)
    await world.scheduler.fire_due()
    await world.pass_time(MINUTE)
    await world.raw.execute(
        "UPDATE fencepost.run_queue SET wait_until = $1", to_datetime(world.now)
    )
    async with _scene(world, policy, job_id, []) as scene:
        yield scene


@asynccontextmanager
async def paused(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """The job has been paused while its first run was running, and two fires are due."""
    job_id = await _add_job(world, policy)
    claimed = await start_first(world)
    await world.raw.execute("UPDATE fencepost.job_schedules SET paused = true")
    await world.pass_time(MINUTE)
    async with _scene(world, policy, job_id, claimed) as scene:
        yield scene


@asynccontextmanager
async def backfilled(world: World, policy: OverlapPolicy) -> AsyncIterator[Scene]:
    """As `running`, and the run of a backfill, for the minute before the first fire, waits."""
    job_id = await _add_job(world, policy)
    await world.raw.execute("UPDATE fencepost.jobs SET created_at = $1", to_datetime(NOON - HOUR))
    claimed = await start_first(world)
    operations = Operations(database=world.database, catalogue=world.catalogue)
    asked = BackfillAsked(
        name=NAME,
        since=NOON - MINUTE,
        until=NOON,
        rate=1.0,
        max_runs=1,
        allows_overlap=False,
        reason="",
        dry_run=False,
        request=None,
    )
    await operations.backfill(asked, now=world.now, encode=lambda _: b"")
    steps = BackfillSteps(database=world.database, clock=world.database.clock, wake=world.woken)
    assert await steps.step()
    assert (await world.runs_of(job_id))[0] == (-60, "blocked", "backfill")
    async with _scene(world, policy, job_id, claimed, first=NOON - MINUTE) as scene:
        yield scene


async def _add_job(world: World, policy: OverlapPolicy) -> str:
    spec = job_spec(every(MINUTE, overlap=policy))
    return await world.add_job(spec=spec, next_run_at=NOON)


async def start_first(world: World, *, capped: bool = False) -> Sequence[Claimed]:
    """The first fire becomes a run and is claimed, and a minute passes."""
    await world.scheduler.fire_due()
    claimed = await world.claim(capped=capped)
    assert len(claimed) == 1
    await world.pass_time(MINUTE)
    return claimed


@asynccontextmanager
async def _scene(
    world: World,
    policy: OverlapPolicy,
    job_id: str,
    runs: Sequence[Claimed],
    *,
    first: Instant = NOON,
) -> AsyncIterator[Scene]:
    invariants = Invariants(world=world, policy=policy, first=first)
    async with scene_of(world, job_id, runs, invariants) as scene:
        yield scene


@asynccontextmanager
async def scene_of(
    world: World, job_id: str, runs: Sequence[Claimed], invariants: Invariants
) -> AsyncIterator[Scene]:
    """The world as it is now, before every order."""
    await save_rows(world.raw)
    async with engines(world, _ACTORS_MAX) as all_engines:
        yield Scene(
            world=world,
            engines=all_engines,
            invariants=invariants,
            job_id=job_id,
            runs=runs,
        )
