"""`fencepost runs why`: what keeps a run from starting, and what to do about it."""

from typing import TYPE_CHECKING

from fencepost_server.cli.choices import RunState
from fencepost_server.cli.options import RunName
from fencepost_server.cli.run_view import remark, state_of
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.tables import one_line, print_json, short_seconds
from fencepost_server.cli.values import last_part, run_path, short_run

if TYPE_CHECKING:
    from fencepost.v1.run_pb2 import Hold, Run

# {subject} is the last part of what the hold points at, {kind} the run's.
_ADVICE = {
    "NOT_DUE": "nothing: it is due by itself",
    "BACKOFF": "see why it failed: fencepost runs get {run}",
    "SNOOZED": "nothing: its handler asked to be called again then",
    "RELEASED": "nothing: a worker gave it back until then",
    "EARLIER_RUN": "look at the earlier run: fencepost runs get {subject_run}",
    "QUEUE_PAUSED": "fencepost queues resume {subject}",
    "TENANT_LIMIT": "wait, or raise it: fencepost tenants limits {subject} --max-in-flight N",
    "QUEUE_LIMIT": "wait, or raise it: fencepost queues set {subject} --max-in-flight N",
    "JOB_LIMIT": "wait, or raise max_in_flight of the job",
    "KEY_LIMIT": "wait, or raise it: fencepost queues set {queue} --max-in-flight-per-key N",
    "RATE_LIMIT": "wait, or raise it: fencepost queues set {queue} --rate-limit N",
    "NO_WORKER": "start a worker that listens on the queue {queue}",
    "NO_HANDLER": "start a worker that has a handler for {kind}",
    "WORKERS_FULL": "wait, or start more workers: fencepost workers list",
    "BEHIND_OTHERS": "wait, or start more workers; a higher priority goes first",
    "NEXT_CLAIM": "nothing: the next claim takes it",
}


@calls_server
def why(settings: Settings, name: RunName) -> None:
    """Say what keeps a run from starting, one thing after the other, and what to do.

    Examples:

      fencepost runs why nightly/2026-12-01T02:30:00Z

      fencepost runs why nightly/2026-12-01T02:30:00Z -o json

      fencepost --tenant acme runs why nightly/2026-12-01T02:30:00Z
    """
    from fencepost.v1.run_service_pb2 import ExplainRunRequest

    from fencepost_server.cli.connection import connected

    request = ExplainRunRequest(name=run_path(settings.tenant, name))
    with connected(settings) as server:
        answer = server.call(server.runs.ExplainRun, request, what=f"explain run {name!r}")
    if settings.json:
        print_json(answer)
        return
    print(_verdict(answer.run, len(answer.holds)))
    for hold in answer.holds:
        for line in describe_hold(hold, answer.run):
            print(line)


def _verdict(run: "Run", holds: int) -> str:
    state, said = state_of(run), remark(run)
    where = f"{short_run(run.name)} is {state}"
    if holds:
        things = "1 thing keeps" if holds == 1 else f"{holds} things keep"
        return f"{where}: {things} it from starting"
    if state == RunState.RUNNING:
        return f"{where}: attempt {run.attempt} on worker {last_part(run.worker)}"
    if not said and state in (RunState.QUEUED, RunState.BLOCKED, RunState.RETRYING):
        said = "nothing keeps it from starting"
    return f"{where}: {said}" if said else where


def describe_hold(hold: "Hold", run: "Run") -> list[str]:
    """The hold in words, who holds the places, and what to do."""
    from fencepost.v1.run_pb2 import HoldCode

    known = hold.code in HoldCode.values()
    code = HoldCode.Name(hold.code).removeprefix("HOLD_CODE_") if known else "UNKNOWN"
    text = one_line(hold.message, 256) or code.lower().replace("_", " ")
    if hold.HasField("clears_in"):
        text += f" · clears in {short_seconds(hold.clears_in.ToMicroseconds() / 1e6)}"
    lines = [f"- {text}"]
    if hold.holders:
        lines.append(f"  held by  {' '.join(map(short_run, hold.holders))}")
    if advice := _ADVICE.get(code):
        filled = advice.format(
            run=short_run(run.name),
            kind=run.kind,
            queue=last_part(run.queue),
            subject=last_part(hold.subject),
            subject_run=short_run(hold.subject),
        )
        lines.append(f"  try      {filled}")
    return lines
