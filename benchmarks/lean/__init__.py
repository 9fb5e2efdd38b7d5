"""Builds the lean client, a worker in Go that does no more than the protocol asks."""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import CACHE

_SOURCES = Path(__file__).parent


def build() -> Path:
    """The program, made from the sources and the contract as they are now.

    The stubs are generated each time and not committed: vtprotobuf's are quick and large.
    Needs Go 1.26 and, the first time, whatever module proxy Go is configured with.
    """
    if shutil.which("go") is None:
        raise SystemExit("the lean client needs Go 1.26 or newer on the PATH: https://go.dev/dl")
    buf = Path(sys.executable).parent / "buf"
    subprocess.run([buf, "generate"], cwd=_SOURCES, check=True)
    CACHE.mkdir(exist_ok=True)
    program = CACHE / "lean"
    subprocess.run(["go", "build", "-o", program, "."], cwd=_SOURCES, check=True)
    return program
