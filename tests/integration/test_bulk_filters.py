"""Filters of changes to many runs: they pick what lists show, in bounded looks."""

import json

import pytest
from fencepost_server.clock import SECOND
from fencepost_server.domain.operation import OperationAction, OperationState
from fencepost_server.domain.run import RunKey

from tests.factories import job_spec
from tests.integration.dead_letter_desk import DeadLetterDesk
from tests.integration.world import World

REPLAY, DONE = OperationAction.REPLAY, OperationState.DONE


@pytest.fixture
def desk(world: World) -> DeadLetterDesk:
    return DeadLetterDesk(world)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("state:DEAD", "abc"),
        ("kind:other", "b"),
        ("kind:ot*,send", "abc"),
        ("kind!=other", "ac"),
        ("last_failure.code:A,B", "ab"),
        ("labels.team:web", "a"),
        ("labels:team", "ac"),
        ("labels.team!=web", "bc"),
        ("job:a", "a"),
        ("job:b*", "b"),
        ("queue:default kind:send", "ac"),
        ("origin:ENQUEUE dead_reason:NOT_RETRYABLE", "abc"),
        ("ended_at<2026-12-01T12:00:01Z", "a"),
        ("ended_at>=2026-12-01T12:00:01Z created_at<2026-12-01T12:00:02Z", "b"),
        ("scheduled_at>2026-12-01T12:00:01Z", "bc"),
        ("skip_reason:MISFIRE", ""),
        ("unique_key:order-7", "c"),
        ("worker:0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42", ""),
    ],
)
async def test_filters_pick_what_lists_show(
    world: World, desk: DeadLetterDesk, text: str, wanted: str
) -> None:
    keys: dict[RunKey, str] = {}
    for name, kind, labels in (
        ("a", "send", {"team": "web"}),
        ("b", "other", {}),
        ("c", "send", {"team": "ops"}),
    ):
        [key] = await desk.dead(name=name, spec=job_spec(kind=kind), code=name.upper())
        keys[key] = name
        await world.raw.execute(
            "UPDATE fencepost.dead_letters SET labels = $1::text::jsonb, unique_key = $2 "
            "WHERE job_id = $3::uuid",
            json.dumps(labels),
            "order-7" if name == "c" else None,
            key.job_id,
        )
        await world.move(SECOND)
    seen = await desk.ask(REPLAY, text, dry_run=True)
    assert "".join(sorted(keys[record.key] for record in seen.samples)) == wanted
    assert seen.matched == len(wanted)
    ended = await desk.finish(await desk.start(REPLAY, text))
    assert ended.changed == len(wanted)
    assert {keys[key] for key in await desk.replayed()} == set(wanted)


async def test_a_sparse_filter_is_walked_in_bounded_looks(
    world: World, desk: DeadLetterDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost_server.engine.bulk_steps._SCAN_MIN", 10)
    monkeypatch.setattr("fencepost_server.engine.bulk_steps._SCAN_MAX", 10)
    await desk.dead(35, name="many")
    await world.move(SECOND)
    [last] = await desk.dead(name="last", spec=job_spec(kind="rare"))
    name = await desk.start(REPLAY, "kind:rare")
    for _ in range(3):
        assert await desk.steps.step()
        assert (await desk.get(name)).changed == 0
    ended = await desk.finish(name)
    assert (ended.state, ended.matched, ended.changed) == (DONE, 1, 1)
    assert await desk.replayed() == [last]
