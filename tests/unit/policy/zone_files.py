"""Folders of compiled zones, made by the tests instead of taken from the machine."""

import struct
from pathlib import Path


def compiled(transitions: list[tuple[int, int]], *, first_offset: int, rule: str = "") -> bytes:
    """A TZif file: (UTC second, offset from then on), an offset before, a POSIX rule after."""
    offsets = [first_offset, *(offset for _, offset in transitions)]
    kinds = sorted(set(offsets))

    def block(form: str) -> bytes:
        header = b"TZif2" + bytes(15)
        header += struct.pack(">6l", 0, 0, 0, len(transitions), len(kinds), 4)
        body = b"".join(struct.pack(form, at) for at, _ in transitions)
        body += bytes(kinds.index(offset) for _, offset in transitions)
        # The kind listed first is the one before all transitions.
        body += b"".join(struct.pack(">lBB", offset, 0, 0) for offset in kinds)
        return header + body + b"XXX\0"

    assert kinds.index(first_offset) == 0, "the first offset has to be the smallest"
    return block(">l") + block(">q") + f"\n{rule}\n".encode()


def write_zones(folder: Path, zones: dict[str, bytes], *, version: str = "2031c") -> Path:
    """A folder as an unpacked tzdata package has it."""
    package = folder / "tzdata"
    for name, content in zones.items():
        path = package / "zoneinfo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    package.joinpath("__init__.py").write_text(f'IANA_VERSION = "{version}"\n')
    return folder
