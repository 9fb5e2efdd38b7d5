"""A watcher whose server loses its Postgres for a while: the stream stays and goes on."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
from fencepost_server.domain.run import RunKey, RunState
from fencepost_server.store.migrate import migrate

from tests.checker import invariants
from tests.checker.history import read_history
from tests.checker.recorder import record
from tests.integration.own_postgres import own_postgres
from tests.integration.running_server import running, until
from tests.integration.test_watch_runs import watching


async def test_a_stream_outlives_an_outage_of_the_database(postgres_dir: Path) -> None:
    with own_postgres(postgres_dir) as storage:
        await migrate(storage.dsn)
        await record(storage.dsn)
        async with running(storage.dsn) as server:
            await server.make_job()
            async with watching(server.runs) as watch:
                [before] = await server.enqueue()
                await watch.state(before, RunState.QUEUED)
                await asyncio.to_thread(storage.stop)
                await asyncio.to_thread(storage.start)
                enqueued: list[RunKey] = []

                async def is_back() -> bool:
                    try:
                        enqueued.extend(await server.enqueue())
                    except grpc.aio.AioRpcError as error:
                        if error.code() is not grpc.StatusCode.UNAVAILABLE:
                            raise
                    return bool(enqueued)

                await until(is_back, what="the database is back")
                after = (enqueued[0], RunState.QUEUED)
                await watch.until(lambda each: after in each.seen or each.gaps > 0)
        assert invariants.always(await read_history(storage.dsn)) == []
