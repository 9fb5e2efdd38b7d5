"""Stores reports that nobody will send again: what a session or a caller leaves behind."""

import asyncio
from collections.abc import Sequence

import structlog

from fencepost_server.clock import MILLISECOND, SECOND, Duration
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.engine.verdicts import Report, Verdict

_log = structlog.get_logger("last_reports")

# A report whose row was locked is tried so often, so long apart; then its lease runs out.
_TRIES = 20
_PAUSE: Duration = 100 * MILLISECOND


async def store_last(lifecycle: Lifecycle, reports: Sequence[Report]) -> None:
    """Until each report has a final verdict, or for two seconds.

    Raises StorageUnavailable or ServerOverloaded.
    """
    left = list(reports)
    for number in range(_TRIES):
        if number:
            await asyncio.sleep(_PAUSE / SECOND)
        judged = await lifecycle.report(left)
        left = [
            report
            for report, answer in zip(left, judged, strict=True)
            if answer.verdict is Verdict.RETRY
        ]
        if not left:
            return
    _log.warning("reports_given_up", runs=[str(report.key) for report in left[:10]])
