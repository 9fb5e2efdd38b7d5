"""The docs say what the code says: tables are fresh, links and references lead somewhere."""

import re
from pathlib import Path

import pytest

from docs.generate import DOCS, SECTIONS, pages, refresh

ROOT = DOCS.parent
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")
_ADR_REFERENCE = re.compile(r"docs/adr/(\d{4})[\w-]*(?:\.md)?")
_EVENT = re.compile(r'_log\.(?:debug|info|warning|error|exception)\(\s*"(\w+)"')
_SOURCES = ("server/fencepost_server", "sdk/python/fencepost", "migrations", "tests", "benchmarks")


def _all_pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md")), ROOT / "server" / "README.md"]


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", pages(), ids=_relative)
def test_what_is_generated_is_fresh(path: Path) -> None:
    text = path.read_text()

    assert text == refresh(text), "run make generate and commit"


def test_every_generated_table_stands_in_some_page() -> None:
    text = "".join(path.read_text() for path in pages())

    assert set(SECTIONS) == set(re.findall(r"<!-- generated: ([a-z-]+) -->", text))


@pytest.mark.parametrize("path", _all_pages(), ids=_relative)
def test_every_link_leads_to_a_file(path: Path) -> None:
    missing = [
        target for target in _LINK.findall(path.read_text()) if not (path.parent / target).exists()
    ]

    assert missing == []


def test_every_decision_is_in_the_index_once() -> None:
    numbered = sorted(path.name for path in (DOCS / "adr").glob("[0-9]*.md"))
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (DOCS / "adr" / "README.md").read_text())

    assert listed == numbered
    assert [name[:4] for name in numbered] == [f"{n + 1:04d}" for n in range(len(numbered))]


def test_every_decision_says_context_decision_and_consequences() -> None:
    for path in (DOCS / "adr").glob("[0-9]*.md"):
        headings = re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)

        assert headings == ["Context", "Decision", "Consequences"], path.name


def test_every_decision_that_a_source_names_exists() -> None:
    known = {path.name[:4] for path in (DOCS / "adr").glob("[0-9]*.md")}
    named = {
        number
        for folder in _SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".sql"} and "v1" not in path.parts
        for number in _ADR_REFERENCE.findall(path.read_text())
    }

    assert named - known == set()


def test_every_event_of_the_servers_log_is_explained() -> None:
    text = (DOCS / "operations.md").read_text()
    events = {
        event
        for path in (ROOT / "server" / "fencepost_server").rglob("*.py")
        for event in _EVENT.findall(path.read_text())
    }

    assert {event for event in events if f"`{event}`" not in text} == set()
