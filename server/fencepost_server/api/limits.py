"""What this server speaks and enforces, as it tells clients and workers."""

from fencepost.v1 import worker_pb2

from fencepost_server.api import validate

REVISION_MIN = REVISION_MAX = 1
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
CREDIT_WINDOW_MAX = 1000
HELD_RUNS_MAX = 5000


def server_limits() -> worker_pb2.ServerLimits:
    """The limits as a message."""
    return worker_pb2.ServerLimits(
        max_payload_bytes=validate.PAYLOAD_BYTES_MAX,
        max_result_bytes=validate.PAYLOAD_BYTES_MAX,
        max_message_bytes=MESSAGE_BYTES_MAX,
        max_credit_window=CREDIT_WINDOW_MAX,
        max_batch_entries=validate.BATCH_ENTRIES_MAX,
        max_held_runs=HELD_RUNS_MAX,
    )
