"""What a session leaves behind is given back, also when its rows are locked just then."""

import asyncio
from collections.abc import Sequence

import asyncpg
import pytest
from fencepost_server.api.settlement import Settlement
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.verdicts import Judged, Report, Verdict
from fencepost_server.policy.outcome import Released

from tests.integration.running_server import until
from tests.integration.world import World


async def _lock(world: World, key: RunKey) -> "asyncpg.Connection[asyncpg.Record]":
    holder = await asyncpg.connect(world.dsn)
    await holder.execute("BEGIN")
    await holder.execute("SELECT FROM fencepost.run_queue WHERE job_id = $1 FOR UPDATE", key.job_id)
    return holder


@pytest.mark.parametrize("way", ["undelivered", "abandoned"])
async def test_a_locked_run_is_given_back_once_its_row_is_free(
    world: World, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await world.started()
    judged: list[Sequence[Judged]] = []
    report_once = world.lifecycle.report

    async def report(reports: Sequence[Report]) -> Sequence[Judged]:
        judged.append(await report_once(reports))
        return judged[-1]

    monkeypatch.setattr(world.lifecycle, "report", report)

    async def was_refused() -> bool:
        return len(judged) > 1

    settle = Settlement(lifecycle=world.lifecycle)
    holder = await _lock(world, run.key)
    try:
        if way == "undelivered":
            settle.undelivered([(run.key, 1)])
            settled = asyncio.create_task(settle.finish())
        else:
            abandoned = Report(key=run.key, attempt=1, ending=Released())
            settled = asyncio.create_task(settle.store([abandoned]))
        await until(was_refused, what="the report was tried again")
        assert {each.verdict for [each] in judged} == {Verdict.RETRY}
        await holder.execute("ROLLBACK")
    finally:
        await holder.close()
    await settled
    row = await world.live(run.key)
    assert (row["state"], row["attempt_open"], row["lost_lease_count"]) == ("queued", False, 0)
    outcome = "undelivered" if way == "undelivered" else "released"
    assert await world.attempts_of(run.key) == [(1, outcome, False)]


async def test_a_run_that_stays_locked_is_left_to_its_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost_server.engine.last_reports._TRIES", 2)
    run = await world.started()
    settle = Settlement(lifecycle=world.lifecycle)
    holder = await _lock(world, run.key)
    try:
        settle.undelivered([(run.key, 1)])
        await settle.finish()
    finally:
        await holder.close()

    assert (await world.live(run.key))["state"] == "running"
    await world.lose_lease()
    assert (await world.live(run.key))["lost_lease_count"] == 1


async def test_a_run_that_ended_meanwhile_is_not_tried_again(world: World) -> None:
    run = await world.started()
    await world.report(run)
    settle = Settlement(lifecycle=world.lifecycle)
    settle.undelivered([(run.key, 1)])
    await settle.finish()
    assert (await world.ended(run.key))["state"] == "succeeded"
