"""Writes the tables of the docs that have their truth in the code, or checks that they are fresh.

A page keeps its prose; what stands between its markers is written here. `make generate` calls
this, and tests/architecture/test_docs.py holds every page to it.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from fencepost.v1 import admin_service_pb2, job_service_pb2, run_service_pb2
from fencepost_server import errors
from fencepost_server.config import ENV_PREFIX, Config
from fencepost_server.domain.run import TRANSITIONS, RunState
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs import capacity

DOCS = Path(__file__).parent
SERVER = DOCS.parent / "server" / "fencepost_server"

_MARKED = re.compile(
    r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end of generated -->)", re.DOTALL
)
_STATEMENT = re.compile(r"^-- name: (\w+)\n((?:--.*\n)*)", re.MULTILINE)
_MOVE = re.compile(r"^-- Moves: .*?(\w+) \(", re.MULTILINE)
_REFUSED = re.compile(r'refuse_method\(\s*"(\w+)"')
_DEFINED = re.compile(r"^    (?:async )?def ([A-Z]\w+)\(", re.MULTILINE)
_SERVICES = (
    job_service_pb2.DESCRIPTOR.services_by_name["JobService"],
    run_service_pb2.DESCRIPTOR.services_by_name["RunService"],
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
)


def render_transitions() -> str:
    """Every event of a run, the states it leads from and to, and the statements that do it."""
    statements = _statements_by_event()
    return _table(
        ("rows", "event", "from", "to", "statements"),
        (
            (
                each.rows,
                f"`{each.event}`",
                _states(each.sources) or "(no run)",
                _states(each.targets),
                ", ".join(f"`{name}`" for name in statements.get(each.event, ()))
                or "none in this version",
            )
            for each in TRANSITIONS
        ),
    )


def render_diagram() -> str:
    """The same as a drawing, one arrow for each pair of states."""
    events: dict[tuple[str, str], list[str]] = {}
    for each in TRANSITIONS:
        for source in [_spelled(state) for state in sorted(each.sources)] or ["[*]"]:
            for target in sorted(each.targets):
                pair = (source, _spelled(target))
                events.setdefault(pair, []).append(each.event)
    arrows = [
        f"    {source} --> {target}: {', '.join(names)}"
        for (source, target), names in events.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *arrows, "```"]) + "\n"


def render_errors() -> str:
    """The catalogue, by status code and then in the order of errors.py."""
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, errors.FencepostError)
        and value is not errors.FencepostError
    ]
    return _table(
        ("reason", "code", "when", "worth repeating"),
        (
            (
                f"`{each.reason}`",
                f"`{each.code.name}`",
                (each.__doc__ or "").strip().splitlines()[0],
                "yes" if each.retryable else "no",
            )
            for each in sorted(classes, key=lambda each: each.code)
        ),
    )


def render_settings() -> str:
    """Every setting of a server process."""
    return _table(
        ("variable", "default", "allowed", "meaning"),
        (
            (
                f"`{ENV_PREFIX}{name.upper()}`",
                _default(field),
                _allowed(field),
                field.description or "",
            )
            for name, field in Config.model_fields.items()
        ),
    )


def render_methods() -> str:
    """Every method of the contract, and whether this version serves it."""
    sources = [path.read_text() for path in sorted((SERVER / "api").glob("*.py"))]
    refused = {name for text in sources for name in _REFUSED.findall(text)}
    defined = {name for text in sources for name in _DEFINED.findall(text)}
    return _table(
        ("service", "served", "answer UNIMPLEMENTED"),
        (
            (
                f"`{service.name}`",
                _names(m.name for m in service.methods if m.name in defined - refused),
                _names(m.name for m in service.methods if m.name not in defined - refused),
            )
            for service in _SERVICES
        ),
    )


def render_costs() -> str:
    """What capacity is computed from."""
    return _table(("", "Postgres", "server", "log", "wire"), capacity.cost_rows())


def render_capacity() -> str:
    """What the three loads of the page need."""
    answers = [capacity.needs(load) for load in capacity.LOADS]
    return _table(("", *(each.load.name for each in answers)), capacity.rows(answers))


SECTIONS: Mapping[str, Callable[[], str]] = {
    "transitions": render_transitions,
    "diagram": render_diagram,
    "errors": render_errors,
    "settings": render_settings,
    "methods": render_methods,
    "costs": render_costs,
    "capacity": render_capacity,
}


def pages() -> list[Path]:
    """The pages that have a generated part."""
    found = [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md"]
    return [path for path in found if _MARKED.search(path.read_text())]


def refresh(text: str) -> str:
    """The page with its generated parts as they should be. Raises KeyError for a strange name."""
    return _MARKED.sub(lambda part: part[1] + SECTIONS[part["name"]]() + part[3], text)


def main(arguments: list[str]) -> int:
    """Write the stale pages; with --check only name them, and exit 1 if there are any."""
    stale = [path for path in pages() if refresh(path.read_text()) != path.read_text()]
    for path in stale:
        if "--check" not in arguments:
            path.write_text(refresh(path.read_text()))
        sys.stdout.write(f"{path.relative_to(DOCS.parent)}\n")
    return 1 if stale and "--check" in arguments else 0


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(_cell(value) for value in line)} |\n" for line in lines)


def _cell(value: str) -> str:
    return value.replace("|", "\\|")


def _spelled(state: RunState) -> str:
    return state.name.lower()


def _states(states: Iterable[RunState]) -> str:
    return ", ".join(f"`{_spelled(state)}`" for state in sorted(states))


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none in this version"


def _statements_by_event() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted((SERVER / "store" / "sql").glob("*.sql")):
        for name, comment in _STATEMENT.findall(path.read_text()):
            for event in _MOVE.findall(comment):
                found.setdefault(event, []).append(name)
    return found


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, frozenset):
        return f"`{','.join(sorted(value))}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _allowed(field: FieldInfo) -> str:
    bounds = {
        key: value
        for part in field.metadata
        for key in ("ge", "le")
        if (value := getattr(part, key, None)) is not None
    }
    if bounds:
        return f"{bounds['ge']:g} to {bounds['le']:g}"
    choices = _choices(field.annotation)
    if choices:
        return ", ".join(choices)
    return "true, false" if field.annotation is bool else "text"


def _choices(annotation: Any) -> list[str]:
    """The values of a Literal, also inside a set or Annotated."""
    found: list[str] = []
    for part in get_args(annotation):
        if isinstance(part, str):
            found.append(part)
        elif not isinstance(part, Enum):
            found.extend(_choices(part))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
