"""The tree of commands: what needs no server starts fast, options work in either place."""

import re
import subprocess
import sys

import pytest
from fencepost.v1 import job_service_pb2
from fencepost_server.cli.tables import one_line, print_rows, short_seconds
from fencepost_server.cli.tree import build

from tests.unit.cli.scripted import Run, ScriptedServer

HEAVY = ["grpc", "google.protobuf", "rich", "asyncpg", "pydantic_settings"]


def loaded_by(*arguments: str) -> list[str]:
    """Which heavy modules a command imports."""
    code = (
        "import contextlib, io, sys\n"
        "from fencepost_server.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        f"    assert main({list(arguments)!r}) == 0\n"
        "assert out.getvalue()\n"
        f"print(*[name for name in {HEAVY!r} + ['typer'] if name in sys.modules])\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return said.stdout.split()


def test_the_version_needs_nothing() -> None:
    assert loaded_by("--version") == []


@pytest.mark.parametrize(
    "arguments", [("--help",), ("jobs", "create", "--help"), ("runs", "bulk", "replay", "--help")]
)
def test_help_needs_no_grpc(arguments: tuple[str, ...]) -> None:
    assert loaded_by(*arguments) == ["typer"]


def test_every_leaf_has_three_examples() -> None:
    def leaves(command: object, path: str) -> list[tuple[str, str]]:
        children = getattr(command, "commands", None)
        if children is None:
            return [(path, getattr(command, "help", None) or "")]
        return [
            leaf for name, child in children.items() for leaf in leaves(child, f"{path} {name}")
        ]

    found = leaves(build(), "fencepost")
    assert len(found) == 52
    short = [path for path, text in found if text.partition("Examples:")[2].count("fencepost") < 3]
    assert short == []


def test_options_work_before_and_after_the_command(
    server: ScriptedServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on("ListJobs", job_service_pb2.ListJobsResponse())
    monkeypatch.setenv("FENCEPOST_TENANT", "from-environment")
    run("jobs", "list")
    run("--tenant", "before", "jobs", "list")
    run("--tenant", "before", "jobs", "list", "--tenant", "after")
    parents = [request.parent for request in server.requests["ListJobs"]]
    assert parents == ["tenants/from-environment", "tenants/before", "tenants/after"]


def test_the_output_of_the_environment_is_checked(
    server: ScriptedServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on("ListJobs", job_service_pb2.ListJobsResponse())
    monkeypatch.setenv("FENCEPOST_OUTPUT", "json")
    assert run("jobs", "list").out == '{\n  "jobs": []\n}\n'
    monkeypatch.setenv("FENCEPOST_OUTPUT", "xml")
    result = run("jobs", "list")
    assert (result.code, "table or json" in result.err) == (2, True)


def test_a_mistyped_command_gets_a_suggestion(run: Run) -> None:
    result = run("jobs", "lst")
    assert (result.code, "'list'" in result.err) == (2, True)
    assert "fencepost jobs --help" in result.err


def test_no_command_shows_the_help(run: Run) -> None:
    result = run()
    assert result.code == 2
    assert "Usage: fencepost" in result.err + result.out


def test_a_server_without_a_database_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_DATABASE_URL", raising=False)
    for command in ("server", "migrate"):
        result = run(command)
        assert result.code == 2
        assert "FENCEPOST_DATABASE_URL is not set" in result.err


def test_a_database_that_is_away_is_told(run: Run) -> None:
    result = run("migrate", "--database-url", "postgresql://nobody@127.0.0.1:1/none")
    assert result.code == 6
    assert "cannot migrate the database" in result.err


def test_interrupted_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fencepost_server.cli.connection.connected", interrupt)
    assert run("jobs", "list").code == 130


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0s"), (0.425, "0.42s"), (5, "5s"), (59.4, "59s"), (60, "1m 00s"), (3725, "1h 02m")],
)
def test_durations_are_short(seconds: float, expected: str) -> None:
    assert short_seconds(seconds) == expected


def test_text_of_others_stays_on_its_line() -> None:
    assert one_line("a\r\n\tb\x1b[2Jc") == "a b [2Jc"
    assert one_line("x" * 90) == "x" * 79 + "…"


def test_a_terminal_gets_a_table_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_rows(("RUN", "STATE", "NOTE"), [("hello/2026-12-01T09:00:00Z", "dead", "[b] " * 20)])
    out = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "hello/2026-12-01T09:00:00Z" in plain
    assert "[b]" in plain
    assert plain != out
    assert max(len(line) for line in plain.splitlines()) <= 60
    monkeypatch.setenv("NO_COLOR", "1")
    print_rows(("RUN", "STATE"), [("hello", "dead")])
    assert capsys.readouterr().out == "RUN    STATE\nhello  dead\n"
