"""Reads pages until there are enough rows, and writes filters in the grammar of the API."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from fencepost_server.cli.failure import note

PAGE_SIZE_MAX = 1000
LIMIT_DEFAULT = 50

_BARE = re.compile(r"^[A-Za-z0-9._:/@+-]+\*?$")


def collect(fetch: Callable[[int, str], tuple[Sequence[Any], str]], *, limit: int) -> list[Any]:
    """Up to `limit` rows; says on standard error if there are more.

    `fetch` takes a page size and a page token, and hands back rows and the next token.
    """
    rows: list[Any] = []
    token = ""
    while True:
        page, token = fetch(min(limit - len(rows), PAGE_SIZE_MAX), token)
        rows += page
        if not token:
            return rows[:limit]
        if len(rows) >= limit:
            note(f"the first {limit}; more with --limit {limit * 10}")
            return rows[:limit]


def join_filter(
    text: str | None, conditions: Sequence[tuple[str, Sequence[str] | str | None]]
) -> str:
    """One filter out of `--filter` and the flags that stand for a condition."""
    parts = [text] if text else []
    for field, value in conditions:
        values = [value] if isinstance(value, str) else list(value or ())
        if values:
            parts.append(f"{field}={','.join(map(_quoted, values))}")
    return " AND ".join(parts)


def _quoted(value: str) -> str:
    if _BARE.match(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
