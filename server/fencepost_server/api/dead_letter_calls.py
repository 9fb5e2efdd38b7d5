"""The calls of RunService about dead letters."""

from dataclasses import replace

from fencepost.v1 import run_service_pb2

from fencepost_server.api import validate
from fencepost_server.api.run_filter import read_filter
from fencepost_server.api.wire_dead_letter import read_groups_max, read_replay, write_group
from fencepost_server.api.wire_job import REASON_BYTES_MAX
from fencepost_server.api.wire_operation import read_parent
from fencepost_server.api.wire_run import write_run
from fencepost_server.domain.names import parse_run
from fencepost_server.domain.run import RunState
from fencepost_server.engine.dead_letters import DeadLetters
from fencepost_server.store.runs import RunRecord


class DeadLetterCalls:
    """Serves ReplayRun, DiscardRun and ListDeadLetterGroups for the servicer."""

    def __init__(self, *, dead_letters: DeadLetters) -> None:
        self._dead_letters = dead_letters

    async def replay(
        self, request: run_service_pb2.ReplayRunRequest
    ) -> run_service_pb2.ReplayRunResponse:
        """Runs a dead letter again."""
        asked = read_replay(request)
        answer = await self._dead_letters.replay(
            asked, now=self._dead_letters.now(), encode=_replayed
        )
        return run_service_pb2.ReplayRunResponse.FromString(answer)

    async def discard(
        self, request: run_service_pb2.DiscardRunRequest
    ) -> run_service_pb2.DiscardRunResponse:
        """Gives a dead letter up."""
        record = await self._dead_letters.discard(
            parse_run(request.name, field="name"),
            reason=validate.text(request.reason, field="reason", bytes_max=REASON_BYTES_MAX),
            now=self._dead_letters.now(),
        )
        return run_service_pb2.DiscardRunResponse(run=write_run(record, full=True))

    async def groups(
        self, request: run_service_pb2.ListDeadLetterGroupsRequest
    ) -> run_service_pb2.ListDeadLetterGroupsResponse:
        """How dead letters died, the newest deaths first."""
        parent = read_parent(request.parent)
        groups_max = read_groups_max(request)
        query = read_filter(request.filter, job=parent.job or None)
        if RunState.DEAD not in query.states:
            return run_service_pb2.ListDeadLetterGroupsResponse()
        query = replace(query, states=frozenset((RunState.DEAD,)))
        found = await self._dead_letters.groups(parent, query, groups_max=groups_max)
        return run_service_pb2.ListDeadLetterGroupsResponse(
            groups=[write_group(group) for group in found.groups],
            grouped=found.grouped,
            total_groups=found.total_groups,
        )


def _replayed(record: RunRecord) -> bytes:
    return run_service_pb2.ReplayRunResponse(run=write_run(record, full=False)).SerializeToString()
