"""Time of one page of runs by each filter over a month of history: kinds of filters that match
much, little, one run of all, and nothing.

Usage: python -m benchmarks.history [--rows 5000000] [--live 100000] [--page 50]
"""

import argparse
import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import asyncpg
from fencepost_server.api.run_filter import read_filter
from fencepost_server.domain.names import JobName
from fencepost_server.engine.run_reads import ListPage, RunReads
from fencepost_server.engine.wake import Wakes
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Database
from fencepost_server.store.day_tables import DayTables
from fencepost_server.store.statements import load

from benchmarks.setting import fresh_database, median, postgres

DAYS = 30
JOBS = 2_000
ROUNDS = 5
PAGES_MAX = 100
NEEDLE_WORKER = "0197a4c2-7d1e-7b1a-9c55-3f2f6a1d0e42"

_NAMES = """
INSERT INTO fencepost.kinds (name) SELECT 'kind.' || n FROM generate_series(1, 40) AS n;
INSERT INTO fencepost.kinds (name) VALUES ('kind.needle');
INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at)
SELECT tenant_id, q, now(), now()
FROM fencepost.tenants, unnest('{{q0,q1,q2,q3,q4,needle}}'::text[]) AS q;
CREATE TABLE public.bench_jobs AS
SELECT n, ('0197a4c2-7d1e-7b1a-9c55-' || lpad(to_hex(n), 12, '0'))::uuid AS job_id,
       (SELECT queue_id FROM fencepost.queues WHERE name = 'q' || n % 5) AS queue_id,
       (SELECT kind_id FROM fencepost.kinds WHERE name = 'kind.' || 1 + n % 40) AS kind_id,
       (SELECT tenant_id FROM fencepost.tenants) AS tenant_id
FROM generate_series(0, {jobs} - 1) AS n;
INSERT INTO fencepost.jobs (job_id, tenant_id, name, version, created_at, updated_at)
SELECT job_id, tenant_id, 'job-' || n, 1, now(), now() FROM bench_jobs;
INSERT INTO fencepost.job_versions (job_id, version, spec, created_at)
SELECT job_id, 1, CASE WHEN n = 7 THEN '{{"labels": {{"team": "few"}}}}'
                       WHEN n % 10 = 0 THEN '{{"labels": {{"team": "web"}}}}'
                       ELSE '{{}}' END::jsonb
       || jsonb_build_object('target', jsonb_build_object(
              'kind', 'kind.' || 1 + n % 40, 'queue_name', 'q' || n % 5)), now()
FROM bench_jobs;
CREATE TABLE public.bench_workers AS
SELECT n, gen_random_uuid() AS worker_id FROM generate_series(0, 49) AS n;
ANALYZE;
"""
# One day as it comes to be: mostly fires at whole minutes, some ad-hoc runs with keys, a twentieth
# with labels of their own, few that did not simply succeed; stored in the order they ended.
_DAY = """
INSERT INTO fencepost.job_runs
    (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, ended_at,
     tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count, snooze_count,
     replay_count, state, origin, priority, worker_id, labels, failure_code, skip_reason,
     cancel_cause, unique_key)
SELECT j.job_id, x.at, x.at, x.at, x.at, x.at, x.at + (1 + n % 60) * interval '1 s', j.tenant_id,
       j.queue_id, j.kind_id, 1, (n % 100 <> 1)::int, 0, 0, 0, 0,
       (CASE WHEN n % 50 = 0 THEN 'cancelled' WHEN n % 100 = 1 THEN 'skipped'
             ELSE 'succeeded' END)::fencepost.run_state,
       (CASE WHEN n % 10 = 3 THEN 'enqueue' ELSE 'schedule' END)::fencepost.run_origin, 0,
       CASE WHEN n % 100 <> 1 THEN (
           SELECT w.worker_id FROM bench_workers AS w WHERE w.n = x.n / 7 % 50) END,
       CASE WHEN n % 20 = 3 THEN jsonb_build_object('customer', 'c' || n / 20 % 500) END,
       CASE WHEN n % 50 = 7 THEN 'E' || n / 50 % 20 END,
       CASE WHEN n % 100 = 1 THEN 'expired' END::fencepost.skip_reason,
       CASE WHEN n % 50 = 0 THEN 'requested' END::fencepost.cancel_cause,
       CASE WHEN n % 20 = 3 THEN 'order-' || $4::int || '-' || n END
FROM (
    SELECT n, n * 7919 % {jobs} AS job, CASE
        WHEN n % 10 = 3 THEN $1::timestamptz + n * ($2::float8 / $3::int) * interval '1 s'
                             + interval '1 us'
        ELSE date_trunc('minute', $1::timestamptz + n * ($2::float8 / $3::int) * interval '1 s')
        END AS at
    FROM generate_series(0, $3::int - 1) AS n) AS x
JOIN (SELECT n AS job, job_id, tenant_id, queue_id, kind_id FROM bench_jobs) AS j USING (job)
ORDER BY x.at + (1 + n % 60) * interval '1 s'
ON CONFLICT DO NOTHING
"""
# The one run that the sparse filters look for.
_NEEDLE = """
INSERT INTO fencepost.job_runs
    (job_id, scheduled_at, available_at, created_at, claimed_at, ended_at, tenant_id, queue_id,
     kind_id, version, attempt, failure_count, lost_lease_count, snooze_count, replay_count, state,
     origin, priority, worker_id, labels, failure_code, unique_key)
SELECT job_id, $1, $1, $1::timestamptz - interval '90 days', $1,
       $1::timestamptz + interval '9 hours', tenant_id,
       (SELECT queue_id FROM fencepost.queues WHERE name = 'needle'),
       (SELECT kind_id FROM fencepost.kinds WHERE name = 'kind.needle'), 1, 1, 0, 0, 0, 0,
       'succeeded', 'backfill', 0, $2::uuid, '{"customer": "needle"}', 'NEEDLE', 'needle'
FROM bench_jobs WHERE n = 9
"""
_LIVE = """
INSERT INTO fencepost.run_queue
    (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version, state,
     origin, priority, lease_s, cancel_grace_s, attempt_timeout_s)
SELECT j.job_id, $1::timestamptz + x.n * interval '1 ms', $1, $1, j.tenant_id, j.queue_id,
       j.kind_id, 1, 'queued', 'enqueue', 0, 30, 30, 3600
FROM generate_series(1, $2::int) AS x (n)
JOIN bench_jobs AS j ON j.n = x.n % {jobs}
"""


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


