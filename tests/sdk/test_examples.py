"""The examples are programs that load; what they promise is checked where it is built."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"
_PROGRAMS = (
    "hello_worker.py",
    "create_job.py",
    "enqueue.py",
    "long_run_with_progress.py",
    "typed_payload.py",
)


@pytest.mark.parametrize("program", _PROGRAMS)
def test_an_example_loads_without_a_server(program: str) -> None:
    names = runpy.run_path(str(_EXAMPLES / program), run_name="example")
    assert "worker" in names or "main" in names
    assert names["__doc__"]
