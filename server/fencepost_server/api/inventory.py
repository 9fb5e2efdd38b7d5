"""Reads what a worker says it holds, in Hello, heartbeats and Goodbye."""

from collections.abc import Sequence

from fencepost.v1 import worker_pb2

from fencepost_server.api.wire_worker import read_held
from fencepost_server.clock import SECOND
from fencepost_server.domain.names import is_uuid
from fencepost_server.domain.run import RunKey
from fencepost_server.engine.verdicts import Held
from fencepost_server.errors import InvalidField

# Instants below it, the year 2200, need no closer look.
_SECONDS_MAX = 7_258_118_400
_NANOS_PER_SECOND = 1_000_000_000


def read_inventory(
    runs: Sequence[worker_pb2.HeldRun],
) -> tuple[list[Held], list[worker_pb2.RunNotice]]:
    """What can be renewed, and a notice for every entry that cannot be a run at all."""
    held: list[Held] = []
    unknown: list[worker_pb2.RunNotice] = []
    for run in runs:
        plain = _plain(run)
        if plain is not None:
            held.append(plain)
            continue
        try:
            held.append(read_held(run, field="runs", drop_bad_progress=True))
        except InvalidField:
            lost = worker_pb2.LeaseLost(reason=worker_pb2.LEASE_LOST_REASON_UNKNOWN_RUN)
            unknown.append(worker_pb2.RunNotice(run=run.run, attempt=run.attempt, lease_lost=lost))
    return held, unknown


def _plain(run: worker_pb2.HeldRun) -> Held | None:
    """What nearly every entry is, read in one go; None: it wants a closer look."""
    key, attempt = run.run, run.attempt
    at = key.scheduled_at
    job_id, seconds, nanos = key.job_id, at.seconds, at.nanos
    if (
        attempt < 1
        or not 0 < seconds < _SECONDS_MAX
        or not 0 <= nanos < _NANOS_PER_SECOND
        or nanos % 1000
        or not is_uuid(job_id)
        or run.HasField("progress")
    ):
        return None
    return Held(RunKey(job_id, seconds * SECOND + nanos // 1000), attempt)
