"""What a run writes and asks of Postgres from fire to history: WAL (records and full-page images
apart), statements, rows.

Usage: python -m benchmarks.writes [--runs 50000] [--schedules 200000] [--rounds 3]

Each round begins with a checkpoint. Runs are fired, claimed 500 at a time and completed 500 at a
time. What becomes of the tables under a lasting load: benchmarks.bloat.
"""

import argparse
from datetime import timedelta

import asyncpg
import uvloop

from benchmarks.long_data import EPOCH, copied, jobs_template, set_clock, settings
from benchmarks.long_engine import PHASES, PhaseCost, phases, prepare
from benchmarks.long_gauges import told
from benchmarks.setting import median, postgres


async def _run(dsn: str, options: argparse.Namespace) -> None:
    # All runs of a round are due in one second.
    template = await jobs_template(dsn, jobs=options.schedules, rate=options.runs)
    rounds: list[dict[str, PhaseCost]] = []
    async with copied(dsn, template, begin=EPOCH - timedelta(minutes=1)) as url:
        await prepare(url)
        connection = await asyncpg.connect(url)
        try:
            for number in range(options.rounds):
                await set_clock(url, EPOCH + timedelta(seconds=number), still=True)
                await connection.execute("CHECKPOINT")
                rounds.append(await phases(url, connection))
                assert rounds[-1]["fire"].runs == options.runs
                # As the product does every 15 s.
                await connection.execute("VACUUM (TRUNCATE off) fencepost.run_queue")
        finally:
            await connection.close()
    told(
        f"{'per run':<10} {'WAL records':>12} {'page images':>12} {'per 1,000: statements':>22} "
        f"{'inserted':>9} {'updated':>9} {'deleted':>9} {'read':>9} {'buffers':>9}"
    )
    sums = [0.0, 0.0]
    for phase in PHASES:
        found = [each[phase] for each in rounds]
        record = median([each.record_bytes for each in found])
        image = median([each.image_bytes for each in found])
        sums = [sums[0] + record, sums[1] + image]
        told(
            f"{phase:<10} {record:10,.0f} B {image:10,.0f} B "
            f"{1000 * median([each.statements for each in found]):22,.1f} "
            f"{1000 * median([each.inserted for each in found]):9,.0f} "
            f"{1000 * median([each.updated for each in found]):9,.0f} "
            f"{1000 * median([each.deleted for each in found]):9,.0f} "
            f"{1000 * median([each.rows_read for each in found]):9,.0f} "
            f"{1000 * median([each.buffers for each in found]):9,.0f}"
        )
        reads = sorted(found[-1].read_by_table.items(), key=lambda each: -each[1])
        tables = ", ".join(f"{name} {1000 * rows:,.0f}" for name, rows in reads[:4] if rows)
        told(f"{'':<10} read per 1,000 runs: {tables}")
    told(f"{'together':<10} {sums[0]:10,.0f} B {sums[1]:10,.0f} B")


def main() -> None:
    """A line per phase."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50_000)
    parser.add_argument("--schedules", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared-buffers", default="2GB")
    options = parser.parse_args()
    if options.runs * options.rounds > options.schedules:
        parser.error("--runs times --rounds is at most --schedules")
    with postgres(settings(shared_buffers=options.shared_buffers, autovacuum=False)) as dsn:
        uvloop.run(_run(dsn, options))


if __name__ == "__main__":
    main()
