"""What workers say they did: a file each, appended to line by line in one write, so that a
killed process leaves all that it knew.
"""

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.checker.history import History, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Handled:
    """A handler began or came to its end (`event` "start" or "end") for one attempt."""

    key: Key
    attempt: int
    event: str
    process: int


class WorkerLog:
    """Writes the file of one worker process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def write(self, *, run_key: str, attempt: int, event: str) -> None:
        """`run_key` is the text form that the handler got."""
        line = {"run": run_key, "attempt": attempt, "event": event, "process": os.getpid()}
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())


def read_worker_logs(folder: Path) -> list[Handled]:
    """All whole lines of the files in `folder`; a line that a kill has torn is left out."""
    found: list[Handled] = []
    for path in folder.iterdir():
        *whole, _ = path.read_text().split("\n")
        for text in whole:
            line = json.loads(text)
            job_id, at = line["run"].split("/")
            found.append(
                Handled(
                    key=Key(job_id, datetime.fromisoformat(at)),
                    attempt=line["attempt"],
                    event=line["event"],
                    process=line["process"],
                )
            )
    return found


def handled_as_recorded(history: History, handled: Sequence[Handled]) -> list[str]:
    """I4 from the workers' side: every attempt that started was claimed, none started twice,
    and a run that succeeded was handled to its end by the attempt whose result was stored."""
    claimed = {(claim.key, claim.attempt) for claim in history.claims()}
    starts: dict[tuple[Key, int], list[int]] = defaultdict(list)
    ends: set[tuple[Key, int]] = set()
    for each in handled:
        if each.event == "start":
            starts[each.key, each.attempt].append(each.process)
        else:
            ends.add((each.key, each.attempt))
    breaches = [f"{k} attempt {a} started unclaimed" for k, a in starts.keys() - claimed]
    breaches += [
        f"{key} attempt {attempt} started in {processes}"
        for (key, attempt), processes in starts.items()
        if len(processes) > 1
    ]
    breaches += [
        f"{key} succeeded by attempt {steps[-1].attempt}, which no worker finished"
        for key, steps in history.steps.items()
        if steps[-1].operation == "insert"
        and steps[-1].state == "succeeded"
        and (key, steps[-1].attempt) not in ends
    ]
    return breaches
