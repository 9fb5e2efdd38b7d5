"""ExplainRun: the holds of a waiting run as messages."""

from collections.abc import Sequence
from typing import cast

from fencepost.v1 import run_pb2, run_service_pb2

from fencepost_server.api.wire_admin import read_subscriptions
from fencepost_server.api.wire_run import write_run
from fencepost_server.api.wire_time import to_duration, to_timestamp
from fencepost_server.domain.names import parse_run
from fencepost_server.engine.explain_run import Listens, RunExplanations
from fencepost_server.policy.explain_run import Hold


class ExplainCalls:
    """Serves ExplainRun."""

    def __init__(self, *, explanations: RunExplanations) -> None:
        self._explanations = explanations

    async def explain(
        self, request: run_service_pb2.ExplainRunRequest
    ) -> run_service_pb2.ExplainRunResponse:
        """What keeps a run from starting. Raises InvalidField, TenantNotFound, RunNotFound."""
        found = await self._explanations.explain(parse_run(request.name, field="name"))
        return run_service_pb2.ExplainRunResponse(
            run=write_run(found.run, full=False),
            holds=map(write_hold, found.holds),
            evaluated_at=to_timestamp(found.evaluated_at),
        )


def write_hold(hold: Hold) -> run_pb2.Hold:
    """The hold as a message; an unknown end stays absent."""
    message = run_pb2.Hold(
        code=cast("run_pb2.HoldCode.ValueType", int(hold.code)),
        message=hold.message,
        subject=hold.subject,
        used=hold.used,
        limit=hold.limit,
        runs_ahead=hold.runs_ahead,
        holders=hold.holders,
    )
    if hold.clears_in is not None:
        message.clears_in.CopyFrom(to_duration(hold.clears_in))
    return message


def subscriptions_of(stored: bytes | None) -> Sequence[Listens]:
    """What a worker's row says that it listens to."""
    return [
        Listens(queue=each.queue, kinds=frozenset(each.kinds))
        for each in read_subscriptions(stored)
    ]
