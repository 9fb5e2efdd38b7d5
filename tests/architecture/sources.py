"""The server's sources as tests read them: named SQL with its headers, and Python's use of it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import fencepost_server
from fencepost_server.domain.run import RunState

SERVER = Path(fencepost_server.__file__).parent
SQL_FILES = tuple(sorted(path.stem for path in (SERVER / "store" / "sql").glob("*.sql")))
MIGRATIONS = tuple(sorted((SERVER.parents[1] / "migrations").glob("*.sql")))

_BLOCK = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)
_MOVES = re.compile(
    r"^-- Moves: (?P<rows>T\d+(?:,? T\d+)*) (?P<event>\w+) \((?P<states>[^)]*)\)\.$"
)
_MAKES_OR_REMOVES = re.compile(r"(INSERT INTO|DELETE FROM) fencepost\.run_queue")
_SETS_STATE = re.compile(
    r"UPDATE fencepost\.run_queue AS q\s+SET(?:(?!\bFROM\b|\bWHERE\b).)*\bstate = ", re.DOTALL
)
_STATES = {state.name.lower() for state in RunState}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """One `-- Moves:` line."""

    rows: frozenset[str]
    event: str
    sources: frozenset[str]
    targets: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One named statement as written, comments and all."""

    file: str
    name: str
    text: str

    @property
    def sql(self) -> str:
        return "\n".join(
            line for line in self.text.splitlines() if not line.lstrip().startswith("--")
        )

    @property
    def moves(self) -> list[Moves]:
        return [_moves(line) for line in self.text.splitlines() if line.startswith("-- Moves:")]

    @property
    def state_literals(self) -> set[str]:
        """The run states that the statement spells out."""
        return set(re.findall(r"'(\w+)'", self.sql)) & _STATES

    @property
    def changes_states(self) -> bool:
        """Whether it makes, moves or removes live runs."""
        return bool(_MAKES_OR_REMOVES.search(self.sql) or _SETS_STATE.search(self.sql))


def _moves(line: str) -> Moves:
    match = _MOVES.match(line)
    assert match is not None, f"not a Moves line: {line}"
    sources, targets = match["states"].split("->")
    return Moves(
        rows=frozenset(re.findall(r"T\d+", match["rows"])),
        event=match["event"],
        sources=_names(sources),
        targets=_names(targets),
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


@cache
def blocks() -> tuple[Block, ...]:
    """All named statements."""
    found = []
    for file in SQL_FILES:
        parts = _BLOCK.split((SERVER / "store" / "sql" / f"{file}.sql").read_text())
        found += [
            Block(file=file, name=name, text=text)
            for name, text in zip(parts[1::2], parts[2::2], strict=True)
        ]
    return tuple(found)


@cache
def modules() -> tuple[tuple[Path, ast.Module], ...]:
    """The server's Python files, parsed."""
    return tuple((path, ast.parse(path.read_text())) for path in sorted(SERVER.rglob("*.py")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One `_SQL["name"]` in Python; `values` None: they are not spelled out at the call."""

    path: Path
    line: int
    file: str
    name: str
    values: frozenset[str] | None


@cache
def uses() -> tuple[Use, ...]:
    """Every use of a statement by name."""
    return tuple(use for path, module in modules() for use in _uses_of(path, module))


def _uses_of(path: Path, module: ast.Module) -> Iterator[Use]:
    files = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and _is_load(node.value):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            [target] = node.targets
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for name, value in zip(names, values, strict=True):
                assert isinstance(name, ast.Name)
                assert isinstance(value, ast.Call)
                [argument] = value.args
                assert isinstance(argument, ast.Constant)
                files[name.id] = str(argument.value)
    calls = {
        id(argument): node
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        for argument in node.args
    }
    for node in ast.walk(module):
        if not (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id in files
        ):
            continue
        call = calls.get(id(node))
        for statement in _constants(node.slice):
            yield Use(
                path=path,
                line=node.lineno,
                file=files[node.value.id],
                name=statement,
                values=None if call is None else _keywords(call),
            )


def _is_load(value: ast.expr) -> bool:
    values = value.elts if isinstance(value, ast.Tuple) else [value]
    return bool(values) and all(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "load"
        for each in values
    )


def _constants(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.IfExp):
        return _constants(node.body) + _constants(node.orelse)
    return []


def _keywords(call: ast.Call) -> frozenset[str] | None:
    names = [keyword.arg for keyword in call.keywords]
    return None if None in names else frozenset(name for name in names if name is not None)
