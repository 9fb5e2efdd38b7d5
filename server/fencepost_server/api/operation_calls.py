"""The calls of RunService about operations."""

from fencepost.v1 import run_service_pb2

from fencepost_server.api import validate
from fencepost_server.api.page_tokens import PageTokens, query_hash
from fencepost_server.api.wire_operation import (
    read_bulk,
    read_operation_filter,
    write_bulk,
    write_operation,
)
from fencepost_server.domain.names import parse_operation, parse_tenant
from fencepost_server.engine.backfill import Operations
from fencepost_server.engine.bulk import Bulk, BulkUpdates


class OperationCalls:
    """Serves BatchUpdateRuns, GetOperation, ListOperations and StopOperation for the servicer."""

    def __init__(
        self, *, operations: Operations, bulk: BulkUpdates, page_tokens: PageTokens
    ) -> None:
        self._operations = operations
        self._bulk = bulk
        self._page_tokens = page_tokens

    async def start(
        self, request: run_service_pb2.BatchUpdateRunsRequest
    ) -> run_service_pb2.BatchUpdateRunsResponse:
        """Begins to change many runs, or only counts them."""
        asked = read_bulk(request)

        def encode(bulk: Bulk) -> bytes:
            return write_bulk(bulk, tenant=asked.parent.tenant).SerializeToString()

        answer = await self._bulk.start(asked, now=self._operations.now(), encode=encode)
        return run_service_pb2.BatchUpdateRunsResponse.FromString(answer)

    async def get(
        self, request: run_service_pb2.GetOperationRequest
    ) -> run_service_pb2.GetOperationResponse:
        """Reads one."""
        name = parse_operation(request.name, field="name")
        record = await self._operations.get(name)
        return run_service_pb2.GetOperationResponse(
            operation=write_operation(record, tenant=name.tenant)
        )

    async def list(
        self, request: run_service_pb2.ListOperationsRequest
    ) -> run_service_pb2.ListOperationsResponse:
        """Reads a page, newest first."""
        tenant = parse_tenant(request.parent, field="parent")
        page_size = validate.page_size(request.page_size)
        states, actions = read_operation_filter(request.filter)
        hashed = query_hash(request)
        before = None
        if request.page_token:
            before = str(self._page_tokens.read(request.page_token, query=hashed)[0])
        records, following = await self._operations.list(
            tenant, states=states, actions=actions, before=before, page_size=page_size
        )
        return run_service_pb2.ListOperationsResponse(
            operations=[write_operation(record, tenant=tenant) for record in records],
            next_page_token=(
                "" if following is None else self._page_tokens.make([following], query=hashed)
            ),
        )

    async def stop(
        self, request: run_service_pb2.StopOperationRequest
    ) -> run_service_pb2.StopOperationResponse:
        """Ends one early."""
        name = parse_operation(request.name, field="name")
        record = await self._operations.stop(name, now=self._operations.now())
        return run_service_pb2.StopOperationResponse(
            operation=write_operation(record, tenant=name.tenant)
        )
