"""ListRuns against a plain reading of its rules: every filter alone and with every other, over
runs in all places, pages of all sizes, and while runs move between places.
"""

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import asyncpg
import pytest
from fencepost_server.api.run_filter import read_filter
from fencepost_server.clock import DAY, HOUR, SECOND, Instant, to_datetime
from fencepost_server.domain.names import JobName
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.run_reads import RunReads
from fencepost_server.errors import FilterNotSupported
from fencepost_server.store import run_terms
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.day_tables import DayTables

from tests.factories import NOON
from tests.integration import run_population
from tests.integration.held_database import HandClock, own_database
from tests.integration.ledger import Woken
from tests.integration.run_population import CODES, JOBS, WORKERS, Stored, make_population
from tests.integration.world import build

RUNS = make_population(NOON, count=500)
_BY_KEY = {run.key: run for run in RUNS}
Test = Callable[[Stored], bool]


def _rfc(at: Instant) -> str:
    return f"{to_datetime(at):%Y-%m-%dT%H:%M:%SZ}"


_RECENT, _OLD = NOON - 3 * DAY, NOON - 300 * DAY
# A filter, what it means, and from which instant on it looks into history (None: a week back).
FILTERS: tuple[tuple[str, Test, Instant | None], ...] = (
    ("state=RUNNING", lambda r: r.state == "running", None),
    ("state=SUCCEEDED,QUEUED", lambda r: r.state in ("succeeded", "queued"), None),
    ("state!=SUCCEEDED", lambda r: r.state != "succeeded", None),
    ("state=DEAD", lambda r: r.state == "dead", None),
    ("job=sms", lambda r: r.job.name == "sms", None),
    (f"job={JOBS[3].job_id}", lambda r: r.job == JOBS[3], None),
    ("job=sms,mail-2", lambda r: r.job.name in ("sms", "mail-2"), None),
    ("job=mail*", lambda r: r.job.name.startswith("mail"), None),
    ("job!=mail", lambda r: r.job.name != "mail", None),
    ("kind=mail.open", lambda r: r.job.kind == "mail.open", None),
    ("kind=mail*", lambda r: r.job.kind.startswith("mail"), None),
    ("kind!=mail.send,rare.kind", lambda r: r.job.kind not in ("mail.send", "rare.kind"), None),
    ("queue=bulk", lambda r: r.job.queue == "bulk", None),
    ("queue!=bulk", lambda r: r.job.queue != "bulk", None),
    ("origin=BACKFILL", lambda r: r.origin == "backfill", None),
    ("origin!=ENQUEUE", lambda r: r.origin != "enqueue", None),
    (f"worker={WORKERS[0]}", lambda r: r.worker == WORKERS[0], None),
    (f"worker!={WORKERS[0]}", lambda r: r.worker != WORKERS[0], None),
    ("skip_reason=EXPIRED", lambda r: r.skip_reason == "expired", None),
    ("skip_reason!=EXPIRED", lambda r: r.skip_reason != "expired", None),
    ("dead_reason=MAX_FAILURES", lambda r: r.dead_reason == "max_failures", None),
    ("cancel_cause=OVERLAP", lambda r: r.cancel_cause == "overlap", None),
    ("cancel_cause!=OVERLAP", lambda r: r.cancel_cause != "overlap", None),
    (f"last_failure.code={CODES[1]}", lambda r: r.failure_code == CODES[1], None),
    (f"last_failure.code!={CODES[1]}", lambda r: r.failure_code != CODES[1], None),
    ("unique_key=order-3,order-4", lambda r: r.unique_key in ("order-3", "order-4"), None),
    ("unique_key!=order-3", lambda r: r.unique_key != "order-3", None),
    ("labels.team=web", lambda r: r.all_labels.get("team") == "web", None),
    ("labels.team=web,db", lambda r: r.all_labels.get("team") in ("web", "db"), None),
    ("labels.team!=web", lambda r: r.all_labels.get("team") != "web", None),
    ("labels:customer", lambda r: "customer" in r.all_labels, None),
    ("labels:tier", lambda r: "tier" in r.all_labels, None),
    (f"scheduled_at>={_rfc(_OLD)}", lambda r: r.scheduled_at >= _OLD, _OLD),
    (f"scheduled_at>{_rfc(_RECENT)}", lambda r: r.scheduled_at > _RECENT, _RECENT),
    (f"scheduled_at<{_rfc(NOON)}", lambda r: r.scheduled_at < NOON, None),
    (f"created_at<{_rfc(_RECENT)}", lambda r: r.created_at < _RECENT, None),
    (f"created_at>={_rfc(_RECENT)}", lambda r: r.created_at >= _RECENT, None),
    (
        f"ended_at>={_rfc(_RECENT)}",
        lambda r: r.ended_at is not None and r.ended_at >= _RECENT,
        None,
    ),
    (
        f"ended_at<{_rfc(_RECENT)}",
        lambda r: r.ended_at is not None and r.ended_at < _RECENT,
        None,
    ),
)


