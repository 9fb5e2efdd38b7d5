"""Where zone data comes from: the pinned `tzdata` package, or a folder or wheel beside it.

`policy.zone` makes zones of it. The host's own zone files are read only when a person names
their folder, to compare them.
"""

import re
import zipfile
from collections.abc import Iterator
from functools import cached_property, lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from io import BytesIO
from itertools import islice
from pathlib import Path
from zoneinfo import ZoneInfo

_MAGIC = b"TZif"
# Copies of all zones in other shapes, which a system's folder holds beside the zones.
_NOT_ZONES = ("posix", "right", "localtime", "posixrules")
_DEPTH_MAX = 4
_NAMES_MAX = 5000
_TEXT_BYTES_MAX = 4096


class NoZoneData(Exception):
    """The path holds no zone data; the message says what was looked for."""


class ZoneSource:
    """Compiled zones under a folder `root`, as `tzdata` or a system's zoneinfo has them."""

    def __init__(self, root: Traversable, *, version: str) -> None:
        self._root = root
        self.version = version

    @cached_property
    def names(self) -> frozenset[str]:
        """Every zone's IANA name."""
        return frozenset(islice(_walk(self._root, "", _DEPTH_MAX), _NAMES_MAX))

    def content(self, name: str) -> bytes:
        """The compiled zone of a name out of `names`; equal bytes are equal zones."""
        assert name in self.names, f"{name!r} is not in zone data {self.version}"
        return self._root.joinpath(*name.split("/")).read_bytes()

    def read(self, name: str) -> ZoneInfo:
        """The zone of a name out of `names`."""
        return ZoneInfo.from_file(BytesIO(self.content(name)), key=name)


class _Pinned(ZoneSource):
    @cached_property
    def names(self) -> frozenset[str]:
        """As listed by the package, which is quicker than to look into each file."""
        return frozenset(files("tzdata").joinpath("zones").read_text("ascii").split())


@lru_cache(maxsize=1)
def pinned() -> ZoneSource:
    """The zone data that schedules run on."""
    package = files("tzdata")
    return _Pinned(package.joinpath("zoneinfo"), version=_package_version(package))


def open_source(path: Path) -> ZoneSource:
    """Zone data at a path: a `tzdata` wheel, an unpacked one, or a folder of zoneinfo files.

    Raises NoZoneData, or OSError if it cannot be read.
    """
    if not path.exists():
        raise NoZoneData(f"{path} does not exist")
    root: Traversable = path
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise NoZoneData(f"{path} is not a wheel (a zip file) of tzdata")
        root = zipfile.Path(path)
    for package in (root.joinpath("tzdata"), root):
        zones = package.joinpath("zoneinfo")
        if zones.is_dir() and package.joinpath("__init__.py").is_file():
            return _checked(ZoneSource(zones, version=_package_version(package)), path)
    return _checked(ZoneSource(root, version=_folder_version(root)), path)


def _checked(source: ZoneSource, path: Path) -> ZoneSource:
    if not source.names:
        raise NoZoneData(f"{path} holds no compiled zones (files that begin with TZif)")
    return source


def _walk(folder: Traversable, prefix: str, depth: int) -> Iterator[str]:
    for entry in folder.iterdir():
        if not prefix and entry.name in _NOT_ZONES:
            continue
        if entry.is_dir():
            if depth > 1:
                yield from _walk(entry, f"{prefix}{entry.name}/", depth - 1)
        elif "." not in entry.name and entry.is_file():
            with entry.open("rb") as file:
                if file.read(len(_MAGIC)) == _MAGIC:
                    yield f"{prefix}{entry.name}"


def _package_version(package: Traversable) -> str:
    text = package.joinpath("__init__.py").read_text("utf-8")
    found = re.search(r'^IANA_VERSION\s*=\s*"(\w+)"', text, re.MULTILINE)
    return found[1] if found else "unknown"


def _folder_version(root: Traversable) -> str:
    """As zic's own output tells it: in +VERSION, or in the first line of tzdata.zi."""
    for name, pattern in (("+VERSION", r"(\d{4}[a-z]+)"), ("tzdata.zi", r"# version (\w+)")):
        entry = root.joinpath(name)
        if entry.is_file():
            with entry.open("r", encoding="utf-8") as file:
                found = re.match(pattern, file.read(_TEXT_BYTES_MAX))
            if found:
                return found[1]
    return "unknown"
