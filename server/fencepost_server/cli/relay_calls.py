"""Asks the server for the runs of outbox rows, and says of each row what became of it.

Imports gRPC, so commands import this module when they run, never at the top.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc
import grpc.aio
from fencepost.v1.failure_pb2 import Problem
from fencepost.v1.run_service_pb2 import BatchEnqueueRunsRequest, EnqueueRunRequest

from fencepost_server.cli.status import RpcStatus, read_status
from fencepost_server.clock import DAY, SECOND, monotonic
from fencepost_server.store.outbox import OutboxRow

# As long as the contract allows: a relay that comes back later may make a run again.
_KEEP_FOR = 30 * DAY
_ROWS_PER_CALL = 500
_BYTES_PER_CALL = 3 * 1024 * 1024
# A larger message the server would refuse unread, with a status that looks like overload.
_BYTES_PER_ROW = 1024 * 1024
_CALLS_AT_ONCE = 8
_DEADLINE_S = 30
# The rows are locked meanwhile: with one deadline more, this stays below the minute after which
# Postgres ends an idle transaction.
_BEGIN_CALLS_FOR = 20 * SECOND
_WHY_CHARS_MAX = 1000
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_FOR_GOOD = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
}
_NO_ANSWER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_CODES = {code.value[0]: code for code in grpc.StatusCode}

Entry = tuple[str, EnqueueRunRequest]


class Fate(Enum):
    """What is to be done with a row."""

    # Its run is there.
    SENT = "sent"
    # The server will never take it.
    FAILED = "failed"
    # The server does not take it now.
    PUT_OFF = "put off"
    # It was not asked for, or nobody answered.
    UNTOUCHED = "untouched"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Fate of one row, and why unless it was sent."""

    fate: Fate
    why: str = ""


@dataclass(slots=True, kw_only=True)
class _Pass:
    """What the calls for one batch of rows have in common."""

    slots: asyncio.Semaphore
    ends_at: int
    # Why no server answers. Empty: it does.
    away: str = ""

    @property
    def is_over(self) -> bool:
        """Whether no more calls are begun."""
        return bool(self.away) or monotonic() > self.ends_at


