"""Names become ids once, whoever asks first, and no process remembers without bound."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg
import pytest
from fencepost_server.clock import SECOND
from fencepost_server.errors import QueueNotFound, RequestIdReused, TenantNotFound
from fencepost_server.store import requests
from fencepost_server.store.catalogue import Catalogue, Remembered
from fencepost_server.store.database import Connection, Database, Row
from fencepost_server.store.requests import RequestKey, RequestScope
from fencepost_server.store.statements import Statement

NOW = 1_796_000_000 * SECOND
SCOPE = RequestScope(tenant_id=1, method="CreateJob")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with Database(database_url, hot_size=2, requests_size=8) as opened:
        yield opened


def test_what_is_remembered_is_bounded() -> None:
    remembered: Remembered[int, int] = Remembered(size_max=3)
    for number in range(10):
        remembered.add({number: -number})
    assert len(remembered) == 3
    assert remembered.find(range(10)) == {7: -7, 8: -8, 9: -9}


async def test_two_processes_agree_on_ids(database: Database) -> None:
    first, second = (Catalogue(pool=database.requests) for _ in range(2))
    names = [f"kind-{number}" for number in range(50)]
    ids = await asyncio.gather(
        *(each.kind_ids(order) for each in (first, second) for order in (names, names[::-1]))
    )
    assert all(each == ids[0] for each in ids)
    assert len(set(ids[0].values())) == 50
    assert await second.kind_names(ids[0].values()) == {
        kind_id: name for name, kind_id in ids[0].items()
    }
    assert await first.find_kind_ids(["kind-1", "never-named"]) == {"kind-1": ids[0]["kind-1"]}


async def test_equal_rules_are_one_schedule(database: Database) -> None:
    first, second = (Catalogue(pool=database.requests) for _ in range(2))
    rules = [{"cron": {"a": 1, "b": [number % 3]}} for number in range(9)]
    turned = [{"cron": dict(reversed(rule["cron"].items()))} for rule in rules]
    ids = await asyncio.gather(first.schedule_ids(rules), second.schedule_ids(turned))
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 3


async def test_ids_are_found_after_they_were_forgotten(database: Database) -> None:
    catalogue = Catalogue(pool=database.requests, remembered_max=2)
    names = [f"kind-{number}" for number in range(5)]
    assert await catalogue.kind_ids(names) == await catalogue.kind_ids(names)
    assert len(await catalogue.kind_ids(names)) == 5


async def test_names_that_nobody_has_are_not_found(database: Database) -> None:
    catalogue = Catalogue(pool=database.requests)
    tenant_id = await catalogue.tenant_id("default")
    assert await catalogue.tenant_names([tenant_id]) == {tenant_id: "default"}
    queue_id = await catalogue.queue_id("default", "default")
    assert await catalogue.queue_names([queue_id]) == {queue_id: (tenant_id, "default")}
    with pytest.raises(TenantNotFound):
        await catalogue.tenant_id("none")
    with pytest.raises(QueueNotFound):
        await catalogue.queue_id("default", "none")
    assert await catalogue.find_queue_ids(tenant_id, ["default", "none"]) == {"default": queue_id}


async def test_queues_of_many_tenants_are_found_with_one_look(
    database_url: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [(f"tenant-{n % 5}", f"queue-{n}") for n in range(50)]
    raw = await asyncpg.connect(database_url)
    await raw.execute(
        "INSERT INTO fencepost.tenants (name, created_at, updated_at) "
        "SELECT 'tenant-' || n, now(), now() FROM generate_series(0, 4) AS n"
    )
    await raw.execute(
        "INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at) "
        "SELECT t.tenant_id, 'queue-' || n, now(), now() FROM generate_series(0, 49) AS n "
        "JOIN fencepost.tenants AS t ON t.name = 'tenant-' || n % 5"
    )
    sent: list[str] = []
    fetch = Connection.fetch

    async def counting(
        connection: Connection, statement: Statement, **values: Any
    ) -> Sequence[Row]:
        sent.append(statement.name)
        return await fetch(connection, statement, **values)

    monkeypatch.setattr(Connection, "fetch", counting)
    catalogue = Catalogue(pool=database.requests)
    found = await catalogue.queues([*names, *names[:3]])
    assert await catalogue.queues(names) == found
    assert sent == ["find_named_queues"]
    assert found.keys() == set(names)
    rows = await raw.fetch(
        "SELECT t.name AS tenant, q.name, q.tenant_id, q.queue_id FROM fencepost.queues AS q "
        "JOIN fencepost.tenants AS t USING (tenant_id) WHERE q.name LIKE 'queue-%'"
    )
    await raw.close()
    assert found == {(row[0], row[1]): (row[2], row[3]) for row in rows}
    # One of them alone, and what another tenant has.
    assert await catalogue.queue_id(*names[7]) == found[names[7]][1]
    with pytest.raises(QueueNotFound, match="queue-1"):
        await catalogue.queues([names[0], ("tenant-0", "queue-1"), ("none", "default")])
    with pytest.raises(TenantNotFound, match="none"):
        await catalogue.queues([names[0], ("none", "default"), ("tenant-0", "queue-1")])


async def test_a_rolled_back_call_leaves_no_memory(database: Database) -> None:
    key = RequestKey(request_id="r", body_hash=b"1")
    with pytest.raises(RuntimeError, match="undone"):
        await _answer(database, key, b"first", fails=True)
    assert await requests.recall(database.requests, SCOPE, [key], now=NOW) == {}
    await _answer(database, key, b"second")
    assert await requests.recall(database.requests, SCOPE, [key], now=NOW) == {"r": b"second"}
    other = RequestKey(request_id="r", body_hash=b"2")
    found = await requests.recall(database.requests, SCOPE, [other], now=NOW)
    assert isinstance(found["r"], RequestIdReused)


async def _answer(
    database: Database, key: RequestKey, answer: bytes, *, fails: bool = False
) -> None:
    async with database.requests.transaction() as connection:
        assert await requests.begin(connection, SCOPE, [key], now=NOW) == {}
        await requests.finish(connection, SCOPE, {key.request_id: answer})
        if fails:
            raise RuntimeError("undone")