@dataclass(kw_only=True)
class Lists:
    """What tests list with, and change beside it."""

    reads: RunReads
    raw: "asyncpg.Connection[asyncpg.Record]"

    async def pages(self, text: str, *, size: int) -> AsyncIterator[list[tuple[Instant, str]]]:
        """The keys of each page to the end."""
        after: RunKey | None = None
        since: Instant | None = None
        for _ in range(2000):
            page = await self.reads.list(
                JobName(tenant="default", job=""),
                read_filter(text, job=None),
                after=after,
                searched_since=since,
                page_size=size,
                full=False,
            )
            yield [(run.key.scheduled_at, run.key.job_id) for run in page.runs]
            after, since = page.after, page.searched_since
            if after is None:
                return
        raise AssertionError("the list did not end")

    async def keys(self, text: str, *, size: int = 1000) -> list[tuple[Instant, str]]:
        """All pages in a row."""
        return [key async for page in self.pages(text, size=size) for key in page]


@pytest.fixture(scope="module")
def populated_dsn(postgres_dsn: str, template_database: str) -> Iterator[str]:
    """A database with the whole population; tests leave it as they found it."""
    name = f"fencepost_population_{os.getpid()}"
    with own_database(postgres_dsn, template_database, name) as dsn:
        asyncio.run(_fill(dsn))
        yield dsn


async def _fill(dsn: str) -> None:
    async with build(dsn) as world:
        tables = DayTables(dsn)
        today = to_datetime(NOON).date()
        first = to_datetime(NOON - run_population.DAYS * DAY).date()
        await tables.ensure(first, today)
        await world.retention._set_bounds()
        await run_population.store(world.raw, RUNS)
        await tables.index_before(today, tables_max=100)
        await world.raw.execute("ANALYZE")


@pytest.fixture
async def lists(populated_dsn: str) -> AsyncIterator[Lists]:
    raw = await asyncpg.connect(populated_dsn, server_settings={"timezone": "UTC"})
    try:
        async with Database(populated_dsn, hot_size=1, requests_size=2) as database:
            database.clock = HandClock(NOON)
            catalogue = Catalogue(pool=database.requests)
            yield Lists(
                reads=RunReads(database=database, catalogue=catalogue, wake=Woken()), raw=raw
            )
    finally:
        await raw.close()


def _expected(tests: Sequence[tuple[str, Test, Instant | None]]) -> list[tuple[Instant, str]]:
    bounds = [since for _, _, since in tests if since is not None]
    newest = min([NOON] + [NOON for text, _, _ in tests if text.startswith("scheduled_at<")])
    history_from = max(bounds) if bounds else newest - 7 * DAY
    return sorted(
        (
            run.key
            for run in RUNS
            if run.job.tenant == "default"
            and all(test(run) for _, test, _ in tests)
            and (run.place in ("queue", "dead") or run.scheduled_at >= history_from)
        ),
        reverse=True,
    )


def test_the_population_has_something_for_every_filter() -> None:
    """An oracle that expects nothing would prove nothing."""
    for each in FILTERS:
        found = _expected([each])
        assert 0 < len(found) < len(RUNS) * 9 // 10, each[0]
    assert {run.place for run in RUNS} == {"queue", "dead", "history", "stray"}
    assert len({run.scheduled_at for run in RUNS}) < len(RUNS), "no two share an instant"


async def test_each_filter_alone(lists: Lists) -> None:
    assert await lists.keys("") == _expected([])
    for each in FILTERS:
        assert await lists.keys(each[0], size=37) == _expected([each]), each[0]