async def _fill(url: str, *, rows: int, now: datetime) -> None:
    """A month up to now, of which the last day is not over and yet has a day's runs."""
    today = now.date()
    tables = DayTables(url)
    first = today - timedelta(days=DAYS - 1)
    await tables.ensure(first, today + timedelta(days=7))
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            "UPDATE fencepost.shard_state SET history_from = $1, history_until = $2",
            _midnight(first),
            _midnight(today + timedelta(days=8)),
        )
        await connection.execute(_NAMES.format(jobs=JOBS))
        for back in range(DAYS - 1, -1, -1):
            begin = _midnight(today - timedelta(days=back))
            seconds = 86_400.0 if back else (now - begin).total_seconds()
            await connection.execute(
                _DAY.format(jobs=JOBS), begin, seconds, rows // DAYS, back, timeout=600
            )
        needle = _midnight(today - timedelta(days=25)) + timedelta(hours=3, seconds=7)
        await connection.execute(_NEEDLE, needle, NEEDLE_WORKER)
        await connection.execute("VACUUM ANALYZE", timeout=600)
        began = time.perf_counter()
        while await tables.index_before(today, tables_max=1):
            pass
        print(f"indexes of days that are over: {time.perf_counter() - began:.1f} s")
        for row in await connection.fetch(
            "SELECT CASE WHEN c.relkind = 'r' THEN 'the table' "
            "ELSE regexp_replace(pg_get_indexdef(c.oid), '^.* USING ', '') END AS what, "
            "pg_relation_size(c.oid) AS size FROM pg_class c "
            "WHERE c.relname LIKE $1 || '%' AND c.relkind IN ('r', 'i') ORDER BY size DESC",
            f"job_runs_{today - timedelta(days=3):%Y%m%d}",
        ):
            print(f"  {row['size'] / (rows / DAYS):7.1f} bytes per run: {row['what']}")
    finally:
        await connection.close()


def _filters(now: datetime) -> list[str]:
    ten = f"{now.date() - timedelta(days=10)}"
    hour = "{0}>={1}T05:00:00Z {0}<{1}T06:00:00Z"
    return [
        "",
        *(f"state={state}" for state in ("SUCCEEDED", "CANCELLED", "SKIPPED", "DEAD", "RUNNING")),
        *("job=job-5", "job=job-5,job-6", "job=job-1*", "job!=job-5"),
        *("kind=kind.5", "kind=kind.needle", "kind=kind.5,kind.needle", "kind!=kind.5"),
        *("queue=q3", "queue=needle", f"worker={NEEDLE_WORKER}"),
        *("origin=ENQUEUE", "origin=BACKFILL", "skip_reason=EXPIRED", "dead_reason=MAX_FAILURES"),
        *("cancel_cause=REQUESTED", "cancel_cause=OVERLAP"),
        *("last_failure.code=E7", "last_failure.code=NEEDLE", "last_failure.code!=E7"),
        *("unique_key=order-20-103", "unique_key=needle"),
        *("labels.customer=c103", "labels.customer=needle", "labels:customer", "labels:nothing"),
        *("labels.team=web", "labels.team=few", "labels.team!=web"),
        *(hour.format("created_at", ten), hour.format("ended_at", ten)),
        *("created_at<2020-01-01T00:00:00Z", "ended_at<2020-01-01T00:00:00Z"),
        *("kind=kind.5 state=CANCELLED origin=ENQUEUE", "job=job-9 unique_key=needle"),
        # What no index can know: each is frequent, and the two never meet.
        "kind=kind.5 queue=q1",
    ]


