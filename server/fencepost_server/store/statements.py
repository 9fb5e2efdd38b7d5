"""Loads the named SQL statements of store/sql, so that Python holds no SQL text.

A file is a series of `-- name: some_name` blocks; the comment lines under a name say its
purpose, and `@word` is a parameter, numbered in the order of its first appearance.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"(?<![@\w])@([a-z_]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One named statement: its text with `$n`, and the parameter names in that order."""

    name: str
    text: str
    parameters: tuple[str, ...]

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """`values` in the order the statement wants; exactly its parameters are allowed."""
        assert values.keys() == set(self.parameters), (
            f"{self.name} takes {sorted(self.parameters)}, got {sorted(values)}"
        )
        return [values[name] for name in self.parameters]


@cache
def load(file: str) -> Mapping[str, Statement]:
    """All statements of `store/sql/{file}.sql` by name."""
    text = resources.files(__package__).joinpath("sql", f"{file}.sql").read_text()
    parts = _NAME.split(text)
    return {
        name: _statement(name, body) for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def _statement(name: str, body: str) -> Statement:
    parameters: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in parameters:
            parameters.append(match[1])
        return f"${parameters.index(match[1]) + 1}"

    lines = [line for line in body.splitlines() if not line.lstrip().startswith("--")]
    sql = _PARAMETER.sub(number, "\n".join(lines)).strip().rstrip(";")
    # The name in front shows up in pg_stat_activity and in logs of slow statements.
    return Statement(name=name, text=f"/* {name} */ {sql}", parameters=tuple(parameters))
