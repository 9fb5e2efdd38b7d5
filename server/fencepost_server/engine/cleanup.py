"""Clean-up of everything that would grow for ever: what may go, how old it must be, and how
much of it one pass takes.

Every statement deletes at most a batch, in rows that nobody else has locked, so several
servers may clean up at once and none of them holds up anybody for long.
"""

from collections.abc import Mapping

import structlog

from fencepost_server.clock import DAY, Duration, Instant
from fencepost_server.store.database import Database
from fencepost_server.store.statements import load

_SQL = load("upkeep")
_log = structlog.get_logger("cleanup")

ROWS_PER_STATEMENT = 5_000
STATEMENTS_PER_PASS = 20
WORKER_KEPT: Duration = DAY
OPERATION_KEPT: Duration = 30 * DAY
VERSION_KEPT: Duration = 30 * DAY
# A server remembers the number of a rule for less long than this; see store/catalogue.py.
RULE_KEPT: Duration = 7 * DAY
# How long what was still needed is left alone.
_LOOK_AGAIN: Duration = DAY
# Looking whether something is needed costs more than deleting it.
_JUDGED_PER_STATEMENT = 500


class Cleanup:
    """The clean-up passes of one server over one database."""

    def __init__(self, *, database: Database, history: Duration) -> None:
        """`history`: how long ended runs are kept."""
        self._database = database
        self._history = history

    async def prune(self, now: Instant, *, floor: Instant) -> None:
        """One pass over what is looked after seldom; `floor` is the oldest instant kept."""
        bounds: Mapping[str, Mapping[str, Instant]] = {
            "prune_strays": {"before": floor},
            "prune_fire_skips": {"before": floor},
            "prune_discarded": {"before": floor},
            "prune_requests": {"now": now},
            "prune_claim_requests": {"now": now},
            "prune_operations": {"before": now - OPERATION_KEPT},
            "prune_workers": {"before": now - WORKER_KEPT},
        }
        for name, values in bounds.items():
            for _ in range(STATEMENTS_PER_PASS):
                rows = await self._database.requests.execute(
                    _SQL[name], rows_max=ROWS_PER_STATEMENT, **values
                )
                if rows < ROWS_PER_STATEMENT:
                    break
        await self._judge("prune_versions", now - max(VERSION_KEPT, self._history))
        await self._judge("prune_kept_attempts", now - self._history)
        # A day more than anything that could name the job.
        await self._judge("prune_jobs", now - max(OPERATION_KEPT, self._history) - DAY)
        await self._prune_rules(now)

    async def forget_keys(self, now: Instant) -> None:
        """Unique keys: says until when ended runs hold theirs, and drops those held no longer."""
        for name in ("stamp_run_keys", "prune_run_keys"):
            for _ in range(STATEMENTS_PER_PASS):
                rows = await self._database.requests.execute(
                    _SQL[name], now=now, rows_max=ROWS_PER_STATEMENT
                )
                if rows < ROWS_PER_STATEMENT:
                    break

    async def _judge(self, name: str, before: Instant) -> None:
        for _ in range(STATEMENTS_PER_PASS):
            row = await self._database.requests.fetch_one(
                _SQL[name],
                before=before,
                again=before + _LOOK_AGAIN,
                rows_max=_JUDGED_PER_STATEMENT,
            )
            assert row is not None, "a count always answers one row"
            if row["looked_at"] < _JUDGED_PER_STATEMENT:
                break

    async def _prune_rules(self, now: Instant) -> None:
        before = now - RULE_KEPT
        rows = await self._database.requests.fetch(
            _SQL["old_rules"], before=before, rows_max=ROWS_PER_STATEMENT
        )
        old = [row["schedule_id"] for row in rows]
        if not old:
            return
        await self._database.requests.execute(_SQL["keep_used_rules"], schedule_ids=old, now=now)
        gone = await self._database.requests.execute(
            _SQL["prune_rules"], schedule_ids=old, before=before
        )
        if gone:
            _log.info("schedule_rules_pruned", rules=gone)
