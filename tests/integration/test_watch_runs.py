"""WatchRuns over sockets: two servers on one database, filters, cursors, drains, slow readers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from fencepost.v1 import admin_service_pb2, run_pb2, run_service_pb2, worker_pb2
from fencepost_server.api import watch_calls
from fencepost_server.clock import MILLISECOND
from fencepost_server.domain.run import RunKey, RunState

from tests.integration.definition_server import Refusal, read_refusal
from tests.integration.run_server import serving
from tests.integration.running_server import RunningServer, key_of, running, success, until
from tests.integration.worker_session import WAIT_S

TENANT = "tenants/default"


class Watch:
    """One stream as its reader sees it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.cursor = ""
        self.gaps = 0
        self.seen: list[tuple[RunKey, RunState]] = []

    async def message(self) -> run_service_pb2.WatchRunsResponse:
        """The next message, told or empty."""
        read = await asyncio.wait_for(self.call.read(), WAIT_S)
        assert read is not grpc.aio.EOF, "the stream ended"
        message: run_service_pb2.WatchRunsResponse = read
        assert len(message.events) <= 256
        assert 0 < len(message.cursor) <= 512
        self.cursor = message.cursor
        self.gaps += message.gap
        self.seen += [
            (key_of(event.run.key), RunState(event.run.state)) for event in message.events
        ]
        return message

    async def until(self, is_so: Callable[["Watch"], bool]) -> None:
        """Read until what was seen is enough. Bounded as a whole: messages without events come
        for ever.
        """
        async with asyncio.timeout(2 * WAIT_S):
            while not is_so(self):
                await self.message()

    async def state(self, key: RunKey, state: RunState) -> None:
        """Read until the run is seen in a state."""
        await self.until(lambda watch: (key, state) in watch.seen)

    def states(self, key: RunKey) -> list[RunState]:
        """The states of a run in the order they were told."""
        return [state for seen, state in self.seen if seen == key]


@asynccontextmanager
async def watching(runs: Any, **values: Any) -> AsyncIterator[Watch]:
    """A watch of the default tenant whose first message was read."""
    call = runs.WatchRuns(run_service_pb2.WatchRunsRequest(**({"parent": TENANT} | values)))
    try:
        watch = Watch(call)
        await watch.message()
        yield watch
    finally:
        call.cancel()


