"""Zones made from a POSIX rule, for clock changes that no real zone has at the right place."""

import struct
from io import BytesIO
from zoneinfo import ZoneInfo

from fencepost_server.policy.zone import Zone


def zone_of_posix_rule(name: str, rule: str) -> Zone:
    """A zone that has followed one rule for ever: a TZif file with nothing but a footer."""
    head = b"TZif2" + bytes(15) + struct.pack(">6l", 0, 0, 0, 0, 1, 4)
    block = struct.pack(">lbb", 0, 0, 0) + b"UTC\0"
    data = BytesIO(head + block + head + block + f"\n{rule}\n".encode())
    return Zone(name, ZoneInfo.from_file(data, key=name))
