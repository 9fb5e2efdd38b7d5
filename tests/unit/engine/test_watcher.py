"""What one watcher has still to be told: merged by key, bounded, and never passed by a cursor."""

from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.engine.watcher import PENDING_MAX, Change, Position, Watcher

from tests.factories import JOB_ID, NOON
from tests.unit.api.test_wire_run import record


def at(end: int) -> Position:
    return Position(epoch=1, low=end, end=end)


def key(number: int) -> RunKey:
    return RunKey(JOB_ID, NOON + number)


def changes(*numbers: int, changed_at: int = NOON) -> list[Change]:
    return [Change(key(number), changed_at) for number in numbers]


def watcher() -> Watcher:
    return Watcher(tenant_id=1, job_id=None, position=at(0))


def test_a_position_reads_and_writes_what_postgres_does() -> None:
    position = Position.of("10:15:10,12", epoch=3)
    assert position == Position(epoch=3, low=10, end=15, open=(10, 12))
    assert position.snapshot == "10:15:10,12"
    assert Position.of("7:7:", epoch=1) == at(7)
    assert position.compact() == position
    many = Position(epoch=1, low=5, end=100, open=tuple(range(5, 60)))
    assert many.compact() == at(5), "no transaction is passed, some are told again"


def test_a_cursor_moves_only_when_all_of_a_look_was_taken() -> None:
    mine = watcher()
    mine.offer(changes(1, 2, 3), until=at(5))
    first = mine.take(2)
    assert [change.key for change in first.changes] == [key(1), key(2)]
    assert mine.position == at(0)
    assert mine.woken.is_set()
    assert [change.key for change in mine.take(2).changes] == [key(3)]
    assert mine.position == at(5)
    assert not mine.woken.is_set()
    mine.offer([], until=at(9))
    assert mine.position == at(9)


def test_a_look_that_brings_nothing_does_not_pass_what_waits() -> None:
    mine = watcher()
    mine.offer(changes(1), until=at(5))
    mine.offer([], until=at(8))
    assert mine.position == at(0)
    mine.take(1)
    assert mine.position == at(8)


def test_a_key_that_waits_is_told_once_with_its_newest_change() -> None:
    mine = watcher()
    mine.offer(changes(1, 2), until=at(5))
    mine.offer(changes(1, changed_at=NOON + 9), until=at(6))
    taken = mine.take(10)
    assert list(taken.changes) == [Change(key(1), NOON + 9), Change(key(2), NOON)]
    assert taken.until == mine.position == at(6)


def test_a_change_while_it_is_being_told_is_told_again() -> None:
    mine = watcher()
    mine.offer(changes(1), until=at(5))
    mine.take(1)
    mine.offer(changes(1), until=at(6))
    assert [change.key for change in mine.take(1).changes] == [key(1)]


def test_what_could_not_be_told_comes_first_again() -> None:
    mine = watcher()
    mine.offer(changes(1, 2), until=at(5))
    taken = mine.take(10)
    mine.offer(changes(2, 3), until=at(6))
    mine.put_back(taken)
    assert mine.position == at(0)
    again = mine.take(10)
    assert [change.key for change in again.changes] == [key(1), key(2), key(3)]
    assert mine.position == at(6)
    mine.lose(until=at(7))
    mine.put_back(mine.take(10))
    assert mine.take(1).gap, "a gap that was not told is not forgotten"


def test_more_than_it_may_hold_is_a_gap() -> None:
    mine = watcher()
    mine.offer(changes(*range(PENDING_MAX)), until=at(5))
    assert mine.pending == PENDING_MAX
    mine.offer(changes(PENDING_MAX), until=at(6))
    assert mine.pending == 0
    taken = mine.take(10)
    assert (taken.gap, list(taken.changes), mine.position) == (True, [], at(6))
    assert not mine.take(10).gap


def test_only_what_looks_different_is_news() -> None:
    mine = watcher()
    assert mine.is_news(record(state=RunState.RUNNING, attempt=1))
    assert not mine.is_news(record(state=RunState.RUNNING, attempt=1, priority=3))
    assert mine.is_news(record(state=RunState.RUNNING, attempt=1, cancel_requested=True))
    assert mine.is_news(record(state=RunState.RUNNING, attempt=2))
    mine.lose(until=at(1))
    assert mine.is_news(record(state=RunState.RUNNING, attempt=2)), "after a gap all is news"
