"""Counts what a change to many runs is about, and stores it as an operation; `bulk_steps`
carries it out."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fencepost_server.clock import Instant
from fencepost_server.domain.names import JobName
from fencepost_server.domain.operation import OperationAction, make_operation_id
from fencepost_server.engine.dead_letters import NoSuchFilterJobError, resolve_job
from fencepost_server.errors import FencepostError
from fencepost_server.policy.bulk import COUNTED_MAX
from fencepost_server.store import matches, requests
from fencepost_server.store import operations as store
from fencepost_server.store import runs as run_store
from fencepost_server.store.catalogue import Catalogue
from fencepost_server.store.database import Connection, Database
from fencepost_server.store.matches import MatchScope
from fencepost_server.store.operations import NewBulk, OperationRecord
from fencepost_server.store.requests import RequestKey, RequestScope
from fencepost_server.store.runs import RunQuery, RunRecord

_METHOD = "BatchUpdateRuns"
_SAMPLES_MAX = 5
# What a filter means whose job does not exist: nothing, for ever.
_NO_JOB = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkAsked:
    """What BatchUpdateRuns asks for; `query` holds only states that the action changes.

    `parent` without a job: all jobs. Runs per second, and 0 for no bound, as in the contract.
    """

    parent: JobName
    query: RunQuery
    filter: str
    action: OperationAction
    reason: str
    dry_run: bool
    rate: float
    stop_when_failing: float
    max_runs: int
    use_newest_version: bool
    request: RequestKey | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulk:
    """The operation (None: a dry run), how many match now, and the first and last of them."""

    operation: OperationRecord | None
    matched: int
    samples: Sequence[RunRecord]


class BulkUpdates:
    """Serves BatchUpdateRuns."""

    def __init__(self, *, database: Database, catalogue: Catalogue) -> None:
        self._database = database
        self._catalogue = catalogue

    async def start(
        self, asked: BulkAsked, *, now: Instant, encode: Callable[[Bulk], bytes]
    ) -> bytes:
        """Stores the operation, or with `dry_run` only counts; the encoded answer.

        Raises TenantNotFound, JobNotFound or RequestIdReused.
        """
        tenant_id = await self._catalogue.tenant_id(asked.parent.tenant)
        scope = RequestScope(tenant_id=tenant_id, method=_METHOD)
        keys = [] if asked.request is None or asked.dry_run else [asked.request]
        # A call that was answered before gets that answer, whatever has changed since.
        for answer in (
            await requests.recall(self._database.requests, scope, keys, now=now)
        ).values():
            return _answered(answer)
        async with self._database.requests.connection() as connection:
            job_id = await _job_id(connection, tenant_id, asked)
            found = await matches.find(
                connection,
                asked.query,
                MatchScope(tenant_id=tenant_id, job_id=job_id, matched_at=now),
                matches_max=COUNTED_MAX,
                keys_max=_SAMPLES_MAX,
                scan_max=None,
            )
            shown = list(found.keys)
            if found.last is not None and found.last not in shown:
                shown.append(found.last)
            records = await run_store.read(connection, shown, full=False)
        samples = [records[key] for key in shown if key in records]
        if asked.dry_run:
            return encode(Bulk(operation=None, matched=found.count, samples=samples))
        operation_id = make_operation_id(now=now, entropy=os.urandom(10))
        async with self._database.requests.transaction() as connection:
            for answer in (await requests.begin(connection, scope, keys, now=now)).values():
                return _answered(answer)
            await store.insert_bulk(
                connection,
                NewBulk(
                    operation_id=operation_id,
                    tenant_id=tenant_id,
                    action=asked.action,
                    job_id=job_id,
                    query=matches.query_to_json(asked.query),
                    filter=asked.filter,
                    rate=asked.rate,
                    max_runs=asked.max_runs,
                    stop_when_failing=asked.stop_when_failing,
                    use_newest_version=asked.use_newest_version,
                    matched=found.count,
                    reason=asked.reason,
                    now=now,
                ),
            )
            made = await store.read(connection, tenant_id, operation_id)
            encoded = encode(Bulk(operation=made, matched=found.count, samples=samples))
            await requests.finish(connection, scope, {key.request_id: encoded for key in keys})
        return encoded


async def _job_id(connection: Connection, tenant_id: int, asked: BulkAsked) -> str | None:
    try:
        return await resolve_job(connection, tenant_id, asked.parent, asked.query)
    except NoSuchFilterJobError:
        return _NO_JOB


def _answered(answer: bytes | FencepostError) -> bytes:
    if isinstance(answer, FencepostError):
        raise answer
    return answer
