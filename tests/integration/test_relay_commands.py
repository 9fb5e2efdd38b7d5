"""`fencepost relay` as a process: one run for each committed row and none for any other, through
kills, doubles, poisoned rows and servers that are away."""

import asyncio
import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from fencepost.v1 import run_service_pb2

from tests.checker import invariants
from tests.checker.history import read_history
from tests.checker.recorder import record
from tests.integration.outbox_app import (
    App,
    an_app,
    holding_answers,
    insert,
    kill,
    relays,
    start_relay,
)
from tests.integration.own_postgres import own_postgres
from tests.integration.running_server import RunningServer, running, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def payloads(server: RunningServer) -> list[int]:
    """Of all runs that wait, in order."""
    found: list[int] = []
    token = ""
    while True:
        page = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(
                parent="tenants/default",
                page_size=50,
                page_token=token,
                view=run_service_pb2.RUN_VIEW_FULL,
            )
        )
        found += [json.loads(run.payload.json) for run in page.runs]
        token = page.next_page_token
        if not token:
            return sorted(found)


async def test_a_row_is_a_run_with_all_that_it_says(
    database_url: str, empty_database_url: str
) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    text = '{"b": 1.0,  "a": "\\u0000", "n": 1e400}'
    async with running(database_url) as server, an_app(empty_database_url) as app:
        await server.make_job("mail", labels={"of": "job"})
        async with app.connection() as connection:
            transaction = connection.transaction()
            await transaction.start()
            await insert(connection, "mail", payload='"rolled back"')
            await transaction.rollback()
        await app.want(
            payload=text,
            labels='{"team": "web"}',
            run_at=due,
            priority=7,
            concurrency_key="acme",
            traceparent=f"00-{TRACE}-00f067aa0ba902b7-01",
        )
        with relays() as started:
            started.append(start_relay(app, server.address))
            await app.until_empty()
            code = await asyncio.to_thread(started[0].stop)
        page = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(
                parent="tenants/default", view=run_service_pb2.RUN_VIEW_FULL
            )
        )
    assert code == 0
    [run] = page.runs
    assert run.payload.json == text
    assert dict(run.labels) == {"of": "job", "team": "web"}
    assert run.available_at.ToDatetime(tzinfo=UTC).replace(microsecond=0) == due
    assert (run.priority, run.concurrency_key) == (7, "acme")
    assert "relay_stopped" in started[0].lines[-1]


async def test_a_relay_killed_between_answer_and_delete_makes_no_second_run(
    database_url: str, empty_database_url: str
) -> None:
    async with running(database_url) as server, an_app(empty_database_url) as app:
        await server.make_job("mail")
        await app.want_many(700)
        async with holding_answers(server.runs) as (address, held):
            with relays() as started:
                started.append(start_relay(app, address))
                await asyncio.wait_for(held.carried_out.wait(), 60)
                await kill(started[0])
        made = len(await payloads(server))
        assert (made, await app.left()) == (500, 700)
        with relays() as started:
            started.append(start_relay(app, server.address))
            await app.until_empty()
        assert await payloads(server) == list(range(700))


async def test_two_relays_share_an_outbox_and_kills_double_nothing(
    database_url: str, empty_database_url: str
) -> None:
    committed: list[int] = []
    enough = asyncio.Event()

    async def write(app: App, first: int) -> None:
        async with app.connection() as connection:
            for number in range(first, first + 100_000):
                transaction = connection.transaction()
                await transaction.start()
                await insert(connection, "mail", labels=json.dumps({"n": str(number)}))
                if number % 3:
                    await transaction.commit()
                    committed.append(number)
                else:
                    await transaction.rollback()
                if enough.is_set():
                    return

    await record(database_url)
    async with running(database_url) as server, an_app(empty_database_url) as app:
        await server.make_job("mail")

        async def made() -> int:
            rows = await server.query("SELECT count(*) FROM fencepost.run_queue")
            count: int = rows[0][0]
            return count

        with relays() as started:
            started += [start_relay(app, server.address, "--batch", "20") for _ in range(2)]
            writers = [
                asyncio.create_task(write(app, first)) for first in (0, 1_000_000, 2_000_000)
            ]
            for _ in range(3):
                before = await made()

                async def more(before: int = before) -> bool:
                    return await made() >= before + 50

                await until(more, what="50 more runs", seconds=60)
                await kill(started.pop(0))
                started.append(start_relay(app, server.address, "--batch", "20"))
            enough.set()
            await asyncio.gather(*writers)
            await app.until_empty()
        found = await server.query("SELECT labels->>'n' FROM fencepost.run_queue")
    assert sorted(int(row[0]) for row in found) == sorted(committed)
    assert invariants.always(await read_history(database_url)) == []
    assert len(committed) >= 150