class _Lists:
    """Pages as the API asks for them, without the wire."""

    def __init__(self, database: Database, *, page_size: int, backend: int) -> None:
        """`backend`: process id of the one connection of the pool."""
        self._backend = backend
        self._reads = RunReads(
            database=database, catalogue=Catalogue(pool=database.requests), wake=Wakes()
        )
        self._page_size = page_size

    async def page(self, text: str, before: ListPage | None = None) -> ListPage:
        """The first page, or the one after `before`."""
        return await self._reads.list(
            JobName(tenant="default", job=""),
            read_filter(text, job=None),
            after=None if before is None else before.after,
            searched_since=None if before is None else before.searched_since,
            page_size=self._page_size,
            full=False,
        )

    async def measure(self, text: str, *, shown: str) -> None:
        """One line: the first page, and those after it until one has rows."""
        times: list[float] = []
        computed = self._computed()
        for _ in range(ROUNDS):
            began = time.perf_counter()
            page = await self.page(text)
            times.append((time.perf_counter() - began) * 1000)
        computed = (self._computed() - computed) / ROUNDS
        worst, pages = max(times), 1
        while page.after is not None and not page.runs and pages < PAGES_MAX:
            began = time.perf_counter()
            page = await self.page(text, page)
            worst = max(worst, (time.perf_counter() - began) * 1000)
            pages += 1
        print(
            f"{shown:<64}{computed:8.1f}{median(times):8.1f}{worst:8.1f}{pages:7}"
            f"{len(page.runs):6}",
            flush=True,
        )

    def _computed(self) -> float:
        """Milliseconds of processor time that Postgres and this process spent so far: what a
        page costs on a machine that has nothing else to do."""
        nanoseconds = Path(f"/proc/{self._backend}/schedstat").read_text().split()[0]
        return int(nanoseconds) / 1e6 + time.process_time() * 1000


async def _measure(url: str, texts: Mapping[str, str], *, page_size: int) -> None:
    async with Database(url, hot_size=1, requests_size=1) as database:
        await database.sample_clock(load("upkeep")["clock"])
        lists = _Lists(database, page_size=page_size, backend=await _backend(url))
        for _ in range(3):
            await lists.page("")
        title = f"ms for a page of {page_size} by filter"
        print(f"{title:<64}{'cpu':>8}{'median':>8}{'worst':>8}{'pages':>7}{'rows':>6}")
        for shown, text in texts.items():
            await lists.measure(text, shown=shown or "(none)")


async def _backend(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        pid: int = await connection.fetchval(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'fencepost' "
            "AND datname = current_database()"
        )
        return pid
    finally:
        await connection.close()


def _texts(now: datetime) -> dict[str, str]:
    """Each filter as it is, which looks at a week, and bounded to the month."""
    month = f"scheduled_at>={_midnight(now.date() - timedelta(days=DAYS)):%Y-%m-%dT%H:%M:%SZ}"
    texts: dict[str, str] = {}
    for text in _filters(now):
        texts[text] = text
        texts[f"{text} 30 days".strip()] = f"{text} {month}".strip()
    return texts


async def _run(dsn: str, *, rows: int, live: int, page_size: int) -> None:
    url = await fresh_database(dsn, "history")
    now = datetime.now(UTC)
    began = time.perf_counter()
    await _fill(url, rows=rows, now=now)
    print(f"{rows:,} runs over {DAYS} days made in {time.perf_counter() - began:.0f} s")
    await _measure(url, _texts(now), page_size=page_size)
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_LIVE.format(jobs=JOBS), now, live)
        await connection.execute("VACUUM ANALYZE fencepost.run_queue")
    finally:
        await connection.close()
    print(f"with {live:,} live runs besides:")
    texts = ("", "state=QUEUED", "state=RUNNING", "kind=kind.needle", "job=job-5")
    await _measure(url, {text: text for text in texts}, page_size=page_size)


def main() -> None:
    """Print a table of milliseconds per filter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--live", type=int, default=100_000)
    parser.add_argument("--page", type=int, default=50)
    options = parser.parse_args()
    with postgres() as dsn:
        asyncio.run(_run(dsn, rows=options.rows, live=options.live, page_size=options.page))


if __name__ == "__main__":
    main()
