"""What a session says: verdicts that wait together are one message, and the order stays."""

import asyncio

from fencepost.v1 import run_service_pb2, worker_pb2
from fencepost_server.api.outbox import VERDICTS_MERGED_MAX, Outbox, Response


async def _written(outbox: Outbox) -> list[run_service_pb2.WorkResponse]:
    """Everything that waits, as the worker reads it."""
    messages: list[run_service_pb2.WorkResponse] = []

    async def write(message: Response) -> None:
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        messages.append(run_service_pb2.WorkResponse.FromString(raw))

    writing = asyncio.create_task(outbox.write_to(write))
    await outbox.flushed()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    return messages


def verdicts(*attempts: int) -> run_service_pb2.WorkResponse:
    return run_service_pb2.WorkResponse(
        verdicts=worker_pb2.Verdicts(
            verdicts=[worker_pb2.AttemptVerdict(attempt=attempt) for attempt in attempts]
        )
    )


def ack(seq: int) -> run_service_pb2.WorkResponse:
    return run_service_pb2.WorkResponse(heartbeat_ack=worker_pb2.HeartbeatAck(seq=seq))


async def test_verdicts_that_wait_together_are_one_message() -> None:
    outbox = Outbox()
    for message in (verdicts(1, 2), verdicts(3), ack(9), verdicts(4), verdicts(5, 6)):
        outbox.say(message)
    first, between, last = await _written(outbox)
    assert [each.attempt for each in first.verdicts.verdicts] == [1, 2, 3]
    assert between.heartbeat_ack.seq == 9
    assert [each.attempt for each in last.verdicts.verdicts] == [4, 5, 6]


async def test_merged_verdicts_are_bounded() -> None:
    outbox = Outbox()
    third = VERDICTS_MERGED_MAX // 3 + 1
    for first in range(0, 4 * third, third):
        outbox.say(verdicts(*range(first, first + third)))
    written = [[each.attempt for each in one.verdicts.verdicts] for one in await _written(outbox)]
    assert [len(each) for each in written] == [3 * third, third]
    assert [attempt for each in written for attempt in each] == list(range(4 * third))
