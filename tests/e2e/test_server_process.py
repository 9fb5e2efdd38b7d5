"""The server as a process: signals, addresses, settings, and databases that do not fit."""

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import grpc.aio
import pytest
from fencepost.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc, run_service_pb2
from fencepost.v1 import run_service_pb2_grpc as run_grpc
from fencepost_server.store.migrate import migrate

from tests.checker import invariants
from tests.checker.history import read_history
from tests.checker.recorder import record
from tests.checker.worker_log import handled_as_recorded, read_worker_logs
from tests.e2e.fleet import Process, Server, fleet, start_worker
from tests.integration.own_postgres import OwnPostgres, own_postgres
from tests.processes import descendants, is_running

pytestmark = pytest.mark.e2e
_RUNS = 200


def server_process(database_url: str, **settings: str) -> Process:
    """A server that is not waited for."""
    return Process(
        [sys.executable, "-m", "fencepost_server"],
        FENCEPOST_DATABASE_URL=database_url,
        FENCEPOST_LISTEN=settings.pop("listen", "127.0.0.1:0"),
        FENCEPOST_LOG_FORMAT="json",
        **settings,
    )


def left(process: Process, *, seconds: float = 30) -> tuple[int, str]:
    """The exit code of a process that leaves by itself, and what it said."""
    code = process.popen.wait(seconds)
    process.stop()
    return code, "\n".join(process.lines)


@pytest.fixture
def storage(postgres_dir: Path) -> Iterator[OwnPostgres]:
    """A migrated Postgres that the test may stop and start."""
    with own_postgres(postgres_dir) as postgres:
        asyncio.run(migrate(postgres.dsn))
        yield postgres


