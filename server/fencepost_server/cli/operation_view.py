"""How `fencepost ops` shows operations: as a table, as pairs, or as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencepost_server.cli.failure import note
from fencepost_server.cli.settings import Settings
from fencepost_server.cli.tables import (
    instant,
    print_json,
    print_json_list,
    print_pairs,
    print_rows,
)
from fencepost_server.cli.values import last_part

if TYPE_CHECKING:
    from fencepost.v1.operation_pb2 import Operation


_DONE = {"backfill": "made", "replay": "replayed", "cancel": "cancelled", "discard": "discarded"}


def show_operations(settings: Settings, operations: "Sequence[Operation]") -> None:
    """Many, a line for each."""
    if settings.json:
        print_json_list("operations", operations)
        return
    if not operations:
        note("no operations; begin one: fencepost runs bulk replay --filter ... --dry-run")
        return
    print_rows(
        ("OPERATION", "ACTION", "STATE", "CHANGED", "OF", "DEAD", "CREATED", "FILTER"),
        [
            (
                last_part(each.name),
                action_of(each),
                state_of(each),
                str(each.changed),
                str(each.matched),
                str(each.changed_dead),
                instant(each, "created_at"),
                each.filter,
            )
            for each in operations
        ],
    )


def show_operation(settings: Settings, operation: "Operation") -> None:
    """One, whole."""
    if settings.json:
        print_json(operation)
        return
    print_pairs(
        [
            ("operation", last_part(operation.name)),
            ("action", action_of(operation)),
            ("state", state_of(operation)),
            ("filter", operation.filter),
            ("reason", operation.reason),
            ("creator", operation.creator),
            ("rate", f"{operation.rate:g} runs a second"),
            ("matched", str(operation.matched)),
            ("changed", str(operation.changed)),
            ("unchanged", str(operation.unchanged)),
            ("failed", str(operation.failed)),
            *_endings(operation),
            ("created", instant(operation, "created_at")),
            ("ended at", instant(operation, "ended_at")),
            *(("problem", problem.message) for problem in operation.problems),
        ]
    )


def _endings(operation: "Operation") -> list[tuple[str, str]]:
    if action_of(operation) not in ("replay", "backfill"):
        return []
    stop = f"{operation.stop_when_failing:.0%} dead" if operation.stop_when_failing else ""
    return [
        ("ended", f"{operation.changed_ended} of {operation.changed}"),
        ("dead", str(operation.changed_dead)),
        ("stops at", stop),
    ]


def progress_of(operation: "Operation") -> str:
    """How far it has come, in one line."""
    action = action_of(operation)
    parts = [
        state_of(operation),
        f"{operation.changed} of {operation.matched} {_DONE.get(action, 'changed')}",
    ]
    if action in ("replay", "backfill"):
        parts.append(f"{operation.changed_ended} ended")
    for count, word in ((operation.changed_dead, "dead"), (operation.failed, "failed")):
        if count:
            parts.append(f"{count} {word}")
    return " · ".join(parts)


def state_of(operation: "Operation") -> str:
    """In lower case, with the cause of a stop."""
    from fencepost.v1.operation_pb2 import OperationState, StopCause

    state = OperationState.Name(operation.state).removeprefix("OPERATION_STATE_").lower()
    if not operation.stop_cause:
        return state
    return f"{state} ({StopCause.Name(operation.stop_cause).removeprefix('STOP_CAUSE_').lower()})"


def action_of(operation: "Operation") -> str:
    """In lower case."""
    from fencepost.v1.operation_pb2 import OperationAction

    return OperationAction.Name(operation.action).removeprefix("OPERATION_ACTION_").lower()