async def test_rows_that_can_never_be_sent_stand_aside_with_the_reason(
    database_url: str, empty_database_url: str
) -> None:
    async with running(database_url) as server, an_app(empty_database_url) as app:
        await server.make_job("mail")
        await app.query(
            "ALTER TABLE fencepost_outbox DROP CONSTRAINT fencepost_outbox_run_at_check"
        )
        [endless] = await app.query(
            "INSERT INTO fencepost_outbox (job, run_at) VALUES ('mail', 'infinity')"
            " RETURNING id::text AS id"
        )
        bad = {
            await app.want(job="later", payload="7"): "JOB_NOT_FOUND",
            await app.want(tenant="nobody"): "TENANT_NOT_FOUND",
            await app.want(tenant="a/b"): "parent",
            await app.want(labels='{"n": 1}'): "labels.n",
            endless["id"]: "run_at",
            await app.want(labels=json.dumps({f"k{n}": "v" for n in range(40)})): "labels",
        }
        await app.want_many(3)
        with relays() as started:
            started.append(start_relay(app, server.address))
            await app.until_empty()
            failed = await app.query(
                "SELECT id::text, failure FROM fencepost_outbox WHERE failed_at IS NOT NULL"
            )
            found = {row["id"]: row["failure"] for row in failed}
            assert found.keys() == bad.keys()
            assert {row_id for row_id, text in bad.items() if text not in found[row_id]} == set()
            assert await payloads(server) == [0, 1, 2]
            # What a person does once the job is there.
            await server.make_job("later")
            await app.query(
                "UPDATE fencepost_outbox SET failed_at = NULL, next_try_at = now()"
                " WHERE job = 'later'"
            )
            await app.until_empty()
        assert await payloads(server) == [0, 1, 2, 7]
        assert any("outbox_row_failed" in line for line in started[0].lines)


async def test_rows_wait_for_a_server_that_is_away(
    database_url: str, empty_database_url: str
) -> None:
    async with an_app(empty_database_url) as app:
        with relays() as started:
            async with running(database_url) as server:
                await server.make_job("mail")
                address = server.address
            await app.want_many(5)
            started.append(start_relay(app, address))
            await asyncio.to_thread(started[0].wait_for, "relay_waiting")
            assert await app.left() == 5
            async with running(database_url, listen=address) as server:
                await app.until_empty()
                assert await payloads(server) == [0, 1, 2, 3, 4]
                await asyncio.to_thread(started[0].wait_for, "relay_goes_on")


@pytest.mark.timeout(180)
async def test_a_relay_outlasts_a_restart_of_the_applications_database(
    database_url: str, postgres_dir: Path
) -> None:
    with own_postgres(postgres_dir) as postgres, relays() as started:
        async with running(database_url) as server, an_app(postgres.dsn) as app:
            await server.make_job("mail")
            await app.want_many(2)
            started.append(start_relay(app, server.address))
            await app.until_empty()
            await asyncio.to_thread(postgres.stop)
            await asyncio.to_thread(started[0].wait_for, "relay_waiting")
            await asyncio.to_thread(postgres.start)
            await app.want(payload="2")
            await app.until_empty()
            assert await payloads(server) == [0, 1, 2]


async def test_once_ends_when_nothing_is_due(database_url: str, empty_database_url: str) -> None:
    async with running(database_url) as server, an_app(empty_database_url) as app:
        await server.make_job("mail")
        await app.want_many(3)
        with relays() as started:
            for expected, line in ((0, "3 sent · 0 failed"), (0, "0 sent · 0 failed")):
                process = start_relay(app, server.address, "--once")
                started.append(process)
                assert await asyncio.to_thread(process.popen.wait, 60) == expected
                await asyncio.to_thread(process.wait_for, line)
            await app.want(job="none")
            refused = start_relay(app, server.address, "--once")
            started.append(refused)
            assert await asyncio.to_thread(refused.popen.wait, 60) == 1
            away = start_relay(app, "127.0.0.1:1", "--once")
            await app.want()
            started.append(away)
            assert await asyncio.to_thread(away.popen.wait, 60) == 6


async def test_a_missing_table_is_told_and_ends_it(empty_database_url: str) -> None:
    with relays() as started:
        process = start_relay(App(dsn=empty_database_url), "127.0.0.1:1")
        started.append(process)
        assert await asyncio.to_thread(process.popen.wait, 60) == 1
        line = await asyncio.to_thread(process.wait_for, "why:")
        assert "fencepost_outbox" in line
        await asyncio.to_thread(process.wait_for, "fencepost relay --print-ddl")


async def test_the_table_refuses_what_the_server_would(empty_database_url: str) -> None:
    async with an_app(empty_database_url) as app:
        for values in (
            {"payload": json.dumps("x" * 262_143)},
            {"labels": "[]"},
            {"priority": 10},
            {"concurrency_key": "k" * 129},
            {"unique_key": ""},
        ):
            with pytest.raises(asyncpg.CheckViolationError):
                await app.want(**values)
        with pytest.raises(asyncpg.InvalidTextRepresentationError):
            await app.want(payload="{")
        assert await app.left() == 0


async def test_the_shop_of_the_docs_gets_its_runs(
    database_url: str, empty_database_url: str
) -> None:
    async with running(database_url) as server, an_app(empty_database_url) as app:
        await server.make_job("confirm-order")
        shop = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).parents[2] / "examples" / "outbox_shop.py"),
            env={**os.environ, "SHOP_DATABASE_URL": app.dsn},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await shop.communicate()
        assert said.decode().splitlines() == [
            "order 1 of Ada",
            "no order: Grace cannot pay 999999.00",
            "order 3 of Edsger",
        ]
        with relays() as started:
            started.append(start_relay(app, server.address, "--once"))
            assert await asyncio.to_thread(started[0].popen.wait, 60) == 0
        found = await server.query("SELECT labels->>'customer' FROM fencepost.run_queue")
    assert sorted(row[0] for row in found) == ["Ada", "Edsger"]


async def test_rows_of_a_business_key_make_one_run(
    database_url: str, empty_database_url: str
) -> None:
    async with running(database_url) as server, an_app(empty_database_url) as app:
        await server.make_job("mail")
        for number in range(3):
            await app.want(payload=str(number), unique_key="order-17")
        with relays() as started:
            started.append(start_relay(app, server.address))

            async def is_empty() -> bool:
                return await app.left() == 0

            await until(is_empty, what="no row waits")
        assert await payloads(server) == [0]
