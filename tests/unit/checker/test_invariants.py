"""The checker of histories finds what it is there to find: each invariant has a history that
keeps it and one that breaks it.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.checker import invariants
from tests.checker.history import Change, History, Key
from tests.checker.invariants import Budgets, Caps
from tests.checker.sink import Sink
from tests.checker.worker_log import Handled, WorkerLog, handled_as_recorded, read_worker_logs

NINE = datetime(2026, 12, 1, 9, tzinfo=UTC)
KEY = Key("a", NINE)


class Told:
    """Builds a history change by change, a transaction each unless it goes on."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def add(
        self,
        operation: str,
        state: str,
        attempt: int = 0,
        *,
        key: Key = KEY,
        place: str = "run_queue",
        goes_on: bool = False,
        **others: object,
    ) -> "Told":
        number = len(self.changes) + 1
        change = Change(
            seq=number,
            xid=self.changes[-1].xid if goes_on else str(number),
            at=NINE + timedelta(seconds=number),
            place=place,
            operation=operation,
            key=key,
            available_at=key.scheduled_at,
            state=state,
            attempt=attempt,
            attempt_open=state == "running",
            worker_id=f"worker-{attempt}" if state == "running" else None,
        )
        self.changes.append(replace(change, **others))  # type: ignore[arg-type]
        return self

    def end(self, state: str, attempt: int, place: str = "job_runs", key: Key = KEY) -> "Told":
        self.add("delete", "running", attempt, key=key)
        return self.add("insert", state, attempt, key=key, place=place, goes_on=True)

    @property
    def history(self) -> History:
        return History.of(self.changes)


def good() -> Told:
    """Fired, lost once, claimed again, succeeded."""
    told = Told().add("insert", "queued").add("update", "running", 1)
    told.add("update", "retrying", 1, attempt_open=True, lost_lease_count=1)
    return told.add("update", "running", 2).end("succeeded", 2)


def test_an_ordinary_life_breaks_nothing() -> None:
    history = good().history
    assert invariants.always(history) == []
    assert invariants.all_ended(history) == []
    assert invariants.budgets_end_runs(history) == []
    assert invariants.caps_hold(history, Caps(tenants={1: 1}, queues={1: 1}, jobs={"a": 1})) == []
    assert invariants.fires_do_not_overlap(history, ["a"]) == []
    assert invariants.everything_answered(history, {"a": {NINE}}, {}) == []
    assert [claim.attempt for claim in history.claims()] == [1, 2]


def test_a_dead_letter_may_be_replayed_and_goes_on_counting_attempts() -> None:
    told = Told().add("insert", "queued").add("update", "running", 1)
    told.add("delete", "running", 1).add(
        "insert", "dead", 1, place="dead_letters", goes_on=True, dead_reason="not_retryable"
    )
    told.add("insert", "queued", 1, replay_count=1)
    told.add("delete", "dead", 1, place="dead_letters", goes_on=True)
    history = told.add("update", "running", 2).end("succeeded", 2).history
    assert invariants.always(history) == []
    assert invariants.budgets_end_runs(history) == []


def test_a_row_that_its_own_transaction_took_back_was_never_there() -> None:
    told = good().add("insert", "queued").add("delete", "queued", goes_on=True)
    assert invariants.always(told.history) == []


@pytest.mark.parametrize(
    ("broken", "invariant"),
    [
        (good().add("insert", "queued"), invariants.one_place_per_run),
        (Told().add("insert", "queued").add("delete", "queued", goes_on=True)
         .add("insert", "queued").add("delete", "queued"), invariants.one_place_per_run),
        (good().add("insert", "cancelled", 2, place="job_runs"), invariants.legal_transitions),
        (Told().add("insert", "queued").add("update", "retrying"), invariants.legal_transitions),
        (Told().add("insert", "running", 1), invariants.legal_transitions),
        (Told().add("insert", "queued").add("update", "running", 2),
         invariants.attempts_rise_by_one),
        (Told().add("insert", "queued").add("update", "running", 1).end("succeeded", 2),
         invariants.attempts_rise_by_one),
        (good().add("insert", "queued", 0), invariants.attempts_rise_by_one),
        (Told().add("insert", "queued").add("update", "running", 1)
         .add("update", "running", 1, worker_id="another"), invariants.attempts_rise_by_one),
        (Told().add("insert", "queued").add("update", "running", 1,
                                            at=NINE - timedelta(seconds=2)),
         invariants.nothing_starts_early),
        (Told().add("insert", "queued").add("update", "running", 1), invariants.all_ended),
        (Told().add("insert", "queued").add("update", "running", 1).add("delete", "running", 1)
         .add("insert", "dead", 1, place="dead_letters", goes_on=True,
              dead_reason="max_failures", failure_count=4), invariants.budgets_end_runs),
        (Told().add("insert", "queued").add("update", "retrying", 5, lost_lease_count=5),
         invariants.budgets_end_runs),
    ],
)  # fmt: skip
def test_each_breach_is_found(broken: Told, invariant: Callable[[History], list[str]]) -> None:
    assert invariant(broken.history) != []


