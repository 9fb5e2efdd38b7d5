"""A scripted server for each test that asks for one, and a way to run commands against it."""

from collections.abc import Iterator

import pytest
from fencepost_server.cli.main import main

from tests.unit.cli.scripted import Result, Run, ScriptedServer, serving


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving() as script:
        yield script


@pytest.fixture
def run(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs a command in this process against `server`."""
    for name in ("FENCEPOST_TENANT", "FENCEPOST_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FENCEPOST_SERVER", server.address)
    monkeypatch.setenv("TZ", "UTC")

    def command(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Result(code=code, out=captured.out, err=captured.err)

    return command
