"""Migrations: applied once, by one of many, and never onto something they do not fit."""

import asyncio
from pathlib import Path

import asyncpg
import pytest
from fencepost_server.store import migrate as runner
from fencepost_server.store.migrate import MigrationError, load_migrations, migrate, migrations_dir


async def _ledger(dsn: str) -> list[tuple[int, str]]:
    connection = await asyncpg.connect(dsn)
    try:
        rows = await connection.fetch(
            "SELECT number, name FROM fencepost.schema_migrations ORDER BY number"
        )
        return [(row["number"], row["name"]) for row in rows]
    finally:
        await connection.close()


async def _execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def test_migrating_twice_applies_nothing_the_second_time(empty_database_url: str) -> None:
    names = [migration.name for migration in load_migrations(migrations_dir())]
    assert await migrate(empty_database_url) == names
    assert await migrate(empty_database_url) == []
    assert await _ledger(empty_database_url) == list(enumerate(names, start=1))


async def test_many_servers_may_migrate_at_once(empty_database_url: str) -> None:
    applied = await asyncio.gather(*(migrate(empty_database_url) for _ in range(6)))
    names = [migration.name for migration in load_migrations(migrations_dir())]
    assert sorted(applied, key=len)[-1] == names
    assert sum(map(len, applied)) == len(names)


async def test_a_migration_that_was_changed_after_it_was_applied_stops_it(
    empty_database_url: str,
) -> None:
    await migrate(empty_database_url)
    await _execute(empty_database_url, "UPDATE fencepost.schema_migrations SET checksum = 'x'")
    with pytest.raises(MigrationError, match=r"0001_initial was changed after it had been applied"):
        await migrate(empty_database_url)


async def test_a_database_that_is_newer_than_the_server_stops_it(empty_database_url: str) -> None:
    await migrate(empty_database_url)
    await _execute(
        empty_database_url,
        "INSERT INTO fencepost.schema_migrations VALUES (9999, '9999_future', 'x', now())",
    )
    with pytest.raises(MigrationError, match=r"9999_future, newer than this version knows"):
        await migrate(empty_database_url)


async def test_a_migration_that_fails_leaves_nothing_behind(
    empty_database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_migrations(migrations_dir())[0]
    (tmp_path / "0001_initial.sql").write_text(first.text)
    (tmp_path / "0002_broken.sql").write_text("CREATE TABLE fencepost.half (id int); SELECT 1/0;")
    monkeypatch.setattr(runner, "migrations_dir", lambda: tmp_path)
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(empty_database_url)
    assert await _ledger(empty_database_url) == [(1, "0001_initial")]
    (tmp_path / "0002_broken.sql").write_text("CREATE TABLE fencepost.half (id int);")
    assert await migrate(empty_database_url) == ["0002_broken"]


@pytest.mark.parametrize("names", [["0002_gap.sql"], ["0001_a.sql", "notes.sql"], []])
def test_a_folder_with_gaps_strays_or_nothing_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("SELECT 1")
    with pytest.raises(MigrationError, match=r"expected|no migrations"):
        load_migrations(tmp_path)