def test_budgets_of_a_job_are_its_own() -> None:
    told = Told().add("insert", "queued").add("update", "retrying", 1, failure_count=1)
    assert invariants.budgets_end_runs(told.history) == []
    assert invariants.budgets_end_runs(told.history, {"a": Budgets(max_failures=1)}) != []


@pytest.mark.parametrize(
    "caps",
    [
        Caps(tenants={1: 1}),
        Caps(queues={1: 1}),
        Caps(jobs={"a": 1}),
        Caps(keys_of_queues={1: 1}),
    ],
)
def test_two_open_attempts_break_a_cap_of_one(caps: Caps) -> None:
    told = Told()
    for minute in range(2):
        key = Key("a", NINE + timedelta(minutes=minute))
        told.add("insert", "queued", key=key, concurrency_key="k")
        told.add("update", "running", 1, key=key, concurrency_key="k")
    assert len(invariants.caps_hold(told.history, caps)) == 1


def test_runs_of_fires_overlap_but_ad_hoc_runs_may() -> None:
    later = Key("a", NINE + timedelta(minutes=1))
    told = good()
    told.changes = told.changes[:2]
    overlapping = told.add("insert", "queued", key=later).history
    assert invariants.fires_do_not_overlap(overlapping, ["a"]) != []
    assert invariants.fires_do_not_overlap(overlapping, ["b"]) == []
    told.changes[-1] = replace(told.changes[-1], origin="enqueue")
    assert invariants.fires_do_not_overlap(told.history, ["a"]) == []
    told.changes[-1] = replace(told.changes[-1], origin="schedule", state="blocked")
    assert invariants.fires_do_not_overlap(told.history, ["a"]) == []


def test_overtaking_by_more_than_a_minute_is_found() -> None:
    old, new = Key("a", NINE), Key("b", NINE + timedelta(seconds=61))
    told = Told().add("insert", "queued", key=old).add("insert", "queued", key=new)
    told.add("update", "running", 1, key=new)
    assert len(invariants.nobody_is_overtaken(told.history)) == 1
    assert invariants.nobody_is_overtaken(told.history, by=timedelta(seconds=62)) == []


def test_fires_without_an_answer_with_two_and_unexpected_ones_are_found() -> None:
    other = NINE + timedelta(minutes=1)
    history = good().history
    assert len(invariants.everything_answered(history, {"a": {NINE, other}}, {})) == 1
    assert len(invariants.everything_answered(history, {"a": {NINE}}, {"a": {NINE}})) == 1
    assert len(invariants.everything_answered(history, {}, {})) == 1
    assert invariants.everything_answered(history, {"a": {NINE, other}}, {"a": {other}}) == []


def test_what_workers_say_is_held_against_the_record(tmp_path: Path) -> None:
    path = tmp_path / "worker"
    log = WorkerLog(path)
    for attempt, event in ((1, "start"), (2, "start"), (2, "end")):
        log.write(run_key="a/2026-12-01T09:00:00Z", attempt=attempt, event=event)
    with path.open("a") as file:
        file.write('{"run": "a/2026')
    handled = read_worker_logs(tmp_path)
    assert [(each.key, each.attempt, each.event) for each in handled] == [
        (KEY, 1, "start"), (KEY, 2, "start"), (KEY, 2, "end"),
    ]  # fmt: skip
    history = good().history
    assert handled_as_recorded(history, handled) == []
    assert handled_as_recorded(history, handled[:2]) != []
    assert handled_as_recorded(history, [*handled, handled[0]]) != []
    unclaimed = Handled(key=KEY, attempt=3, event="start", process=1)
    assert handled_as_recorded(history, [*handled, unclaimed]) != []


def test_the_sink_takes_a_key_once_and_refuses_old_tokens() -> None:
    with Sink() as sink:
        answers = [_post(sink.url, key, token) for key, token in (("k", 2), ("k", 1), ("k", 3))]
    assert answers == ['{"done": true}', '{"done": false}', '{"done": false}']
    assert sink.effects.sent["k"] == 3
    assert sink.effects.done == {"k": 2}
    assert sink.effects.stale == [("k", 1)]


def _post(url: str, key: str, token: int) -> str:
    body = f'{{"key": "{key}", "token": {token}}}'.encode()
    with urlopen(Request(url, data=body, method="POST")) as answer:
        text: str = answer.read().decode()
        return text
