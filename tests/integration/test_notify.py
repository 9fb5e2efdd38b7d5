"""Hints between processes: they arrive, coalesced, and survive a broken connection."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import asyncpg
from fencepost_server.clock import MILLISECOND, Instant
from fencepost_server.domain.run import Lane
from fencepost_server.engine.wake import JOBS_CHANNEL, LANES_CHANNEL, Wakes
from fencepost_server.store.notify import Notifier


class Process:
    """One process's end of the wire: what it hears, and an event for it."""

    def __init__(self) -> None:
        self.wakes = Wakes()
        self.wakes.jobs_woken.append(self._jobs)
        self.wakes.lanes_woken.append(self._lanes)
        self.heard: list[str] = []
        self.lanes: set[Lane] = set()
        self.lane_calls: list[tuple[set[Lane], Instant]] = []
        self._changed = asyncio.Event()

    def received(self, channel: str, payload: str) -> None:
        self.heard.append(payload)
        self.wakes.heard(channel, payload)
        self._changed.set()

    def _jobs(self) -> None:
        self._changed.set()

    def _lanes(self, lanes: Iterable[Lane], at: Instant) -> None:
        known = set(lanes)
        self.lanes |= known
        self.lane_calls.append((known, at))
        self._changed.set()

    async def until_heard(self, count: int = 1) -> None:
        async with asyncio.timeout(20):
            while len(self.heard) < count:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def _processes(dsn: str, count: int = 2) -> AsyncIterator[list[Process]]:
    processes = [Process() for _ in range(count)]
    notifiers = []
    for process in processes:
        notifier = Notifier(
            dsn,
            channels=(JOBS_CHANNEL, LANES_CHANNEL),
            received=process.received,
            interval=10 * MILLISECOND,
        )
        process.wakes.notifier = await notifier.__aenter__()
        notifiers.append(notifier)
    try:
        await _until_listening(dsn, count)
        yield processes
    finally:
        for notifier in notifiers:
            await notifier.__aexit__(None, None, None)


async def _until_listening(dsn: str, count: int) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        async with asyncio.timeout(20):
            while True:
                # The last statement of a notifier at rest is its LISTEN to the last channel.
                listening = await connection.fetchval(
                    "SELECT count(*) FROM pg_stat_activity WHERE application_name = "
                    "'fencepost-notify' AND datname = current_database() AND state = 'idle' "
                    "AND query LIKE $1",
                    f"%{LANES_CHANNEL}%",
                )
                if listening >= count:
                    return
    finally:
        await connection.close()


async def test_hints_reach_the_other_process_and_not_the_sender_again(database_url: str) -> None:
    async with _processes(database_url) as (one, two):
        lanes = {Lane(1, 2, 0), Lane(1, 3, 9)}
        one.wakes.lanes(lanes)
        await two.until_heard()
        assert two.lanes == lanes
        assert one.heard == []
        assert one.lane_calls == [(lanes, 0)]
        two.wakes.jobs([7, 8])
        await one.until_heard()
        assert one.heard == ["7 8"]


async def test_hints_of_a_moment_are_one_notification(database_url: str) -> None:
    async with _processes(database_url) as (one, two):
        for kind in range(500):
            one.wakes.lanes([Lane(1, kind % 5, 0)])
        await two.until_heard()
        one.wakes.jobs([1])
        await two.until_heard(2)
        assert two.heard[0].split() == [f"1:{kind}:0" for kind in range(5)]


async def test_a_hint_too_long_for_postgres_means_look_everywhere(database_url: str) -> None:
    async with _processes(database_url) as (one, two):
        one.wakes.lanes([Lane(1, kind, 0) for kind in range(5000)])
        await two.until_heard()
        assert two.heard == [""]
        assert two.lane_calls == [(set(), 0)]


async def test_what_is_ready_later_is_told_within_the_process_only(database_url: str) -> None:
    async with _processes(database_url) as (one, two):
        one.wakes.lanes([Lane(1, 1, 0)], at=5)
        one.wakes.lanes([Lane(1, 2, 0)])
        await two.until_heard()
        assert two.lanes == {Lane(1, 2, 0)}
        assert one.lane_calls == [({Lane(1, 1, 0)}, 5), ({Lane(1, 2, 0)}, 0)]


async def test_no_lanes_and_no_partitions_are_no_hint(database_url: str) -> None:
    async with _processes(database_url) as (one, two):
        one.wakes.lanes([])
        one.wakes.jobs([])
        one.wakes.jobs([5])
        await two.until_heard()
        assert two.heard == ["5"]


async def test_hints_flow_again_after_the_connection_was_cut(database_url: str) -> None:
    async with _processes(database_url) as (one, two):
        connection = await asyncpg.connect(database_url)
        try:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'fencepost-notify' AND datname = current_database()"
            )
        finally:
            await connection.close()
        await _until_listening(database_url, 2)
        one.wakes.jobs([3])
        await two.until_heard()
        assert two.heard == ["3"]
