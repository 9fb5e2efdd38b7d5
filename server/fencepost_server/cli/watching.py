"""Follows one run to its end by long polls, over restarts of the server."""

import time
from collections.abc import Callable

from fencepost.v1.run_pb2 import Run
from fencepost.v1.run_service_pb2 import WaitRunRequest, WaitRunResponse

from fencepost_server.cli.connection import Connection
from fencepost_server.cli.failure import CliError, ExitCode, note
from fencepost_server.cli.values import short_run

# Short enough that a new state is told soon: the long poll itself tells only of the end.
_POLL_S = 2.0
_ANSWER_S = 10.0
# How long a server may be away before the watch gives up, and how long between two tries.
_AWAY_S = 60.0
_RETRY_S = 1.0


def wait_for_end(
    server: Connection, name: str, *, timeout_s: float | None, on_change: Callable[[Run], None]
) -> tuple[Run, bool]:
    """The run when it has ended, or as it was when `timeout_s` was over, and whether it ended.

    `on_change` hears of every state or attempt seen on the way.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    seen: tuple[int, int] | None = None
    while True:
        left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
        # Before the first answer, a wrong address is likelier than a restart.
        answer = _poll(server, name, max(left, 0.0), patient=seen is not None)
        now = (answer.run.state, answer.run.attempt)
        if now != seen:
            on_change(answer.run)
            seen = now
        if answer.ended or (deadline is not None and time.monotonic() >= deadline):
            return answer.run, answer.ended


def _poll(server: Connection, name: str, wait_s: float, *, patient: bool) -> WaitRunResponse:
    """One long poll; `patient` outlasts a restart of the server."""
    request = WaitRunRequest(name=name)
    request.wait.FromNanoseconds(int(wait_s * 1e9))
    give_up_at = time.monotonic() + (_AWAY_S if patient else 0)
    told = False
    while True:
        try:
            answer: WaitRunResponse = server.call(
                server.runs.WaitRun,
                request,
                what=f"watch run {short_run(name)}",
                timeout_s=wait_s + _ANSWER_S,
            )
        except CliError as error:
            if error.exit_code is not ExitCode.UNREACHABLE or time.monotonic() > give_up_at:
                raise
            if not told:
                note(f"  {error.why}; trying again")
                told = True
            time.sleep(_RETRY_S)
        else:
            return answer
