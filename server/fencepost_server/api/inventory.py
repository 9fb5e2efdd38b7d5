"""Reads what a worker says it holds, in Hello, heartbeats and Goodbye."""

from collections.abc import Sequence

from fencepost.v1 import worker_pb2

from fencepost_server.api.wire_worker import read_held
from fencepost_server.engine.verdicts import Held
from fencepost_server.errors import InvalidField


def read_inventory(
    runs: Sequence[worker_pb2.HeldRun],
) -> tuple[list[Held], list[worker_pb2.RunNotice]]:
    """What can be renewed, and a notice for every entry that cannot be a run at all."""
    held: list[Held] = []
    unknown: list[worker_pb2.RunNotice] = []
    for run in runs:
        try:
            held.append(read_held(run, field="runs", drop_bad_progress=True))
        except InvalidField:
            lost = worker_pb2.LeaseLost(reason=worker_pb2.LEASE_LOST_REASON_UNKNOWN_RUN)
            unknown.append(worker_pb2.RunNotice(run=run.run, attempt=run.attempt, lease_lost=lost))
    return held, unknown
