"""The calls of JobService about fires that have passed: the ledger and backfills."""

from fencepost.v1 import job_service_pb2

from fencepost_server.api import validate
from fencepost_server.api.page_tokens import PageTokens, query_hash
from fencepost_server.api.wire_fire import read_fire_query, write_fire
from fencepost_server.api.wire_operation import read_backfill, write_backfill
from fencepost_server.domain.names import parse_job
from fencepost_server.engine.backfill import Operations
from fencepost_server.engine.ledger import Ledger


class FireCalls:
    """Serves ListFires and BackfillJob for the servicer."""

    def __init__(self, *, ledger: Ledger, operations: Operations, page_tokens: PageTokens) -> None:
        self._ledger = ledger
        self._operations = operations
        self._page_tokens = page_tokens

    async def list_fires(
        self, request: job_service_pb2.ListFiresRequest
    ) -> job_service_pb2.ListFiresResponse:
        """A page of the ledger, newest first."""
        name = parse_job(request.parent, field="parent")
        now = self._ledger.now()
        query = read_fire_query(request, now=now)
        page_size = validate.page_size(request.page_size)
        hashed = query_hash(request)
        after = None
        if request.page_token:
            # The bounds are those of the first page: "now" has moved on.
            at, rank, since, until = self._page_tokens.read(request.page_token, query=hashed)
            after = (int(at), int(rank))
            query = query.within(since=int(since), until=int(until))
        page = await self._ledger.page(name, query, after=after, page_size=page_size, now=now)
        token = ""
        if page.following is not None:
            token = self._page_tokens.make(
                [*page.following, query.since, query.until], query=hashed
            )
        return job_service_pb2.ListFiresResponse(
            fires=[write_fire(fire, tenant=name.tenant, job=page.job) for fire in page.fires],
            next_page_token=token,
        )

    async def backfill(
        self, request: job_service_pb2.BackfillJobRequest
    ) -> job_service_pb2.BackfillJobResponse:
        """Counts the fires without a run, and unless it is a dry run begins to make them."""
        now = self._operations.now()
        asked = read_backfill(request, now=now)
        encoded = await self._operations.backfill(
            asked,
            now=now,
            encode=lambda made: write_backfill(
                made, tenant=asked.name.tenant, job=asked.name.job
            ).SerializeToString(),
        )
        return job_service_pb2.BackfillJobResponse.FromString(encoded)
