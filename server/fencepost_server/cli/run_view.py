"""How `fencepost runs` shows runs: as a table, as pairs, or as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencepost_server.cli.choices import RunState
from fencepost_server.cli.failure import note
from fencepost_server.cli.settings import Settings
from fencepost_server.cli.tables import (
    elapsed,
    instant,
    one_line,
    print_json,
    print_json_list,
    print_pairs,
    print_rows,
)
from fencepost_server.cli.values import last_part, short_run

if TYPE_CHECKING:
    from fencepost.v1.run_pb2 import Attempt, Run


def show_runs(settings: Settings, runs: "Sequence[Run]", *, conditions: str) -> None:
    """Many, a line for each; `conditions` is the filter that they match."""
    if settings.json:
        print_json_list("runs", runs)
        return
    if not runs:
        note(
            f"no run matches {conditions}"
            if conditions
            else "no runs; make one: fencepost run JOB --watch"
        )
        return
    rows = [
        (
            short_run(run.name),
            state_of(run),
            run.kind,
            str(run.attempt),
            _origin(run),
            _waited(run),
            _took(run),
            remark(run),
        )
        for run in runs
    ]
    print_rows(("RUN", "STATE", "KIND", "ATTEMPT", "ORIGIN", "WAITED", "TOOK", "NOTE"), rows)


def describe_change(run: "Run") -> str:
    """Where a watched run has got to, in one line."""
    parts = [state_of(run), f"attempt {run.attempt}" if run.attempt else "", remark(run)]
    return "  " + " · ".join(part for part in parts if part)


def show_run(settings: Settings, run: "Run") -> None:
    """One run, whole."""
    if settings.json:
        print_json(run)
        return
    labels = " ".join(f"{key}={value}" for key, value in sorted(run.labels.items()))
    failure = run.last_failure
    print_pairs(
        [
            ("run", short_run(run.name)),
            ("state", state_of(run)),
            ("note", remark(run)),
            ("origin", _origin(run)),
            ("queue", last_part(run.queue)),
            ("kind", run.kind),
            ("due", instant(run.key, "scheduled_at")),
            ("available", instant(run, "available_at")),
            ("claimed", instant(run, "claimed_at")),
            ("ended", instant(run, "ended_at")),
            ("waited", _waited(run)),
            ("took", _took(run)),
            ("attempt", str(run.attempt)),
            ("failures", str(run.failure_count) if run.failure_count else ""),
            ("worker", last_part(run.worker)),
            ("progress", f"{run.progress.percent:g}% {run.progress.message}".strip())
            if run.HasField("progress")
            else ("progress", ""),
            ("failure", one_line(f"{failure.code} {failure.message}", 500)),
            ("payload", run.payload.json),
            ("result", run.result.json),
            ("labels", labels),
        ]
    )


def print_attempts(attempts: "Sequence[Attempt]") -> None:
    """The attempts of a run, a line for each."""
    from fencepost.v1.run_pb2 import AttemptOutcome

    rows = [
        (
            str(each.attempt),
            AttemptOutcome.Name(each.outcome).removeprefix("ATTEMPT_OUTCOME_").lower()
            if each.outcome
            else "open",
            last_part(each.worker),
            instant(each, "claimed_at"),
            elapsed(each.claimed_at, each.ended_at) if each.HasField("ended_at") else "",
            one_line(f"{each.failure.code} {each.failure.message}"),
        )
        for each in attempts
    ]
    print_rows(("ATTEMPT", "OUTCOME", "WORKER", "CLAIMED", "TOOK", "FAILURE"), rows)


def state_of(run: "Run") -> str:
    """Its state as people read it."""
    from fencepost.v1.run_pb2 import RunState as Wire

    return Wire.Name(run.state).removeprefix("RUN_STATE_").lower()


def _origin(run: "Run") -> str:
    from fencepost.v1.run_pb2 import RunOrigin

    return RunOrigin.Name(run.origin).removeprefix("RUN_ORIGIN_").lower().replace("_", " ")


def _waited(run: "Run") -> str:
    if not run.HasField("first_claimed_at"):
        return ""
    return elapsed(run.key.scheduled_at, run.first_claimed_at)


def _took(run: "Run") -> str:
    if not (run.HasField("claimed_at") and run.HasField("ended_at")):
        return ""
    return elapsed(run.claimed_at, run.ended_at)


def remark(run: "Run") -> str:
    """Why the run is where it is, in a few words."""
    from fencepost.v1.run_pb2 import CancelCause, DeadReason
    from fencepost.v1.schedule_pb2 import SkipReason

    reason = ""
    if run.dead_reason:
        reason = DeadReason.Name(run.dead_reason).removeprefix("DEAD_REASON_")
    elif run.skip_reason:
        reason = SkipReason.Name(run.skip_reason).removeprefix("SKIP_REASON_")
    elif run.cancel_cause:
        reason = CancelCause.Name(run.cancel_cause).removeprefix("CANCEL_CAUSE_")
    elif state_of(run) == RunState.BLOCKED and run.blocked_by:
        return f"behind {short_run(run.blocked_by)}"
    elif state_of(run) == RunState.RETRYING:
        reason = f"again at {instant(run, 'available_at')}"
    failure = run.last_failure
    said = one_line(f"{failure.code} {failure.message}") if run.HasField("last_failure") else ""
    if state_of(run) in (RunState.SUCCEEDED, RunState.RUNNING):
        said = ""
    parts = [reason.lower().replace("_", " ") if reason.isupper() else reason, said]
    return ": ".join(part for part in parts if part)
