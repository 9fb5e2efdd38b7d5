"""Installs the Python queues into an environment of their own in the cache."""

import sys
from pathlib import Path

from benchmarks.compare.tool import HERE, NotMeasured, run
from benchmarks.measure import CACHE

_FOLDER = CACHE / "python"


async def install() -> Path:
    """The environment's interpreter. Raises NotMeasured."""
    python = _FOLDER / "bin" / "python"
    lock = HERE / "python" / "requirements.lock"
    done = _FOLDER / "installed.lock"
    if not done.exists() or done.read_text() != lock.read_text():
        try:
            await run([sys.executable, "-m", "venv", "--clear", str(_FOLDER)])
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            await run([*pip, "--require-hashes", "-r", str(lock)])
        except RuntimeError as error:
            raise NotMeasured(f"pip failed: {error}") from error
        done.write_text(lock.read_text())
    return python


async def version(package: str) -> str:
    """The installed version of a package."""
    script = f"from importlib.metadata import version; print(version({package!r}))"
    return (await run([_FOLDER / "bin" / "python", "-c", script])).strip()