@pytest.mark.parametrize("part", range(2))
async def test_every_pair_of_filters(lists: Lists, part: int) -> None:
    pairs = list(itertools.combinations(FILTERS, 2))[part::2]
    for pair in pairs:
        text = " ".join(each[0] for each in pair)
        assert await lists.keys(text) == _expected(pair), text


@pytest.mark.parametrize("text", ["", "state!=SUCCEEDED", "labels.team=web", "job=mail*"])
async def test_pages_of_every_size_add_up_to_the_whole(lists: Lists, text: str) -> None:
    chosen = [each for each in FILTERS if each[0] == text]
    wanted = _expected(chosen)
    small = (1, 2, 3) if text == "job=mail*" else (17,)
    for size in (*small, 50, len(wanted) - 1, len(wanted), len(wanted) + 1):
        pages = [page async for page in lists.pages(text, size=size)]
        assert all(len(page) <= size for page in pages)
        assert [key for page in pages for key in page] == wanted


async def test_a_page_that_runs_out_of_time_goes_on_where_it_ended(
    lists: Lists, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost_server.engine.run_reads.LIST_TIME_MAX", 0)
    for text in ("", "kind=rare.kind", f"scheduled_at>={_rfc(_OLD)}"):
        chosen = [each for each in FILTERS if each[0] == text]
        if text == "kind=rare.kind":
            chosen = [(text, lambda run: run.job.kind == "rare.kind", None)]
        pages = [page async for page in lists.pages(text, size=40)]
        assert [key for page in pages for key in page] == _expected(chosen)
        assert len(pages) > 20


async def test_runs_that_move_while_paging_are_seen_exactly_once(lists: Lists) -> None:
    rng = random.Random(11)
    now = {run.key: run for run in RUNS if run.job.tenant == "default"}
    movable = [
        key
        for key, run in now.items()
        if run.place in ("queue", "dead", "history") and NOON - 7 * DAY <= key[0] <= NOON
    ]
    seen: list[tuple[Instant, str]] = []
    moves = 0
    try:
        async for page in lists.pages("", size=9):
            seen += page
            for key in rng.sample(movable, 25):
                moved = _moved(now[key])
                await run_population.move(lists.raw, now[key], moved)
                now[key] = moved
                moves += 1
    finally:
        for key in movable:
            if now[key] != _BY_KEY[key]:
                await run_population.move(lists.raw, now[key], _BY_KEY[key])
    assert moves > 500
    assert seen == _expected([])
    assert await lists.keys("") == _expected([])


def _moved(run: Stored) -> Stored:
    """Where the run may go next: queue to history, history aside, dead letter to the queue."""
    if run.place == "dead":
        return replace(run, place="queue", state="queued", dead_reason=None, ended_at=None)
    ended_at = run.scheduled_at + HOUR
    if run.place == "queue":
        return replace(run, place="history", state="succeeded", ended_at=ended_at, skip_reason=None)
    return replace(
        run,
        place="dead",
        state="dead",
        dead_reason="max_failures",
        ended_at=ended_at,
        skip_reason=None,
    )


async def test_what_is_shown_is_what_matched(lists: Lists, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fencepost_server.engine.run_reads.LIST_TIME_MAX", 60 * SECOND)
    page = await lists.reads.list(
        JobName(tenant="default", job=""),
        read_filter("unique_key=order-3 labels:customer", job=None),
        after=None,
        searched_since=None,
        page_size=100,
        full=False,
    )
    assert page.runs
    for run in page.runs:
        assert run.unique_key == "order-3"
        assert run.labels["customer"] in ("c1", "c2")
    assert page.searched_since == (NOON - 7 * DAY) // SECOND * SECOND


async def test_a_filter_that_comes_down_to_too_many_jobs_is_refused(
    lists: Lists, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_terms, "JOBS_MAX", 3)
    with pytest.raises(FilterNotSupported) as refused:
        await lists.keys("job=mail*,sms")
    assert "more than 3 jobs" in str(refused.value)
    # Labels that many jobs have are looked at run by run instead.
    monkeypatch.setattr(run_terms, "JOBS_MAX", 1)
    chosen = next(each for each in FILTERS if each[0] == "labels.team=web")
    assert await lists.keys("labels.team=web") == _expected([chosen])
