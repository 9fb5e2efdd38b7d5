"""What workers report most, that a first attempt succeeded: stored by one narrow statement per
tick. What that leaves, for whatever reason, goes the way of all other reports.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import structlog

from fencepost_server.clock import Instant
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.verdicts import PlainSuccess, Report
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import ConflictError, Pool
from fencepost_server.store.locks import was_locked_out
from fencepost_server.store.statements import load

_OUTCOMES = load("outcomes")
_log = structlog.get_logger("plain_reports")

# job_id, scheduled_at, place among the reports of the tick, result, timings. Tuples, because
# there are tens of thousands a second; they sort by key, and the place keeps bytes from being
# compared.
Ending: TypeAlias = tuple[str, Instant, int, bytes | None, bytes | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSuccesses:
    """What a statement ended, and which places of the tick it left."""

    left: Sequence[int]
    keys: Collection[RunKey]
    queue_ids: Collection[int]
    serial_job_ids: Collection[str]


def split(reports: Sequence[Report | PlainSuccess]) -> tuple[list[Ending], list[int]]:
    """Plain successes in key order, and the places of all other reports.

    A success whose run is also named by one of those is left to them, because the first
    report of an attempt counts.
    """
    plain: list[Ending] = []
    others: list[int] = []
    for place, report in enumerate(reports):
        if isinstance(report, tuple):
            job_id, scheduled_at, result, timings = report
            plain.append((job_id, scheduled_at, place, result, timings))
        elif report.attempt == 1 and report.ending is None and report.progress is None:
            plain.append((*report.key, place, report.result, report.timings))
        else:
            others.append(place)
    if others and plain:
        named = {as_report(reports[place]).key for place in others}
        shared = [row[2] for row in plain if row[:2] in named]
        if shared:
            taken = set(shared)
            plain = [row for row in plain if row[2] not in taken]
            others = sorted(others + shared)
    plain.sort()
    return plain, others


def as_report(report: Report | PlainSuccess) -> Report:
    """A plain success in the form of all other reports."""
    if not isinstance(report, tuple):
        return report
    job_id, scheduled_at, result, timings = report
    return Report(
        key=RunKey(job_id, scheduled_at), attempt=1, ending=None, result=result, timings=timings
    )


async def store_successes(pool: Pool, plain: Sequence[Ending], *, now: Instant) -> StoredSuccesses:
    """Ends first attempts that run; `plain` has one at least and is in key order.

    Stores none of them where a row is locked for long or history refuses one. Raises
    StorageUnavailable.
    """
    job_ids, scheduled_ats, places, results, timings = zip(*plain, strict=True)
    try:
        [row] = await pool.fetch(
            _OUTCOMES["succeed_plain_runs"],
            job_ids=job_ids,
            scheduled_ats=scheduled_ats,
            results=_sent(results),
            timings=_sent(timings),
            now=now,
        )
    except ConflictError as error:
        # With the statement that can be bisected it is told whose.
        _log.info("plain_successes_refused", runs=len(plain), error=str(error))
    except StorageUnavailable as error:
        if not was_locked_out(error):
            raise
        _log.debug("plain_successes_locked_out", runs=len(plain))
    else:
        # A key equals the plain tuple of its parts; made one by one they would cost as much as
        # all the rest here.
        keys = cast("list[RunKey]", list(zip(job_ids, scheduled_ats, strict=True)))
        left: Sequence[int] = ()
        if row["ended"] < len(plain):
            done = set(row["places"] or ())
            left = [places[n - 1] for n in range(1, len(plain) + 1) if n not in done]
            keys = [keys[n - 1] for n in sorted(done)]
        return StoredSuccesses(
            left=left,
            keys=keys,
            queue_ids=row["queue_ids"] or (),
            serial_job_ids={str(job_id) for job_id in row["serial_job_ids"] or ()},
        )
    return StoredSuccesses(left=places, keys=(), queue_ids=(), serial_job_ids=())


def _sent(values: Sequence[bytes | None]) -> Sequence[bytes | None]:
    """Nothing at all where nobody sent anything: to say None a thousand times has its price."""
    return () if values.count(None) == len(values) else values
