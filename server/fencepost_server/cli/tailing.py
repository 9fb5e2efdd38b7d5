"""Reads the stream of WatchRuns over restarts of the server, from cursor to cursor."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from fencepost.v1.run_service_pb2 import WatchRunsRequest, WatchRunsResponse

from fencepost_server.cli.connection import Connection
from fencepost_server.cli.failure import CliError, ExitCode, note

_WHAT = "watch runs"
# How long a server may be away before the watch gives up, and the pauses between two tries.
_AWAY_S = 60.0
_RETRY_FIRST_S = 0.2
_RETRY_MAX_S = 5.0


def messages(
    server: Connection, request: WatchRunsRequest, *, ends_at: float | None
) -> Iterator[WatchRunsResponse]:
    """Until `ends_at` of the monotonic clock, or for ever. Raises CliError when the server
    refuses, or is away for a minute."""
    heard, heard_at, tries = False, time.monotonic(), 0
    while True:
        try:
            for message in _stream(server, request, ends_at):
                if tries:
                    note("  goes on")
                request.cursor = message.cursor
                heard, heard_at, tries = True, time.monotonic(), 0
                yield message
            why = "the server ended the stream"
        except grpc.RpcError as error:
            if _is_over(ends_at):
                return
            refused = server.explain(error, what=_WHAT)
            # Before the first answer, a wrong address is likelier than a restart.
            if refused.exit_code is not ExitCode.UNREACHABLE or not heard:
                raise refused from error
            why = refused.why
        if _is_over(ends_at):
            return
        if tries and time.monotonic() - heard_at > _AWAY_S:
            raise CliError(
                f"cannot {_WHAT}", why=why, hint="run it again", exit_code=ExitCode.UNREACHABLE
            )
        if not tries:
            note(f"  {why}; trying again")
        time.sleep(min(_RETRY_MAX_S, _RETRY_FIRST_S * 2.0 ** min(tries, 10)))
        tries += 1


def _stream(
    server: Connection, request: WatchRunsRequest, ends_at: float | None
) -> Iterator[WatchRunsResponse]:
    left = None if ends_at is None else max(0.0, ends_at - time.monotonic())
    call = server.runs.WatchRuns(request, timeout=left)
    try:
        with _interruptible(call):
            yield from call
    finally:
        call.cancel()


@contextmanager
def _interruptible(call: Any) -> Iterator[None]:
    """SIGINT ends the call, and is raised then: raised wherever Python is at that moment, it can
    get lost in a callback of gRPC, and the stream goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        call.cancel()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        if interrupts:
            raise KeyboardInterrupt
    except grpc.RpcError as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _is_over(ends_at: float | None) -> bool:
    # The server's clock of the deadline may be a little ahead of ours.
    return ends_at is not None and time.monotonic() >= ends_at - 0.05
