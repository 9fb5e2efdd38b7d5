"""What the pages on time promise is what the code does: nights, H, differences from croniter."""

import re
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import pytest
from fencepost_server.clock import HOUR, format_instant, from_datetime
from fencepost_server.domain.schedule import CronSpec, DstFoldPolicy, DstGapPolicy
from fencepost_server.policy.cron import compile_cron
from fencepost_server.policy.cron_fields import MACROS
from fencepost_server.policy.cron_parse import parse_cron

from tests.unit.policy.test_cron_against_croniter import DIFFERENCES

DOCS = Path(__file__).parents[3] / "docs"
PAGE = "\n".join((DOCS / name).read_text("utf-8") for name in ("time.md", "time-details.md"))
GAP_NIGHT = "2027-03-28T00:00Z"
FOLD_NIGHT = "2027-10-31T00:00Z"


def rows(after: str) -> list[list[str]]:
    """The cells of the first table below a text, without its heading."""
    lines = PAGE[PAGE.index(after) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return table


def cell(spec: CronSpec, night: str, hours: int) -> str:
    """A rule's fires in a night, as the page writes them."""
    start = from_datetime(datetime.fromisoformat(night))
    found = compile_cron(spec).between(start - 1, start + hours * HOUR - 1, 100)
    return " ".join(f"{format_instant(at)[11:16]}Z" for at in found) or "none"


def test_the_night_that_lacks_an_hour() -> None:
    table = rows("**The night that lacks an hour**")
    assert len(table) == 4
    for expression, *cells in table:
        expected = [
            cell(
                CronSpec(expressions=(expression,), time_zone="Europe/Berlin", dst_gap=gap),
                GAP_NIGHT,
                2,
            )
            for gap in DstGapPolicy
        ]
        assert cells == expected, expression


def test_the_night_with_an_hour_twice() -> None:
    table = rows("**The night with an hour twice**")
    assert len(table) == 4
    for expression, *cells in table:
        expected = [
            cell(
                CronSpec(expressions=(expression,), time_zone="Europe/Berlin", dst_fold=fold),
                FOLD_NIGHT,
                3,
            )
            for fold in DstFoldPolicy
        ]
        assert cells == expected, expression


def test_h_can_be_recomputed_as_shown() -> None:
    digests = re.findall(r"\$ printf '([^']+)' \| sha256sum \| cut -c1-16\n(\w{16})\n", PAGE)
    assert [text for text, _ in digests] == ["default/report minute", "default/report hour"]
    for text, digest in digests:
        assert sha256(text.encode()).hexdigest()[:16] == digest
    minute, hour = (
        int(digest, 16) % size for (_, digest), size in zip(digests, (60, 24), strict=True)
    )
    assert f"\n{minute} {hour}\n" in PAGE
    assert f"At {hour:02d}:{minute:02d}, in the time zone UTC." in PAGE
    assert parse_cron("H H * * *", seed="default/report").text == f"{minute} {hour} * * *"


def test_each_difference_from_croniter_is_on_the_page() -> None:
    told = [row[0].partition("`")[0] for row in rows("Against croniter")]
    assert told == [row.expression for row in DIFFERENCES]


@pytest.mark.parametrize("macro", MACROS)
def test_every_macro_is_on_the_page(macro: str) -> None:
    assert f"`{macro.lower()}`" in PAGE


def test_every_example_of_the_grammar_is_accepted() -> None:
    examples = [row[1].strip("`") for row in rows("Five fields, or six")]
    whole = [text for text in examples if len(text.split()) == 5 and "@" not in text]
    assert len(whole) == 5
    for text in whole:
        assert parse_cron(text, seed="default/report").can_fire()
