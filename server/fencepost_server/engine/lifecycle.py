"""What workers say about attempts: completions, releases and heartbeats, merged over all
sessions and unary calls of the process into one statement per tick.

The API hands in reports and gets a verdict per report after its commit. A stale attempt
changes nothing, whoever sends it and however late.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import structlog

from fencepost_server.clock import Clock, Duration, Instant
from fencepost_server.domain.run import Lane, RunKey
from fencepost_server.engine import plain_reports
from fencepost_server.engine.attempts import Effects, Ended, end_attempts
from fencepost_server.engine.refill import Refills
from fencepost_server.engine.renewals import Renewals
from fencepost_server.engine.specs import SpecCache, SpecKey
from fencepost_server.engine.tick import Ticker
from fencepost_server.engine.verdicts import (
    SUCCESS_APPLIED,
    Held,
    Judged,
    Notice,
    PlainSuccess,
    Renewal,
    Report,
    Verdict,
    cancel_notice,
    judge,
    lost_notice,
)
from fencepost_server.engine.wake import Wake
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.database import ConflictError, Database, Row
from fencepost_server.store.statements import load

_OUTCOMES = load("outcomes")
_LEASES = load("leases")
_log = structlog.get_logger("lifecycle")

# Rows that another transaction holds are tried again; after this many ticks the worker is
# asked to send again.
_TRIES = 3
_PENDING_MAX = 20_000


class Lifecycle:
    """Two tickers and what they store. Run `run` until it is cancelled."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        specs: SpecCache,
        wake: Wake,
        gather: Duration,
        batch_max: int,
    ) -> None:
        """`gather` and `batch_max` as in `Ticker`."""
        self._database = database
        self._clock = clock
        self._specs = specs
        self._wake = wake
        self._reports: Ticker[Report | PlainSuccess, Judged] = Ticker(
            self._store_reports, gather=gather, batch_max=batch_max, pending_max=_PENDING_MAX
        )
        self._held: Ticker[Held, Renewal] = Ticker(
            self._store_heartbeats, gather=gather, batch_max=batch_max, pending_max=_PENDING_MAX * 5
        )
        self._renewals = Renewals(pool=database.hot, clock=clock, inspect=self._inspect)
        # Set when heartbeats could not be stored; read and cleared by the lease keeper.
        self.heartbeats_failed = False
        self.serial_ended: list[Callable[[Collection[str]], None]] = []
        # Hears the queue_ids whose attempts were closed, after the commit.
        self.places_freed: list[Callable[[Collection[int]], None]] = []
        # Hands freed places on in the commit that frees them, where there are workers for it.
        self.refills: Refills | None = None
        # Told which runs a commit has changed, ended or not.
        self.changed: list[Callable[[Collection[RunKey]], None]] = []

    async def run(self) -> None:
        """Store what is submitted."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._reports.run())
            group.create_task(self._held.run())

    async def report(self, reports: Sequence[Report | PlainSuccess]) -> Sequence[Judged]:
        """A verdict per report, in order, after its commit.

        Raises StorageUnavailable or ServerOverloaded: nothing was written as far as known.
        """
        return await self._reports.submit(reports)

    async def heartbeat(self, held: Sequence[Held]) -> Sequence[Renewal]:
        """A renewal per held run, in order, after its commit. Raises as `report`."""
        return await self._held.submit(held)

    async def cut_leases(self, runs: Sequence[tuple[RunKey, int]], *, fuse: Duration) -> None:
        """Shorten leases to `fuse` from now: their worker may never have heard of them."""
        runs = sorted(runs)
        await self._database.hot.execute(
            _LEASES["cut_leases"],
            job_ids=[key.job_id for key, _ in runs],
            scheduled_ats=[key.scheduled_at for key, _ in runs],
            attempts=[attempt for _, attempt in runs],
            until=self._clock.now() + fuse,
        )

    async def notices(self, held: Sequence[Held]) -> Sequence[Notice]:
        """What there is to tell about these attempts, as a heartbeat would, without renewing.

        Raises StorageUnavailable.
        """
        found = await self._inspect([each.key for each in held])
        now = self._clock.now()
        told: list[Notice] = []
        for each in held:
            row = found.get(each.key)
            notice = lost_notice(each, row)
            if notice is None and row is not None:
                notice = cancel_notice(each, row, now)
            if notice is not None:
                told.append(notice)
        return told

    async def _store_reports(self, reports: Sequence[Report | PlainSuccess]) -> Sequence[Judged]:
        plain, pending = plain_reports.split(reports)
        if plain and (self.refills is None or not self.refills.is_wanted()):
            stored = await plain_reports.store_successes(
                self._database.hot, plain, now=self._clock.now()
            )
            self._tell_serial(stored.serial_job_ids)
            self._tell_freed(stored.queue_ids)
            self._tell_changed(stored.keys)
            pending += stored.left
        else:
            pending += [row[2] for row in plain]
        answers = [SUCCESS_APPLIED] * len(reports)
        if pending:
            places = sorted(pending)
            left = [plain_reports.as_report(reports[place]) for place in places]
            for place, answer in zip(places, await self._store_rest(left), strict=True):
                answers[place] = answer
        return answers

    async def _store_rest(self, reports: Sequence[Report]) -> Sequence[Judged]:
        answers: dict[int, Judged] = {}
        pending = list(range(len(reports)))
        for _ in range(_TRIES):
            firsts = self._first_of_each(reports, pending)
            done = await self._store_successes(
                [i for i in firsts if reports[i].ending is None], reports
            )
            done |= await self._store_others(
                [i for i in firsts if reports[i].ending is not None], reports
            )
            answers |= done
            pending = [i for i in pending if i not in done]
            if not pending:
                break
            answers |= await self._judge_refused(pending, reports)
            pending = [i for i in pending if i not in answers]
            if not pending:
                break
        return [answers.get(i, Judged(Verdict.RETRY)) for i in range(len(reports))]

    @staticmethod
    def _first_of_each(reports: Sequence[Report], pending: Sequence[int]) -> list[int]:
        """The first report of each attempt, in key order; repeats are judged afterwards."""
        first: dict[tuple[RunKey, int], int] = {}
        for i in pending:
            first.setdefault((reports[i].key, reports[i].attempt), i)
        return sorted(first.values(), key=lambda i: reports[i].key)

    async def _store_successes(
        self, picked: Sequence[int], reports: Sequence[Report]
    ) -> dict[int, Judged]:
        if not picked:
            return {}
        try:
            rows, filled = await self._succeed(
                job_ids=[reports[i].key.job_id for i in picked],
                scheduled_ats=[reports[i].key.scheduled_at for i in picked],
                attempts=[reports[i].attempt for i in picked],
                results=[reports[i].result for i in picked],
                timings=[reports[i].timings for i in picked],
                progresses=[reports[i].progress for i in picked],
                now=self._clock.now(),
            )
        except ConflictError as error:
            return await self._bisect(self._store_successes, picked, reports, error)
        # With the attempt: a stale report of the same run may be in the same tick.
        ended = {(str(row["job_id"]), row["scheduled_at"], row["attempt"]) for row in rows}
        serial = {str(row["job_id"]) for row in rows if row["serial"]}
        self._tell_serial(serial)
        self._tell_freed({row["queue_id"] for row in rows} - filled)
        self._tell_changed([RunKey(job_id, at) for job_id, at, _ in ended])
        return {
            i: SUCCESS_APPLIED for i in picked if (*reports[i].key, reports[i].attempt) in ended
        }

    async def _succeed(self, **values: Any) -> tuple[Sequence[Row], set[int]]:
        """What succeed_runs returns, and the queues whose places were filled in its commit."""
        if self.refills is not None and self.refills.is_wanted():
            try:
                return await self.refills.commit(
                    lambda connection: connection.fetch(_OUTCOMES["succeed_runs"], **values)
                )
            except ConflictError as error:
                # Of an end or of a claim; without claims it can be told.
                _log.error("refill_refused", error=str(error))
        return await self._database.hot.fetch(_OUTCOMES["succeed_runs"], **values), set()

    @staticmethod
    async def _bisect(
        store: Callable[[Sequence[int], Sequence[Report]], Awaitable[dict[int, Judged]]],
        picked: Sequence[int],
        reports: Sequence[Report],
        error: ConflictError,
    ) -> dict[int, Judged]:
        """A key that is in history twice is a bug; it must not hold up the other runs."""
        if len(picked) == 1:
            key = reports[picked[0]].key
            _log.error("end_refused_by_history", run=str(key), error=str(error))
            return {}
        middle = len(picked) // 2
        done = await store(picked[:middle], reports)
        return done | await store(picked[middle:], reports)

    async def _store_others(
        self, picked: Sequence[int], reports: Sequence[Report]
    ) -> dict[int, Judged]:
        if not picked:
            return {}
        try:
            return await self._store_endings(picked, reports)
        except ConflictError as error:
            return await self._bisect(self._store_others, picked, reports, error)

    async def _store_endings(
        self, picked: Sequence[int], reports: Sequence[Report]
    ) -> dict[int, Judged]:
        by_attempt = {(reports[i].key, reports[i].attempt): i for i in picked}
        async with self._database.hot.transaction() as connection:
            now = self._clock.now()
            rows = await connection.fetch(
                _OUTCOMES["lock_open_attempts"],
                job_ids=[reports[i].key.job_id for i in picked],
                scheduled_ats=[reports[i].key.scheduled_at for i in picked],
                attempts=[reports[i].attempt for i in picked],
            )
            if not rows:
                return {}
            policies = await self._specs.policies(
                {SpecKey(str(row["job_id"]), row["version"]) for row in rows},
                connection=connection,
            )
            found = {RunKey(str(row["job_id"]), row["scheduled_at"]): row for row in rows}
            places = {key: by_attempt[key, row["attempt"]] for key, row in found.items()}
            ended = [_ended(row, reports[places[key]]) for key, row in found.items()]
            effects = await end_attempts(connection, ended, policies, now=now)
        self.spread(effects, now=now)
        return {
            places[key]: Judged(Verdict.APPLIED, run_state=state)
            for key, state in effects.states.items()
        }

    def spread(self, effects: Effects, *, now: Instant) -> None:
        """Tell dispatchers and the promoter what a commit of ends has changed."""
        lanes: dict[bool, set[Lane]] = {True: set(), False: set()}
        for lane, at in effects.ready.items():
            if at <= now:
                lanes[True].add(lane)
            else:
                self._wake.lanes([lane], at=at)
        self._wake.lanes(lanes[True])
        self._tell_serial(effects.serial_jobs)
        self._tell_freed(effects.queue_ids)
        self._wake.attempts(effects.affected)
        self._tell_changed(list(effects.states))

    def _tell_freed(self, queue_ids: Collection[int]) -> None:
        if queue_ids:
            for freed in self.places_freed:
                freed(queue_ids)

    def _tell_serial(self, job_ids: Collection[str]) -> None:
        if job_ids:
            for ended in self.serial_ended:
                ended(job_ids)

    def _tell_changed(self, keys: Collection[RunKey]) -> None:
        for changed in self.changed:
            changed(keys)

    async def _judge_refused(
        self, picked: Sequence[int], reports: Sequence[Report]
    ) -> dict[int, Judged]:
        """Verdicts of protocol S29; an attempt that is still open was only locked just now."""
        rows = await self._inspect([reports[i].key for i in picked])
        answers: dict[int, Judged] = {}
        for i in picked:
            judged = judge(rows.get(reports[i].key), reports[i].attempt)
            if judged is not None:
                answers[i] = judged
        return answers

    async def _inspect(self, keys: Sequence[RunKey]) -> dict[RunKey, Row]:
        rows = await self._database.hot.fetch(
            _OUTCOMES["inspect_runs"],
            job_ids=[key.job_id for key in keys],
            scheduled_ats=[key.scheduled_at for key in keys],
        )
        return {RunKey(str(row["job_id"]), row["scheduled_at"]): row for row in rows}

    async def _store_heartbeats(self, held: Sequence[Held]) -> Sequence[Renewal]:
        try:
            return await self._renewals.store(held)
        except StorageUnavailable:
            self.heartbeats_failed = True
            raise


def _ended(row: Row, report: Report) -> Ended:
    assert report.ending is not None
    return Ended(
        row=row,
        ending=report.ending,
        failure=report.failure,
        failure_code=report.failure_code,
        timings=report.timings,
        progress=report.progress,
    )