async def query(dsn: str, sql: str) -> list[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        return list(await connection.fetch(sql))
    finally:
        await connection.close()


def test_sigterm_drains_and_leaves_nothing(database_url: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with fleet() as processes:
            server = Server(database_url)
            processes.append(server)
            pid = server.popen.pid
            children = descendants(pid)
            server.send(number)
            code, said = left(server)
            assert code == 0, said
            assert '"event": "draining"' in said
            assert '"event": "stopped"' in said
            assert "Traceback" not in said
            assert not [child for child in children if is_running(child)]
    rows = asyncio.run(
        query(
            database_url,
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'fencepost%'",
        )
    )
    assert rows[0][0] == 0


def test_a_second_signal_ends_at_once(database_url: str) -> None:
    with fleet() as processes:
        server = Server(database_url)
        processes.append(server)

        async def held_open() -> None:
            # A session that does not leave, so that the drain would take its whole grace.
            async with grpc.aio.insecure_channel(server.address) as channel:
                call: Any = run_grpc.RunServiceStub(channel).Work()
                request = run_service_pb2.WorkRequest()
                request.hello.worker_id = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"
                request.hello.min_revision = request.hello.max_revision = 1
                request.hello.slots = 1
                request.hello.subscriptions.add(queue="tenants/default/queues/default")
                await call.write(request)
                welcome = await call.read()
                assert welcome.WhichOneof("event") == "welcome"
                server.send(signal.SIGTERM)
                drain = await call.read()
                assert drain.WhichOneof("event") == "server_drain"
                assert server.popen.poll() is None
                server.send(signal.SIGTERM)
                code, said = await asyncio.to_thread(left, server, seconds=10)
                assert code == 128 + signal.SIGTERM, said
                assert "ended_at_once" in said
                call.cancel()

        asyncio.run(held_open())


def test_a_port_in_use_is_told(database_url: str) -> None:
    with fleet() as processes, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = server_process(database_url, listen=address)
        processes.append(process)
        code, said = left(process)
        assert code == 1, said
        assert f"cannot listen on {address}" in said
        assert "Traceback" not in said


def test_bad_settings_are_told() -> None:
    with fleet() as processes:
        process = server_process("mysql://x", FENCEPOST_CLAIM_BATCH_MAX="many")
        processes.append(process)
        code, said = left(process)
        assert code == 2, said
        assert "FENCEPOST_DATABASE_URL must begin with postgresql://" in said
        assert "FENCEPOST_CLAIM_BATCH_MAX=many" in said
        assert "Traceback" not in said


def test_databases_that_do_not_fit_are_told(database_url: str, empty_database_url: str) -> None:
    asyncio.run(
        query(
            database_url,
            "INSERT INTO fencepost.schema_migrations VALUES (9999, '9999_later', 'x', now())",
        )
    )
    nowhere = empty_database_url.rpartition("/")[0] + "/fencepost_nowhere"
    for url, words in (
        (empty_database_url, "run `fencepost migrate` first"),
        (database_url, "newer than this version knows"),
        (nowhere, 'database "fencepost_nowhere" does not exist'),
    ):
        with fleet() as processes:
            process = server_process(url)
            processes.append(process)
            code, said = left(process)
            assert code == 1, said
            assert words in said
            assert "Traceback" not in said


def test_a_server_waits_for_its_database(storage: OwnPostgres) -> None:
    storage.stop()
    with fleet() as processes:
        impatient = server_process(storage.dsn)
        processes.append(impatient)
        impatient.wait_for("waiting_for_storage")
        impatient.send(signal.SIGTERM)
        code, said = left(impatient)
        assert code == 0, said
        patient = server_process(storage.dsn)
        processes.append(patient)
        patient.wait_for("waiting_for_storage")
        storage.start()
        patient.wait_for('"event": "serving"')
        assert patient.stop() == 0


def test_servers_share_a_queue_and_a_killed_ones_runs_are_finished(
    database_url: str, tmp_path: Path
) -> None:
    asyncio.run(record(database_url))
    asyncio.run(
        query(
            database_url,
            "UPDATE fencepost.shard_state SET heartbeats_at = now(), no_reap_until = now()",
        )
    )
    with fleet() as processes:
        settings = {"FENCEPOST_LEASE_TTL_S": "15", "FENCEPOST_HEARTBEAT_INTERVAL_S": "5"}
        servers = [Server(database_url, **settings) for _ in range(2)]
        processes += servers
        workers = [
            start_worker(each.address, ["default"], tmp_path / str(number))
            for number, each in enumerate(servers)
        ]
        processes += workers

        async def work() -> None:
            async with grpc.aio.insecure_channel(servers[0].address) as channel:
                jobs = job_service_pb2_grpc.JobServiceStub(channel)
                await jobs.CreateJob(
                    job_service_pb2.CreateJobRequest(
                        parent="tenants/default",
                        job_name="shared",
                        job=job_pb2.Job(target=job_pb2.Target(kind="slow")),
                    )
                )
                runs = run_grpc.RunServiceStub(channel)
                request = run_service_pb2.EnqueueRunRequest(job="tenants/default/jobs/shared")
                await runs.BatchEnqueueRuns(
                    run_service_pb2.BatchEnqueueRunsRequest(
                        parent="tenants/default", requests=[request] * _RUNS
                    )
                )

        asyncio.run(work())
        asyncio.run(
            _until(
                database_url,
                "SELECT count(DISTINCT worker_id) FROM fencepost.run_queue WHERE state = 'running'",
                len(workers),
            )
        )
        servers[1].send(signal.SIGKILL)
        workers[1].send(signal.SIGKILL)
        asyncio.run(_until(database_url, "SELECT count(*) FROM fencepost.job_runs", _RUNS))
        by_worker = asyncio.run(
            query(
                database_url,
                "SELECT state::text, count(*) FROM fencepost.job_runs GROUP BY 1",
            )
        )
        assert [tuple(row) for row in by_worker] == [("succeeded", _RUNS)]
        assert workers[0].stop() == 0
        assert servers[0].stop() == 0
    history = asyncio.run(read_history(database_url))
    assert len(history.steps) == _RUNS
    assert invariants.always(history) == []
    assert invariants.all_ended(history) == []
    assert handled_as_recorded(history, read_worker_logs(tmp_path)) == []
    assert max(claim.attempt for claim in history.claims()) > 1, "the kill took nothing away"


async def _until(dsn: str, sql: str, want: int) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 90
    while True:
        rows = await query(dsn, sql)
        if rows[0][0] == want:
            return
        assert loop.time() < deadline, f"{rows[0][0]} instead of {want}: {sql}"
        await asyncio.sleep(0.1)
