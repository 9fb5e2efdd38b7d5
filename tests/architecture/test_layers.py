"""Imports go one way, and only the edges know what time the machine thinks it is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import SERVER, modules

ROOT = SERVER.parents[1]
# Commands speak to people in their machine's time; the rest of the server lives on the
# database clock.
_MAY_READ_THE_CLOCK = ("clock.py", "cli", "dev")
_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("time", "gmtime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}


def test_the_contracts_of_the_import_linter_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    found = subprocess.run(
        [str(program), "--config", "pyproject.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 broken" in found.stdout


def _reads_of_the_clock(module: ast.Module) -> list[int]:
    lines = []
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if (name, node.attr) in _CLOCKS:
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            lines += [node.lineno for alias in node.names if ("time", alias.name) in _CLOCKS]
    return lines


@pytest.mark.parametrize(
    ("path", "module"), modules(), ids=[str(path.relative_to(SERVER)) for path, _ in modules()]
)
def test_nothing_inside_reads_the_wall_clock(path: Path, module: ast.Module) -> None:
    top = path.relative_to(SERVER).parts[0]
    if top not in _MAY_READ_THE_CLOCK:
        assert _reads_of_the_clock(module) == []


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.time()",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.date.today()",
        "from time import time_ns",
    ],
)
def test_the_check_sees_every_way_to_read_the_clock(text: str) -> None:
    assert _reads_of_the_clock(ast.parse(text))


def test_policies_and_values_are_free_of_input_and_output() -> None:
    forbidden = {"asyncio", "asyncpg", "grpc", "random", "secrets", "socket", "os", "time"}
    for path, module in modules():
        if path.relative_to(SERVER).parts[0] not in ("domain", "policy"):
            continue
        for node in ast.walk(module):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found = {name.split(".")[0] for name in names} & forbidden
            assert not found, f"{path.name} imports {found}"
