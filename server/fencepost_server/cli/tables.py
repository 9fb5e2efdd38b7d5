"""Writes answers to standard output: aligned columns for people, JSON for programs."""

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

Row = Sequence[str]

_STATE_STYLES = {
    "succeeded": "green",
    "ready": "green",
    "active": "green",
    "dead": "bold red",
    "retrying": "yellow",
    "running": "cyan",
    "paused": "yellow",
    "draining": "yellow",
}


def print_rows(headings: Row, rows: Sequence[Row]) -> None:
    """A table: coloured and fitted on a terminal, else plain columns that are never cut."""
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        _print_styled(headings, rows)
    else:
        _print_plain([headings, *rows])


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """One thing, a line for each of its parts that has a value."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        if value:
            print(f"{name:<{width}}  {value}")


def print_json(message: Any) -> None:
    """A message as canonical protobuf JSON: the field names of grpcurl and of the docs."""
    print(json.dumps(to_dict(message), indent=2, ensure_ascii=False))


def print_json_list(name: str, messages: Sequence[Any]) -> None:
    """Many, in the shape of the list call's answer."""
    document = {name: [to_dict(message) for message in messages]}
    print(json.dumps(document, indent=2, ensure_ascii=False))


def json_line(message: Any) -> str:
    """A message as one line of JSON, for streams."""
    return json.dumps(to_dict(message), ensure_ascii=False)


def to_dict(message: Any) -> dict[str, Any]:
    """A message as canonical protobuf JSON."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message)


def instant(message: Any, field: str) -> str:
    """A timestamp field in the terminal's zone, with its offset; "" if it is absent."""
    if not message.HasField(field):
        return ""
    at: datetime = getattr(message, field).ToDatetime(tzinfo=UTC)
    return at.astimezone().isoformat(sep=" ", timespec="seconds")


def elapsed(start: Any, end: Any) -> str:
    """Time between two timestamps, short; "" if it went backwards."""
    seconds = (end.ToMicroseconds() - start.ToMicroseconds()) / 1e6
    return "" if seconds < 0 else short_seconds(seconds)


def short_seconds(seconds: float) -> str:
    """A duration for a narrow column: 0.42s, 12s, 3m 20s, 2h 05m, 3d 4h."""
    if seconds < 10:
        return f"{seconds:.2f}".rstrip("0").rstrip(".") + "s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600}h"


def one_line(text: str, length: int = 80) -> str:
    """Text without line breaks or control characters, cut for a column."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= length else flat[: length - 1] + "…"


def _print_plain(rows: Sequence[Row]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell or '-':<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_styled(headings: Row, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, heading in enumerate(headings):
        # The first column is what is copied into the next command.
        table.add_column(heading, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell or "-", style=_STATE_STYLES.get(cell, "")) for cell in row))
    Console().print(table)
