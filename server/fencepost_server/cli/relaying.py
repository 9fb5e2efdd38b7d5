"""The loop of `fencepost relay`: takes rows of an outbox, has their runs made, deletes them."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio
import structlog
from fencepost.v1 import run_service_pb2_grpc

from fencepost_server.cli.relay_calls import Fate, OutboxCalls, Verdict
from fencepost_server.cli.settings import Settings
from fencepost_server.clock import SECOND, monotonic
from fencepost_server.errors import StorageUnavailable
from fencepost_server.store.outbox import Outbox, OutboxRow

_log = structlog.get_logger("relay")

_BYTES_MAX = 2 * 1024 * 1024
_BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 30.0
_REPORT_EVERY = 10 * SECOND
_FAILURES_TOLD = 10
# A server that is back is found within seconds, and one that vanished is noticed.
_CHANNEL = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOptions:
    """How a relay works; `once` ends it when nothing is due."""

    database_url: str
    batch: int
    poll_s: float
    once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What became of rows."""

    sent: int
    failed: int
    put_off: int
    # Why the last pass left rows untouched. Empty: it did not.
    away: str


class Relay:
    """Passes over one outbox until `stopping` is set; several may work on the same one."""

    def __init__(self, outbox: Outbox, calls: OutboxCalls, options: RelayOptions) -> None:
        self.stopping = asyncio.Event()
        self._outbox = outbox
        self._calls = calls
        self._options = options
        self._counts: Counter[Fate] = Counter()
        self._told: Counter[Fate] = Counter()
        self._told_at = monotonic()
        self._away = ""

    async def run(self) -> Tally:
        """Until asked to stop, or with `once` until nothing is due or nobody answers.

        Raises OutboxUnusable when the application's database refuses.
        """
        failures = 0
        while not self.stopping.is_set():
            found, moved = 0, 0
            try:
                found, moved = await self._pass()
            except StorageUnavailable as error:
                self._is_away(f"the outbox's database: {error.__cause__ or error}")
            if self._options.once and (self._away or not found):
                break
            # A pass that got nothing through is a reason to ask less often.
            failures = failures + 1 if self._away or found > moved == 0 else 0
            if failures:
                await self._wait(_backoff(failures))
            elif not found:
                await self._wait(self._options.poll_s)
            self._report(every=_REPORT_EVERY)
        self._report(every=0)
        return Tally(
            sent=self._counts[Fate.SENT],
            failed=self._counts[Fate.FAILED],
            put_off=self._counts[Fate.PUT_OFF],
            away=self._away,
        )

    async def _pass(self) -> tuple[int, int]:
        """How many rows were due, and how many of them are sent or failed now."""
        async with self._outbox.take(rows_max=self._options.batch, bytes_max=_BYTES_MAX) as batch:
            rows = batch.rows
            if not rows:
                self._is_back()
                return 0, 0
            verdicts = await self._calls.send(rows)
            by_fate = {
                fate: {row_id: each.why for row_id, each in verdicts.items() if each.fate is fate}
                for fate in Fate
            }
            await batch.settle(
                sent=list(by_fate[Fate.SENT]),
                failed=by_fate[Fate.FAILED],
                put_off=by_fate[Fate.PUT_OFF],
            )
        # Counted after the commit: a pass that was rolled back comes again.
        self._counts.update({fate: len(ids) for fate, ids in by_fate.items()})
        self._tell_refusals(rows, verdicts)
        away = next(filter(None, by_fate[Fate.UNTOUCHED].values()), "")
        if away:
            self._is_away(away)
        else:
            self._is_back()
        return len(rows), len(by_fate[Fate.SENT]) + len(by_fate[Fate.FAILED])

    def _tell_refusals(self, rows: Sequence[OutboxRow], verdicts: Mapping[str, Verdict]) -> None:
        refused = [row for row in rows if verdicts[row.id].fate in (Fate.FAILED, Fate.PUT_OFF)]
        for row in refused[:_FAILURES_TOLD]:
            verdict = verdicts[row.id]
            told = {"id": row.id, "job": row.job, "why": verdict.why}
            if verdict.fate is Fate.FAILED:
                _log.error("outbox_row_failed", **told)
            else:
                _log.warning("outbox_row_put_off", **told)

    def _is_away(self, why: str) -> None:
        if not self._away:
            _log.warning("relay_waiting", why=why)
        self._away = why

    def _is_back(self) -> None:
        if self._away:
            _log.info("relay_goes_on")
        self._away = ""

    def _report(self, *, every: int) -> None:
        if self._counts == self._told or monotonic() - self._told_at < every:
            return
        new = self._counts - self._told
        _log.info(
            "outbox_relayed",
            sent=new[Fate.SENT],
            failed=new[Fate.FAILED],
            put_off=new[Fate.PUT_OFF],
            sent_since_start=self._counts[Fate.SENT],
        )
        self._told, self._told_at = self._counts.copy(), monotonic()

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.stopping.wait(), seconds)
        except TimeoutError:
            return


async def relay(settings: Settings, options: RelayOptions) -> Tally:
    """Until SIGTERM or SIGINT, which end it after the rows at hand; a second ends it at once."""
    async with AsyncExitStack() as stack:
        channel = grpc.aio.insecure_channel(settings.server, options=_CHANNEL)
        await stack.enter_async_context(channel)
        outbox = await stack.enter_async_context(Outbox(options.database_url))
        stub = run_service_pb2_grpc.RunServiceStub(channel)
        work = Relay(outbox, OutboxCalls(stub, tenant=settings.tenant), options)
        stack.callback(_listen(work.stopping))
        _log.info("relay_started", server=settings.server, tenant=settings.tenant)
        tally = await work.run()
        _log.info("relay_stopped")
        return tally


def _listen(stopping: asyncio.Event) -> Callable[[], None]:
    """Sets `stopping` at the first signal; what it returns ends the listening."""
    loop = asyncio.get_running_loop()

    def told(number: signal.Signals) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    def forget() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)
    return forget


def _backoff(failures: int) -> float:
    longest = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 20))
    return longest * random.uniform(0.5, 1)  # spreads relays that failed together
