"""Renews the leases of what workers say they hold: nearly all by one narrow statement per tick, the
rest (progress, lost leases, rows that others have locked) by one that looks closer.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog

from fencepost_server.clock import Clock, Instant
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.verdicts import RENEWED, Held, Renewal, cancel_notice, lost_notice
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import Pool, Row
from fencepost_server.store.locks import was_locked_out
from fencepost_server.store.statements import load

_LEASES = load("leases")
_log = structlog.get_logger("renewals")

# Rows that another transaction holds are tried again so often; then the old lease stands.
_TRIES = 3


class Renewals:
    """`inspect` tells where runs are now."""

    def __init__(
        self,
        *,
        pool: Pool,
        clock: Clock,
        inspect: Callable[[Sequence[RunKey]], Awaitable[Mapping[RunKey, Row]]],
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._inspect = inspect

    async def store(self, held: Sequence[Held]) -> Sequence[Renewal]:
        """A renewal per entry, in order. Raises StorageUnavailable."""
        order = sorted(range(len(held)), key=lambda i: held[i].key)
        plain = [i for i in order if held[i].progress is None]
        pending = [i for i in order if held[i].progress is not None]
        if plain:
            left, asked = await _renew_plain(self._pool, held, plain, now=self._clock.now())
            # Renewed again for what there is to tell: few are asked to stop, and not for long.
            pending = sorted({*pending, *left, *asked}, key=lambda i: held[i].key)
        renewals = [RENEWED] * len(held)
        if pending:
            rest = await self._renew_rest([held[i] for i in pending])
            for place, renewal in zip(pending, rest, strict=True):
                renewals[place] = renewal
        return renewals

    async def _renew_rest(self, held: Sequence[Held]) -> Sequence[Renewal]:
        """Of entries in key order."""
        answers: dict[int, Renewal] = {}
        pending = list(range(len(held)))
        for _ in range(_TRIES):
            now = self._clock.now()
            rows = await self._pool.fetch(
                _LEASES["renew_leases"],
                job_ids=[held[i].key.job_id for i in pending],
                scheduled_ats=[held[i].key.scheduled_at for i in pending],
                attempts=[held[i].attempt for i in pending],
                progresses=[held[i].progress for i in pending],
                now=now,
            )
            renewed = {
                (str(row["job_id"]), row["scheduled_at"], row["attempt"]): row for row in rows
            }
            for i in pending:
                row = renewed.get((*held[i].key, held[i].attempt))
                if row is not None:
                    answers[i] = Renewal(cancel_notice(held[i], row, now))
            pending = [i for i in pending if i not in answers]
            if not pending:
                break
            found = await self._inspect([held[i].key for i in pending])
            for i in pending:
                notice = lost_notice(held[i], found.get(held[i].key))
                if notice is not None:
                    answers[i] = Renewal(notice)
            pending = [i for i in pending if i not in answers]
            if not pending:
                break
        return [answers.get(i, Renewal(not_renewed=True)) for i in range(len(held))]


async def _renew_plain(
    pool: Pool, held: Sequence[Held], places: Sequence[int], *, now: Instant
) -> tuple[list[int], list[int]]:
    """Renews running attempts: `places` of `held`, in key order and without progress.

    Returns the places that were not renewed, and those whose attempts are asked to stop.
    Renews none where a row is locked for long. Raises StorageUnavailable.
    """
    values: dict[str, Any] = {
        "job_ids": [held[i].key.job_id for i in places],
        "scheduled_ats": [held[i].key.scheduled_at for i in places],
        "attempts": [held[i].attempt for i in places],
    }
    try:
        [row] = await pool.fetch(_LEASES["renew_plain_leases"], **values, now=now)
    except StorageUnavailable as error:
        if not was_locked_out(error):
            raise
        _log.debug("plain_renewals_locked_out", runs=len(places))
        return list(places), []
    left: list[int] = []
    if row["renewed"] < len(places):
        done = set(row["places"] or ())
        left = [place for n, place in enumerate(places, start=1) if n not in done]
    return left, [places[n - 1] for n in row["cancelled"] or ()]
