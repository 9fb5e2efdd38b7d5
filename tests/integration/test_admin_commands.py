"""Queues, calendars and tenants from the terminal, against a real server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fencepost_server.cli.main import main

from tests.integration.definition_server import DefinitionServer, serving

ICS = """BEGIN:VCALENDAR
VERSION:2.0
PRODID:-//tests//tests//EN
BEGIN:VEVENT
UID:1
DTSTAMP:20260101T000000Z
DTSTART;VALUE=DATE:20261225
DTEND;VALUE=DATE:20261226
SUMMARY:a holiday
END:VEVENT
END:VCALENDAR
"""


class Terminal:
    """Types commands, in a thread beside the server."""

    def __init__(self, server: DefinitionServer, capsys: pytest.CaptureFixture[str]) -> None:
        self._server = server
        self._capsys = capsys

    async def type(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Standard output and error of a command that ends with `code`."""
        self._capsys.readouterr()
        ended = await asyncio.to_thread(main, [*words, "--server", self._server.address])
        said = self._capsys.readouterr()
        assert ended == code, said.out + said.err
        return said.out, said.err

    async def read(self, *words: str) -> Any:
        """The document that a command prints."""
        return json.loads((await self.type(*words, "-o", "json"))[0])


async def test_queues_are_made_bounded_and_paused(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(database_url) as server:
        terminal = Terminal(server, capsys)
        await terminal.type("queues", "create", "billing", "--max-in-flight", "10")
        await terminal.type("queues", "create", "billing", code=5)
        await terminal.type("queues", "set", "billing", "--max-in-flight-per-key", "2")
        await terminal.type("queues", "pause", "billing", "--reason", "the provider is down")
        out, _ = await terminal.type("queues", "get", "billing")
        assert "paused (the provider is down)" in out
        assert "10 at once, 2 per key" in out
        queue = await terminal.read("queues", "resume", "billing")
        assert (queue["maxInFlight"], queue["maxInFlightPerKey"]) == (10, 2)
        assert "paused" not in queue
        assert "pauseReason" not in queue
        names = [each["name"] for each in (await terminal.read("queues", "list"))["queues"]]
        assert names == ["tenants/default/queues/billing", "tenants/default/queues/default"]
        _, err = await terminal.type("queues", "set", "billing", "--max-in-flight", "-1", code=2)
        assert "max_in_flight" in err
        _, err = await terminal.type("queues", "get", "none", code=3)
        assert "fencepost queues list" in err


async def test_calendars_are_made_changed_imported_and_deleted(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(database_url) as server:
        terminal = Terminal(server, capsys)
        await terminal.type(
            *("calendars", "create", "shutdown", "--range", "2026-12-24..2027-01-01"),
            *("--date", "2026-05-01", "--tz", "Europe/Berlin", "--description", "nobody is here"),
        )
        changed = await terminal.read("calendars", "update", "shutdown", "--date", "2026-05-02")
        assert changed["dates"] == ["2026-05-02"]
        assert changed["ranges"] == [{"firstDate": "2026-12-24", "lastDate": "2027-01-01"}]
        assert (changed["timeZone"], changed["description"]) == ("Europe/Berlin", "nobody is here")
        file = tmp_path / "holidays.ics"
        file.write_text(ICS)
        for _ in range(2):
            imported = await terminal.read("calendars", "import-ics", str(file))
            assert (imported["name"], imported["ics"]) == (
                "tenants/default/calendars/holidays",
                ICS,
            )
        # The file is the whole calendar from now on.
        replaced = await terminal.read("calendars", "import-ics", str(file), "--name", "shutdown")
        assert "ranges" not in replaced
        assert (replaced["ics"], replaced["timeZone"]) == (ICS, "Europe/Berlin")
        out, _ = await terminal.type("calendars", "list")
        assert [line.split()[0] for line in out.splitlines()] == [
            *("CALENDAR", "holidays", "shutdown")
        ]
        file.write_text("BEGIN:NONSENSE")
        _, err = await terminal.type("calendars", "import-ics", str(file), code=2)
        assert "ics" in err
        daily = ("jobs", "create", "daily", "--kind", "k", "--cron", "0 9 * * *")
        made = await terminal.read(*daily, "--exclude-calendar", "holidays")
        assert made["schedule"]["excludeCalendars"] == ["holidays"]
        _, err = await terminal.type("calendars", "delete", "holidays", "--yes", code=5)
        assert "take it out of the jobs" in err
        await terminal.type("calendars", "delete", "shutdown", "--yes")
        await terminal.type("calendars", "get", "shutdown", code=3)


async def test_tenants_are_made_and_bounded(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(database_url) as server:
        terminal = Terminal(server, capsys)
        await terminal.type("tenants", "create", "acme", "--display-name", "Acme Ltd.")
        await terminal.type("tenants", "create", "acme", code=5)
        limited = await terminal.read("tenants", "limits", "acme", "--max-in-flight", "50")
        assert (limited["maxInFlight"], limited["displayName"]) == (50, "Acme Ltd.")
        _, err = await terminal.type("tenants", "limits", "acme", code=2)
        assert "nothing to set" in err
        out, _ = await terminal.type("tenants", "get", "acme")
        assert "at once       50" in out
        names = [each["name"] for each in (await terminal.read("tenants", "list"))["tenants"]]
        assert names == ["tenants/acme", "tenants/default"]
        await terminal.type("tenants", "get", "none", code=3)