class OutboxCalls:
    """Sends rows; each may be sent any number of times, also by several relays at once.

    `runs` is a stub of RunService on an asyncio channel, `tenant` that of rows which name none.
    """

    def __init__(self, runs: Any, *, tenant: str) -> None:
        self._runs = runs
        self._tenant = tenant

    async def send(self, rows: Sequence[OutboxRow]) -> dict[str, Verdict]:
        """A verdict for each row, by id."""
        verdicts: dict[str, Verdict] = {}
        groups: dict[tuple[str, str], list[Entry]] = {}
        for row in rows:
            tenant = self._tenant if row.tenant is None else row.tenant
            try:
                request = enqueue_request(row, tenant=tenant)
            except ValueError as error:
                verdicts[row.id] = _verdict(Fate.FAILED, str(error))
                continue
            groups.setdefault((tenant, _trace_of(row)), []).append((row.id, request))
        this = _Pass(
            slots=asyncio.Semaphore(_CALLS_AT_ONCE), ends_at=monotonic() + _BEGIN_CALLS_FOR
        )
        calls = [
            self._send_together(this, tenant, trace, entries)
            for (tenant, trace), group in groups.items()
            for entries in _parts(group)
        ]
        for found in await asyncio.gather(*calls):
            verdicts |= found
        return verdicts

    async def _send_together(
        self, this: _Pass, tenant: str, trace: str, entries: list[Entry]
    ) -> dict[str, Verdict]:
        request = BatchEnqueueRunsRequest(
            parent=f"tenants/{tenant}", requests=[each for _, each in entries]
        )
        answer = await _call(this, self._runs.BatchEnqueueRuns, request, trace)
        if not isinstance(answer, _Refused):
            return {
                row_id: _of_problem(outcome.problem)
                if outcome.HasField("problem")
                else Verdict(fate=Fate.SENT)
                for (row_id, _), outcome in zip(entries, answer.outcomes, strict=True)
            }
        if answer.fate is Fate.FAILED and not answer.is_about_all and len(entries) > 1:
            # One of them spoils the call for the others.
            alone = await asyncio.gather(
                *(self._send_alone(this, trace, each) for _, each in entries)
            )
            return dict(zip((row_id for row_id, _ in entries), alone, strict=True))
        return {row_id: _verdict(answer.fate, answer.why) for row_id, _ in entries}

    async def _send_alone(self, this: _Pass, trace: str, request: EnqueueRunRequest) -> Verdict:
        answer = await _call(this, self._runs.EnqueueRun, request, trace)
        if isinstance(answer, _Refused):
            return _verdict(answer.fate, answer.why)
        return Verdict(fate=Fate.SENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """A call that made nothing, as far as its caller knows."""

    fate: Fate
    why: str
    # The same for every row of the tenant.
    is_about_all: bool = False


async def _call(this: _Pass, method: Callable[..., Any], request: Any, trace: str) -> Any:
    async with this.slots:
        if this.is_over:
            return _Refused(fate=Fate.UNTOUCHED, why=this.away)
        metadata = (("traceparent", trace),) if trace else None
        try:
            return await method(request, timeout=_DEADLINE_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            status = read_status(error)
    why = _in_words(status)
    if status.code in _NO_ANSWER:
        this.away = why
        return _Refused(fate=Fate.UNTOUCHED, why=why)
    return _Refused(
        fate=Fate.FAILED if status.code in _FOR_GOOD else Fate.PUT_OFF,
        why=why,
        is_about_all=status.reason == "TENANT_NOT_FOUND"
        or any(field == "parent" for field, _ in status.fields),
    )


def enqueue_request(row: OutboxRow, *, tenant: str) -> EnqueueRunRequest:
    """The request for one row. Raises ValueError for what no server would take."""
    request = EnqueueRunRequest(
        job=f"tenants/{tenant}/jobs/{row.job}",
        labels=_labels(row.labels),
        priority=row.priority,
        concurrency_key=row.concurrency_key,
    )
    if row.payload is not None:
        request.payload.json = row.payload
    if row.run_at is not None:
        request.run_at.seconds, micros = divmod(row.run_at, SECOND)
        request.run_at.nanos = micros * 1000
    if row.unique_key is None:
        request.unique_key.key = f"outbox/{row.id}"
        request.unique_key.keep_for.FromMicroseconds(_KEEP_FOR)
    else:
        request.unique_key.key = row.unique_key
        # The business key may be free again soon after the run; this holds for an hour.
        request.request_id = row.id
        if row.unique_keep_for is not None:
            request.unique_key.keep_for.FromMicroseconds(row.unique_keep_for)
    if request.ByteSize() > _BYTES_PER_ROW:
        raise ValueError(f"the row is too large: {request.ByteSize()} bytes")
    return request


def _labels(text: str | None) -> dict[str, str]:
    labels = {} if text is None else json.loads(text)
    if not isinstance(labels, dict):
        raise ValueError("labels: must be an object")
    for key, value in labels.items():
        if not isinstance(value, str):
            raise ValueError(f"labels.{key}: must be a string, not {json.dumps(value)[:100]}")
    return labels


def _trace_of(row: OutboxRow) -> str:
    """A trace is a help and no reason to refuse a row; it rides on a call, not on an entry."""
    trace = row.traceparent or ""
    return trace if _TRACEPARENT.fullmatch(trace) else ""


def _parts(entries: list[Entry]) -> Iterator[list[Entry]]:
    """As many calls as the bounds of a message ask for."""
    part: list[Entry] = []
    size = 0
    for entry in entries:
        length = entry[1].ByteSize()
        if part and (len(part) == _ROWS_PER_CALL or size + length > _BYTES_PER_CALL):
            yield part
            part, size = [], 0
        part.append(entry)
        size += length
    if part:
        yield part


def _of_problem(problem: Problem) -> Verdict:
    code = _CODES.get(problem.code, grpc.StatusCode.UNKNOWN)
    for_good = code in _FOR_GOOD and not problem.retryable
    why = f"{problem.reason or code.name}: {problem.message}"
    return _verdict(Fate.FAILED if for_good else Fate.PUT_OFF, why)


def _in_words(status: RpcStatus) -> str:
    return f"{status.reason or status.code.name}: {status.why}"


def _verdict(fate: Fate, why: str) -> Verdict:
    # Postgres takes no NUL in text, and the text of others may hold one.
    return Verdict(fate=fate, why=why.replace("\0", "")[:_WHY_CHARS_MAX])