async def refused(runs: Any, **values: Any) -> Refusal:
    """How a watch is refused before its first message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with watching(runs, **values):
            pass
    return read_refusal(caught.value)


async def claim(server: RunningServer) -> worker_pb2.Assignment:
    """One run, as a worker that polls takes it."""
    answer = await server.runs.ClaimRuns(
        run_service_pb2.ClaimRunsRequest(
            subscriptions=[worker_pb2.QueueSubscription(queue=f"{TENANT}/queues/default")],
            max_runs=1,
        )
    )
    run: worker_pb2.Assignment
    (run,) = answer.runs
    return run


async def complete(server: RunningServer, run: worker_pb2.Assignment) -> None:
    await server.runs.CompleteRun(run_service_pb2.CompleteRunRequest(completion=success(run)))


async def test_a_watcher_hears_in_order_what_another_server_does(database_url: str) -> None:
    async with running(database_url) as one, running(database_url) as other:
        await one.make_job()
        async with watching(other.runs) as watch:
            [key] = await one.enqueue()
            await watch.state(key, RunState.QUEUED)
            run = await claim(one)
            await watch.state(key, RunState.RUNNING)
            await complete(one, run)
            await watch.state(key, RunState.SUCCEEDED)
            assert watch.states(key) == [RunState.QUEUED, RunState.RUNNING, RunState.SUCCEEDED]
            assert watch.gaps == 0


async def test_an_event_holds_the_run_as_a_list_would_show_it(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job(labels={"team": "web"})
        async with watching(server.runs) as watch:
            [key] = await server.enqueue()
            call, watch.seen = watch.call, []
            message = await asyncio.wait_for(call.read(), WAIT_S)
        [event] = message.events
        listed = await server.runs.ListRuns(run_service_pb2.ListRunsRequest(parent=TENANT))
        assert event.run == listed.runs[0]
        assert key_of(event.run.key) == key
        assert event.changed_at == event.run.created_at


async def test_parent_and_filter_say_what_is_told(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job("mail", labels={"team": "web"})
        await server.make_job("sms")
        async with (
            watching(server.runs, parent=f"{TENANT}/jobs/sms") as of_job,
            watching(server.runs, filter="state:SUCCEEDED labels.team:web") as filtered,
            watching(server.runs, parent=f"{TENANT}/jobs/-", filter="job:mail") as of_name,
        ):
            [mail] = await server.enqueue()
            await complete(server, await claim(server))
            [sms] = await server.enqueue(job="sms")
            await of_job.state(sms, RunState.QUEUED)
            await filtered.state(mail, RunState.SUCCEEDED)
            await of_name.state(mail, RunState.SUCCEEDED)
            assert {key for key, _ in of_job.seen} == {sms}
            assert filtered.seen == [(mail, RunState.SUCCEEDED)]
            assert {key for key, _ in of_name.seen} == {mail}


async def test_runs_of_other_tenants_are_never_told(database_url: str) -> None:
    async with running(database_url) as server:
        await server.admin.CreateTenant(admin_service_pb2.CreateTenantRequest(tenant_name="acme"))
        await server.make_job()
        async with watching(server.runs, parent="tenants/acme") as foreign:
            async with watching(server.runs) as watch:
                [key] = await server.enqueue()
                await watch.state(key, RunState.QUEUED)
            # Both streams are fed by the same look.
            assert foreign.seen == []
            told = asyncio.ensure_future(foreign.call.read())
            await server.enqueue()
            async with watching(server.runs, cursor=watch.cursor) as again:
                await again.until(lambda each: bool(each.seen))
            assert not told.done()
            told.cancel()


async def test_a_stream_goes_on_elsewhere_when_its_server_drains(database_url: str) -> None:
    async with running(database_url) as other:
        await other.make_job()
        async with running(database_url) as one, watching(one.runs) as watch:
            [first] = await other.enqueue()
            await watch.state(first, RunState.QUEUED)
            one.stopping.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.until(lambda _: False)
            refusal = read_refusal(caught.value)
            assert (refusal.code.name, refusal.reason) == ("UNAVAILABLE", "SERVER_DRAINING")
        run = await claim(other)
        [second] = await other.enqueue()
        async with watching(other.runs, cursor=watch.cursor) as again:
            await again.state(second, RunState.QUEUED)
            await again.state(first, RunState.RUNNING)
            assert again.gaps == 0
            await complete(other, run)
            await again.state(first, RunState.SUCCEEDED)


async def test_bad_requests_name_what_is_wrong(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        async with watching(server.runs, filter="state:DEAD") as watch:
            cursor = watch.cursor
        other_filter = await refused(server.runs, cursor=cursor)
        assert (other_filter.code.name, other_filter.reason) == (
            "INVALID_ARGUMENT",
            "INVALID_PAGE_TOKEN",
        )
        assert other_filter.fields == ["cursor"]
        made_up = await refused(server.runs, cursor="bm9uZQ")
        assert (made_up.reason, made_up.fields) == ("INVALID_PAGE_TOKEN", ["cursor"])
        assert (await refused(server.runs, parent="")).fields == ["parent"]
        assert (await refused(server.runs, parent="tenants/none")).reason == "TENANT_NOT_FOUND"
        no_job = await refused(server.runs, parent=f"{TENANT}/jobs/none")
        assert (no_job.code.name, no_job.reason) == ("NOT_FOUND", "JOB_NOT_FOUND")
        bad = await refused(server.runs, filter="colour:red")
        assert (bad.reason, bad.fields) == ("FILTER_NOT_SUPPORTED", ["filter"])
        async with watching(server.runs, filter="state:DEAD", cursor=cursor) as again:
            assert again.gaps == 0


async def test_a_slow_reader_hears_the_newest_state_of_every_run(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job(labels={f"label{n}": "x" * 60 for n in range(20)})
        call = server.runs.WatchRuns(run_service_pb2.WatchRunsRequest(parent=TENANT))
        watch = Watch(call)
        await watch.message()
        keys = [key for _ in range(3) for key in await server.enqueue(1000)]
        # Nothing is read while all of them move on: 6 MB would be more than the stream holds.
        async with server.session(credit=3000) as session:
            runs = await session.runs(3000)
            for start in range(0, 3000, 500):
                await session.complete(*map(success, runs[start : start + 500]))
        await watch.until(
            lambda each: (
                {key for key, state in each.seen if state is RunState.SUCCEEDED} == set(keys)
            )
        )
        for key in keys[::100]:
            told = watch.states(key)
            assert told == sorted(told)
        assert watch.gaps == 0
        call.cancel()


async def test_a_reader_that_leaves_is_not_watched_for(database_url: str) -> None:
    async with serving(database_url) as server:
        async with watching(server.runs):
            assert server.watches.count == 1
        await until(lambda: _is_idle(server.watches), what="no watcher is left")


async def _is_idle(watches: Any) -> bool:
    return bool(watches.count == 0)


async def test_a_stream_with_nothing_to_tell_is_not_silent(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_calls, "_IDLE", 50 * MILLISECOND)
    async with running(database_url) as server, watching(server.runs) as watch:
        first = watch.cursor
        # Transactions end all the time, so the cursor moves on without any event.
        await watch.until(lambda each: each.cursor != first)
        assert watch.seen == []
        assert watch.gaps == 0


async def test_a_cancel_request_is_an_event_of_its_own(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        [key] = await server.enqueue()
        run = await claim(server)
        async with watching(server.runs) as watch:
            name = (
                (await server.runs.ListRuns(run_service_pb2.ListRunsRequest(parent=TENANT)))
                .runs[0]
                .name
            )
            await server.runs.CancelRun(run_service_pb2.CancelRunRequest(name=name))
            message = await asyncio.wait_for(watch.call.read(), WAIT_S)
            [event] = message.events
            assert event.run.cancel_requested
            assert event.run.state == run_pb2.RUN_STATE_RUNNING
            await complete(server, run)
            await watch.state(key, RunState.SUCCEEDED)
